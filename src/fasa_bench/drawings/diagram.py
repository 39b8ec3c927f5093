"""Figure 2: FASA as a drawing. Nothing is measured: which parts there are, and how many numbers each of them reads."""

from __future__ import annotations

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from fasa_bench.drawings.style import PAGE, Drawing, footnote
from fasa_bench.figures import COLOURS, GREY, STYLE

BLUE, ORANGE, GREEN = COLOURS[0], COLOURS[1], COLOURS[2]
PALE = "#e4e4e4"
CHUNKS, TOKENS = 8, 12  # drawn; a head of 128 dimensions has 64 chunks
DOMINANT = (2, 5)  # chunks drawn as dominant
CHOSEN = (0, 3, 4, 8, 11)  # tokens drawn as selected
SCORES = (0.9, 0.2, 0.3, 0.8, 0.75, 0.15, 0.25, 0.4, 0.85, 0.3, 0.2, 0.95)
CAPTION = (
    "FASA. Once, offline: contextual agreement (CA) ranks the frequency chunks (FCs) of each head. At each decode "
    "step: token importance prediction (TIP) scores all t cached tokens with the n_tip dominant FCs, 2 · t · n_tip "
    "numbers of the key cache; focused attention (FAC) attends to the b best tokens with all d dimensions, 2 · b · d "
    "numbers"
)


def draw() -> Drawing:
    """The whole figure; its record has no points."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(PAGE, 2.6), layout="constrained")
        ax = figure.subplots()
        ax.set_xlim(0, 70)
        ax.set_ylim(0, 23.5)
        ax.set_axis_off()
        _offline(ax)
        _predict(ax)
        _focus(ax)
        _arrow(ax, (17.6, 13), (21.6, 13))
        _arrow(ax, (45.1, 13), (48.6, 13))
        footnote(
            figure, ["drawn: 8 FCs and 12 tokens; a head of 128 dimensions has 64 FCs, of which the paper takes 16"]
        )
    return Drawing(figure, CAPTION)


def _offline(ax: Axes) -> None:
    _frame(ax, 0.5, 17, "Offline, once", GREY, "agreement of each FC with its head")
    for chunk in range(CHUNKS):
        height = 6.2 if chunk in DOMINANT else (1.1, 1.9, 0, 1.5, 0.9, 0, 2.3, 1.3)[chunk]
        colour = BLUE if chunk in DOMINANT else "#bbbbbb"
        ax.add_patch(Rectangle((3 + 1.6 * chunk, 7), 1.2, height, facecolor=colour))
    ax.plot([2.6, 15.9], [7, 7], color="black", linewidth=0.6)
    _say(ax, 9, 5.6, "FC 0 … d/2 − 1")
    _say(ax, 9, 14.8, "CA = |top-K(head) ∩ top-K(FC)| / K")
    _say(ax, 9, 3.2, "keep the n_tip best of each head:\ndominant FCs", colour=BLUE)


def _predict(ax: Axes) -> None:
    _frame(ax, 21.8, 23.2, "1  TIP: which tokens matter?", BLUE, "each step, all t tokens, dominant FCs only")
    _cache(ax, 24.8, 8.8, columns=DOMINANT, tokens=range(TOKENS), colour=BLUE)
    _say(ax, 30.0, 6.9, "keys: FCs × t tokens")
    _arrow(ax, (35.6, 13.2), (37.6, 13.2))
    for token, score in enumerate(SCORES):
        y = _row(8.8, token)
        ax.add_patch(Rectangle((38.2, y), 5.2 * score, 0.75, facecolor=BLUE if token in CHOSEN else "#bbbbbb"))
    _say(ax, 40.8, 6.9, "score")
    _say(ax, 33.4, 3.2, "query · key over the dominant FCs;\nthe b best tokens go on", colour=BLUE)


def _focus(ax: Axes) -> None:
    _frame(ax, 48.8, 20.7, "2  FAC: attend to them", GREEN, "b tokens, all d dimensions, exactly")
    _cache(ax, 51.2, 8.8, columns=range(CHUNKS), tokens=CHOSEN, colour=GREEN)
    _say(ax, 56.4, 6.9, "keys, values")
    _arrow(ax, (62.0, 13.2), (64.0, 13.2))
    box = FancyBboxPatch(
        (64.3, 11.7), 3.6, 3, boxstyle="round,pad=0.2", facecolor="white", edgecolor=GREEN, linewidth=0.8
    )
    ax.add_patch(box)
    _say(ax, 66.1, 13.2, "output", colour="black")
    _say(ax, 59.1, 3.2, "softmax over b tokens at their\ntrue positions; nothing is evicted", colour=GREEN)


def _frame(ax: Axes, left: float, width: float, title: str, colour: str, below: str) -> None:
    ax.add_patch(
        FancyBboxPatch(
            (left + 0.4, 1.2),
            width - 0.8,
            19,
            boxstyle="round,pad=0.4",
            facecolor="none",
            edgecolor=colour,
            linewidth=0.9,
        )
    )
    ax.text(left + width / 2, 22.3, title, ha="center", va="center", fontsize=8, fontweight="bold", color=colour)
    _say(ax, left + width / 2, 18.6, below)


def _cache(ax: Axes, left: float, bottom: float, columns: object, tokens: object, colour: str) -> None:
    """A grid of tokens by chunks; what is read has a colour."""
    for token in range(TOKENS):
        for chunk in range(CHUNKS):
            read = token in tokens and chunk in columns  # type: ignore[operator]
            place = (left + 1.3 * chunk, _row(bottom, token))
            ax.add_patch(Rectangle(place, 1.15, 0.65, facecolor=colour if read else PALE))


def _row(bottom: float, token: int) -> float:
    return bottom + 0.75 * (TOKENS - 1 - token)


def _say(ax: Axes, x: float, y: float, text: str, colour: str = GREY) -> None:
    ax.text(x, y, text, ha="center", va="center", fontsize=6, color=colour)


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=7, color="black", linewidth=0.9))
