"""Grids whose cells take more than a look at one run: calibrations compared, FCs that sets have in common, stages.

An experiment's layout names one of DERIVED. Overlaps read the artefacts of runs of task=calibration: mean CA [layers,
Hq, FCs] of each text, in the run folder. A head's dominant FCs are its best ones, `share` of all: a quarter if the
layout does not say.
"""

from __future__ import annotations

import itertools
import logging
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from fasa_bench.exhibits import LABELS, Cell, Grid, State, Stored, cell_of
from fasa_bench.experiments import PROFILES, Experiment, Planned
from fasa_bench.latency_tables import STAGES, WHO
from fasa_bench.paper import Place, Value
from fasa_bench.store import Run
from fasa_bench.tables import budget, is_timing, machine

log = logging.getLogger("fasa_bench")

Layout = Mapping[str, Any]
Array = NDArray[Any]
Cells = dict[tuple[Any, Any], Cell]
QUARTER = 0.25  # of a head's FCs, as FASA takes by default


@dataclass(frozen=True)
class Agreement:
    """What a run stored for one text. mean: CA [layers, Hq, units]; k, tokens: size of the sets, and of the text."""

    run: Run
    dataset: str
    mean: Array
    k: int
    tokens: int


def calibrations(experiment: Experiment, layout: Layout, place: Place | None, stored: Stored) -> Iterator[Grid]:
    """Scores by the text that FASA was calibrated on (Table 6).

    `self` is each data set calibrated on itself; `cv`, the last row, the standard deviation of the rows above (full KV
    left out) by their mean.
    """
    for profile, model, planned in _by_model(experiment):
        rows, columns = ["fkv", *layout["rows"], "cv"], layout["values"]
        runs = {_row_of(one): stored.find(one) for one in planned}
        cells: Cells = {}
        for column in columns:
            for row in rows[:-1]:
                run = runs.get(column if row == "self" else row)
                key = {"method": row} if row == "fkv" else {"calibration": row}
                cells[row, column] = cell_of(run, column, _paper(place, model=model, dataset=column, **key), stored)
            paper = _paper(place, model=model, dataset=column, metric="cv")
            cells["cv", column] = _spread([cells[row, column] for row in rows[1:-1]], paper)
        yield _grid(layout, profile, model, rows, columns, cells, units={"cv": "ratio"})


def overlap(experiment: Experiment, layout: Layout, place: Place | None, stored: Stored) -> Iterator[Grid]:
    """Share of the dominant FCs that two calibration texts have in common, mean over heads (Table 10).

    The last column is the mean of a row, its own 100 included as in the paper. n: heads.
    """
    for profile, model, planned in _by_model(experiment):
        names = layout["values"]
        found: dict[str, tuple[Array, Run]] = {}
        for run in filter(None, map(stored.find, (one for one in planned if one.given["task"] == "calibration"))):
            for source, samples in _samples(run).items():
                found.setdefault(source, (dominant(np.mean(samples, axis=0), layout.get("share", QUARTER)), run))
        cells: Cells = {}
        for row, column in itertools.product(names, names):
            paper = _paper(place, model=model, calibration=row, other=column, metric="overlap")
            cells[row, column] = Cell(paper=paper)
            if row in found and column in found:
                (mine, run), (theirs, other) = found[row], found[column]
                used = tuple(dict.fromkeys((run.folder.name, other.folder.name)))
                heads = int(np.prod(mine.shape[:-1]))
                cells[row, column] = Cell(
                    in_common(mine, theirs), n=heads, runs=used, state=_state(run, other), paper=paper
                )
        for row in names:
            paper = _paper(place, model=model, calibration=row, metric="overlap_avg")
            cells[row, "mean"] = _mean([cells[row, column] for column in names], paper)
        yield _grid(layout, profile, model, names, [*names, "mean"], cells, average="mean")


def sizes(experiment: Experiment, layout: Layout, place: Place | None, stored: Stored) -> Iterator[Grid]:
    """How alike the dominant FCs of sets of samples are, by the number of samples in a set.

    Two columns for each source: with each other, mean over all pairs of disjoint sets, and with the set of all samples,
    mean over the disjoint sets. In brackets the least and the most; n: pairs, or sets.
    """
    for profile, model, planned in _by_model(experiment):
        cells: Cells = {}
        columns = [f"{source} · {what}" for source in layout["values"] for what in ("each other", "all samples")]
        for run in filter(None, map(stored.find, planned)):
            for source, samples in _samples(run).items():
                whole = dominant(np.mean(samples, axis=0), layout.get("share", QUARTER))
                for size in layout["rows"]:
                    sets = [
                        dominant(np.mean(samples[start : start + size], axis=0), layout.get("share", QUARTER))
                        for start in range(0, len(samples) - size + 1, size)
                    ]
                    pairs = [in_common(one, other) for one, other in itertools.combinations(sets, 2)]
                    cells[size, f"{source} · each other"] = _over(pairs, run)
                    cells[size, f"{source} · all samples"] = _over([in_common(one, whole) for one in sets], run)
        yield _grid(layout, profile, model, layout["rows"], columns, cells, interval="the least and the most")


def stages(experiment: Experiment, layout: Layout, place: Place | None, stored: Stored) -> Iterator[Grid]:
    """Milliseconds of a decode step's stages by context: of every stored timing, the method's and full KV's."""
    for run in stored.runs:
        rows = sorted((row for row in run.rows if "measured" in row), key=lambda row: row["fields"]["context"])
        for who in ("method", "full") if is_timing(run) else ():
            parts = {row["fields"]["context"]: row["measured"][who] for row in rows if who in row["measured"]}
            if not any(part.get("stages_ms") for part in parts.values()):
                continue
            here = [name for name in STAGES if any(name in part["stages_ms"] for part in parts.values())]
            state: State = "complete" if run.status == "complete" else "partial"
            cells = {
                (name, context): Cell(
                    part["stages_ms"].get(name), n=len(part["step_ms"]), runs=(run.folder.name,), state=state
                )
                for context, part in parts.items()
                for name in here
            }
            for context, part in parts.items():
                low, middle, high = (float(value) for value in np.quantile(part["step_ms"], [0.25, 0.5, 0.75]))
                cells["step", context] = Cell(middle, low, high, len(part["step_ms"]), (run.folder.name,), state)
            given = budget(run)
            name = WHO[who] or f"{LABELS.get(run.name('method'), run.name('method'))}, budget {given}"
            title = f"{LABELS.get(run.name('model'), run.name('model'))}, {name}; {machine(run)}"
            profile = "mini" if run.name("model") == "smollm2_135m" else "paper"
            yield Grid(
                title, {"model": run.name("model")}, profile, "stage", "context", (*here, "step"), tuple(parts), cells,
                unit="ms", better="low", interval="quartiles over steps",
            )  # fmt: skip


DERIVED: dict[str, Callable[[Experiment, Layout, Place | None, Stored], Iterator[Grid]]] = {
    "calibrations": calibrations,
    "overlap": overlap,
    "sizes": sizes,
    "stages": stages,
}


def dominant(agreement: Array, share: float) -> Array:
    """Which FCs are the best of their head, `share` of all: CA [..., FCs] -> bool [..., FCs]; of ties the first."""
    count = max(1, round(share * agreement.shape[-1]))
    best = np.argsort(-agreement, axis=-1, kind="stable")[..., :count]
    chosen = np.zeros(agreement.shape, dtype=bool)
    np.put_along_axis(chosen, best, True, axis=-1)
    return chosen


def in_common(mine: Array, theirs: Array) -> float:
    """In %, mean over heads: how much of one set of FCs is in the other; both are [..., FCs] with as many each."""
    return float(100 * ((mine & theirs).sum(-1) / mine.sum(-1)).mean())


def agreements(run: Run) -> Iterator[Agreement]:
    """Of each text that a run of task=calibration observed; files that are gone or damaged are left out."""
    task = run.config.get("task") or {}
    for row in run.rows:
        for name in row.get("files") or ():
            try:
                mean = load_file(run.folder / name)["agreement"]
            except (OSError, KeyError, SafetensorError) as error:
                log.warning("%s: its artefact %s cannot be read (%s) and is left out", run.folder, name, error)
                continue
            tokens = int(row.get("prompt_tokens") or task.get("prefill", 0)) + int(task.get("decode", 0)) // 2
            yield Agreement(run, row["fields"]["dataset"], mean, int(task.get("k", 0)), tokens)


def _samples(run: Run) -> dict[str, list[Array]]:
    """{source: CA [layers, Hq, FCs] of each of its texts}."""
    found: dict[str, list[Array]] = {}
    for each in agreements(run):
        found.setdefault(each.dataset, []).append(each.mean)
    return found


def _by_model(experiment: Experiment) -> Iterator[tuple[str, str, list[Planned]]]:
    for profile in PROFILES:
        models: dict[str, list[Planned]] = {}
        for planned in experiment.plan(profile):
            models.setdefault(planned.given["model"], []).append(planned)
        for model, those in models.items():
            yield profile, model, those


def _row_of(planned: Planned) -> str:
    return "fkv" if planned.get("method") == "fkv" else Path(planned.given["calibration.text"]).stem


def _paper(place: Place | None, **wanted: Any) -> Value | None:
    found = place.find(**wanted) if place else []
    return found[0] if len(found) == 1 else None


def _grid(
    layout: Layout, profile: str, model: str, rows: Sequence[Any], columns: Sequence[Any], cells: Cells, *,
    average: Any = None, units: Mapping[Any, str] | None = None, interval: str = "",
) -> Grid:  # fmt: skip
    return Grid(
        LABELS.get(model, model), {"model": model}, profile, layout["row"], layout["column"], tuple(rows),
        tuple(columns), cells, average=average, units=units or {}, interval=interval or Grid.interval,
    )  # fmt: skip


def _spread(cells: Sequence[Cell], paper: Value | None) -> Cell:
    """Standard deviation by mean, of what is all there."""
    values = [cell.value for cell in cells if cell.value is not None]
    if len(values) < len(cells) or not statistics.fmean(values):
        return Cell(paper=paper)
    value = statistics.stdev(values) / statistics.fmean(values)
    return Cell(value, n=len(values), runs=_runs(cells), state=_worst(cells), paper=paper)


def _mean(cells: Sequence[Cell], paper: Value | None) -> Cell:
    values = [cell.value for cell in cells if cell.value is not None]
    if len(values) < len(cells):
        return Cell(paper=paper)
    return Cell(statistics.fmean(values), runs=_runs(cells), state=_worst(cells), paper=paper)


def _over(values: Sequence[float], run: Run) -> Cell:
    if not values:
        return Cell()
    return Cell(statistics.fmean(values), min(values), max(values), len(values), (run.folder.name,), _state(run))


def _runs(cells: Iterable[Cell]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for cell in cells for name in cell.runs))


def _state(*runs: Run) -> State:
    return "complete" if all(run.status == "complete" for run in runs) else "partial"


def _worst(cells: Iterable[Cell]) -> State:
    return "partial" if any(cell.state == "partial" for cell in cells) else "complete"
