"""Tables, figures and report as artefacts of one W&B run, with all cells and all runs as tables to plot and filter.

python -m fasa_bench.report wandb. Without an API key, or with WANDB_MODE=offline, all of it lies under
<results_dir>/wandb until `wandb sync`; the report's page of runs shows the same without W&B.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fasa_bench.errors import UserError
from fasa_bench.site.build import Site
from fasa_bench.store import Run, report_runs
from fasa_bench.tracking import Logger, WandbTracker

FOLDERS = ("tables", "figures", "report")
CELL = [
    *("exhibit", "profile", "model", "row", "column", "unit", "ours", "ci_low", "ci_high", "n", "paper", "verdict"),
    *("state", "difference_to_full_kv", "p_value", "runs"),
]
RUN = [
    *("run_id", "model", "task", "method", "name", "budget", "status", "tokens_read", "decode_ms", "cache_mib"),
    *("metric", "value", "ci_low", "ci_high", "n"),
]


def publish(results_dir: str | Path, stored: Sequence[Run] | None = None, logger: Logger | None = None) -> str:
    """Log everything; returns where it is. The run's id follows from what is logged: the same twice is one run.

    Raises UserError where there is nothing to log yet, or W&B fails: here it was asked for, and is no by-product.
    """
    root = Path(results_dir)
    folders = [root / name for name in FOLDERS if any((root / name).glob("*"))]
    if not folders:
        raise UserError(f"nothing to publish under {root}: `make tables figures report` first")
    site = Site(root, root / "report", report_runs(root) if stored is None else stored)
    tracker = WandbTracker(logger or Logger(), _id(folders), {"method": "report"}, root)
    tracker.name, tracker.strict = "report", True
    with tracker:
        tracker.log_report(
            tables={"cells": (CELL, list(_cells(site))), "runs": (RUN, list(_runs(site)))},
            images=sorted((root / "figures").glob("*.png")),
            folders=folders,
        )
        return tracker.place


def _cells(site: Site) -> Iterator[list[Any]]:
    for exhibit in site.exhibits.values():
        for grid in exhibit.grids:
            for (row, column), cell in grid.cells.items():
                pair = cell.difference or {}
                yield [
                    exhibit.id, grid.profile, grid.title, exhibit.label(row), exhibit.label(column),
                    grid.unit_of(row, column), cell.value, cell.low, cell.high, cell.n,
                    cell.paper.value if cell.paper else None, cell.verdict, cell.state, pair.get("difference"),
                    pair.get("p_value"), " ".join(cell.runs),
                ]  # fmt: skip


def _runs(site: Site) -> Iterator[list[Any]]:
    """One line a run and score: what the report's page of runs draws."""
    for view in site.views:
        point = view.point
        shared = [point[key] for key in ("id", "model", "task", "method", "name")]
        shared += [None if view.budget == "full" else view.budget_sort, point["status"], point["tokens"], point["ms"]]
        for metric, numbers in point["scores"].items():
            yield [*shared, point["mib"], metric, *numbers]


def _id(folders: Sequence[Path]) -> str:
    content = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                content.update(path.relative_to(folder.parent).as_posix().encode() + path.read_bytes())
    return f"report-{content.hexdigest()[:16]}"
