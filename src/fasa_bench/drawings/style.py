"""What all figures share: how methods look, sizes, files of the same bytes each time, and the record beside them."""

from __future__ import annotations

import io
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from fasa_bench.figures import COLOURS, GREY, MARKERS, STYLE, Look
from fasa_bench.paper import Value
from fasa_bench.store import Run

COLUMN, PAGE = 3.3, 7.0  # widths of a paper's column and page, inches
NOT_RUN = "not run"
BLACK = "#000000"
SMALL: dict[str, Any] = {"fontsize": 6, "color": GREY}
FAINT: dict[str, Any] = {"fontsize": 5.5, "color": GREY}
# the same in all figures; other names get what is left
LOOKS = {
    "fkv": Look(GREY, "", "--"),
    "oracle": Look(BLACK, "X", "-"),
    "fasa_c": Look(COLOURS[0], "o", "-"),
    "fasa_plus": Look(COLOURS[1], "s", "-"),
    "quest": Look(COLOURS[2], "^", "-"),
    "streamingllm": Look(COLOURS[3], "D", "-"),
    "snapkv": Look(COLOURS[4], "v", "-"),
    "sparq": Look(COLOURS[5], "P", "-"),
}


@dataclass
class Drawing:
    """A figure, its caption, and what each of its points is made of: JSON types, runs by id."""

    figure: Figure
    caption: str
    points: list[dict[str, Any]] = field(default_factory=list)


def look(name: str, names: Sequence[str]) -> Look:
    """Of one of the names of a figure."""
    if name in LOOKS:
        return LOOKS[name]
    place = [other for other in names if other not in LOOKS].index(name)
    return Look(COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)], "-" if place < len(COLOURS) else ":")


def files(name: str, title: str, drawing: Drawing, runs: Mapping[str, Run], root: Path) -> dict[str, bytes]:
    """{"figure4.png": bytes, ...}: PNG, PDF and the record; the same drawing gives the same bytes.

    runs: by id, those that the points name; root: what their folders are told relative to.
    """
    made: dict[str, bytes] = {}
    with mpl.rc_context(STYLE):
        for kind, dated in {"png": "Software", "pdf": "CreationDate"}.items():
            buffer = io.BytesIO()
            drawing.figure.savefig(buffer, format=kind, dpi=300, metadata={dated: None})
            drawing.figure.set_layout_engine("none")  # laid out once: it takes as long as to draw
            made[f"{name}.{kind}"] = buffer.getvalue()
    used = sorted({run for point in drawing.points for run in point.get("runs", ())})
    record = {
        "figure": name,
        "title": title,
        "caption": drawing.caption,
        "runs": {run: folder(runs[run], root) for run in used if run in runs},
        "points": drawing.points,
    }
    made[f"{name}.json"] = (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode()
    return made


def folder(run: Run, root: Path) -> str:
    """Of a run, relative to the results' where it lies in them."""
    return (run.folder.relative_to(root) if run.folder.is_relative_to(root) else run.folder).as_posix()


def of_paper(value: Value) -> dict[str, Any]:
    """One of the paper's values for the record."""
    return {
        "source": value.source,
        "how": value.how,
        "confidence": value.confidence,
        "value": value.value,
        "low": value.low,
        "high": value.high,
    }


def say_not_run(ax: Axes, what: str = NOT_RUN) -> None:
    ax.text(0.5, 0.5, what, transform=ax.transAxes, ha="center", va="center", fontsize=7, color=GREY, style="italic")


def footnote(figure: Figure | SubFigure, parts: Iterable[str], width: float = PAGE) -> None:
    """Small print below everything, wrapped to the figure's width in inches."""
    text = "; ".join(part for part in parts if part)
    figure.supxlabel("\n".join(textwrap.wrap(text, int(21 * width))), fontsize=5.5, color=GREY)
