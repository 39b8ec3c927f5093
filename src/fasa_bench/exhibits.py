"""Tables and figures as data: grids of cells, each with the paper's number, ours, and the runs that ours came from.

`build` makes an exhibit from an experiment's layout (conf/experiment). A layout, or each of a list of them, says:

panel, row, column: keys of the command line (method, budget, calibration.k, ...), one or a list, or `dataset` or
    `metric`, whose values are then listed under `values`. metric: the metric of all cells if none of the three is one
    of these; also a path into summary.json such as latency.decode_ms_per_token.median.
rows, columns: names that are no settings of runs but parts of a metric's name, as a list, or a mapping to what stands
    in that name: with metric "compound_ca/{row}/budget={column}" one run fills a whole grid. `row` and `column` are
    then the keys that the paper's values have these names under.
derived: a function of fasa_bench.derived makes the grids, where a cell takes more than a look at one run.
title: what tells its grids from those of other layouts. where: settings a run must have to be part of it.
unit, better (high | low): what the metric does not tell.
paper: by metric, what the paper's values call it where they differ: {speed-up 64K: {metric: speedup, context: 65536}}.
draw: how figures draw it (fasa_bench.drawings): curves if not said.
average: a metric that is the mean over the columns, added as the last one; the mean is taken here where a run lacks it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from fasa_bench.comparison import differences
from fasa_bench.errors import UserError
from fasa_bench.experiments import PROFILES, Experiment, Planned
from fasa_bench.paper import Place, Value
from fasa_bench.statistics import Difference
from fasa_bench.store import Run
from fasa_bench.tables import lower_is_better

State = Literal["complete", "partial", "not run", "not given"]
Better = Literal["high", "low"]
Key = tuple[Any, ...]
# what the paper's values call a key of the command line
PAPER_KEYS = {"calibration.k": "calibration_k", "calibration.text": "calibration", "method.n_tip": "n_tip"}
PAPER_KEYS |= {"task.corpus": "dataset", "task.contexts": "context"}
PAPER_METHODS = {"fasa_c": ("fasa", "fasa_c")}  # the paper says FASA where time and memory do not matter
LAYOUT = {"panel", "row", "column", "rows", "columns", "values", "metric", "where", "unit", "better", "average"}
LAYOUT |= {"paper", "draw", "derived", "title"}


@dataclass(frozen=True)
class Cell:
    """One number. value: ours, None if there is none; low, high: its 95 % interval; n: examples; runs: ids of the runs
    it was computed from; difference: to full KV on the same examples; paper: what the paper has here.

    state: "not run" where no stored run gives it, "partial" where some of a run's examples are missing, "not given"
    where a run has everything and yet no such number.
    """

    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    runs: tuple[str, ...] = ()
    state: State = "not run"
    difference: Difference | None = None
    paper: Value | None = None
    simulated: bool = False  # the method reads all keys to choose: its time says nothing

    @property
    def verdict(self) -> Literal["agrees", "differs", "unclear", ""]:
        """Whether the paper's number lies in our interval; "" without both, "unclear" without an interval."""
        if self.value is None or self.paper is None or self.paper.value is None:
            return ""
        if self.low is None or self.high is None:
            return "unclear"
        return "agrees" if self.low <= self.paper.value <= self.high else "differs"


@dataclass(frozen=True)
class Grid:
    """Cells by row and column. keys: what holds for the whole panel, e.g. {"model": "llama31_8b"}; profile: whose."""

    title: str
    keys: Mapping[str, Any]
    profile: str
    row_key: str
    column_key: str
    rows: tuple[Any, ...]
    columns: tuple[Any, ...]
    cells: Mapping[tuple[Any, Any], Cell]
    unit: str = "%"
    better: Better = "high"
    average: Any = None  # the column that is the mean of the others
    metrics: tuple[str, ...] = ()  # its rows or columns, where these are metrics, each with its own unit
    units: Mapping[Any, str] = field(default_factory=dict)  # of rows that differ
    interval: str = "95 % bootstrap interval over examples"  # what low and high of its cells are

    def unit_of(self, row: Any, column: Any) -> str:
        if row in self.units:
            return self.units[row]
        return next((unit(name) for name in (row, column) if name in self.metrics), self.unit)

    def is_lower_better(self, row: Any, column: Any) -> bool:
        return next((lower_is_better(name) for name in (row, column) if name in self.metrics), self.better == "low")

    def cell(self, row: Any, column: Any) -> Cell:
        return self.cells.get((row, column), Cell())

    @property
    def runs(self) -> list[str]:
        return sorted({name for cell in self.cells.values() for name in cell.runs})

    @property
    def is_empty(self) -> bool:
        """Whether nothing of it was run."""
        return all(cell.value is None for cell in self.cells.values())


@dataclass(frozen=True)
class Exhibit:
    """A table or figure of the paper, or one that it left out. notes: caveats, what the paper does not state."""

    id: str
    title: str
    grids: tuple[Grid, ...]
    notes: tuple[str, ...] = ()
    printed: Mapping[Any, str] = field(default_factory=dict)  # names as the paper prints them

    @property
    def kind(self) -> str:
        return "figure" if self.id.startswith("figure") else "table"

    @property
    def name(self) -> str:
        """ "Table 2"; an exhibit of our own by its title."""
        number = self.id.removeprefix(self.kind)
        return f"{self.kind.capitalize()} {number}" if number.isdigit() else self.title

    def label(self, value: Any) -> str:
        """A name as the paper prints it, else as people write it."""
        if isinstance(value, str) and JOINT in value:
            return JOINT.join(map(self.label, value.split(JOINT)))
        return self.printed.get(value) or LABELS.get(value) or str(value)


JOINT = " · "  # between the parts of a name
LABELS = {
    "fkv": "Full KV",
    "oracle": "Oracle",
    "quest": "Quest",
    "streamingllm": "StreamingLLM",
    "snapkv": "SnapKV",
    "h2o": "H2O",
    "rkv": "R-KV",
    "sparq": "SparQ",
    "fasa_c": "FASA",
    "fasa_m": "FASA-M",
    "fasa_plus": "FASA+ (ours)",
    "random": "Random",
    "fasa_pyramidkv": "FASA + PyramidKV",
    "snapkv_pyramidkv": "SnapKV + PyramidKV",
    "smollm2_135m": "SmolLM2-135M",
    "llama32_3b": "Llama-3.2-3B",
    "llama31_8b": "Llama-3.1-8B",
    "mistral_7b": "Mistral-7B-v0.3",
    "qwen25_7b": "Qwen2.5-7B",
    "qwen25_14b": "Qwen2.5-14B",
    "qwen25_14b_1m": "Qwen2.5-14B-1M",
    "qwen25_32b": "Qwen2.5-32B",
    "r1_llama_8b": "R1-Llama-8B",
    "r1_qwen_14b": "R1-Qwen-14B",
    "r1_qwen_32b": "R1-Qwen-32B",
    "deepseek_v2_lite": "DeepSeek-V2-Lite",
    "baichuan_13b": "Baichuan-13B",
    "bloomz_7b1": "BLOOMZ-7B1",
    "mpt_7b_chat": "MPT-7B-Chat",
    "math500": "MATH500",
    "aime24": "AIME24",
    "pg19": "PG19",
    "wikitext": "WikiText",
    "c4": "C4",
    "c4_en": "C4",
    "avg_table2": "AVG.",
    "qasper": "Qasper",
    "narrativeqa": "NarrativeQA",
    "multifieldqa_en": "MultiFieldQA-en",
    "multifieldqa_zh": "MultiFieldQA-zh",
    "hotpotqa": "HotpotQA",
    "2wikimqa": "2WikiMQA",
    "musique": "MuSiQue",
    "gov_report": "GovReport",
    "dureader": "DuReader",
    "trec": "TREC",
    "lcc": "LCC",
    "query_head": "query head",
    "kv_head": "KV head",
    "code_similarity": "code similarity",
    "passkey": "pass key",
    "oracle_mass": "Oracle's mass",
    "fasa_tip": "FASA-TIP",
    "fasa_adaptive": "FASA, adaptive",
    "rope": "true pairs",
    "adjacent": "adjacent dimensions",
    "single": "single dimensions",
}


class Stored:
    """Stored runs, looked up by experiments; differences to full KV are computed once, for what is looked at."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = list(runs)
        self._by_name: dict[tuple[str, ...], list[Run]] = {}
        for run in self.runs:
            self._by_name.setdefault((run.name("model"), run.name("task"), run.name("method")), []).append(run)

    def find(self, planned: Planned) -> Run | None:
        name = (planned.given["model"], planned.given["task"], planned.get("method"))
        return planned.find(self._by_name.get(name, ()))

    def difference(self, run: Run, metric: str) -> Difference | None:
        return self._differences.get(run.folder, {}).get(metric)

    @cached_property
    def _differences(self) -> Mapping[Any, Mapping[str, Difference]]:
        return differences(self.runs)


def build(experiment: Experiment, place: Place | None, stored: Stored) -> Exhibit:
    """The exhibit of an experiment: the paper's models first, then the embedded one."""
    layouts = experiment.layout if isinstance(experiment.layout, list) else [experiment.layout]
    grids = [grid for layout in layouts for grid in _grids(experiment, layout, place, stored)]
    notes = list(experiment.notes)
    if experiment.needs:
        notes.append(f"not run on the embedded model, as it needs another architecture: {experiment.needs}")
    if place:
        notes += [*place.caveats, *([f"the paper does not state: {', '.join(place.missing)}"] if place.missing else [])]
    return Exhibit(experiment.id, experiment.title, tuple(grids), tuple(notes), place.printed if place else {})


def _grids(experiment: Experiment, layout: Mapping[str, Any], place: Place | None, stored: Stored) -> Iterator[Grid]:
    unknown = layout.keys() - LAYOUT
    if unknown:
        raise UserError.of(
            f"{experiment.id}: layout", sorted(unknown)[0], f"unknown key; known keys are {', '.join(sorted(LAYOUT))}"
        )
    if "derived" in layout:
        from fasa_bench.derived import DERIVED  # not at the top: it needs this module

        if layout["derived"] not in DERIVED:
            raise UserError.of(f"{experiment.id}: derived", layout["derived"], f"must be one of {', '.join(DERIVED)}")
        yield from DERIVED[layout["derived"]](experiment, layout, place, stored)
        return
    dimensions = {name: _list(layout.get(name)) for name in ("panel", "row", "column")}
    listed = next((key for keys in dimensions.values() for key in keys if key in ("dataset", "metric")), None)
    rows, columns = (_inserted(layout.get(side)) for side in ("rows", "columns"))
    metrics = layout["values"] if "values" in layout else [layout.get("metric")]
    for profile in PROFILES:
        panels: dict[Key, dict[tuple[Any, Any], Cell]] = {}
        for planned in experiment.plan(profile):
            if any(planned.get(key) not in _list(value) for key, value in layout.get("where", {}).items()):
                continue
            run = stored.find(planned)
            given = {key: planned.get(key) for keys in dimensions.values() for key in keys if key != listed}
            for metric, row, column in itertools.product(metrics, rows, columns):
                named = {"row": row, "column": column}
                at = {
                    side: (named[side],)
                    if named.get(side) is not None
                    else tuple(metric if key == listed else given[key] for key in keys)
                    for side, keys in dimensions.items()
                }
                named = {side: name for side, name in named.items() if name is not None}
                if named:
                    called = layout.get("paper", {}).get(metric, {})
                    paper = _paper_value_named(place, planned, dimensions, metric, named, called)
                    metric = metric.format(row=rows[row], column=columns[column])
                else:
                    called = layout.get("paper", {}).get(metric, {})
                    paper = _paper_value(place, planned, dimensions, listed, metric, called)
                cells = panels.setdefault(at["panel"], {})
                cells[_one(at["row"]), _one(at["column"])] = cell_of(
                    run, metric, paper and in_unit(paper, layout.get("unit", "%")), stored
                )
        for panel, cells in panels.items():
            yield _grid(layout, dimensions, panel, cells, profile, place, stored)


def _grid(
    layout: Mapping[str, Any], dimensions: Mapping[str, list[str]], panel: Key, cells: dict[tuple[Any, Any], Cell],
    profile: str, place: Place | None, stored: Stored,
) -> Grid:  # fmt: skip
    rows, columns = (tuple(dict.fromkeys(at[index] for at in cells)) for index in (0, 1))
    metric = layout.get("average")
    keys = dict(zip(dimensions["panel"], panel, strict=True))
    if metric:
        by_id = {run.folder.name: run for run in stored.runs}
        for row in rows:
            mine = [cells.get((row, column), Cell()) for column in columns]
            cells[row, metric] = _average(mine, metric, by_id, stored, _average_of_paper(place, keys, row, metric))
        columns = (*columns, metric)
    names = _list(layout.get("values")) or [layout.get("metric")]
    better: Better = layout.get("better") or ("low" if lower_is_better(str(names[0])) else "high")
    metrics = tuple(names) if "metric" in (*dimensions["row"], *dimensions["column"]) and "unit" not in layout else ()
    labels: dict[Any, str] = {**LABELS, **(place.printed if place else {})}
    parts = [_told(key, part, labels) for key, part in zip(dimensions["panel"], panel, strict=True)]
    title = ", ".join([*parts, *_list(layout.get("title"))])
    return Grid(
        title, keys, profile, "/".join(dimensions["row"]), "/".join(dimensions["column"]), rows, columns, cells,
        layout.get("unit") or unit(str(names[0])), better, metric, metrics,
    )  # fmt: skip


def cell_of(run: Run | None, metric: str, paper: Value | None, stored: Stored) -> Cell:
    """A metric of a run, or why there is none."""
    if run is None:
        return Cell(paper=paper)
    name, simulated = run.folder.name, run.summary.get("speed") == "simulated"
    entry = (run.summary.get("metrics") or {}).get(metric)
    if entry is None and "." in metric:
        value = _path(run.summary, metric)
        entry = None if value is None else {"value": value}
    if not entry or entry.get("value") is None:
        missing: State = "not given" if run.status == "complete" and run.summary.get("metrics") and entry else "not run"
        return Cell(paper=paper, runs=(name,) if entry else (), state=missing, simulated=simulated)
    state: State = "complete" if run.status == "complete" else "partial"
    return Cell(
        entry["value"], entry.get("ci_low"), entry.get("ci_high"), entry.get("n"), (name,), state,
        stored.difference(run, metric), paper, simulated,
    )  # fmt: skip


def _average(cells: Sequence[Cell], metric: str, by_id: Mapping[str, Run], stored: Stored, paper: Value | None) -> Cell:
    """Of a row, if none of its cells is missing; with the interval that a single run of all of them gives."""
    values = [cell.value for cell in cells if cell.value is not None]
    names = tuple(dict.fromkeys(name for cell in cells for name in cell.runs))
    if len(values) < len(cells):
        return Cell(paper=paper)
    mean = sum(values) / len(values)
    whole = cell_of(by_id[names[0]], metric, paper, stored) if len(names) == 1 else Cell(paper=paper)
    if whole.value is not None and abs(whole.value - mean) < 1e-6:
        return whole
    state: State = "partial" if any(cell.state == "partial" for cell in cells) else "complete"
    return Cell(mean, runs=names, state=state, paper=paper)


def _paper_value(
    place: Place | None, planned: Planned, dimensions: Mapping[str, list[str]], listed: str | None, metric: str,
    called: Mapping[str, Any],
) -> Value | None:  # fmt: skip
    """The paper's number of these settings, if there is just one."""
    if place is None:
        return None
    keys = dict.fromkeys(key for names in dimensions.values() for key in names)
    wanted = {PAPER_KEYS.get(key, key): metric if key == listed else planned.get(key) for key in keys}
    wanted.setdefault("model", planned.given["model"])
    if listed != "dataset":
        wanted.setdefault("metric", metric)
    wanted |= called
    method = planned.get("method")
    if method == "fkv":
        wanted.pop("budget", None)
    for name in PAPER_METHODS.get(method, (method,)):
        found = (
            place.find(**wanted, method=name) if "method" not in wanted else place.find(**{**wanted, "method": name})
        )
        if len(found) > 1:  # a data set's score, and what else the paper says of it
            found = [value for value in found if value.metric == metric]
        if len(found) == 1:
            return found[0]
    return None


def _paper_value_named(
    place: Place | None, planned: Planned, dimensions: Mapping[str, list[str]], metric: str, named: Mapping[str, Any],
    called: Mapping[str, Any],
) -> Value | None:  # fmt: skip
    """The same where rows or columns are parts of the metric's name; a name may be the value of any key of its side."""
    if place is None:
        return None
    others = [key for side, keys in dimensions.items() if side not in named for key in keys]
    wanted = {PAPER_KEYS.get(key, key): planned.get(key) for key in ("model", *others)}
    if not metric.startswith("{"):
        wanted["metric"] = metric.partition("/")[0]
    found = [
        value
        for value in place.find(**{**wanted, **called})
        if all(any(value.get(key) == name for key in dimensions[side]) for side, name in named.items())
    ]
    return found[0] if len(found) == 1 else None


def in_unit(value: Value, unit: str) -> Value:
    """Some of the paper's drawings have shares where scores are per cent."""
    if (value.unit, unit) != ("ratio", "%"):
        return value
    percent = [None if number is None else 100 * number for number in (value.value, value.low, value.high)]
    return replace(value, unit="%", value=percent[0], low=percent[1], high=percent[2])


def _average_of_paper(place: Place | None, keys: Mapping[str, Any], row: Any, metric: str) -> Value | None:
    names = PAPER_METHODS.get(row, (row,))
    found = [value for name in names for value in (place.find(**keys, method=name, metric=metric) if place else [])]
    return found[0] if len(found) == 1 else None


def unit(metric: str) -> str:
    """Of a metric, as its name tells."""
    return "perplexity" if "perplexity" in metric else "tokens" if metric.startswith("tokens/") else "%"


def _inserted(names: Any) -> Mapping[Any, Any]:
    """{name: what stands for it in the metric}; without names, one that is none."""
    if not names:
        return {None: ""}
    return names if isinstance(names, Mapping) else {name: name for name in names}


def _path(tree: Any, path: str) -> Any:
    for part in path.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def _list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _told(key: str, value: Any, labels: Mapping[Any, str]) -> str:
    """A bare number with what it is."""
    name = key.rpartition(".")[2].replace("_", " ")
    return f"{name} {value}" if isinstance(value, int | float) else str(labels.get(value, value))


def _one(key: Key) -> Any:
    """A row is named by its value, or by all of them if there are several."""
    return key[0] if len(key) == 1 else JOINT.join(str(part) for part in key if part is not None)
