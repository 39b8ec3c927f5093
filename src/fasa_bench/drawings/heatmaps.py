"""Contextual agreement (CA) as pictures: unit by query head, a panel a layer, from the artefacts of task=calibration.

The paper's panels name model, layer and data set (results/paper/figureN.yaml). The embedded model is shown at the same
relative depth, in the paper's colours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from fasa_bench.derived import QUARTER, Agreement, agreements, dominant, in_common
from fasa_bench.drawings.style import COLUMN, NOT_RUN, PAGE, Drawing, footnote, say_not_run
from fasa_bench.exhibits import Exhibit, Stored
from fasa_bench.experiments import PROFILES, Experiment, Planned
from fasa_bench.figures import STYLE
from fasa_bench.paper import Place

HEIGHT, LOW = 1.55, 0.8  # inches of a panel, and of one that was not run
COLOURS = "viridis"  # its lightness rises evenly: the same order for colour-blind readers and in grey
PLAIN = (0.1, 0.5)  # range of the colours where the paper's is not known
DATASET = "qasper"
UNITS = {"dimensions": "dimensions", "chunks": "FCs"}  # by key of the paper's panels
# numbers of transformer layers of the paper's models, by their config.json
LAYERS = {"llama32_3b": 28, "llama31_8b": 32, "mistral_7b": 32, "qwen25_14b": 48, "qwen25_14b_1m": 48, "qwen25_32b": 64}
LAYERS |= {"baichuan_13b": 40, "deepseek_v2_lite": 27}


@dataclass(frozen=True)
class Panel:
    """layer: counted from 0. dimensions: single ones that come before the chunks. unit: what the x axis counts.

    paper: what its own panel shows, "" for models that it has not.
    """

    model: str
    layer: int
    dataset: str
    colours: tuple[float, float]
    dimensions: int
    unit: str
    paper: str
    found: Agreement | None


def draw(experiment: Experiment, exhibit: Exhibit, place: Place | None, stored: Stored) -> Drawing:
    """The paper's panels, and those of models in place of its own, in the first line; the embedded model's below."""
    lines = [list(_panels(experiment, profile, place, stored)) for profile in PROFILES]
    lines = [line for line in lines if line]
    columns = max(map(len, lines))
    width = PAGE if columns > 1 else COLUMN
    points: list[dict[str, Any]] = []
    with mpl.rc_context(STYLE):
        heights = [HEIGHT if any(panel.found for panel in line) else LOW for line in lines]
        figure = Figure(figsize=(width, sum(heights) + 0.45), layout="constrained")
        axes = figure.subplots(len(lines), columns, squeeze=False, height_ratios=heights)
        for line, panels in zip(axes, lines, strict=True):
            for ax in line[len(panels) :]:
                ax.set_visible(False)
            for ax, panel in zip(line, panels, strict=False):
                _draw_panel(ax, panel, exhibit, first=panel is panels[0])
                points += _record(panel)
            _bar(figure, line, panels)
        notes = [*_notes([panel for line in lines for panel in line]), *_agreement_of_two(lines, exhibit)]
        notes += [f"the embedded model lacks what it needs: {experiment.needs}"] if experiment.needs else []
        footnote(figure, notes, width)
    return Drawing(figure, "; ".join([*notes, *exhibit.notes]), points)


def _panels(experiment: Experiment, profile: str, place: Place | None, stored: Stored) -> Iterator[Panel]:
    planned = {one.given["model"]: one for one in experiment.plan(profile)}
    theirs = {given["model"] for given in place.panels} if place else set()
    for given in place.panels if place else ():
        for layer in given.get("layers") or [given["layer"]]:
            if profile == "paper":
                yield _panel(given, given["model"], layer, planned.get(given["model"]), stored)
            for model, one in planned.items():
                if model not in theirs:  # at the same relative depth
                    yield _panel(given, model, layer, one, stored, depth=layer / (LAYERS[given["model"]] - 1))


def _panel(
    given: Mapping[str, Any],
    model: str,
    layer: int,
    planned: Planned | None,
    stored: Stored,
    depth: float | None = None,
) -> Panel:
    dataset = given.get("dataset", DATASET)
    run = stored.find(planned) if planned else None
    found = next((one for one in agreements(run) if one.dataset == dataset), None) if run else None
    if found is not None:
        layer = layer if depth is None else round(depth * (len(found.mean) - 1))
        if layer >= len(found.mean):
            found = None
    ends = given.get("colour_range") or given.get("colour_ticks") or PLAIN
    units = " + ".join(f"{given[key]} {name}" for key, name in UNITS.items() if key in given)
    theirs = f"{units} × {given['heads']} heads" if depth is None else ""
    dimensions = int(given.get("dimensions", 0)) if "chunks" in given else 0
    unit = "FC" if "dimensions" not in given else "dimension, then FC" if dimensions else "dimension"
    return Panel(model, layer, dataset, (ends[0], ends[-1]), dimensions, unit, theirs, found)


def _draw_panel(ax: Axes, panel: Panel, exhibit: Exhibit, first: bool) -> None:
    where = f"layer {panel.layer}" if panel.found or panel.paper else "same relative depth"
    ax.set_title(f"{exhibit.label(panel.model)}\n{where}, {exhibit.label(panel.dataset)}")
    if panel.found is None:
        say_not_run(ax, f"{NOT_RUN}\npaper:\n{panel.paper}" if panel.paper else NOT_RUN)
        ax.set_xticks([])
        ax.set_yticks([])
        return
    values = panel.found.mean[panel.layer]
    low, high = panel.colours
    ax.imshow(values, aspect="auto", interpolation="nearest", cmap=COLOURS, vmin=low, vmax=high, origin="upper")
    heads, units = values.shape
    if 0 < panel.dimensions < units:
        ax.axvline(panel.dimensions - 0.5, color="white", linewidth=0.8)
    ax.set_xticks([0, *range(8, units, 8 if units <= 64 else 32)])
    ax.set_yticks(range(0, heads, 2 if heads <= 12 else 8))
    ax.set_xlabel(panel.unit)
    if first:
        ax.set_ylabel("query head")
    for spine in ax.spines.values():
        spine.set_visible(False)


def _bar(figure: Figure, line: Sequence[Axes], panels: Sequence[Panel]) -> None:
    """One scale a line of panels; where they differ, as in Figure 11, each panel its own."""
    shown = [(ax, panel) for ax, panel in zip(line, panels, strict=False) if panel.found is not None]
    ranges = {panel.colours for _, panel in shown}
    for low, high in sorted(ranges):
        own = [ax for ax, panel in shown if panel.colours == (low, high)]
        scale = ScalarMappable(Normalize(low, high), COLOURS)
        bar = figure.colorbar(scale, ax=own, extend="both", pad=0.01, aspect=14, shrink=0.95)
        bar.set_label("CA", fontsize=6.5)
        bar.outline.set_visible(False)


def _record(panel: Panel) -> Iterator[dict[str, Any]]:
    """A panel for the record: its numbers lie in the run's artefact; here are their size, ends and mean."""
    if panel.found is None:
        return
    values = panel.found.mean[panel.layer]
    yield {
        "panel": f"{panel.model}, layer {panel.layer}, {panel.dataset}",
        "heads": values.shape[0],
        "units": values.shape[1],
        "lowest": round(float(values.min()), 4),
        "mean": round(float(values.mean()), 4),
        "highest": round(float(values.max()), 4),
        "k": panel.found.k,
        "tokens": panel.found.tokens,
        "runs": [panel.found.run.folder.name],
    }


def _notes(panels: Sequence[Panel]) -> list[str]:
    found = [panel for panel in panels if panel.found is not None]
    sizes = sorted({(one.k, one.tokens) for panel in found if (one := panel.found)})
    notes = [f"CA of the best {k} of {tokens:,} tokens; by chance {k / tokens:.2f}" for k, tokens in sizes]
    if any(panel.model not in LAYERS for panel in found):
        notes.append("embedded model: layers at the paper's relative depth")
    return notes


def _agreement_of_two(lines: Sequence[Sequence[Panel]], exhibit: Exhibit) -> Iterator[str]:
    """How alike a model's CA is on two data sets: over all its layers and heads."""
    for line in lines:
        found = {panel.dataset: panel.found for panel in line if panel.found is not None}
        if len(found) == 2:
            one, other = found.values()
            alike = np.corrcoef(one.mean.ravel(), other.mean.ravel())[0, 1]
            shared = in_common(dominant(one.mean, QUARTER), dominant(other.mean, QUARTER))
            yield (
                f"{exhibit.label(line[0].model)}, both data sets over all layers: correlation of CA {alike:.3f}, "
                f"{shared:.0f}% of each head's best quarter of FCs the same"
            )
