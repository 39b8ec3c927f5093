"""What our runs give for the numbers in the paper's text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean

from fasa_bench.exhibits import Cell, Exhibit, Grid
from fasa_bench.paper import Claim
from fasa_bench.store import Run
from fasa_bench.tables import is_timing, machine, metrics, number

FASA = "fasa_c"  # as runs are named: the paper's FASA where time and memory do not matter
EIGHTH = (8, "F=4 of 32")  # Table 1's row of an eighth of the FCs, for heads of 64 and of 32


@dataclass(frozen=True)
class Found:
    """Of one model. name: of it, and of a method if the claim is of another; low, high: 95 % interval; runs: ids."""

    name: str
    profile: str
    value: float
    low: float | None = None
    high: float | None = None
    runs: tuple[str, ...] = ()
    partial: bool = False
    model: str | None = None

    def text(self, unit: str) -> str:
        interval = "" if self.low is None or self.high is None else f" [{number(self.low, 3)}, {number(self.high, 3)}]"
        return f"{number(self.value, 3)} {unit}{interval}"


@dataclass(frozen=True)
class Evidence:
    """Exhibits by id, and all runs."""

    exhibits: Mapping[str, Exhibit]
    runs: Sequence[Run]

    def grids(self, name: str) -> Iterator[tuple[Exhibit, Grid]]:
        if exhibit := self.exhibits.get(name):
            yield from ((exhibit, grid) for grid in exhibit.grids)


def find(name: str, claim: Claim, evidence: Evidence) -> Iterator[Found]:
    """name: "table2.fasa_loss". A claim without a function here is the cell that the paper has with its settings."""
    yield from OURS[name](evidence) if name in OURS else _cell(name.partition(".")[0], claim, evidence)


def _cell(place: str, claim: Claim, evidence: Evidence) -> Iterator[Found]:
    for exhibit, grid in evidence.grids(place):
        for cell in grid.cells.values():
            paper = cell.paper
            settings = paper and paper.unit == claim.unit and claim.where.items()
            if paper and settings and all(paper.get(key) == value for key, value in settings):
                yield from _one(_title(exhibit, grid), grid, cell)


def _kept(evidence: Evidence) -> Iterator[Found]:
    """Table 2: FASA's average as a share of full KV's, with the paired interval."""
    for exhibit, grid, full, fasa in _averages(evidence):
        if full:
            yield _paired(exhibit, grid, fasa, partial(_share_kept, full))


def _share_kept(full: float, difference: float) -> float:
    return 100 * (full + difference) / full


def _loss(evidence: Evidence) -> Iterator[Found]:
    """Table 2: full KV's average less FASA's, with the paired interval."""
    for exhibit, grid, _, fasa in _averages(evidence):
        yield _paired(exhibit, grid, fasa, lambda difference: -difference)


def _averages(evidence: Evidence) -> Iterator[tuple[Exhibit, Grid, float, Cell]]:
    """Full KV's average and FASA's cell, where there is a difference of both."""
    for exhibit, grid in evidence.grids("table2"):
        full, fasa = grid.cell("fkv", grid.average), grid.cell(FASA, grid.average)
        if full.value is not None and fasa.difference and fasa.difference["difference"] is not None:
            yield exhibit, grid, full.value, fasa


def _quest(evidence: Evidence) -> Iterator[Found]:
    for exhibit, grid in evidence.grids("table2"):
        quest = grid.cell("quest", "narrativeqa")
        if quest.difference and quest.difference["difference"] is not None:
            yield _paired(exhibit, grid, quest, lambda difference: -difference)


def _over_snapkv(evidence: Evidence) -> Iterator[Found]:
    """Table 1: mean over the budgets that both have."""
    for exhibit, grid in evidence.grids("table1"):
        for row in EIGHTH:
            pairs = [(grid.cell(row, budget), grid.cell("snapkv", budget)) for budget in grid.columns]
            both = [(a, b) for a, b in pairs if a.value is not None and b.value is not None]
            if both:
                cells = [cell for pair in both for cell in pair]
                gain = mean(float(a.value or 0) - float(b.value or 0) for a, b in both)
                yield _without_interval(_title(exhibit, grid), grid, gain, cells)


def _at_64(evidence: Evidence) -> Iterator[Found]:
    for exhibit, grid in evidence.grids("table1"):
        for row in EIGHTH:
            yield from _one(_title(exhibit, grid), grid, grid.cell(row, 64))


def _share(column: str) -> Callable[[Evidence], Iterator[Found]]:
    def of(evidence: Evidence) -> Iterator[Found]:
        """Table 9, model by model."""
        for exhibit, grid in evidence.grids("table9"):
            for row in grid.rows:
                yield from _one(exhibit.label(row), grid, grid.cell(row, column))

    return of


def _least_overlap(evidence: Evidence) -> Iterator[Found]:
    """Table 10: the least of all pairs of different sets."""
    for exhibit, grid in evidence.grids("table10"):
        pairs = [grid.cell(row, column) for row in grid.rows for column in grid.rows if row != column]
        known = [cell for cell in pairs if cell.value is not None]
        if known:
            least = min(known, key=lambda cell: cell.value or 0)
            yield _without_interval(_title(exhibit, grid), grid, least.value or 0, [least])


def _least_gain(evidence: Evidence) -> Iterator[Found]:
    """Table 8: FASA less full KV on the data set where that is least."""
    for exhibit, grid in evidence.grids("table8"):
        known = [cell for cell in (grid.cell(FASA, column) for column in grid.columns) if cell.difference]
        if known:
            least = min(known, key=lambda cell: (cell.difference or {}).get("difference") or 0)
            yield _paired(exhibit, grid, least, lambda difference: difference)


def _speedup(evidence: Evidence) -> Iterator[Found]:
    """Timings of FASA-C and FASA+ at 64K, on whatever machine and weights they were made."""
    for run in evidence.runs:
        entry = metrics(run).get("speed-up 64K") or {}
        if is_timing(run) and run.name("method") in (FASA, "fasa_plus") and entry.get("value") is not None:
            name = f"{run.name('model')}, {run.name('method')}, {machine(run)}"
            profile = "mini" if run.name("model") == "smollm2_135m" else "paper"
            bounds = entry.get("ci_low"), entry.get("ci_high")
            yield Found(
                name, profile, entry["value"], *bounds, (run.folder.name,), run.status != "complete", run.name("model")
            )


def _compression(evidence: Evidence) -> Iterator[Found]:
    """Device bytes of full KV by those of FASA-M, at the longest context that was timed."""
    for run in evidence.runs:
        timed = [row for row in run.rows if row.get("measured", {}).get("full") and row["measured"].get("method")]
        if run.name("method") != "fasa_m" or not timed:
            continue
        row = max(timed, key=lambda row: int(row["fields"]["context"]))
        held = {who: row["measured"][who]["device_bytes"] for who in ("full", "method")}
        form = "shared per KV head" if run.config["method"].get("fc_granularity") == "kv_head" else "per query head"
        name = f"{run.name('model')}, chunks {form}, {row['fields']['context'] // 1024}K tokens"
        profile = "mini" if run.name("model") == "smollm2_135m" else "paper"
        yield Found(name, profile, held["full"] / held["method"], runs=(run.folder.name,), model=run.name("model"))


OURS: Mapping[str, Callable[[Evidence], Iterator[Found]]] = {
    "headline.longbench": _kept,
    "headline.speedup": _speedup,
    "headline.compression": _compression,
    "headline.dominant": _share("dominant"),
    "headline.non_dominant": _share("non_dominant"),
    "table1.f8_over_snapkv": _over_snapkv,
    "table1.f8_at_64": _at_64,
    "table2.fasa_loss": _loss,
    "table2.quest_narrativeqa": _quest,
    "table8.not_below": _least_gain,
    "table10.above": _least_overlap,
}


def _title(exhibit: Exhibit, grid: Grid) -> str:
    return ", ".join(exhibit.label(part) for part in grid.title.split(", ")) or exhibit.title


def _one(name: str, grid: Grid, cell: Cell) -> Iterator[Found]:
    if cell.value is not None:
        yield Found(
            name, grid.profile, cell.value, cell.low, cell.high, cell.runs, cell.state == "partial", _model(grid)
        )


def _paired(exhibit: Exhibit, grid: Grid, cell: Cell, number_of: Callable[[float], float]) -> Found:
    """number_of: the claim's number, from a difference to full KV."""
    pair = cell.difference or {}
    value, *bounds = (None if pair[key] is None else number_of(float(pair[key] or 0)) for key in PAIR)
    low, high = sorted(bound for bound in bounds if bound is not None) if None not in bounds else (None, None)
    return Found(
        _title(exhibit, grid), grid.profile, value or 0.0, low, high, cell.runs, cell.state == "partial", _model(grid)
    )


PAIR = ("difference", "ci_low", "ci_high")


def _without_interval(name: str, grid: Grid, value: float, cells: Sequence[Cell]) -> Found:
    runs = tuple(dict.fromkeys(run for cell in cells for run in cell.runs))
    unfinished = any(cell.state == "partial" for cell in cells)
    return Found(name, grid.profile, value, runs=runs, partial=unfinished, model=_model(grid))


def _model(grid: Grid) -> str | None:
    return grid.keys.get("model")
