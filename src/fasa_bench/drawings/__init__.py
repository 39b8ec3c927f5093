"""Figures of experiments from stored runs: one module a kind, one style, and a record of what each point is made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fasa_bench import paper
from fasa_bench.drawings import curves, diagram, heatmaps, latency, listing, style
from fasa_bench.errors import UserError
from fasa_bench.exhibits import Exhibit, Stored, build
from fasa_bench.experiments import Experiment, load_experiments
from fasa_bench.latency_tables import timings
from fasa_bench.paper import Place
from fasa_bench.store import Run

KINDS = ("curves", "heatmaps", "prompt_and_decode", "memory_and_time", "diagram", "listing")  # `draw` in a layout


def draw(runs: Sequence[Run], results_dir: str | Path, only: Sequence[str] = ()) -> Iterator[tuple[str, bytes]]:
    """File names and contents of the figures of conf/experiment, PDF, PNG and JSON; the same runs give the same bytes.

    only: names of figures, all if there are none. A figure without any run shows what the paper tells of it. Raises
    UserError for a name that is none.
    """
    found = {name: each for name, each in load_experiments().items() if is_figure(each)}
    for name in only:
        if name not in found:
            raise UserError.of("--only", name, f"must be one of {', '.join(found)}")
    values, stored, by_id = paper.load(), Stored(runs), {run.folder.name: run for run in runs}
    for name in only or found:
        drawing = drawn(found[name], values, stored)
        yield from style.files(name, found[name].title, drawing, by_id, Path(results_dir)).items()


def is_figure(experiment: Experiment) -> bool:
    """A figure of the paper, or one of our own that says how it is drawn."""
    return experiment.id.startswith("figure") or "draw" in _layout(experiment)


def drawn(experiment: Experiment, values: dict[str, Place], stored: Stored) -> style.Drawing:
    """One figure. Raises UserError for a layout that nobody draws."""
    kind = _layout(experiment).get("draw", "curves")
    if kind == "diagram":
        return diagram.draw()
    if kind == "listing":
        return listing.draw()
    place = values.get(experiment.id)
    exhibit: Exhibit = build(experiment, place, stored)
    if kind == "curves":
        return curves.draw(exhibit, place)
    if kind == "heatmaps":
        return heatmaps.draw(experiment, exhibit, place, stored)
    measured = latency.of_batch_one(timings(stored.runs))
    maker = {"prompt_and_decode": latency.figure3, "memory_and_time": latency.figure7}.get(kind)
    if maker is None:
        raise UserError.of(f"{experiment.id}: layout.draw", kind, f"must be one of {', '.join(KINDS)}")
    return style.Drawing(maker(measured, values), "; ".join(exhibit.notes), latency.record(measured))


def _layout(experiment: Experiment) -> dict[str, Any]:
    layout = experiment.layout
    return dict(layout[0] if isinstance(layout, list) else layout)
