"""How much faster `task.mode=parallel` scores a window than `task.mode=stepwise`, and whether both say the same.

    python benchmarks/perplexity_modes.py
    python benchmarks/perplexity_modes.py --methods fkv fasa_c --windows 5 --out modes.json

Every window is prefilled once; from there each method scores it once in steps and three times in one pass, all in one
process and right after each other, so that other work on the machine slows both alike. Timed is the scoring alone
(`Decoder.force`: all passes and losses), not the prefill. The text is Python's own documentation unless --path names
another. Threads are torch's: OMP_NUM_THREADS=1 python benchmarks/perplexity_modes.py uses one.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from hydra import compose, initialize_config_dir

from fasa_bench.errors import UserError
from fasa_bench.runner import Job
from fasa_bench.session import Prefilled, Session
from fasa_bench.texts import documentation

CONF = Path(__file__).resolve().parents[1] / "conf"
METHODS = ["fkv", "oracle", "fasa_c", "fasa_plus", "loki", "random", "quest", "sparq", "streamingllm"]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    jobs = {method: job_of(options, method) for method in options.methods}
    model = jobs[options.methods[0]].model
    size = options.prefill + options.decode
    ids = token_ids(model.tokenizer, options, size * options.windows)
    rows: dict[str, list[dict[str, float]]] = {method: [] for method in jobs}
    for job in jobs.values():
        job.model = model  # loaded once
        job.prepare()
    with Session(model.network, model.prefill_backend) as session:
        for start in range(0, len(ids), size):
            window = ids[start : start + size]
            prefilled = session.prefill(window[: options.prefill], reserve=options.decode)
            if start == 0:  # not timed: the first pass of a process also fetches its memory
                score(prefilled, jobs[options.methods[0]], window[options.prefill :], parallel=True)
            for method, job in jobs.items():
                rows[method].append(compare(prefilled, job, window[options.prefill :]))
                print(f"window {start // size + 1}: {method} {rows[method][-1]['speedup']:.1f}x", file=sys.stderr)
    result = {
        "model": model.name,
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "prefill": options.prefill,
        "decode": options.decode,
        "windows": options.windows,
        "budget": options.budget,
        "methods": {method: summary(windows) | {"per_window": windows} for method, windows in rows.items()},
    }
    print(table(result))
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2_135m", help="a model of conf/model")
    parser.add_argument("--methods", nargs="+", default=METHODS, metavar="METHOD", help="methods of conf/method")
    parser.add_argument("--prefill", type=int, default=768, help="tokens prefilled")
    parser.add_argument("--decode", type=int, default=256, help="tokens scored")
    parser.add_argument("--windows", type=int, default=3, help="windows, of which the median counts")
    parser.add_argument("--budget", type=int, default=64, help="tokens a head reads at a step")
    parser.add_argument("--path", help="a text file; default: Python's documentation")
    parser.add_argument("--out", help="a file for the numbers as JSON")
    return parser.parse_args(arguments)


def job_of(options: argparse.Namespace, method: str) -> Job:
    """The run that `python run.py task=ppl task.mode=parallel method=...` would be; errors if the method cannot."""
    overrides = [f"model={options.model}", f"method={method}", f"budget={options.budget}", "logger=none", "task=ppl"]
    overrides += ["task.mode=parallel", f"task.path={json.dumps(str(Path(__file__).resolve()))}"]  # any path: not read
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return Job.of(compose("config", overrides))


def token_ids(tokenizer: Any, options: argparse.Namespace, wanted: int) -> list[int]:
    text = Path(options.path).read_text(encoding="utf-8") if options.path else documentation()
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < wanted:
        raise UserError.of("--windows", options.windows, f"the text has {len(ids)} tokens, {wanted} are needed")
    return ids[:wanted]


def compare(prefilled: Prefilled, job: Job, targets: list[int]) -> dict[str, float]:
    """Seconds of both modes on one window, and the largest difference of a token's loss in nats.

    A pass is over in a second, in which anything may come between: before and after the steps, the median counts.
    """
    passes = [score(prefilled, job, targets, parallel=True)]
    one, stepwise = score(prefilled, job, targets, parallel=False)
    passes += [score(prefilled, job, targets, parallel=True) for _ in range(2)]
    other, together = passes[0][0], statistics.median(seconds for _, seconds in passes)
    apart = max(abs(a - b) for a, b in zip(one, other, strict=True))
    return {"stepwise_s": stepwise, "parallel_s": together, "speedup": stepwise / together, "max_nll_difference": apart}


def score(prefilled: Prefilled, job: Job, targets: list[int], *, parallel: bool) -> tuple[list[float], float]:
    """Losses, and the seconds that they took."""
    with prefilled.fork(job.method, job.budget) as decoder:
        start = time.perf_counter()
        losses = decoder.force(targets, parallel)
        return losses, time.perf_counter() - start


def summary(windows: list[dict[str, float]]) -> dict[str, float]:
    """Medians over the windows, and the largest difference."""
    medians = {key: statistics.median(row[key] for row in windows) for key in ("stepwise_s", "parallel_s", "speedup")}
    return medians | {"max_nll_difference": max(row["max_nll_difference"] for row in windows)}


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    lines = ["| method | stepwise s | parallel s | times faster | largest difference, nats |", "|---|--:|--:|--:|--:|"]
    for method, row in result["methods"].items():
        seconds = f"{row['stepwise_s']:.2f} | {row['parallel_s']:.2f}"
        lines.append(f"| {method} | {seconds} | {row['speedup']:.1f} | {row['max_nll_difference']:.1e} |")
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
