"""A verdict in words on every number in the paper's text: by the paper's own tables, and by our runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from fasa_bench.exhibits import Cell, Exhibit, Grid
from fasa_bench.paper import Claim, Place
from fasa_bench.paper_claims import Recomputed, recomputed
from fasa_bench.tables import number

Exhibits = Mapping[str, Exhibit]
FASA = "fasa_c"  # as runs are named: the paper's FASA where time and memory do not matter


@dataclass(frozen=True)
class Found:
    """What our runs give for a claim, for one model. low, high: 95 % interval; runs: ids."""

    model: str
    profile: str
    value: float
    low: float | None = None
    high: float | None = None
    runs: tuple[str, ...] = ()
    partial: bool = False

    def text(self, unit: str) -> str:
        interval = "" if self.low is None or self.high is None else f" [{number(self.low, 3)}, {number(self.high, 3)}]"
        return f"{number(self.value, 3)} {unit}{interval}".strip()


@dataclass(frozen=True)
class ClaimView:
    """own: what the paper's own numbers give, where they can; ours: what our runs give, model by model."""

    place: Place
    claim: Claim
    own: Recomputed | None
    ours: tuple[Found, ...] = field(default=())
    how: str = "="

    @property
    def claimed(self) -> str:
        return f"{self.claim.value:g} {self.claim.unit}"

    @property
    def own_text(self) -> str:
        return f"{number(float(self.own.value), 3)} {self.claim.unit}" if self.own else ""

    @property
    def own_verdict(self) -> str:
        """A key of `fasa_bench.site.cells.VERDICTS`."""
        if self.own is None:
            return "none"
        return "agrees" if self.own.holds else "differs" if self.own.sure else "unclear"

    @property
    def verdict(self) -> str:
        """In a sentence or two."""
        by_paper = {
            "none": "The paper gives no numbers to check it by.",
            "agrees": "The paper's own numbers give it.",
            "differs": "The paper's own numbers do not give it.",
            "unclear": "Points read off a drawing do not give it, which decides nothing.",
        }[self.own_verdict]
        return f"{by_paper} {' '.join(self._by_us()) or 'Not run here.'}"

    def _by_us(self) -> Iterator[str]:
        for found in self.ours:
            name = found.model if found.profile == "paper" else f"{found.model} (a much smaller model)"
            unfinished = ", from runs that are not finished" if found.partial else ""
            yield f"{name}: {self._judged(found)}{unfinished}."

    def _judged(self, found: Found) -> str:
        claimed = self.claim.value
        if found.low is None or found.high is None:
            return "a number without an interval, which decides nothing"
        if self.how in ("<=", "<"):
            return (
                "holds" if found.high <= claimed else "does not hold" if found.low > claimed else "the interval is too wide"
            )
        if self.how in (">=", ">"):
            return (
                "holds" if found.low >= claimed else "does not hold" if found.high < claimed else "the interval is too wide"
            )
        return "agrees within the interval" if found.low <= claimed <= found.high else "differs"


def claims(paper: Mapping[str, Place], exhibits: Exhibits) -> list[ClaimView]:
    """In the order of the paper's tables and figures, the headline's first."""
    own = {each.claim.text: each for each in recomputed(paper)}
    order = {"headline": 0}
    views = []
    for place in sorted(paper.values(), key=lambda place: order.get(place.id, 1)):
        for key, claim in place.claims.items():
            name, given = f"{place.id}.{key}", own.get(claim.text)
            ours = tuple(OURS[name](exhibits)) if name in OURS else tuple(_pinned(place, claim, exhibits))
            views.append(ClaimView(place, claim, given, ours, HOW.get(name) or (given.how if given else "=")))
    return views


def _pinned(place: Place, claim: Claim, exhibits: Exhibits) -> Iterator[Found]:
    """The one cell of the exhibit whose paper's number is the claimed one: same place and settings."""
    exhibit = exhibits.get(place.id)
    wanted = {key: value for key, value in claim.where.items()}
    if exhibit is None or len(wanted) < 2:
        return
    for grid in exhibit.grids:
        for cell in grid.cells.values():
            paper = cell.paper
            if paper and cell.value is not None and all(paper.get(key) == value for key, value in wanted.items()):
                if paper.unit == claim.unit:
                    yield _found(exhibit, grid, cell)


def _retained(exhibits: Exhibits) -> Iterator[Found]:
    """Table 2: FASA's average as a share of full KV's, in percent, with the paired interval."""
    for exhibit, grid, cell in _column(exhibits, "table2"):
        full = grid.cell("fkv", grid.average)
        if cell.value is not None and full.value:
            yield _relative(exhibit, grid, cell, scale=100 / full.value, offset=100.0, value=100 * cell.value / full.value)


def _loss(exhibits: Exhibits) -> Iterator[Found]:
    """Table 2: full KV's average less FASA's, in points, with the paired interval."""
    for exhibit, grid, cell in _column(exhibits, "table2"):
        full = grid.cell("fkv", grid.average)
        if cell.value is not None and full.value is not None:
            yield _relative(exhibit, grid, cell, scale=-1.0, offset=0.0, value=full.value - cell.value)


def _quest_loss(exhibits: Exhibits) -> Iterator[Found]:
    exhibit = exhibits.get("table2")
    for grid in exhibit.grids if exhibit else ():
        full, quest = (grid.cell(name, "narrativeqa") for name in ("fkv", "quest"))
        if exhibit and full.value is not None and quest.value is not None:
            yield _relative(exhibit, grid, quest, scale=-1.0, offset=0.0, value=full.value - quest.value)


def _column(exhibits: Exhibits, name: str) -> Iterator[tuple[Exhibit, Grid, Cell]]:
    """FASA's cell in the average's column of each panel that has one."""
    exhibit = exhibits.get(name)
    for grid in exhibit.grids if exhibit else ():
        if exhibit and grid.average is not None:
            yield exhibit, grid, grid.cell(FASA, grid.average)


def _relative(exhibit: Exhibit, grid: Grid, cell: Cell, *, scale: float, offset: float, value: float) -> Found:
    """A number that follows from the paired difference to full KV: offset + scale * difference."""
    pair = cell.difference or {}
    bounds = [pair.get("ci_low"), pair.get("ci_high")]
    low, high = sorted(offset + scale * bound for bound in bounds if bound is not None) if None not in bounds else (None, None)
    return Found(grid.title or exhibit.title, grid.profile, value, low, high, cell.runs, cell.state == "partial")


def _found(exhibit: Exhibit, grid: Grid, cell: Cell) -> Found:
    assert cell.value is not None
    return Found(
        grid.title or exhibit.title, grid.profile, cell.value, cell.low, cell.high, cell.runs, cell.state == "partial"
    )


# claims that are no single cell; the others are looked up as one
OURS: Mapping[str, Callable[[Exhibits], Iterator[Found]]] = {
    "headline.longbench": _retained,
    "table2.fasa_loss": _loss,
    "table2.quest_narrativeqa": _quest_loss,
}
HOW = {"headline.longbench": ">="}
