"""Curves over the budget: ours with intervals; what was read off the paper's own drawings as hollow points.

A panel for each grid of an exhibit, a curve for each of its rows. Full KV is a line. The paper's points are hollow,
a range is a broad bar; where it gives a range for all budgets, or a number whose budget is not stated, it stands right
of the axis, over "all" and "?".
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from fasa_bench.drawings.style import COLUMN, FAINT, NOT_RUN, PAGE, Drawing, footnote, look, of_paper, say_not_run
from fasa_bench.exhibits import LABELS, Exhibit, Grid, in_unit
from fasa_bench.figures import GREY, STYLE, Look
from fasa_bench.paper import Place, Value

HEIGHT, LOW = 1.5, 0.95  # inches of a panel, and of one with nothing in it
LETTER = 0.06  # inches of a title's
LINE = 34  # letters of a note in a panel
SPAN = 5  # percentage points that an axis has at least
FULL = "fkv"
ALL, UNKNOWN = "all", "?"  # where the paper's numbers for all budgets stand, and those of unknown ones
SEVERAL = 3  # times: scores that lie farther apart than this get a logarithmic axis, if they are no percentages
JOINT = " · "
X_LABELS = {"budget": "budget, tokens", "distance": "distance, tokens"}


@dataclass(frozen=True)
class Told:
    """A number of the paper in a panel. at: a budget, ALL, UNKNOWN, or None for a line across the panel."""

    row: str
    at: float | str | None
    value: Value
    text: str = ""  # for the record, if it is a claim


def draw(exhibit: Exhibit, place: Place | None) -> Drawing:
    """All panels, those of the paper's models first."""
    series = _series(exhibit)
    lines = _lines(exhibit.grids)
    columns = max(2, *map(len, lines))
    width = PAGE if columns > 2 else COLUMN
    points: list[dict[str, Any]] = []
    told = {id(grid): list(_told(grid, place)) if place else [] for grid in exhibit.grids}
    all_told = [each for grid in exhibit.grids for each in told[id(grid)]]
    titles = {id(grid): _title(grid, told[id(grid)]) for grid in exhibit.grids}
    two_lines = LETTER * max(map(len, titles.values())) > width / columns - 0.25
    if two_lines:
        titles = {key: title.replace(", ", "\n") for key, title in titles.items()}
    heights = [LOW if all(grid.is_empty and not told[id(grid)] for grid in line) else HEIGHT for line in lines]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, sum(heights) + 0.55 + 0.13 * two_lines * len(lines)), layout="constrained")
        axes = figure.subplots(len(lines), columns, squeeze=False, height_ratios=heights)
        for index, grids in enumerate(lines):
            for ax in axes[index, len(grids) :]:
                ax.set_visible(False)
            for ax, grid in zip(axes[index], grids, strict=False):
                ax.set_title(titles[id(grid)])
                points += _panel(ax, grid, told[id(grid)], exhibit, series)
                _range(ax, grid, told[id(grid)], place)
                if grid is grids[0] or grid.unit != grids[grids.index(grid) - 1].unit:
                    ax.set_ylabel(_unit(grid))
                if all(len(below) <= grids.index(grid) for below in lines[index + 1 :]):  # the lowest one
                    ax.set_xlabel(_x_label(grid))
        handles = _handles(exhibit, series, bool(all_told))
        fitting = max(2, int(width / (0.45 + 0.045 * max(len(str(handle.get_label())) for handle in handles))))
        even = math.ceil(len(handles) / math.ceil(len(handles) / fitting))  # lines of the same length
        figure.legend(handles=handles, loc="outside upper center", ncols=even, frameon=False)
        footnote(figure, _notes(exhibit, all_told), width)
    return Drawing(figure, "; ".join([*_notes(exhibit, all_told), *exhibit.notes]), points)


def _lines(grids: Sequence[Grid]) -> list[list[Grid]]:
    """Panels by line: one model a line if it has several, else one after the other."""
    by_model = [list(group) for _, group in groupby(grids, key=lambda grid: grid.keys.get("model"))]
    if max(map(len, by_model)) > 1:
        return by_model
    flat = [grid for group in by_model for grid in group]
    return [flat[start : start + 3] for start in range(0, len(flat), 3)]


def _told(grid: Grid, place: Place) -> Iterator[Told]:
    """What the paper has for this panel."""
    if grid.profile != "paper":
        return
    for row in grid.rows:
        values = {column: grid.cell(row, column).paper for column in grid.columns}
        known = {column: value for column, value in values.items() if value is not None}
        if not _is_full(row):
            yield from (Told(row, column, value) for column, value in known.items())
    model, data = grid.keys.get("model"), _data(grid)
    methods = {str(row).split(JOINT)[0]: str(row) for row in grid.rows}
    for value in place.values:
        mine = value.model == model and (data is None or data in (value.dataset, value.metric, value.task))
        row = next((methods[name] for name in (value.method, f"{value.method}_c") if name in methods), None)
        if mine and row is not None and _is_full(row):
            yield Told(row, None, in_unit(value, grid.unit))
        elif mine and row is not None and value.budget is None:
            yield Told(row, UNKNOWN if "label" in value.keys else ALL, in_unit(value, grid.unit))
    yield from _claims(grid, place)


def _claims(grid: Grid, place: Place) -> Iterator[Told]:
    """Claims of the text that name a row's number of chunks and say where its curve lies, or meets full KV's."""
    full = next((cell.paper for (row, _), cell in grid.cells.items() if _is_full(row) and cell.paper), None)
    for claim in place.claims.values():
        row = next((row for row in grid.rows if str(row).endswith(f"{JOINT}{claim.where.get('n_tip')}")), None)
        if row is None or full is None or claim.where.get("dataset", full.dataset) != full.dataset:
            continue
        at = claim.value if claim.unit == "tokens" else claim.where["budget"]
        height = full.value if claim.unit == "tokens" else claim.value
        base = {**vars(full), "value": height, "low": height, "high": height, "confidence": claim.confidence}
        yield Told(row, float(at), Value(**base), claim.text)


def _title(grid: Grid, told: Sequence[Told]) -> str:
    if grid.is_empty and told and all(each.value.model is None for each in told):
        return "Paper (model not stated)"
    return grid.title


def _data(grid: Grid) -> Any:
    keys = grid.keys
    return keys.get("dataset") or keys.get("task.corpus") or keys.get("task")


def _is_full(row: Any) -> bool:
    return str(row).split(JOINT)[0] == FULL


def _panel(ax: Axes, grid: Grid, told: Sequence[Told], exhibit: Exhibit, series: Series) -> list[dict[str, Any]]:
    """Draw one panel; returns its part of the record."""
    title = grid.title
    scaled = _is_scaled(grid)
    budgets = _places(grid)
    extra = [at for at in (ALL, UNKNOWN) if any(each.at == at for each in told)]
    places = {at: _beyond(budgets, 1 + place, scaled) for place, at in enumerate(extra)}
    points: list[dict[str, Any]] = []
    curves = [name for name in series.names if not _is_full(name)]
    for row in grid.rows:
        style, name = series.look(row), exhibit.label(row)
        cells = [(at, grid.cell(row, column)) for at, column in zip(budgets, grid.columns, strict=True)]
        found = [(at, cell) for at, cell in cells if cell.value is not None]
        points += [
            {
                "panel": title, "series": name, "x": at, "value": cell.value, "low": cell.low, "high": cell.high,
                "n": cell.n, "state": cell.state, "runs": list(cell.runs),
            }
            for at, cell in found
        ]  # fmt: skip
        if _is_full(row):
            _full(ax, found, style)
        else:
            shift = curves.index(series.of[row]) - (len(curves) - 1) / 2
            _curve(ax, [(_shifted(at, shift, budgets, scaled), cell) for at, cell in found], style)
    for each in told:
        at: Any = places.get(str(each.at), each.at)
        if each.at == ALL:
            at = _shifted(
                at, 5 * (sorted({one.row for one in told if one.at == ALL}).index(each.row) - 1), budgets, scaled
            )
        _their_point(ax, each, at, series.look(each.row))
        about = {"panel": title, "series": exhibit.label(each.row), "x": each.at, "paper": of_paper(each.value)}
        points.append(about | ({"claim": each.text} if each.text else {}))
    _axes(ax, grid, budgets, places)
    _say_what_is_missing(ax, grid, exhibit, bool(told))
    return points


@dataclass(frozen=True)
class Series:
    """What rows of different panels share a look: `of` names it. numbers: of chunks, by name, over all panels."""

    of: dict[Any, str]
    numbers: dict[str, list[str]]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(self.of.values()))

    def look(self, row: Any) -> Look:
        return look(self.of[row], self.names)

    def label(self, name: str) -> str:
        method = name.split(JOINT)[0]
        return LABELS.get(method, method) + (f", {' / '.join(self.numbers[name])} FCs" if name in self.numbers else "")


def _series(exhibit: Exhibit) -> Series:
    """A row is a method, or a method and its number of chunks: then the first of one model goes with the first of
    another, since heads differ in how many they have.
    """
    of: dict[Any, str] = {}
    numbers: dict[str, list[str]] = {}
    for grid in exhibit.grids:
        counted = [row for row in grid.rows if JOINT in str(row)]
        for row in grid.rows:
            of[row] = str(row)
            if row in counted:
                method, number = str(row).split(JOINT)
                of[row] = f"{method}{JOINT}{counted.index(row)}"
                if number not in numbers.setdefault(of[row], []):
                    numbers[of[row]].append(number)
    return Series(of, numbers)


def _full(ax: Axes, found: Sequence[tuple[float, Any]], style: Look) -> None:
    """The same number at all budgets: a line, and its interval as a band."""
    for _, cell in found[:1]:
        ax.axhline(cell.value, color=style.colour, linestyle=style.line, linewidth=0.9, zorder=1)
        if cell.low is not None:
            ax.axhspan(cell.low, cell.high, color=style.colour, alpha=0.12, linewidth=0, zorder=0)


def _curve(ax: Axes, found: Sequence[tuple[float, Any]], style: Look) -> None:
    if found:
        ax.plot([at for at, _ in found], [cell.value for _, cell in found], color=style.colour, linestyle=style.line)
    for at, cell in found:
        if cell.low is not None:
            ax.vlines(at, cell.low, cell.high, color=style.colour, linewidth=0.6, alpha=0.6, zorder=2)
        faint = 1.0 if cell.state == "complete" else 0.4
        ax.plot(at, cell.value, color=style.colour, marker=style.marker, markersize=3.2, alpha=faint, zorder=4)


def _their_point(ax: Axes, told: Told, at: Any, style: Look) -> None:
    """Hollow; a range as a broad bar, an open one with an arrow; a question mark where sources disagree."""
    value = told.value
    if at is None:
        for height in sorted({end for end in (value.low, value.high) if end is not None}):
            ax.axhline(height, color=style.colour, linestyle=":", linewidth=0.9, zorder=1)
        return
    if told.at == UNKNOWN:
        ax.plot(at, value.low or 0, color=GREY, marker="_", markersize=5, markeredgewidth=0.5)
        return
    hollow: dict[str, Any] = {
        "marker": style.marker,
        "markerfacecolor": "none",
        "markeredgecolor": style.colour,
        "linestyle": "",
    }
    low, high = value.low, value.high
    if low is not None and low == high:
        ax.plot(at, low, markersize=5, markeredgewidth=0.9, zorder=5, **hollow)
    elif low is not None and high is not None:
        ax.vlines(at, low, high, color=style.colour, linewidth=4, alpha=0.35, zorder=3)
        ax.plot(at, (low + high) / 2, markersize=3.5, markeredgewidth=0.7, zorder=5, **hollow)
    else:
        end, turn = (low, True) if low is not None else (high, False)
        assert end is not None
        bars: dict[str, Any] = {"lolims": turn, "uplims": not turn, "elinewidth": 0.8, "capsize": 0}
        ax.errorbar(at, end, yerr=0.06 * abs(end), color=style.colour, markersize=5, **bars, **hollow)
    if value.confidence == "conflicting":
        ax.annotate("?", (at, value.value if value.value is not None else low or high or 0), (4, 1), **FAINT,
                    textcoords="offset points")  # fmt: skip


def _axes(ax: Axes, grid: Grid, budgets: Sequence[float], places: dict[str, float]) -> None:
    ratio = _is_ratio(grid)
    ends = [*budgets, *places.values()]
    if _is_named(grid):
        ax.set_xlim(-0.5, len(budgets) - 0.5)
        ax.set_xticks(
            budgets, [str(column) for column in grid.columns], rotation=30, ha="right", rotation_mode="anchor"
        )
        return
    if not _is_scaled(grid):
        step = (max(budgets) - min(budgets)) / 12
        ax.set_xlim(min(ends) - step, max(ends) + step)
    else:
        ax.set_xscale("log", base=2)
        ax.set_xlim(min(ends) / 1.35, max(ends) * 1.35)
    shown = _apart(ax, budgets)
    labels = [f"{100 * at:g}" if ratio else f"{at:g}" for at in shown]
    ax.xaxis.set_major_locator(FixedLocator([*shown, *places.values()]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks([*shown, *places.values()], [*labels, *places])
    if places:
        left, right = max(budgets), min(places.values())
        edge = math.sqrt(left * right) if _is_scaled(grid) else (left + right) / 2
        ax.axvline(edge, color="#bbbbbb", linewidth=0.5)


def _apart(ax: Axes, budgets: Sequence[float]) -> list[float]:
    """The budgets whose labels have room; the last one always, as it ends the axis."""
    scale = ax.transScale.transform
    start, end = (scale((at, 1))[0] for at in ax.get_xlim())
    room = 0.032 * max(len(f"{at:g}") for at in budgets) + 0.02
    shown: list[float] = []
    for at in sorted(budgets, reverse=True):
        if not shown or scale((shown[-1], 1))[0] - scale((at, 1))[0] > room * (end - start):
            shown.append(at)
    return shown[::-1]


def _range(ax: Axes, grid: Grid, told: Sequence[Told], place: Place | None) -> None:
    """What the axis spans where nothing of ours does: the numbers that the paper's own axis has, if they are known."""
    if grid.unit == "perplexity":
        low, high = ax.dataLim.intervaly
        if 0 < low < math.inf and high / low > SEVERAL:
            ax.set_yscale("log")
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            ax.yaxis.set_minor_formatter(NullFormatter())
            return
    if told or not grid.is_empty:
        low, high = ax.get_ylim()
        if grid.unit == "%" and high - low < SPAN:
            low, high = (low, low + SPAN) if low >= 0 else (-0.05 * SPAN, SPAN)
        room = 0.16 if _missing(grid) else 0  # for what is said at the top
        ax.set_ylim(low, high + room * (high - low))
    ax.yaxis.set_major_locator(MaxNLocator(5))
    if not grid.is_empty:
        return
    if place is None:
        ax.set_yticks([])
        return
    wanted = {"model": grid.keys.get("model"), "dataset": _data(grid)}
    ticks = next(
        (each["y_ticks"] for each in place.panels if "y_ticks" in each and wanted.items() <= each.items()), None
    )
    theirs = [end for each in told for end in (each.value.low, each.value.high or 1.08 * (each.value.low or 0)) if end]
    if ticks:
        low, high = min(*theirs, *ticks), max(*theirs, *ticks)
        ax.set_ylim(low - 0.06 * (high - low), high + 0.25 * (high - low))
        ax.yaxis.set_major_locator(FixedLocator(list(ticks)))
    elif not theirs:
        ax.set_yticks([])


def _missing(grid: Grid) -> list[Any]:
    """Rows of which nothing was run."""
    return [row for row in grid.rows if all(grid.cell(row, column).value is None for column in grid.columns)]


def _say_what_is_missing(ax: Axes, grid: Grid, exhibit: Exhibit, told: bool) -> None:
    missing = _missing(grid)
    if len(missing) == len(grid.rows):
        if not told:
            say_not_run(ax)
        else:
            ax.text(
                0.02, 0.98, f"ours: {NOT_RUN}", transform=ax.transAxes, ha="left", va="top", style="italic", **FAINT
            )
    elif missing:
        names = ", ".join(LABELS.get(row, exhibit.label(row)) for row in missing)
        text = textwrap.fill(f"{NOT_RUN}: {names}", LINE)
        note = ax.text(0.02, 0.98, text, transform=ax.transAxes, ha="left", va="top", style="italic", **FAINT)
        note.set_in_layout(False)  # a panel is not to grow with it


def _handles(exhibit: Exhibit, series: Series, told: bool) -> list[Line2D]:
    handles = []
    for name in series.names:
        style = look(name, series.names)
        shape: dict[str, Any] = {"marker": style.marker, "markersize": 3.2, "linestyle": style.line}
        handles.append(Line2D([], [], color=style.colour, label=series.label(name), **shape))
    if told:
        hollow: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": GREY, "linestyle": ""}
        handles.append(Line2D([], [], marker="o", label="paper, approx.", **hollow))
    cells = [cell for grid in exhibit.grids for cell in grid.cells.values()]
    if any(cell.state == "partial" for cell in cells):
        handles.append(Line2D([], [], color=GREY, marker="o", alpha=0.4, linestyle="", label="not complete"))
    return handles


def _notes(exhibit: Exhibit, told: Sequence[Told]) -> list[str]:
    counts = sorted({cell.n for grid in exhibit.grids for cell in grid.cells.values() if cell.n})
    notes = []
    if counts:
        span = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        notes.append(f"ours: lines and band are 95 % intervals over examples, {span} a point")
    if told:
        notes.append("paper (hollow): points and ranges (bars) read off its drawing, dotted: its full KV")
        if any(each.value.confidence == "conflicting" for each in told):
            notes.append("?: sources disagree")
        if any(each.at == UNKNOWN for each in told):
            notes.append("over “?”: numbers of the paper whose curve and budget are not known")
        if any(each.at == ALL for each in told):
            notes.append("over “all”: its ranges over all budgets")
        if any(each.value.model is None for each in told):
            notes.append("it does not say of which model")
    return notes


def _unit(grid: Grid) -> str:
    arrow = "↓" if grid.better == "low" else "↑"
    return f"{'score, %' if grid.unit == '%' else grid.unit} {arrow}"


def _x_label(grid: Grid) -> str:
    if _is_ratio(grid):
        return "budget, % of the prompt"
    return X_LABELS.get(grid.column_key, grid.column_key.rpartition(".")[2].replace("_", " "))


def _is_ratio(grid: Grid) -> bool:
    return all(isinstance(column, float) for column in grid.columns)


def _is_scaled(grid: Grid) -> bool:
    """Whether columns are budgets in tokens, each a multiple of the one before."""
    return grid.column_key == "budget" and not _is_ratio(grid)


def _is_named(grid: Grid) -> bool:
    """Whether columns are names, which stand side by side, and no numbers."""
    return any(isinstance(column, str) for column in grid.columns)


def _places(grid: Grid) -> list[float]:
    """Where the columns stand on the axis."""
    return [float(place if _is_named(grid) else column) for place, column in enumerate(grid.columns)]


def _beyond(budgets: Sequence[float], steps: int, scaled: bool) -> float:
    if not scaled:
        return max(budgets) + steps * (max(budgets) - min(budgets)) / 5
    return max(budgets) * 2.0 ** (0.9 * steps)


def _shifted(at: float, places: float, budgets: Sequence[float], scaled: bool) -> float:
    """So that intervals at one budget stand side by side."""
    if not scaled:
        return at + places * (max(budgets) - min(budgets)) / 120
    return at * 2.0 ** (0.06 * places)
