"""All GPU measurements in one run of under 8 minutes: one layer, kernels, and whole decode steps of an 8B model.

PYTHONPATH=src python benchmarks/gpu.py --out results/bench-gpu/gpu.json

Needs what transformers needs, no more. The model has Llama-3.1-8B's shape and random weights, in bfloat16, so that
nothing is downloaded. The whole steps are also stored as runs in `runs/` beside FILE, as task=latency stores them:
`python -m fasa_bench.report tables --results-dir results/bench-gpu` makes tables of them, `figures` the figures.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from attention_layer import Shape, compare, table
from configured import exists, method_named, prepare_at_random
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from fasa_bench.environment import environment
from fasa_bench.method import Method
from fasa_bench.roofline import bandwidth
from fasa_bench.session import Session
from fasa_bench.store import RunStore, run_id
from fasa_bench.task import Example, Prediction
from fasa_bench.tasks.latency import Latency
from fasa_bench.timing import DoesNotFitError, begin, measure

KERNELS = Path(__file__).with_name("kernels_gpu.py")
KERNEL_SECONDS = 170
LAYER_TOKENS = [8192, 16384, 32768, 65536, 131072]
LLAMA31_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
SMALL: dict[str, Any] = {  # --small: to try the script where there is no GPU
    **LLAMA31_8B,
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
TASKS = [
    Latency(contexts=[8192, 16384, 32768, 65536, 131072], batches=[1], plain=True, prefill=32768),
    Latency(contexts=[8192, 32768], batches=[8], plain=False, prefill=0),
]
METHODS = ("fasa_plus", "fasa_c", "fasa_m")
BUDGET = 256


class Deadline:
    """Seconds that are left of the time that this script may take."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


def network_of(shape: dict[str, Any], device: torch.device, dtype: torch.dtype) -> LlamaForCausalLM:
    """Random weights, made on the device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            network = LlamaForCausalLM(LlamaConfig(**shape))
    finally:
        torch.set_default_dtype(before)
    return network.eval().requires_grad_(False)


def methods_of(network: PreTrainedModel) -> list[Method]:
    """FASA's forms, prepared with random contextual agreement."""
    config = network.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    shape = (config.num_hidden_layers, heads, kv_heads, config.hidden_size // heads)
    return [prepare_at_random(method_named(name), *shape) for name in METHODS if exists(name)]


def steps_of(session: Session, method: Method, task: Latency, deadline: Deadline) -> list[dict[str, Any]]:
    """The rows of task=latency, as the runner makes them; contexts that there is no time for are left out."""
    rows = []
    model = SimpleNamespace(config=session.network.config)
    for example in task.examples(model, None):  # type: ignore[arg-type]
        if deadline.left < 0:
            print(f"no time is left for {method.name} {example.id}", file=sys.stderr)
            continue
        started = time.monotonic()
        rows.append(row_of(session, method, task, example))
        print(f"{method.name} {example.id}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    return rows


def row_of(session: Session, method: Method, task: Latency, example: Example) -> dict[str, Any]:
    assert example.timing is not None
    row: dict[str, Any] = {"id": example.id, "fields": example.fields, "prefill_s": None, "compress_s": None}
    try:
        prefilled = begin(session, example.prompt_ids, example.timing, method.observes())
        with prefilled.fork(method, BUDGET) as decoder:
            measured = measure(decoder, example.timing)
            row["compress_s"] = decoder.compress_seconds
        if not math.isnan(prefilled.seconds):
            row["prefill_s"] = prefilled.seconds
    except DoesNotFitError as reason:
        measured = {"does_not_fit": str(reason)}
    prediction = Prediction([], "", "timed", measured=measured)
    return {**row, "measured": measured, "scores": task.score(example, prediction)}


def store(folder: Path, name: str, method: Method, task: Latency, dtype: str, rows: list[dict[str, Any]]) -> None:
    """As a run folder, so that the report can read it."""
    given = {"name": method.name, **asdict(method)}
    identity = {"model": {"dtype": dtype}, "method": given, "task": asdict(task), "machine": task.fingerprint()}
    config = {"model": name, "method": given, "task": {"name": task.name, **asdict(task)}, "identity": identity}
    with RunStore(folder, run_id({"model_name": name, **identity}), config) as stored:
        for row in rows:
            if row["id"] not in stored.done:
                stored.append(row)
        stored.write_summary(
            {
                "status": "complete",
                "model": name,
                "method": method.name,
                "task": task.name,
                "budget": BUDGET,
                "metrics": task.metrics(rows),
                "examples": len(rows),
            }
        )


def kernels(out: Path) -> dict[str, Any] | None:
    """The kernels' own checks and times, in a process of their own; None where they could not be had."""
    if not KERNELS.exists():
        print(f"{KERNELS.name} is missing: kernels are left out", file=sys.stderr)
        return None
    command = [sys.executable, str(KERNELS), "--out", str(out), "--seconds", str(KERNEL_SECONDS)]
    try:
        status = subprocess.run(command, timeout=KERNEL_SECONDS + 60).returncode
    except subprocess.TimeoutExpired:
        print(f"{KERNELS.name} took too long", file=sys.stderr)
        return None
    found = json.loads(out.read_text()) if out.exists() else {}
    return {"exit_status": status, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description="All GPU measurements in one run of under 8 minutes.")
    parser.add_argument("--out", type=Path, default=Path("results/bench-gpu/gpu.json"))
    parser.add_argument("--seconds", type=float, default=440, help="start nothing later than this")
    parser.add_argument("--small", action="store_true", help="a tiny model, on the CPU too: to try the script")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.small:
        print("no CUDA GPU: nothing was measured; `make bench` measures the CPU", file=sys.stderr)
        return
    deadline = Deadline(options.seconds)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tasks, shape, name, dtype, tokens = TASKS, LLAMA31_8B, "llama31_8b (random weights)", torch.bfloat16, LAYER_TOKENS
    if options.small:
        few: dict[str, Any] = {"contexts": [512, 1024], "steps": 8}
        tasks, shape, name, dtype = [replace(task, **few) for task in TASKS], SMALL, "small", torch.float32
        tokens = [1024, 2048]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"env": environment(), "bandwidth": bandwidth(device), "budget": BUDGET, "layer": []}

    def save() -> None:
        options.out.write_text(json.dumps(found, indent=2) + "\n")

    for batch in (1, 8):
        for count in tokens:
            found["layer"] += compare(Shape(), count, batch, device, dtype, turns=21)
    print(table(found["layer"]), flush=True)
    save()
    found["steps"] = []
    session = Session(network_of(shape, device, dtype))
    with session:
        for task in tasks:
            for each in methods_of(session.network):
                limit = Deadline(deadline.left - (KERNEL_SECONDS if not options.small else 0))
                rows = steps_of(session, each, task, limit)
                found["steps"].append({"method": each.name, "batches": task.batches, "rows": rows})
                if rows:
                    store(options.out.parent, name, each, task, str(dtype), rows)
                save()
    del session
    if not options.small:
        torch.cuda.empty_cache()
        found["kernels"] = kernels(options.out.with_name("kernels_gpu.json"))
        save()
    print(options.out)


if __name__ == "__main__":
    main()
