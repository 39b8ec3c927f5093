"""Figures 3 and 7 of FASA's paper (arXiv 2602.03152) from stored timings, beside the paper's own points.

Figure 3: what the prompt pass and decoding take, and how much faster a method decodes. Figure 7: memory and time of a
decode step by context. Ours are of batch 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from fasa_bench.drawings.style import PAGE, SMALL, footnote, say_not_run
from fasa_bench.exhibits import LABELS
from fasa_bench.figures import COLOURS, GREY, MARKERS, STYLE
from fasa_bench.latency_tables import Timed, Timings, short, speedup
from fasa_bench.paper import Place

CONTEXTS = [1024 * 2**power for power in range(7)]  # of the paper's Figure 7
DECODED = 512  # tokens that Figure 3 counts, as the authors' script decodes
DECODE, PROMPT = "#56B4E9", "#D55E00"
FULL, PLAIN = {"color": GREY, "marker": "o", "linestyle": "--"}, {"color": "black", "marker": "X", "linestyle": ":"}
NAMES = {"fkv": "full KV", "fasa_c": "FASA-C", "fasa_m": "FASA-M"}


def of_batch_one(found: Sequence[Timings]) -> list[Timings]:
    """Those that timed a decode step of batch 1, which is what the figures show."""
    return [each for each in found if any(timed.batch == 1 for timed in each.of_one("method"))]


def places(found: Sequence[Timings]) -> list[list[Timings]]:
    """By model and machine: only there can times be compared."""
    by_place: dict[str, list[Timings]] = {}
    for each in found:
        by_place.setdefault(each.where, []).append(each)
    return [by_place[where] for where in sorted(by_place)]


def figure3(found: Sequence[Timings], paper: Mapping[str, Place]) -> Figure:
    """Prompt pass and decoding, the paper's and ours, with full KV; then how much faster a method decodes.

    A line of panels for each machine, none if nothing was timed.
    """
    here = places(of_batch_one(found))
    bars = paper["figure3"]
    with mpl.rc_context(STYLE):
        drawn = Figure(figsize=(PAGE, 0.3 + 2.3 * max(1, len(here))), layout="constrained")
        axes = drawn.subplots(max(1, len(here)), 3, squeeze=False)
        contexts = [value.get("context") for value in bars.find(metric="decode_s")]
        theirs = axes[0, 0]
        _bars(theirs, contexts, bars.series(metric="prefill_s"), bars.series(metric="decode_s"))
        theirs.set_title("Paper: full KV (model, GPU,\ndecoded tokens not stated)")
        theirs.legend(loc="upper left", frameon=False, handlelength=1.2)
        for ax in axes[1:, 0]:
            ax.set_visible(False)
        for (_, ours, faster), place in zip(axes, here, strict=False):
            full = _full(place)
            passes = [timed.row["prefill_s"] for timed in full]
            _bars(ours, [timed.context for timed in full], passes, [DECODED * timed.median_ms / 1e3 for timed in full])
            ours.set_title(_where(place[0]))
            ours.set_ylabel(f"full KV, {DECODED} tokens decoded: seconds")
            _speedups(faster, place, paper["figure7"].number(metric="speedup", context=65536))
        if not here:
            for ax in axes[0, 1:]:
                say_not_run(ax)
                ax.set(title="Ours", xticks=[], yticks=[])
        notes = ["percentages: share of the prompt pass (–: not timed)", "vertical lines: 95 % interval over turns"]
        footnote(drawn, [*notes, "batch 1"])
    return drawn


def figure7(found: Sequence[Timings], paper: Mapping[str, Place]) -> Figure:
    """Memory of the cache and time of a step by context: the paper's above, ours below, a line for each machine."""
    here = places(of_batch_one(found))
    points = paper["figure7"]
    with mpl.rc_context(STYLE):
        drawn = Figure(figsize=(PAGE, 0.2 + 2.2 * (1 + max(1, len(here)))), layout="constrained")
        axes = drawn.subplots(1 + max(1, len(here)), 2)
        their_memory, their_time = axes[0]
        _their_points(their_memory, points, "memory")
        their_memory.set_title("Paper: device memory, GB (read off its figure, unsure)")
        _their_points(their_time, points, "step_s")
        their_time.set_title("Paper: s per step (read off its figure, unsure)")
        claim = points.number(metric="speedup", context=65536)
        full_s, sparse_s = (points.number(metric="step_s", method=name, context=65536) for name in ("fkv", "fasa_c"))
        their_time.annotate(
            f"claimed at 64K: {claim} times;\nthese points give {full_s / sparse_s:.1f}",
            (0.97, 0.04),
            xycoords="axes fraction",
            ha="right",
            va="bottom",
            **SMALL,
        )
        for (memory, time), place in zip(axes[1:], here, strict=False):
            _memory_and_time(memory, time, place)
        if not here:
            for ax, what in zip(axes[1], ("cache on the device", "time of a step"), strict=True):
                say_not_run(ax)
                ax.set(title=f"Ours: {what}", xticks=[], yticks=[])
        footnote(drawn, ["batch 1", "ours: medians over steps"] if here else ["batch 1"])
    return drawn


def _memory_and_time(memory: Axes, time: Axes, place: Sequence[Timings]) -> None:
    full = _full(place)
    for ax, value in ((memory, _device_mib), (time, lambda timed: timed.median_ms)):
        _line(ax, full, [value(timed) for timed in full], label="full KV", **FULL)
        for index, each in enumerate(_methods(place)):
            own = each.of_one("method", batch=1)
            _line(ax, own, [value(timed) for timed in own], label=each.name, **_look(index))
        _context_axis(ax, [timed.context for timed in full])
        ax.set_xlabel("cached tokens")
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # labels also where there is no power of ten
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
    plain = _longest(place, "plain")
    if plain:
        _line(time, plain, [timed.median_ms for timed in plain], label="transformers", **PLAIN)
    title = _where(place[0]).replace("\n", " · ")
    memory.set_title(f"{title}\ncache on the device, MiB")
    time.set_title(f"{title}\nms per step")
    for ax in (memory, time):
        ax.legend(frameon=False, loc="upper left")
        low, high = ax.get_ylim()
        free = _of_legend(ax)
        ax.set_ylim(low, high * (high / low) ** (free / (1 - free)))


def _of_legend(ax: Axes) -> float:
    """The part of a panel's height that its legend takes, which is to be free of curves."""
    return 0.04 + 0.09 * len(ax.get_legend_handles_labels()[1])


def record(found: Sequence[Timings]) -> list[dict[str, Any]]:
    """What both figures' points are made of: JSON types."""
    return [
        {
            "panel": each.where,
            "series": timed.name,
            "x": timed.context,
            "ms": timed.step_ms,
            "prefill_s": timed.row["prefill_s"],
            "device_mib": _device_mib(timed),
            "speedup": speedup(timed) if who == "method" else None,
            "runs": [each.run.folder.name],
        }
        for each in of_batch_one(found)
        for who in ("method", "full", "plain")
        for timed in each.of_one(who, batch=1)
    ]


def _full(found: Sequence[Timings]) -> list[Timed]:
    """Full KV at batch 1: of the run that timed it at most contexts, prompt passes counting first."""
    return _longest(found, "full") or _longest(found, "method")


def _longest(found: Sequence[Timings], who: str) -> list[Timed]:
    series = [each.of_one(who, batch=1) for each in found]
    return max(series, key=lambda one: (len(one), sum(timed.row["prefill_s"] is not None for timed in one)))


def _methods(found: Sequence[Timings]) -> list[Timings]:
    return sorted((each for each in found if each.run.summary.get("budget") is not None), key=lambda each: each.name)


def _look(place: int) -> dict[str, Any]:
    return {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[1 + place % (len(MARKERS) - 1)], "linestyle": "-"}


def _bars(ax: Axes, contexts: Sequence[int], prompt: Sequence[float | None], decode: Sequence[float]) -> None:
    """Stacked seconds; above each bar the share of the prompt pass, where it was timed."""
    places = range(len(contexts))
    known = [seconds or 0.0 for seconds in prompt]
    ax.bar(places, decode, color=DECODE, width=0.7, label="decode")
    ax.bar(places, known, bottom=decode, color=PROMPT, width=0.7, label="prompt pass")
    for place, one, other in zip(places, prompt, decode, strict=True):
        share = "–" if one is None else f"{one / (one + other):.0%}"
        ax.annotate(share, (place, (one or 0.0) + other), (0, 1), textcoords="offset points", ha="center", **SMALL)
    ax.set_xticks(places, [short(context) for context in contexts])
    ax.set_ylim(0, 1.1 * max(one + other for one, other in zip(known, decode, strict=True)))
    ax.set_xlabel("prompt tokens")
    ax.set_ylabel("seconds")


def _speedups(ax: Axes, found: Sequence[Timings], claimed: float) -> None:
    ax.axhline(1, color=GREY, linewidth=0.9, linestyle="--")
    contexts: set[int] = set()
    for place, each in enumerate(_methods(found)):
        own = [timed for timed in each.of_one("method", batch=1) if speedup(timed)]
        entries = [speedup(timed) or {} for timed in own]
        values = [float(entry["value"] or math.nan) for entry in entries]
        _line(ax, own, values, label=each.name, **_look(place))
        for timed, entry in zip(own, entries, strict=True):
            if entry["ci_low"] is not None:
                ax.vlines(timed.context, entry["ci_low"], entry["ci_high"] or math.nan, color=_look(place)["color"])
        full = each.of_one("full", batch=1)
        limits = [pair for pair in zip(own, full, strict=False) if pair[1].limit_ms]
        ax.plot(
            [timed.context for timed, _ in limits],
            [(full.limit_ms or math.nan) / (timed.limit_ms or math.nan) for timed, full in limits],
            color=_look(place)["color"],
            linewidth=0.7,
            linestyle=":",
            label="limit by bytes read" if place == 0 else None,
        )
        contexts |= {timed.context for timed in own}
    ax.plot([65536], [claimed], color="black", marker="*", markersize=7, linestyle="", label="paper, FASA-C, 64K")
    _context_axis(ax, sorted(contexts | {65536}))
    ax.set_title("Ours: a decode step,\ntimes as fast as full KV")
    ax.set_xlabel("cached tokens")
    ax.legend(loc="upper left", frameon=False)
    ax.set_ylim(0, ax.get_ylim()[1] / (1 - _of_legend(ax)))


def _their_points(ax: Axes, paper: Place, metric: str) -> None:
    looks = {"fkv": FULL, "fasa_c": _look(0), "fasa_m": _look(1)}  # single points, hence no lines
    drawn: dict[str, dict[int, float]] = {}
    for name, look in looks.items():
        given = paper.find(metric=metric, method=name)
        points = {value.get("context"): value.value for value in given if value.value is not None}
        same = next((NAMES[other] for other, theirs in drawn.items() if theirs == points), None)
        drawn[name] = points
        label, shown = (f"{NAMES[name]}: as {same}", {}) if same else (NAMES[name], points)
        ax.plot(list(shown), list(shown.values()), label=label, **{**look, "linestyle": "", "markerfacecolor": "white"})
    _context_axis(ax, CONTEXTS)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("cached tokens")
    ax.legend(loc="upper left", frameon=False)


def _device_mib(timed: Timed) -> float:
    return float(timed.part["device_bytes"]) / 2**20


def _line(ax: Axes, series: Sequence[Timed], values: Sequence[float], **look: Any) -> None:
    ax.plot([timed.context for timed in series], list(values), **look)


def _context_axis(ax: Axes, contexts: Sequence[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xlim(min(contexts) / 1.25, max(contexts) * 1.25)
    ax.xaxis.set_major_locator(FixedLocator(list(contexts)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(int(value))))


def _where(one: Timings) -> str:
    """Model, and below it the machine: a title."""
    model, *rest = one.where.split(" · ")
    name, *more = model.split(" ", 1)
    return f"{' '.join([LABELS.get(name, name), *more])}\n{' · '.join(rest)}"
