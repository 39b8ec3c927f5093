"""Stored runs as rows of a table: what each is called, what it scored, what it cost."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from fasa_bench.comparison import differences, is_full
from fasa_bench.statistics import Difference
from fasa_bench.store import Run, flatten

MISSING = "-"  # there is no such number for this run
NO_FULL_KV = "no full-KV run"  # of the same model, task and settings
NOT_RUN = "not run"  # the task has this score, and this run has no example of it
MIB = 2**20
REALISED = ("attended_tokens", "cached_tokens", "sparse_steps")
# columns of runs.csv, after the metric's name
DIFFERENCE = {
    "difference": "difference",
    "difference_low": "ci_low",
    "difference_high": "ci_high",
    "p_value": "p_value",
    "pairs": "n",
}
SAME_HEADS = re.compile(r"fc_granularity=(\w+), token_granularity=\1")  # told in two words
# what may tell runs of one name apart
SETTINGS = ("model", "method", "protocol", "cache", "task", "calibration", "seed", "limit")


@dataclass(frozen=True)
class Group:
    """Runs of one model on one task, full KV first, each with the name that tells it from its neighbours."""

    model: str
    task: str
    runs: tuple[tuple[str, Run], ...]

    @property
    def metrics(self) -> list[str]:
        """Headline metrics in the order of the task; not parts of a data set ("a/b") and counts ("n_...")."""
        names = dict.fromkeys(name for _, run in self.runs for name in metrics(run))
        return [name for name in names if "/" not in name and not name.startswith("n_")]

    def main_metrics(self, most: int) -> list[str]:
        """At most `most` of them; averages say the most and stay."""
        names = self.metrics
        averages = [name for name in names if name.startswith("avg")][:most]
        if len(names) > most and averages:
            return [*[name for name in names if name not in averages][: most - len(averages)], *averages]
        return names[:most]

    @cached_property
    def differences(self) -> dict[Path, dict[str, Difference]]:
        return differences([run for _, run in self.runs])

    @property
    def context(self) -> str:
        """Without which the numbers mean little: how many examples, how long, on which machine."""
        runs = [run for _, run in self.runs]
        lengths = [row["prompt_tokens"] for run in runs for row in run.rows if row.get("prompt_tokens")]
        counts = sorted({len(run.rows) for run in runs})
        machines = dict.fromkeys(machine(run) for run in runs if run.env)
        parts = [f"{span(counts)} example{'s' if counts[-1] != 1 else ''}"]
        if lengths:
            parts.append(f"prompts of {span(lengths)} tokens")
        parts.append(" and ".join(machines) + (" (speeds do not compare)" if len(machines) > 1 else ""))
        return ", ".join(part for part in parts if part)


def grouped(runs: Iterable[Run]) -> list[Group]:
    """Group, sort and name runs. Settings that differ between runs of one method and budget join its name."""
    result = []
    by_group: dict[tuple[str, str], dict[str, list[Run]]] = {}
    for run in runs:
        by_group.setdefault((run.name("model"), run.name("task")), {}).setdefault(run.name("method"), []).append(run)
    for (model, task), methods in sorted(by_group.items()):
        named = [(name, run) for method, same in methods.items() for name, run in _named(method, same)]
        named.sort(key=lambda item: (budget(item[1]) is not None, item[0], _order(budget(item[1]))))
        result.append(Group(model, task, tuple(named)))
    return result


def table(runs: Iterable[Run]) -> pd.DataFrame:
    """One row a run, as text: a metric is "value [low, high]" with its 95 % CI, a missing number is never a 0."""
    groups = grouped(runs)
    names = list(dict.fromkeys(name for group in groups for name in group.metrics))
    return pd.DataFrame([_text(group, name, run, names) for group in groups for name, run in group.runs])


def difference_table(group: Group, names: Sequence[str]) -> pd.DataFrame:
    """The runs of a group that are not full KV, as text: each metric's difference to full KV on the same examples."""
    rows = []
    for name, run in group.runs:
        if is_full(run) or is_timing(run):  # a timing took turns with full KV itself
            continue
        found = group.differences.get(run.folder)
        cells = {metric: NO_FULL_KV if found is None else difference(found.get(metric)) for metric in names}
        rows.append({"method": name, "budget": _budget(run), **cells})
    return pd.DataFrame(rows)


def numbers(runs: Iterable[Run]) -> pd.DataFrame:
    """One row a run, as numbers at full precision and with every metric; a missing number is missing."""
    rows = []
    for group in grouped(runs):
        for name, run in group.runs:
            row: dict[str, Any] = {"run_id": run.folder.name, "model": group.model, "task": group.task, "method": name}
            row |= {
                "budget": budget(run),
                "status": run.status,
                "examples": len(run.rows),
                "failed_examples": len(run.failed),
            }
            for metric, entry in metrics(run).items():
                row |= {f"{metric}.{key}": entry.get(key) for key in ("value", "ci_low", "ci_high", "n")}
            for metric, pair in group.differences.get(run.folder, {}).items():
                row |= {f"{metric}.{column}": pair[key] for column, key in DIFFERENCE.items()}
            latency = run.summary.get("latency") or {}
            if simulated(run):
                latency = {}
            row |= flatten({"latency": latency, "memory": run.summary.get("memory") or {}})
            row |= {f"realised.{key}": realised(run, key) for key in REALISED}
            row |= {"speed": "simulated" if simulated(run) else "measured", "machine": machine(run)}
            rows.append(row)
    return pd.DataFrame(rows, dtype=object)  # else a missing number makes floats of a column of integers


# --- what a summary says, whatever is missing in it


def metrics(run: Run) -> Mapping[str, Mapping[str, Any]]:
    return run.summary.get("metrics") or {}


def budget(run: Run) -> int | float | None:
    """Tokens, a ratio, or None for full KV."""
    return run.summary.get("budget") if run.summary else run.config.get("budget")


def realised(run: Run, key: str) -> float | None:
    return (run.summary.get("realised") or {}).get(key)


def decode_ms(run: Run) -> Mapping[str, Any]:
    """median, p25, p75, n of the decode time per token, in ms; empty if there is none or it means nothing."""
    return (
        {} if simulated(run) or is_timing(run) else (run.summary.get("latency") or {}).get("decode_ms_per_token") or {}
    )


def is_timing(run: Run) -> bool:
    """Whether steps were timed at several contexts, which have no time in common: see fasa_bench.latency_tables."""
    return any("measured" in row for row in run.rows)


def simulated(run: Run) -> bool:
    """Whether the method reads as much as full KV does, so that its time is no claim."""
    return run.summary.get("speed") == "simulated"


def machine(run: Run) -> str:
    gpus, threads = run.env.get("gpu") or [], run.env.get("threads", "?")
    return (
        gpus[0] if gpus else f"{run.env.get('cpu', 'unknown')} CPU with {threads} thread{'s' if threads != 1 else ''}"
    )


def lower_is_better(metric: str) -> bool:
    return "perplexity" in metric or metric == "truncated"


# --- text


def number(value: float | int | None, digits: int = 4) -> str:
    """With `digits` digits, but never in powers of ten nor as a 0 that is none."""
    if value is None:
        return MISSING
    if isinstance(value, int):
        return f"{value:,}"
    value = value + 0.0  # no minus before a zero
    if 0 < abs(value) < 10**-digits:
        return f"{value:.1e}"
    return f"{value:,.{max(0, digits - len(str(int(abs(value)))))}f}"


def interval(entry: Mapping[str, Any] | None) -> str:
    """ "value [low, high]"; the bounds, uncertain themselves, get one digit less."""
    if not entry or entry.get("value") is None:
        return MISSING if entry and entry.get("n") else NOT_RUN
    value = number(entry["value"])
    if entry.get("ci_low") is None:
        return value
    return f"{value} [{number(entry['ci_low'], 3)}, {number(entry['ci_high'], 3)}]"


def difference(entry: Difference | None) -> str:
    """ "+difference [low, high] p=...", over the pairs that there are."""
    if not entry or entry["difference"] is None:
        return MISSING
    text = f"{'+' if entry['difference'] > 0 else ''}{number(entry['difference'], 3)}"
    if entry["ci_low"] is None or entry["p_value"] is None:
        return text
    p = "p<0.001" if entry["p_value"] < 0.001 else f"p={entry['p_value']:.3f}"
    return f"{text} [{number(entry['ci_low'], 3)}, {number(entry['ci_high'], 3)}] {p}"


def span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def _status(run: Run) -> str:
    if run.status == "complete":
        return run.status
    failed = f", {len(run.failed)} failed" if run.failed else ""
    return f"{run.status} ({len(run.rows)} done{failed})"


def _text(group: Group, name: str, run: Run, names: Sequence[str]) -> dict[str, str]:
    latency, memory = run.summary.get("latency") or {}, run.summary.get("memory") or {}
    device, host = memory.get("device_bytes"), memory.get("host_bytes")
    cache = MISSING if device is None else number(device / MIB, 3)
    return {
        "model": group.model,
        "task": group.task,
        "method": name,
        "budget": _budget(run),
        **{metric: interval(metrics(run).get(metric)) if metric in group.metrics else MISSING for metric in names},
        "decode ms/token": "simulated" if simulated(run) else number(decode_ms(run).get("median"), 3),
        "prefill s": "simulated" if simulated(run) else number(latency.get("prefill_s"), 3),
        "cache MiB": f"{cache} + {number(host / MIB, 3)} host" if host else cache,
        "tokens read": _count(realised(run, "attended_tokens")),
        "cached tokens": _count(realised(run, "cached_tokens")),
        "sparse steps": _count(realised(run, "sparse_steps")),
        "status": _status(run),
    }


def _budget(run: Run) -> str:
    given = budget(run)
    return "full" if given is None else str(given)


def _count(value: float | None) -> str:
    return MISSING if value is None else f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def _named(method: str, runs: list[Run]) -> list[tuple[str, Run]]:
    settings = {run.folder: flatten({key: run.config.get(key) for key in SETTINGS}) for run in runs}
    by_budget: dict[str, list[Run]] = {}
    for run in runs:
        by_budget.setdefault(repr(budget(run)), []).append(run)
    keys = {
        key
        for same in by_budget.values()
        for key in {key for run in same for key in settings[run.folder]}
        if len({repr(settings[run.folder].get(key)) for run in same}) > 1
    }
    if all(map(is_timing, runs)):  # how long was measured tells no timings apart that differ otherwise
        shorter = {key for key in keys if not key.startswith("task.")}
        told = {(repr(budget(run)), *(repr(settings[run.folder].get(key)) for key in shorter)) for run in runs}
        keys = shorter if len(told) == len(runs) else keys
    named = []
    for run in runs:
        mine = settings[run.folder]
        parts = [
            f"{key.removeprefix('method.').removeprefix('protocol.')}={mine[key]}" for key in sorted(keys & mine.keys())
        ]
        twins = [other for other in by_budget[repr(budget(run))] if settings[other.folder] == mine]
        if len(twins) > 1:  # other code, data or versions: only the id tells
            parts.append(run.folder.name[:6])
        told_apart = SAME_HEADS.sub(r"per \1", ", ".join(parts))
        named.append((f"{method} ({told_apart})" if parts else method, run))
    return named


def _order(value: Any) -> tuple[int, float]:
    """Tokens, then shares, then what was refused because it is neither."""
    return (int(isinstance(value, float)), value or 0) if isinstance(value, int | float | None) else (2, 0)
