"""Tables and figures as data: grids of cells, each with the paper's number, ours, and the runs that ours came from.

`build` makes an exhibit from an experiment's layout (conf/experiment). A layout, or each of a list of them, says:

panel, row, column: keys of the command line (method, budget, calibration.k, ...), one or a list, or `dataset` or
    `metric`, whose values are then listed under `values`. metric: the metric of all cells if none of the three is one
    of these; also a path into summary.json such as latency.decode_ms_per_token.median.
where: settings a run must have to be part of this layout. unit: of the cells ("%" if not said), better: high | low.
paper: by metric, what the paper's values call it where they differ, e.g. {speed-up 64K: {metric: speedup, context: 65536}}.
draw: how figures draw it (fasa_bench.drawings): curves if not said.
average: a metric that is the mean over the columns, added as the last one; the mean is taken here where a run lacks it.
"""

from __future__ import annotations

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
LAYOUT = {"panel", "row", "column", "values", "metric", "where", "unit", "better", "average", "title"} | {"paper", "draw"}


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
        return self.printed.get(value) or LABELS.get(value) or str(value)


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
}


class Stored:
    """Stored runs, looked up by experiments; differences to full KV are computed once, for what is looked at."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = list(runs)
        self._by_name: dict[tuple[str, str], list[Run]] = {}
        for run in self.runs:
            self._by_name.setdefault((run.name("model"), run.name("task")), []).append(run)

    def find(self, planned: Planned) -> Run | None:
        return planned.find(self._by_name.get((planned.given["model"], planned.given["task"]), ()))

    def difference(self, run: Run, metric: str) -> Difference | None:
        return self._differences.get(run.folder, {}).get(metric)

    @cached_property
    def _differences(self) -> Mapping[Any, Mapping[str, Difference]]:
        return differences(self.runs)


def build(experiment: Experiment, place: Place | None, stored: Stored) -> Exhibit:
    """The exhibit of an experiment: the paper's models first, then the embedded one."""
    layouts = experiment.layout if isinstance(experiment.layout, list) else [experiment.layout]
    grids = [grid for layout in layouts for grid in _grids(experiment, layout, place, stored)]
    notes = (
        (*place.caveats, *(f"The paper does not state: {', '.join(place.missing)}." for _ in place.missing[:1]))
        if place
        else ()
    )
    printed = place.printed if place else {}
    return Exhibit(experiment.id, experiment.title, tuple(grids), notes, printed)


def _grids(experiment: Experiment, layout: Mapping[str, Any], place: Place | None, stored: Stored) -> Iterator[Grid]:
    unknown = layout.keys() - LAYOUT
    if unknown:
        raise UserError.of(
            f"{experiment.id}: layout", sorted(unknown)[0], f"unknown key; known keys are {', '.join(sorted(LAYOUT))}"
        )
    dimensions = {name: _list(layout.get(name)) for name in ("panel", "row", "column")}
    listed = next((key for keys in dimensions.values() for key in keys if key in ("dataset", "metric")), None)
    metrics = layout["values"] if listed else [layout.get("metric")]
    for profile in PROFILES:
        panels: dict[Key, dict[tuple[Any, Any], Cell]] = {}
        for planned in experiment.plan(profile):
            if any(planned.get(key) not in _list(value) for key, value in layout.get("where", {}).items()):
                continue
            run = stored.find(planned)
            for metric in metrics:
                at = {
                    name: tuple(metric if key == listed else planned.get(key) for key in keys)
                    for name, keys in dimensions.items()
                }
                called = layout.get("paper", {}).get(metric, {})
                paper = _paper_value(place, planned, dimensions, listed, metric, called)
                paper = paper and in_unit(paper, layout.get("unit", "%"))
                cells = panels.setdefault(at["panel"], {})
                cells[_one(at["row"]), _one(at["column"])] = _cell(run, metric, paper, stored)
        for panel, cells in panels.items():
            yield _grid(layout, dimensions, panel, cells, profile, experiment, place, stored)


def _grid(
    layout: Mapping[str, Any], dimensions: Mapping[str, list[str]], panel: Key, cells: dict[tuple[Any, Any], Cell],
    profile: str, experiment: Experiment, place: Place | None, stored: Stored,
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
    labels: dict[Any, str] = {**LABELS, **(place.printed if place else {})}
    title = ", ".join(str(labels.get(part, part)) for part in panel)
    return Grid(
        title, keys, profile, "/".join(dimensions["row"]), "/".join(dimensions["column"]), rows, columns, cells,
        layout.get("unit", "%"), better, metric,
    )  # fmt: skip


def _cell(run: Run | None, metric: str, paper: Value | None, stored: Stored) -> Cell:
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
    whole = _cell(by_id[names[0]], metric, paper, stored) if len(names) == 1 else Cell(paper=paper)
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
        if len(found) == 1:
            return found[0]
    return None


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


def _path(tree: Any, path: str) -> Any:
    for part in path.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def _list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _one(key: Key) -> Any:
    """A row is named by its value, or by all of them if there are several."""
    return key[0] if len(key) == 1 else " · ".join(str(part) for part in key if part is not None)
