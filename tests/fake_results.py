"""Stored runs whose scores say which cell they belong to: a results folder for the tests of the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fasa_bench.config import build
from fasa_bench.experiments import load_experiments
from fasa_bench.store import RunStore, run_id
from fasa_bench.task import Task
from fasa_bench.tasks.longbench_score import DATA_SETS

METHODS = ["fkv", "oracle", "quest", "streamingllm", "snapkv", "fasa_c", "fasa_plus"]
MODELS = ["smollm2_135m", "llama31_8b"]
EVIL = "<script>alert('x')</script> & \"quoted\" </td> \u2028 \ud800"
TIME = {"median": 41.25, "p25": 40.0, "p75": 43.0, "n": 50}


def code(model: str, method: str, dataset: str) -> float:
    """The score of a cell: every model, method and data set has its own."""
    place = list(DATA_SETS).index(dataset)
    return 10.0 + 40 * MODELS.index(model) + 5 * METHODS.index(method) + 0.1 * place


def fake_results(root: Path) -> Path:
    """Table 2 for the embedded model and for one of the paper's, without SnapKV, and a run that failed in parts."""
    planned = load_experiments()["table2"]
    for profile, model in (("mini", "smollm2_135m"), ("paper", "llama31_8b")):
        for one in planned.plan(profile, {"model": model}):
            method = one.get("method")
            if not (method == "snapkv" and profile == "paper"):
                store(root, model, method, one.given["budget"], one.config, texts=method != "oracle")
    failing = {**planned.plan("mini")[0].config, "task": {"_target_": "x.stdlib.Stdlib"}}
    config = {**failing, "model": {"name": "smollm2_135m"}, "budget": 64}
    with RunStore(root, run_id({"failing": 1}), config) as run:
        run.append({"id": f"passkey/{EVIL}", "error": f"OutOfMemory {EVIL}", "prompt_tokens": 9, "fields": {}})
    return root


def store(root: Path, model: str, method: str, budget: int, sections: dict[str, Any], texts: bool = True) -> None:
    given = None if method == "fkv" else budget
    config = {**sections, "model": {"name": model}, "budget": given}
    config["identity"] = {"model": model, "task": 1, "protocol": 2, "seed": 0, "cache": None}
    task = build("task", config["task"], Task)
    rows = [
        {
            "id": f"{dataset}/{index}",
            "prediction": f"{EVIL} {method} {dataset} {index}" if texts else None,
            "fields": {"dataset": dataset, **({"answers": [f"{EVIL} answer", "other"]} if texts else {})},
            "scores": {
                "score": (code(model, method, dataset) + spread) / 100,
                "rouge_l_google": 0.5,
                "score_recursion_limited": None,
                "empty": False,
            },
            "prompt_tokens": 1900 + index,
            "generated_tokens": 7,
            "finish_reason": "stop",
            **({"prompt_head": f"Read {EVIL}", "prompt_tail": "Answer:"} if texts else {}),
        }
        for dataset in task.selected  # type: ignore[attr-defined]
        for index, spread in enumerate((-2, 2))
    ]
    values = {dataset: code(model, method, dataset) for dataset in task.selected}  # type: ignore[attr-defined]
    values["avg_table2"] = sum(values.values()) / len(values)
    scores = {
        name: {"value": value, "ci_low": value - 2, "ci_high": value + 2, "n": 2} for name, value in values.items()
    }
    with RunStore(root, run_id(config), config) as run:
        for row in rows:
            run.append(row)
        run.write_summary(
            {
                "status": "complete",
                "model": model,
                "method": method,
                "task": "longbench",
                "budget": given,
                "speed": "simulated" if method in ("oracle", "quest") else "physical",
                "metrics": scores,
                "latency": {"prefill_s": 1.0, "decode_ms_per_token": TIME, "stages": {}},
                "memory": {"device_bytes": 2**20 * (METHODS.index(method) + 1), "host_bytes": 0, "peak_bytes": 9},
                "realised": {"attended_tokens": given or 1900.5, "cached_tokens": 1900.5, "sparse_steps": 3},
                "deviations": {"method.pairing": {"value": "rope", "note": f"paper: adjacent {EVIL}"}},
            }
        )
