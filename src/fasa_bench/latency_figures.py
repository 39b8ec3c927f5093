"""Figures 3 and 7 of FASA's paper (arXiv 2602.03152) from stored timings, beside the paper's own points.

Figure 3: what a prompt pass and decoding take. Figure 7: memory and time of a decode step by context.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from fasa_bench.errors import UserError
from fasa_bench.figures import COLOURS, GREY, MARKERS, STYLE
from fasa_bench.latency_tables import Timed, Timings, short, speedup

PAPER = Path(__file__).resolve().parents[2] / "results" / "paper"
DECODED = 512  # tokens that Figure 3 counts; the authors' script decodes so many
PROMPT = "#E69F00"
SMALL = {"fontsize": 6, "color": GREY}


def draw(found: Sequence[Timings], paper: Path = PAPER) -> dict[str, bytes]:
    """{"figure3.pdf": bytes, ...}: both figures as PDF and PNG. Raises UserError if nothing was timed."""
    if not any(each.examples for each in found):
        raise UserError("no decode step has been timed yet: run task=latency")
    files = {}
    with mpl.rc_context(STYLE):
        for name, make in {"figure3": figure3, "figure7": figure7}.items():
            drawn = make(found, yaml.safe_load((paper / f"{name}.yaml").read_text("utf-8")))
            for kind, dated in {"pdf": "CreationDate", "png": "Software"}.items():
                buffer = io.BytesIO()
                drawn.savefig(buffer, format=kind, dpi=300, metadata={dated: None})
                files[f"{name}.{kind}"] = buffer.getvalue()
    return files


def figure3(found: Sequence[Timings], paper: Mapping[str, Any]) -> Figure:
    """Prompt pass and decoding: the paper's, ours with full KV; then how much faster each method decodes."""
    drawn = Figure(figsize=(7, 2.5), layout="constrained")
    theirs, ours, faster = drawn.subplots(1, 3)
    _bars(theirs, paper["contexts"], paper["prefill_s"], paper["decode_s"], "Paper, full KV (model and GPU not stated)")
    full = _longest(found, "full") or _longest(found, "method")
    _bars(
        ours,
        [timed.context for timed in full],
        [timed.row["prefill_s"] for timed in full],
        [DECODED * timed.median_ms / 1e3 for timed in full],
        f"Ours, full KV, {DECODED} tokens decoded",
    )
    _speedups(faster, found, paper)
    drawn.supxlabel(_where(found) + "; bars and shading: 95 % interval over turns", **SMALL)
    return drawn


def figure7(found: Sequence[Timings], paper: Mapping[str, Any]) -> Figure:
    """Memory of the cache and time of a step by context: the paper's above, ours below."""
    drawn = Figure(figsize=(7, 4.3), layout="constrained")
    (memory, time), (our_memory, our_time) = drawn.subplots(2, 2)
    looks = _looks([each.name for each in found])
    _paper_points(memory, paper["memory_GB"], "Paper: memory, GB")
    _paper_points(time, paper["time_s"], "Paper: s per decode step")
    return drawn
