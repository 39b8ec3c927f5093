"""The figure of stored runs: every headline score, and the decode time, over the tokens that were read."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from fasa_bench.errors import UserError
from fasa_bench.store import Run
from fasa_bench.tables import Group, budget, decode_ms, lower_is_better, metrics, realised, simulated

# Okabe & Ito's palette, which colour-blind readers can tell apart; its yellow is too light for thin lines
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
GREY = "#666666"
PANEL = (1.75, 1.6)  # inches; four panels fill a page of 7 inches
METRICS = 3  # panels of scores; the fourth is time
NOTE = "bars and grey band: 95 % interval over examples; of times: median and quartiles"
QUIET: dict[str, Any] = {"fontsize": 6, "color": GREY, "va": "center"}
STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same everywhere
    "font.size": 7,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.1,
    "lines.markersize": 4,
    "pdf.fonttype": 42,  # text stays text
}


@dataclass(frozen=True)
class Point:
    """One run in one panel: value with interval, and where it stands on the axis of tokens."""

    method: str
    tokens: float | None
    value: float
    low: float
    high: float
    finished: bool

    @property
    def bars(self) -> list[list[float]]:
        return [[max(0.0, self.value - self.low)], [max(0.0, self.high - self.value)]]


@dataclass(frozen=True)
class Look:
    colour: str
    marker: str
    line: str


Looks = dict[str, Look]  # by the name of a run


@dataclass(frozen=True)
class Panel:
    """A title, the points of the methods, and those of full KV, which is a line and not a point."""

    title: str
    points: list[Point]
    full: list[Point]
    is_time: bool = False


def draw(groups: Sequence[Group]) -> dict[str, bytes]:
    """The figure as PDF and PNG; the same runs give the same bytes. Raises UserError if no run has a score."""
    files = {}
    with mpl.rc_context(STYLE):
        drawn = figure(groups)
        for kind, dated in {"pdf": "CreationDate", "png": "Software"}.items():
            buffer = io.BytesIO()
            drawn.savefig(buffer, format=kind, dpi=300, metadata={dated: None})
            files[kind] = buffer.getvalue()
    return files


def figure(groups: Sequence[Group]) -> Figure:
    """A row of panels for each model and task: curves over tokens read if there are several budgets, else one line
    for each method. Raises UserError if no run has a score.
    """
    rows = [(group, panels) for group in groups if (panels := _panels(group))]
    if not rows:
        raise UserError("no run has a score yet: there is nothing to draw")
    looks = _looks([group for group, _ in rows])
    with mpl.rc_context(STYLE):
        columns = max(2, *(len(panels) for _, panels in rows))
        heights = [_height(group, panels, columns, looks) for group, panels in rows]
        drawn = Figure(figsize=(columns * PANEL[0], sum(heights) + 0.15), layout="constrained")
        drawn.supxlabel(NOTE, fontsize=5.5, color=GREY)
        parts = drawn.subfigures(len(rows), 1, squeeze=False, height_ratios=heights)
        for part, (group, panels) in zip(parts[:, 0], rows, strict=True):
            _row(part, group, panels, columns, looks)
    return drawn


def _looks(groups: Sequence[Group]) -> Looks:
    """The same in all panels. Full KV is grey; variants of a method, "name (key=value)", share its colour."""
    full = {name for group in groups for name, run in group.runs if budget(run) is None}
    names = sorted({name for group in groups for name, _ in group.runs} - full)
    methods = list(dict.fromkeys(name.split(" (")[0] for name in names))
    looks = dict.fromkeys(full, Look(GREY, "o", "--"))
    for place, name in enumerate(names):
        turn, colour = divmod(methods.index(name.split(" (")[0]), len(COLOURS))
        plain = turn == 0 and name in methods
        looks[name] = Look(COLOURS[colour], MARKERS[place % len(MARKERS)], "-" if plain else ":")
    return looks


def _panels(group: Group) -> list[Panel]:
    panels = [_score_panel(group, metric) for metric in group.main_metrics(METRICS)]
    panels = [panel for panel in panels if panel.points or panel.full]
    time = _time_panel(group)
    return [*panels, time] if panels and (time.points or time.full) else panels


def _score_panel(group: Group, metric: str) -> Panel:
    points: list[Point] = []
    full: list[Point] = []
    for name, run in group.runs:
        entry = metrics(run).get(metric) or {}
        value = entry.get("value")
        if value is not None:
            low, high = entry.get("ci_low"), entry.get("ci_high")
            point = _point(name, run, value, value if low is None else low, value if high is None else high)
            (full if budget(run) is None else points).append(point)
    return Panel(f"{metric} {'↓' if lower_is_better(metric) else '↑'}", points, full)


def _time_panel(group: Group) -> Panel:
    points: list[Point] = []
    full: list[Point] = []
    for name, run in group.runs:
        time = decode_ms(run)
        if time.get("median") is not None:
            (full if budget(run) is None else points).append(
                _point(name, run, time["median"], time["p25"], time["p75"])
            )
    return Panel("decode ms/token ↓", points, full, is_time=True)


def _point(name: str, run: Run, value: float, low: float, high: float) -> Point:
    tokens, given = realised(run, "attended_tokens"), budget(run)
    if tokens is None and isinstance(given, int):
        tokens = given
    return Point(name, tokens, value, low, high, run.status == "complete")


def _curves(group: Group) -> bool:
    """Whether any method was run with several budgets."""
    names = [name for name, run in group.runs if budget(run) is not None]
    return len(names) > len(set(names))


def _row(part: SubFigure, group: Group, panels: Sequence[Panel], columns: int, looks: Looks) -> None:
    budgets = {budget(run) for _, run in group.runs} - {None}
    only = f", budget {next(iter(budgets))}" if len(budgets) == 1 else ""
    part.suptitle(f"{group.model} · {group.task}{only}", fontsize=8, fontweight="bold", x=0.01, ha="left")
    curves = _curves(group)
    axes = part.subplots(1, columns, squeeze=False, sharey=not curves)[0]
    for ax, panel in zip(axes, panels, strict=False):
        ax.set_title(panel.title)
        if curves:
            _draw_curves(ax, panel, looks)
        else:
            _draw_lines(ax, panel, group, looks)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    if curves:
        handles = _handles(group, panels, looks)
        part.legend(handles=handles, loc="outside lower center", ncols=_legend_columns(handles, columns), frameon=False)


def _height(group: Group, panels: Sequence[Panel], columns: int, looks: Looks) -> float:
    """Inches of a row of panels: title and axes, and the legend of curves or a line for each method."""
    if not _curves(group):
        return 0.7 + 0.2 * len({name for name, _ in group.runs})
    handles = _handles(group, panels, looks)
    return PANEL[1] + 0.5 + 0.15 * math.ceil(len(handles) / _legend_columns(handles, columns))


def _legend_columns(handles: Sequence[Line2D], columns: int) -> int:
    """As many as fit below `columns` panels, evenly filled."""
    widest = 0.45 + 0.05 * max(len(str(handle.get_label())) for handle in handles)  # inches
    fitting = max(1, int(columns * PANEL[0] / widest))
    return math.ceil(len(handles) / math.ceil(len(handles) / fitting))


def _handles(group: Group, panels: Sequence[Panel], looks: Looks) -> list[Line2D]:
    points = [point for panel in panels for point in [*panel.full, *panel.points]]
    drawn = {point.method for point in points}
    handles = []
    for name, run in dict(group.runs).items():
        if name in drawn:
            full, look = budget(run) is None, looks[name]
            label = name + (" (full KV)" if full else " (speed simulated)" if simulated(run) else "")
            marker = "" if full else look.marker
            handles.append(Line2D([], [], color=look.colour, marker=marker, linestyle=look.line, label=label))
    if not all(point.finished for point in points):
        hollow = Line2D([], [], color=GREY, marker="o", markerfacecolor="white", linestyle="", label="not complete")
        handles.append(hollow)
    return handles


def _draw_curves(ax: Axes, panel: Panel, looks: Looks) -> None:
    _draw_full(ax, panel, vertical=True)
    names = sorted({point.method for point in panel.points})
    for place, name in enumerate(names):
        shift = 2 ** (0.07 * (place - (len(names) - 1) / 2))  # so that intervals at one budget stand side by side
        points = [point for point in panel.points if point.method == name and point.tokens is not None]
        points.sort(key=lambda point: point.tokens or 0)
        x, y, look = [shift * (point.tokens or 0) for point in points], [point.value for point in points], looks[name]
        ax.plot(x, y, color=look.colour, linestyle=look.line, zorder=3)
        for point in points:
            _draw_point(ax, shift * (point.tokens or 0), point.value, point, look, vertical=True)
    tokens = [point.tokens for point in panel.points if point.tokens]
    ax.set_xscale("log", base=2)
    if tokens:
        powers = [2.0**power for power in range(24) if min(tokens) / 1.5 <= 2.0**power <= max(tokens) * 1.5]
        ax.set_xlim(min(tokens) / 1.25, max(tokens) * 1.25)
        ax.xaxis.set_major_locator(FixedLocator(powers[:: 1 + len(powers) // 6]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.set_xlabel("tokens read per step")
    if panel.is_time:
        ax.set_ylim(bottom=0)


def _draw_lines(ax: Axes, panel: Panel, group: Group, looks: Looks) -> None:
    _draw_full(ax, panel, vertical=False)
    names = list(dict.fromkeys(name for name, _ in group.runs))
    for point in [*panel.full, *panel.points]:
        _draw_point(ax, point.value, names.index(point.method), point, looks[point.method], vertical=False)
    if panel.is_time:
        for name, run in group.runs:
            if simulated(run):
                ax.annotate("simulated", (0.03, names.index(name)), xycoords=("axes fraction", "data"), **QUIET)
    budgets = {name: budget(run) for name, run in group.runs}
    several = len(set(budgets.values()) - {None}) > 1
    ax.set_yticks(range(len(names)), [f"{n} {budgets[n]}" if several and budgets[n] is not None else n for n in names])
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.grid(axis="y", linewidth=0.4, color="#dddddd")
    ax.set_axisbelow(True)
    ax.xaxis.set_major_locator(MaxNLocator(4))
    if panel.is_time:
        ax.set_xlim(left=0)


def _draw_full(ax: Axes, panel: Panel, *, vertical: bool) -> None:
    """Full KV: a line across the panel, and its interval as a band."""
    for point in panel.full:
        span, line = (ax.axhspan, ax.axhline) if vertical else (ax.axvspan, ax.axvline)
        span(point.low, point.high, color=GREY, alpha=0.15, linewidth=0, zorder=0)
        line(point.value, color=GREY, linestyle="--", linewidth=0.9, zorder=1)


def _draw_point(ax: Axes, x: float, y: float, point: Point, look: Look, *, vertical: bool) -> None:
    ax.errorbar(
        x,
        y,
        yerr=point.bars if vertical else None,
        xerr=None if vertical else point.bars,
        color=look.colour,
        marker=look.marker,
        markerfacecolor=look.colour if point.finished else "white",
        elinewidth=0.8,
        capsize=0,
        linestyle="none",
        zorder=4,
    )
