"""What sharing prompts is worth: one sweep against the same runs one by one, on LongBench.

python benchmarks/sweep.py [--out results/bench-sweep] [KEY=VALUE ...]

KEY=VALUE are settings as of run.py, such as task.data_dir=FOLDER. Stopped, it goes on when started again; the sweep
itself is measured in one go, between the two halves of the single runs, so that a machine that slows down hurts both.
Start-up is not counted: the model is loaded and calibrated before. Prints a table and writes OUT/sweep.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from fasa_bench.group import grouped, is_complete, run_group
from fasa_bench.runner import Job
from fasa_bench.store import Run, load_run, write_whole

CONF = Path(__file__).resolve().parents[1] / "conf"
METHODS = "oracle,fasa_c,fasa_plus,streamingllm,snapkv,quest,h2o,rkv"
TASK = ["task=longbench", "task.datasets=[qasper,2wikimqa,lcc]", "limit=4", "task.max_new_tokens=16", "logger=none"]
TIMES = ("prefill_s", "compress_s", "feed_s", "decode_s", "parallel_s", "step_ms", "stages_ms")


def main() -> None:
    parser = argparse.ArgumentParser(description="One sweep against the same runs one by one.")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--budgets", default="128,256,512")
    parser.add_argument("--out", type=Path, default=Path("results/bench-sweep"))
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_intermixed_args()
    jobs = composed(options.methods.split(","), options.budgets.split(","), options.settings)
    for job in jobs:
        job.prepare()
    list(jobs[0].task.examples(jobs[0].model, jobs[0].limit))  # data and tokenizer are there
    half = len(jobs) // 2
    for job in jobs[:half]:
        measured([job], options.out / "single" / job.label)
    measured(jobs, options.out / "together")
    for job in jobs[half:]:
        measured([job], options.out / "single" / job.label)
    found = compared(jobs, options.out)
    write_whole(options.out / "sweep.json", (json.dumps(found, indent=2) + "\n").encode())
    print(table(found))


def composed(methods: Sequence[str], budgets: Sequence[str], settings: Sequence[str]) -> list[Job]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        jobs = [
            Job.of(compose("config", [*TASK, *settings, f"method={name}", f"budget={budget}"]), f"{name}-{budget}")
            for name in methods
            for budget in budgets
        ]
    (group,) = grouped(jobs)
    return group


def measured(jobs: Sequence[Job], folder: Path) -> None:
    """Run them into `folder` and note the seconds there; what is measured already is left alone."""
    note = folder / "seconds.json"
    if note.exists():
        return
    shutil.rmtree(folder, ignore_errors=True)  # an interrupted measurement says nothing
    errors: list[Exception] = []
    start = time.perf_counter()
    run_group(
        [replace(job, results_dir=folder) for job in jobs],
        lambda job, path, error: errors.append(error) if error else None,
    )
    seconds = time.perf_counter() - start
    if errors:
        raise errors[0]
    write_whole(note, json.dumps(seconds).encode())


def compared(jobs: Sequence[Job], out: Path) -> dict[str, Any]:
    together, single, different = {}, {}, []
    for job in jobs:
        one, other = only_run(out / "single" / job.label), load_run(out / "together" / "runs" / job.run_id)
        single[job.label], together[job.label] = one, other
        if rows(one) != rows(other):
            different.append(job.label)
    singles = {label: json.loads((out / "single" / label / "seconds.json").read_text()) for label in single}
    sweep = json.loads((out / "together" / "seconds.json").read_text())
    first = next(iter(together.values()))
    prefill = sum(row["prefill_s"] for row in first.rows)
    parts = ("compress_s", "feed_s", "decode_s")
    decode = sum(row[part] for run in together.values() for row in run.rows for part in parts)
    return {
        "runs": len(jobs),
        "examples": len(first.rows),
        "different_predictions": different,
        "single_s": sum(singles.values()),
        "single_s_each": singles,
        "sweep_s": sweep,
        "one_prefill_s": prefill,
        "all_decodes_s": decode,
        "times_faster": sum(singles.values()) / sweep,
        "over_one_prefill_and_all_decodes": sweep / (prefill + decode),
        "env": first.env,
    }


def only_run(folder: Path) -> Run:
    (path,) = (folder / "runs").iterdir()
    assert is_complete(path)
    return load_run(path)


def rows(run: Run) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in TIMES} for row in run.rows]


def table(found: dict[str, Any]) -> str:
    same = "the same" if not found["different_predictions"] else f"differ: {found['different_predictions']}"
    lines = [
        ("", f"{found['runs']} runs of {found['examples']} examples"),
        ("predictions", same),
        ("one by one", f"{found['single_s']:.1f} s"),
        ("together", f"{found['sweep_s']:.1f} s, {found['times_faster']:.2f} times faster"),
        ("one prefill, all decodes", f"{found['one_prefill_s']:.1f} s + {found['all_decodes_s']:.1f} s"),
        ("together over that", f"{found['over_one_prefill_and_all_decodes']:.3f}"),
    ]
    return "\n".join(["| what | measured |", "|---|---|", *(f"| {name} | {value} |" for name, value in lines)])


if __name__ == "__main__":
    main()
