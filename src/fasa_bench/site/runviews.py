"""Runs as rows of a table and points of a plot; the machines they ran on; the switches that are set in them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasa_bench.store import Run, flatten
from fasa_bench.tables import MIB, budget, decode_ms, grouped, interval, machine, metrics, number, realised, simulated

SHOWN = 2  # headline metrics in the table of runs; all are in the plot


@dataclass(frozen=True)
class RunView:
    """id; folder: link to it from the site's root; name: of the method, with what tells it from its neighbours."""

    id: str
    folder: str
    model: str
    task: str
    name: str
    budget: str
    budget_sort: float | None
    status: str
    examples: int
    failed: int
    scores: tuple[tuple[str, str], ...]
    decode: str
    decode_sort: float | None
    cache: str
    cache_sort: float | None
    tokens: str
    tokens_sort: float | None
    switches: int
    point: Mapping[str, Any]

    @property
    def has_rows(self) -> bool:
        return bool(self.examples or self.failed)

    @property
    def label(self) -> str:
        return f"{self.model} · {self.task} · {self.name} · {self.budget}"


def views(runs: Sequence[Run], root: Path) -> list[RunView]:
    """root: the folder of the site's first page."""
    found = []
    for group in grouped(runs):
        names = group.main_metrics(SHOWN)
        for name, run in group.runs:
            given, time, memory = budget(run), decode_ms(run), run.summary.get("memory") or {}
            held, read = memory.get("device_bytes"), realised(run, "attended_tokens")
            scores = {key: entry for key, entry in metrics(run).items() if _is_point(key, entry)}
            found.append(
                RunView(
                    id=run.folder.name,
                    folder=Path(os.path.relpath(run.folder, root)).as_posix(),
                    model=group.model,
                    task=group.task,
                    name=name,
                    budget="full" if given is None else str(given),
                    budget_sort=given,
                    status=run.status,
                    examples=len(run.rows),
                    failed=len(run.failed),
                    scores=tuple((key, interval(metrics(run).get(key))) for key in names),
                    decode="simulated" if simulated(run) else number(time.get("median"), 3),
                    decode_sort=time.get("median"),
                    cache=number(None if held is None else held / MIB, 3),
                    cache_sort=None if held is None else held / MIB,
                    tokens=number(None if read is None else round(read)),
                    tokens_sort=read,
                    switches=len(run.summary.get("deviations") or {}),
                    point={
                        "id": run.folder.name,
                        "model": group.model,
                        "task": group.task,
                        "method": run.name("method"),
                        "name": name,
                        "budget": given,
                        "status": run.status,
                        "tokens": read,
                        "ms": time.get("median"),
                        "mib": None if held is None else round(held / MIB, 3),
                        "scores": {
                            key: [entry["value"], entry.get("ci_low"), entry.get("ci_high"), entry.get("n")]
                            for key, entry in scores.items()
                        },
                    },
                )
            )
    return found


def _is_point(name: str, entry: Mapping[str, Any]) -> bool:
    return entry.get("value") is not None and "/" not in name and not name.startswith("n_")


@dataclass(frozen=True)
class Machine:
    """An environment that runs were computed in. facts: label and text."""

    title: str
    facts: tuple[tuple[str, str], ...]
    runs: tuple[str, ...]


def machines(runs: Sequence[Run]) -> list[Machine]:
    """Each environment once, the one with most runs first; a run that went on elsewhere stands under its last one."""
    by_env: dict[str, list[Run]] = {}
    for run in runs:
        known = {key: value for key, value in run.env.items() if key != "earlier"}
        by_env.setdefault(json.dumps(known, sort_keys=True, default=str), []).append(run)
    found = []
    for _, same in sorted(by_env.items(), key=lambda item: (-len(item[1]), item[0])):
        env = same[0].env
        facts = [(key, _fact(value)) for key, value in flatten({**env, "packages": {}, "git": {}}).items() if value]
        facts += [(name, str(version)) for name, version in (env.get("packages") or {}).items() if version]
        git = env.get("git") or {}
        if git.get("commit"):
            facts.append(("source", git["commit"] + (" with changes" if git.get("dirty") else "")))
        facts = [(key, value) for key, value in facts if key != "earlier"]
        title = machine(same[0]) if env else "not stored"
        found.append(Machine(title, tuple(facts), tuple(run.folder.name for run in same)))
    return found


def _fact(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


@dataclass(frozen=True)
class Switch:
    """A point where paper, official code and this project differ. values: each with the ids of the runs that have it"""

    key: str
    notes: tuple[str, ...]
    values: tuple[tuple[str, tuple[str, ...]], ...]


def switches(runs: Sequence[Run]) -> list[Switch]:
    """From the runs' `deviations`, by key."""
    values: dict[str, dict[str, list[str]]] = {}
    notes: dict[str, dict[str, None]] = {}
    for run in runs:
        for key, entry in (run.summary.get("deviations") or {}).items():
            value = json.dumps(entry.get("value"), ensure_ascii=False, default=str)
            values.setdefault(key, {}).setdefault(value, []).append(run.folder.name)
            notes.setdefault(key, {})[str(entry.get("note", ""))] = None
    return [
        Switch(key, tuple(notes[key]), tuple((value, tuple(ids)) for value, ids in sorted(values[key].items())))
        for key in sorted(values)
    ]
