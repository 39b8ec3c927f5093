"""The time of a decode step by context and batch: a method in turns with full KV, on one machine, in one process.

Measures what FASA (arXiv 2602.03152) shows in Figures 3 and 7; what is timed and how: fasa_bench.timing, docs/speed.md.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from fasa_bench.environment import environment
from fasa_bench.errors import UserError
from fasa_bench.statistics import bootstrap
from fasa_bench.task import Example, Metric, Prediction, Task, Timing
from fasa_bench.timing import GLUE, MODULES

if TYPE_CHECKING:
    from fasa_bench.models import Model

# scores -> names of their metrics
OVER = {"speedup": "speed-up ", "sdpa_speedup": "over PyTorch's SDPA/", "plain_speedup": "over transformers/"}


@dataclass
class Latency(Task):
    """Parameters
    contexts: tokens in the cache of each example; batches: rows. One example for each pair. What does not fit into the
        memory that is free is reported as such.
    steps, block, warmup: decode steps that are timed, taken `block` to a turn, after `warmup` steps that are not.
    fill: "random" keys and values, which cost no prompt pass and may be longer than the model's positions; or
        "prefill", those of a real pass over random tokens.
    baseline: full KV takes turns with the method: "full", with the fastest dense attention there is, which speed-ups
        are over; and where that is not PyTorch's, "sdpa" too, with PyTorch's.
    plain: transformers takes part as it comes (DynamicCache, SDPA).
    prefill: longest context whose prompt pass is timed as well; None for all, 0 for none.
    """

    name: ClassVar[str] = "latency"
    notes: ClassVar[dict[str, str]] = {
        "fill": "authors' script: a prompt pass over random embeddings; ours random keys and values, equal in time",
        "steps": "authors' script: 256 or 512 steps, their mean; ours 32, median and quartiles, full KV in turns",
        "warmup": "authors' script: none that is left out",
    }

    contexts: list[int] = field(default_factory=lambda: [1024, 2048, 4096, 8192, 16384, 32768, 65536])
    batches: list[int] = field(default_factory=lambda: [1])
    steps: int = 32
    block: int = 4
    warmup: int = 3
    fill: Literal["random", "prefill"] = "random"
    baseline: Literal["fkv"] | None = "fkv"
    plain: bool = False
    prefill: int | None = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("contexts", "batches"):
            value = getattr(self, key)
            if not value or min(value) < 1 or len(set(value)) < len(value):
                raise UserError.of(f"task.{key}", value, "must be a list of different integers of at least 1")
        for key, least in (("steps", 1), ("block", 1), ("warmup", 1), ("prefill", 0)):
            value = getattr(self, key)
            if value is not None and value < least:
                raise UserError.of(f"task.{key}", value, f"must be at least {least}")
        if self.steps % self.block:
            raise UserError.of("task.block", self.block, f"must divide task.steps={self.steps}")

    def examples(self, model: Model, limit: int | None) -> Iterator[Example]:
        draw = np.random.default_rng(self.seed)
        for batch in self.batches:
            for context in self.contexts[:limit]:
                ids = draw.integers(0, model.config.vocab_size, context).tolist()
                timed = self.fill == "prefill" or self.prefill is None or context <= self.prefill
                yield Example(
                    id=f"{context}x{batch}",
                    prompt_ids=ids,
                    timing=Timing(
                        context=context,
                        batch=batch,
                        steps=self.steps,
                        block=self.block,
                        warmup=self.warmup,
                        fill=self.fill,
                        baseline=self.baseline is not None,
                        plain=self.plain,
                        prompt_pass=timed,
                        seed=self.seed,
                    ),
                    fields={"context": context, "batch": batch, "fill": self.fill},
                )

    def fingerprint(self) -> str:
        """Of the machine, since times are its own: another one is another run."""
        here = environment()
        machine = {key: here[key] for key in ("cpu", "threads", "gpu", "driver", "platform")}
        return hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]

    def score(self, example: Example, prediction: Prediction) -> dict[str, Any]:
        """Milliseconds of a step (medians), ratios of turns, and what the device's bandwidth would allow.

        speedup, sdpa_speedup, plain_speedup: for each turn, the time of full KV, of full KV with PyTorch's attention,
            or of transformers, by the method's.
        limit_ms: weights and cache that a step reads, by the bandwidth; share: how much of it is reached.
        accounted: stages by the step.
        """
        measured = prediction.measured
        assert measured is not None
        if "does_not_fit" in measured:
            return {"does_not_fit": measured["does_not_fit"]}
        found: dict[str, Any] = {}
        own = _turns(measured["method"]["step_ms"], self.block)
        rate = measured["bandwidth"]["limit"]
        for who, key in (("method", "decode"), ("full", "full"), ("sdpa", "sdpa"), ("plain", "plain")):
            if who not in measured:
                continue
            part = measured[who]
            found[f"{key}_ms"] = statistics.median(part["step_ms"])
            if "read_bytes" in part:
                bytes_moved = measured["weight_bytes"] + part["read_bytes"]
                found[f"{key}_limit_ms"] = 1e3 * bytes_moved / rate
                found[f"{key}_share"] = found[f"{key}_limit_ms"] / found[f"{key}_ms"]
                found[f"{key}_accounted"] = sum(part["stages_ms"].values()) / found[f"{key}_ms"]
                found[f"{key}_attention_ms"] = sum(
                    ms for name, ms in part["stages_ms"].items() if name not in (MODULES, GLUE)
                )
            if who != "method":
                pairs = zip(_turns(part["step_ms"], self.block), own, strict=True)
                name = "speedup" if who == "full" else f"{who}_speedup"
                found[name] = [round(theirs / ours, 4) for theirs, ours in pairs]
        return found

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Metric]:
        """By context: speed-ups are medians over turns, with their interval; times and shares of single examples."""
        fitting = [row for row in rows if "does_not_fit" not in row["scores"]]
        metrics: dict[str, Metric] = {}
        for row in sorted(fitting, key=lambda row: (-row["fields"]["context"], row["fields"]["batch"])):
            for key, title in OVER.items():
                if key in row["scores"]:
                    metrics[f"{title}{label(row)}"] = bootstrap(row["scores"][key], np.median)
        for row in fitting:
            for key, value in row["scores"].items():
                if isinstance(value, float):
                    metrics[f"{key}/{label(row)}"] = bootstrap([value])
        metrics["n_does_not_fit"] = {"value": len(rows) - len(fitting), "ci_low": None, "ci_high": None, "n": len(rows)}
        return metrics


def label(row: dict[str, Any]) -> str:
    """How people call an example: 64K, or 64K x 4."""
    context, batch = row["fields"]["context"], row["fields"]["batch"]
    short = f"{context // 1024}K" if context % 1024 == 0 else f"{context:,}"
    return short if batch == 1 else f"{short} x {batch}"


def _turns(step_ms: Sequence[float], block: int) -> list[float]:
    """The median of each turn."""
    return [statistics.median(step_ms[start : start + block]) for start in range(0, len(step_ms), block)]
