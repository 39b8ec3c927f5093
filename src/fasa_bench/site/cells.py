"""What a page of a table or figure shows of its cells: the paper's number, ours, their difference, and a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fasa_bench.exhibits import Cell, Exhibit, Grid
from fasa_bench.paper import Value
from fasa_bench.tables import difference, number

PROFILES = {"paper": "the paper's models", "mini": "embedded model"}
NOT_RUN = "not run"
# what a cell's verdict is called, and which sign stands for it
VERDICTS = {
    "agrees": "agrees",
    "differs": "differs",
    "unclear": "no interval",
    "ours": "ours only",
    "other": "another model",
    "missing": NOT_RUN,
    "none": "no number",
}
STATES = {"all": "run", "some": "partly run", "nothing": NOT_RUN, "unplanned": "nothing to run"}


@dataclass(frozen=True)
class CellView:
    """A cell as text; `sort` values are numbers. verdict: a key of VERDICTS; runs: ids."""

    panel: str
    profile: str
    row: str
    column: str
    unit: str
    paper: str
    paper_sort: float | None
    paper_how: str
    ours: str
    ours_sort: float | None
    gap: str
    gap_sort: float | None
    interval: str
    n: str
    verdict: str
    to_full: str
    to_full_sort: float | None
    runs: tuple[str, ...]
    remark: str


@dataclass(frozen=True)
class GridView:
    """A panel. lines: for each row its label and its cells."""

    title: str
    profile: str
    units: tuple[str, ...]
    better: str
    row_key: str
    column_key: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, tuple[CellView | None, ...]], ...]
    state: str

    @property
    def cells(self) -> list[CellView]:
        """Those that were planned."""
        return [cell for _, cells in self.lines for cell in cells if cell is not None]

    @property
    def has_paper(self) -> bool:
        return any(cell.paper for cell in self.cells)


@dataclass(frozen=True)
class Count:
    """Cells of an exhibit in a profile: all, run, comparable with the paper, and how many of these agree."""

    cells: int = 0
    run: int = 0
    compared: int = 0
    agree: int = 0

    @property
    def state(self) -> str:
        if not self.cells:
            return "unplanned"
        return "all" if self.run == self.cells else "some" if self.run else "nothing"

    @property
    def text(self) -> str:
        if not self.cells:
            return STATES["unplanned"]
        share = "" if self.run in (0, self.cells) else f": {self.run} of {self.cells} cells"
        return STATES[self.state] + share


def grids(exhibit: Exhibit) -> list[GridView]:
    """Those that something was run of come first."""
    return sorted((_grid(exhibit, grid) for grid in exhibit.grids), key=lambda grid: grid.state == "nothing")


def count(exhibit: Exhibit, profile: str) -> Count:
    """A cell of a run that is not finished counts as not run yet."""
    cells = [grid.cell(*place) for grid in exhibit.grids if grid.profile == profile for place in _all(grid)]
    verdicts = [cell.verdict for cell in cells]
    return Count(
        len(cells),
        sum(cell.state == "complete" or (cell.state == "not given" and bool(cell.runs)) for cell in cells),
        sum(verdict in ("agrees", "differs") for verdict in verdicts),
        verdicts.count("agrees"),
    )


def _all(grid: Grid) -> list[tuple[Any, Any]]:
    """The places of a grid that were planned, row by row."""
    return [(row, column) for row in grid.rows for column in grid.columns if (row, column) in grid.cells]


def _grid(exhibit: Exhibit, grid: Grid) -> GridView:
    title = grid.title or "all models"
    digits = max((_decimals(cell.paper) for cell in grid.cells.values()), default=0)
    lines = []
    for row in grid.rows:
        places = [(row, column) for column in grid.columns]  # one that no run was planned for stays empty
        views = [_cell(exhibit, grid, title, *place, digits) if place in grid.cells else None for place in places]
        lines.append((_label(exhibit, row), tuple(views)))
    places = _all(grid)
    run = [grid.cell(*place).value is not None for place in places]
    lower = {grid.is_lower_better(*place) for place in places}
    return GridView(
        title=title,
        profile=grid.profile,
        units=tuple(dict.fromkeys(grid.unit_of(*place) for place in places)),
        better="" if len(lower) != 1 else "less" if lower.pop() else "more",
        row_key=_words(grid.row_key),
        column_key=_words(grid.column_key),
        columns=tuple(_label(exhibit, column) for column in grid.columns),
        lines=tuple(lines),
        state="all" if run and all(run) else "some" if any(run) else "nothing",
    )


def _cell(exhibit: Exhibit, grid: Grid, title: str, row: Any, column: Any, digits: int) -> CellView:
    """digits: decimals that the paper prints here."""
    cell = grid.cell(row, column)
    paper = cell.paper
    printed = paper.value if paper else None
    gap = cell.value - printed if cell.value is not None and printed is not None else None
    full = cell.difference
    return CellView(
        panel=title,
        profile=grid.profile,
        row=_label(exhibit, row),
        column=_label(exhibit, column),
        unit=grid.unit_of(row, column),
        paper=_paper(paper, digits),
        paper_sort=printed,
        paper_how="" if not paper or paper.confidence == "exact" else f"{paper.confidence}: {paper.how}",
        ours=number(cell.value) if cell.value is not None else "" if cell.state == "not given" else NOT_RUN,
        ours_sort=cell.value,
        gap="" if gap is None else signed(gap),
        gap_sort=gap,
        interval="" if cell.low is None or cell.high is None else f"{number(cell.low, 3)} to {number(cell.high, 3)}",
        n="" if cell.n is None else f"{cell.n:,}",
        verdict=_verdict(cell, grid.profile),
        to_full=difference(full) if full and full["difference"] is not None else "",
        to_full_sort=full["difference"] if full else None,
        runs=cell.runs,
        remark="; ".join(_remarks(cell)),
    )


def _verdict(cell: Cell, profile: str) -> str:
    if cell.value is None:
        return "none" if cell.state == "not given" else "missing"
    if cell.verdict and profile == "mini":  # the paper does not say of which model its number is; not of this one
        return "other"
    return cell.verdict or "ours"


def _remarks(cell: Cell) -> list[str]:
    remarks = []
    if cell.state == "partial":
        remarks.append("the run is not finished")
    if cell.state == "not given":
        remarks.append("the run gives no such number")
    if cell.simulated:
        remarks.append("reads all keys to choose: its time would say nothing")
    return remarks


def _paper(value: Value | None, digits: int) -> str:
    if value is None:
        return ""
    if value.value is not None:
        return f"{value.value:,.{digits}f}" if value.how == "printed" else f"{value.value:,g}"
    low, high = value.low, value.high
    return f"at most {high:g}" if low is None else f"at least {low:g}" if high is None else f"{low:g} to {high:g}"


def _decimals(value: Value | None) -> int:
    """Of a printed number; those that were read off a drawing have none to speak of."""
    if value is None or value.value is None or value.how != "printed":
        return 0
    return len(f"{value.value:g}".partition(".")[2])


def signed(value: float) -> str:
    """With a true minus sign, as the number is read and not computed with."""
    text = number(abs(value), 3)
    return ("+" if value > 0 else "−" if value < 0 else "") + text


def _label(exhibit: Exhibit, value: Any) -> str:
    if value is None or value == "":
        return "all"
    return exhibit.label(value)


def _words(key: str) -> str:
    """A key of the command line as a heading."""
    parts: Sequence[str] = [part.rsplit(".", 1)[-1].replace("_", " ") for part in key.split("/") if part]
    return " / ".join(parts)
