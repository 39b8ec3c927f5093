"""What a method costs: the difference of a run to full KV, on the same examples."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fasa_bench.config import build
from fasa_bench.errors import UserError
from fasa_bench.statistics import Difference, Sample
from fasa_bench.store import Run
from fasa_bench.task import Task

log = logging.getLogger("fasa_bench")

FULL = "fkv"
SAME = ("model", "task", "protocol", "seed")  # what a run and its full-KV run share; the limit may differ


def differences(runs: Sequence[Run]) -> dict[Path, dict[str, Difference]]:
    """{folder of a run: {metric: difference to the full-KV run, paired by example}}.

    That run has the same model, task, data, protocol and seed, and a cache that is not quantised; of several, the one
    with the most examples in common. A run without one has no entry; full KV itself has none either.
    """
    full = [run for run in runs if is_full(run) and _settings(run)]
    samples: dict[Path, dict[str, Sample]] = {}
    result = {}
    for run in runs:
        rivals = [other for other in full if _settings(other) == _settings(run)]
        if is_full(run) or not rivals:
            continue
        ids = {row["id"] for row in run.rows}
        base = max(rivals, key=lambda other: len(ids & {row["id"] for row in other.rows}))
        for one in (run, base):
            if one.folder not in samples:
                samples[one.folder] = _samples(one)
        mine, theirs = samples[run.folder], samples[base.folder]
        result[run.folder] = {name: mine[name].minus(theirs[name]) for name in mine if name in theirs}
    return result


def is_full(run: Run) -> bool:
    """Whether this is full KV itself, and not with a quantised cache."""
    return run.name("method") == FULL and not _identity(run).get("cache")


def _identity(run: Run) -> Mapping[str, Any]:
    found = run.config.get("identity")
    return found if isinstance(found, Mapping) else {}


def _settings(run: Run) -> dict[str, Any]:
    """Empty for a run that does not say."""
    identity = _identity(run)
    return {key: identity[key] for key in SAME} if all(key in identity for key in SAME) else {}


def _samples(run: Run) -> dict[str, Sample]:
    """What the run's metrics are made of; rows that lack a part count as not there."""
    try:
        task = build("task", run.config["task"], Task)
    except (UserError, KeyError, TypeError) as error:  # a task of the user's that is not here, or of another version
        log.warning("%s: no difference to full KV, its task cannot be made (%s)", run.folder, error)
        return {}
    rows = []
    for row in run.rows:
        try:
            task.samples([row])
        except (KeyError, TypeError, ValueError, AttributeError):
            log.warning("%s: the row %s lacks parts of a row and is left out", run.folder, row["id"])
        else:
            rows.append(row)
    return task.samples(rows)
