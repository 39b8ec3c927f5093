"""Stored timings as Markdown: decode time against full KV, and the stages of a step. Reads run folders only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fasa_bench.statistics import bootstrap, quantiles
from fasa_bench.store import Run
from fasa_bench.tables import MIB, MISSING, budget, grouped, is_timing, machine, number
from fasa_bench.task import Metric

# the method has the run's own name
WHO = {"method": "", "full": "full KV", "sdpa": "full KV by SDPA", "plain": "transformers"}
STAGES = ("tip", "select", "top_k", "kernels", "transfer", "gather", "attend", "update", "modules", "glue")  # in order
NOTE = """\
Times are medians [quartiles] over steps; ratios are medians over turns with their 95 % bootstrap interval. *Limit*: the
weights and the cache that a step reads, by the bandwidth that was measured on this device; *share*: how much of it is
reached. *full KV*: with the fastest dense attention at hand, which on a CPU in float32 is compiled like the method's;
*SDPA*: with PyTorch's. *modules*: projections, MLP, norms, embedding, head; *glue*: rotation, residuals, appending,
Python; *kernels*: of a step in one call, all but the stages that stand beside it."""


@dataclass(frozen=True)
class Timed:
    """What was measured of one of those that took turns, at one context and batch; `row` is the stored example."""

    name: str
    part: dict[str, Any]
    row: dict[str, Any]

    @property
    def context(self) -> int:
        return int(self.row["fields"]["context"])

    @property
    def batch(self) -> int:
        return int(self.row["fields"]["batch"])

    @property
    def step_ms(self) -> Metric:
        return quantiles(self.part["step_ms"])

    @property
    def median_ms(self) -> float:
        return float(np.median(self.part["step_ms"]))

    @property
    def stages_ms(self) -> dict[str, float]:
        return self.part.get("stages_ms") or {}

    @property
    def limit_ms(self) -> float | None:
        """The time of a step that did nothing but read its weights and its part of the cache."""
        measured, read = self.row["measured"], self.part.get("read_bytes")
        return None if read is None else 1e3 * (read + measured["weight_bytes"]) / measured["bandwidth"]["limit"]


@dataclass(frozen=True)
class Timings:
    """What one run timed. examples: by batch and context, those who took turns (the keys of WHO).

    unfit: what did not fit into memory, and why.
    """

    run: Run
    name: str
    examples: list[dict[str, Timed]]
    unfit: dict[str, str]

    @classmethod
    def of(cls, method: str, run: Run) -> Timings:
        """method: the name that tells the run from its neighbours."""
        given = budget(run)
        name = method + ("" if given is None else f" {given}")
        rows = [row for row in run.rows if "method" in row["measured"]]
        rows.sort(key=lambda row: (row["fields"]["batch"], row["fields"]["context"]))
        examples = []
        for row in rows:
            took_part = [who for who in WHO if who in row["measured"]]
            examples.append({who: Timed(WHO[who] or name, row["measured"][who], row) for who in took_part})
        reasons = {row["id"]: (row["measured"] or {}).get("does_not_fit") for row in run.rows}
        return cls(run, name, examples, {example: reason for example, reason in reasons.items() if reason})

    def of_one(self, who: str, batch: int | None = None) -> list[Timed]:
        """Those of one of WHO, at one batch (default: the smallest)."""
        found = [example[who] for example in self.examples if who in example]
        batch = min((timed.batch for timed in found), default=1) if batch is None else batch
        return [timed for timed in found if timed.batch == batch]

    @property
    def where(self) -> str:
        """Model, machine and number format."""
        dtype = str(((self.run.config.get("identity") or {}).get("model") or {}).get("dtype", "")).split(".")[-1]
        return " · ".join(part for part in (self.run.name("model"), machine(self.run), dtype) if part)


def timings(runs: Iterable[Run]) -> list[Timings]:
    groups = grouped(run for run in runs if is_timing(run))
    return [Timings.of(method, run) for group in groups for method, run in group.runs]


def markdown(found: Sequence[Timings]) -> str:
    """For each run: times and ratios by context, how they grow, and the stages of a step."""
    lines: list[str] = []
    for each in found:
        lines += [f"## {each.name} · {each.where}", "", *_times(each), "", *_growth(each)]
        lines += [f"{example}: {reason}.\n" for example, reason in each.unfit.items()]
        lines += ["Stages, ms (medians; measured in steps of their own, in the same turns):", "", *_stages(each), ""]
    return "\n".join([*lines, NOTE, ""])


def short(context: int) -> str:
    """64K for 65,536."""
    return f"{context // 1024}K" if context % 1024 == 0 else f"{context:,}"


def speedup(timed: Timed, over: str = "speedup") -> Metric | None:
    """Of a method over full KV, with its interval over turns; or "sdpa_speedup", "plain_speedup" (task=latency)."""
    turns = timed.row["scores"].get(over)
    return bootstrap(turns, np.median) if turns else None


def _times(each: Timings) -> list[str]:
    head = ["cached", "batch", "who", "ms/step", "times as fast as full KV", "as by SDPA", "as transformers"]
    head += ["cache read, MiB", "limit, ms", "share", "cache held, MiB", "on the host, MiB"]
    body = []
    for timed in (timed for example in each.examples for timed in example.values()):
        ms, limit, method = timed.step_ms, timed.limit_ms, timed.name == each.name
        body.append(
            [
                short(timed.context),
                str(timed.batch),
                timed.name,
                f"{number(ms['median'], 3)} [{number(ms['p25'], 3)}, {number(ms['p75'], 3)}]",
                _ratio(speedup(timed)) if method else MISSING,
                _ratio(speedup(timed, "sdpa_speedup")) if method else MISSING,
                _ratio(speedup(timed, "plain_speedup")) if method else MISSING,
                _mib(timed.part.get("read_bytes")),
                number(limit, 3),
                MISSING if limit is None else f"{limit / timed.median_ms:.0%}",
                _mib(timed.part.get("device_bytes")),
                _mib(timed.part.get("host_bytes")),
            ]
        )
    return _grid(head, body)


def _growth(each: Timings) -> list[str]:
    """How much longer a step takes at the longest context than at 8K, or at the shortest there is."""
    lines = []
    for who in WHO:
        ms = {timed.context: timed.median_ms for timed in each.of_one(who)}
        start, end = (8192 if 8192 in ms else min(ms, default=0)), max(ms, default=0)
        if start < end:
            lines.append(f"{WHO[who] or each.name} {ms[end] / ms[start]:.2f} times ({short(start)} to {short(end)})")
    return [f"Growth of a step's time with the context: {', '.join(lines)}.", ""] if lines else []


def _stages(each: Timings) -> list[str]:
    measured = [timed for example in each.examples for timed in example.values() if timed.stages_ms]
    found = {name for timed in measured for name in timed.stages_ms}
    names = [*(name for name in STAGES if name in found), *sorted(found - set(STAGES))]
    body = []
    for timed in measured:
        total = sum(timed.stages_ms.values())
        cells = [number(timed.stages_ms.get(name), 3) for name in names]
        ends = [number(total, 3), number(timed.median_ms, 3), f"{total / timed.median_ms:.0%}"]
        body.append([short(timed.context), str(timed.batch), timed.name, *cells, *ends])
    return _grid(["cached", "batch", "who", *names, "sum", "step", "sum by step"], body)


def _ratio(entry: Metric | None) -> str:
    if entry is None:
        return MISSING
    value = f"{entry['value']:.2f}"
    return value if entry["ci_low"] is None else f"{value} [{entry['ci_low']:.2f}, {entry['ci_high']:.2f}]"


def _mib(count: int | None) -> str:
    return MISSING if count is None else number(count / MIB, 4) if count else "0"


def _grid(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    rule = [":--" if name == "who" else "--:" for name in head]
    return ["| " + " | ".join(line) + " |" for line in [head, rule, *body]]
