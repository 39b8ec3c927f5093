"""Tables of experiments from fake runs whose every score says whose it is: each cell must hold its own."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from omegaconf import OmegaConf
from safetensors.numpy import save

from fasa_bench import exhibit_tables
from fasa_bench.derived import dominant, in_common
from fasa_bench.errors import UserError
from fasa_bench.exhibits import Cell, Exhibit, Grid, Stored, build
from fasa_bench.experiments import Experiment, Planned, composed, load_experiments
from fasa_bench.paper import Value, load
from fasa_bench.report import write_tables
from fasa_bench.runner import Job
from fasa_bench.store import Run, RunStore, flatten, run_id
from fasa_bench.typeset import booktabs, markdown_table

PAPER = load()
EXPERIMENTS = load_experiments()
PLANNED = [
    (experiment, planned)
    for experiment in EXPERIMENTS.values()
    for profile in ("paper", "mini")
    for planned in experiment.plan(profile)
]


class Scores(dict[str, Any]):
    """Every metric that is asked for, each with a value that no other has; CODES tells whose it is."""

    CODES: ClassVar[dict[float, tuple[str, str]]] = {}

    def __init__(self, run: str) -> None:
        super().__init__()
        self.run = run

    def __bool__(self) -> bool:
        return True

    def get(self, metric: str, default: Any = None) -> Any:
        if metric not in self:
            value = 1 + len(self.CODES) / 1024  # exact in binary
            self.CODES[value] = (self.run, metric)
            self[metric] = {"value": value, "ci_low": value - 1, "ci_high": value + 1, "n": 7}
        return self[metric]


def fake(planned: Planned) -> Run:
    """As a run of these settings is stored; full KV has no budget."""
    budget = None if planned.get("method") == "fkv" else planned.get("budget")
    scale = {"limit": planned.given.get("limit")}
    config = {"model": {"name": planned.given["model"]}, **planned.config, "budget": budget, **scale}
    name = run_id(json.loads(json.dumps(config)))
    summary = {
        "status": "complete",
        "model": planned.given["model"],
        "method": planned.get("method"),
        "task": planned.given["task"],
        "budget": budget,
        "metrics": Scores(name),
    }
    return Run(Path(name), config, summary, [], {})


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    """All runs of all experiments, each once."""
    return {run.folder.name: run for run in (fake(planned) for _, planned in PLANNED)}


@pytest.fixture(scope="module")
def exhibits(runs: dict[str, Run]) -> dict[str, Exhibit]:
    stored = Stored(list(runs.values()))
    return {name: build(each, PAPER.get(name), stored) for name, each in EXPERIMENTS.items()}


def settings(run: Run) -> dict[str, Any]:
    """What a stored run says of itself, by keys of the command line."""
    return flatten(run.config) | {key: run.name(key) for key in ("model", "method", "task")}


def cells(exhibit: Exhibit) -> Iterator[tuple[Grid, Any, Any, Cell]]:
    for grid in exhibit.grids:
        for (row, column), cell in grid.cells.items():
            yield grid, row, column, cell


def place_of(keys: str, own: Mapping[str, Any], metric: str, free_budget: Any) -> Any:
    """Where a score belongs by the settings of its run. free_budget: what stands there for full KV, which has none."""
    told = {**own, "dataset": metric, "metric": metric}
    if told["budget"] is None:
        told["budget"] = free_budget
    parts = [told.get(key) for key in keys.split("/")]
    return parts[0] if len(parts) == 1 else " · ".join(str(part) for part in parts if part is not None)


def layouts(experiment: Experiment) -> list[Mapping[str, Any]]:
    return experiment.layout if isinstance(experiment.layout, list) else [experiment.layout]


@pytest.mark.parametrize(
    "name", [name for name, each in EXPERIMENTS.items() if not any("derived" in one for one in layouts(each))]
)
def test_each_cell_decodes_to_its_own_place(name: str, exhibits: dict[str, Exhibit], runs: dict[str, Run]) -> None:
    decoded = 0
    for grid, row, column, cell in cells(exhibits[name]):
        if column == grid.average:
            others = [grid.cell(row, other).value for other in grid.columns if other != grid.average]
            assert cell.value == pytest.approx(np.mean(others))  # type: ignore[arg-type]
            continue
        assert cell.value is not None, (grid.title, row, column)
        run, metric = Scores.CODES[cell.value]
        own = settings(runs[run])
        assert cell.runs == (run,)
        assert (cell.low, cell.high, cell.n, cell.state) == (cell.value - 1, cell.value + 1, 7, "complete")
        for key, value in grid.keys.items():
            wanted = metric if key in ("dataset", "metric") else own.get(key)
            assert wanted == value or (key == "budget" and wanted is None)
        if "=" in metric:  # parts of the metric's name say where it belongs
            assert f"={column}" in metric or f"{column}/" in metric
            assert str(row).split(" ")[0].removeprefix("F=") in metric or row in (own["model"], own["method"])
        else:
            budget = column if grid.column_key == "budget" else str(column).rpartition(" · ")[2]
            assert place_of(grid.column_key, own, metric, budget) == column
            assert place_of(grid.row_key, own, metric, row) == row
        decoded += 1
    assert decoded or not any(planned for each, planned in PLANNED if each.id == name)


def test_no_two_runs_claim_one_cell() -> None:
    """Else the last of them would stand there, and nobody would see."""
    for experiment in EXPERIMENTS.values():
        for layout in layouts(experiment):
            if (
                "derived" in layout
                or "row" not in layout
                or layout.get("draw") in ("latency", "prompt_and_decode", "memory_and_time")
            ):  # by run
                continue
            keys = [key for side in ("panel", "row", "column") for key in _list(layout.get(side))]
            claimed: dict[Any, Any] = {}
            for planned in (one for each, one in PLANNED if each is experiment):
                if any(planned.get(key) not in _list(value) for key, value in layout.get("where", {}).items()):
                    continue
                at = (planned.profile, *(planned.get(key) for key in keys if key not in ("dataset", "metric")))
                what = tuple(pair for pair in planned.settings if pair[0] != "budget" or planned.get("method") != "fkv")
                assert claimed.setdefault(at, what) == what, (experiment.id, at)


def _list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_deleted_run_blanks_its_cells_and_averages_over_them(
    name: str, exhibits: dict[str, Exhibit], runs: dict[str, Run]
) -> None:
    """Only its own runs are there: else one of another experiment might come in, of other scale but equal settings."""
    used = sorted({run for grid in exhibits[name].grids for run in grid.runs if run in runs})
    for gone in random.Random(name).sample(used, min(2, len(used))):
        kept = [runs[run] for run in used if run != gone]
        after = build(EXPERIMENTS[name], PAPER.get(name), Stored(kept))
        for (_, _, _, old), (_, row, column, new) in zip(cells(exhibits[name]), cells(after), strict=True):
            if gone in old.runs:
                assert (new.value, new.state, new.paper) == (None, "not run", old.paper), (row, column)
            else:
                assert new == old, (row, column)


def test_paper_values_stand_where_the_paper_has_them(exhibits: dict[str, Exhibit], runs: dict[str, Run]) -> None:
    """Every number of the paper's tables is in a cell, beside ours of the same settings."""
    derived = {"avg_difference_to_fkv", "gain", "avg"}  # differences and means that follow from other cells
    for number in range(1, 12):
        place, exhibit = PAPER[f"table{number}"], exhibits[f"table{number}"]
        found = [cell.paper for _, _, _, cell in cells(exhibit) if cell.paper is not None]
        missing = [value.source for value in place.values if value not in found and value.metric not in derived]
        assert missing == []
        for grid, row, column, cell in cells(exhibit):
            if cell.paper is None or cell.value not in Scores.CODES:
                continue
            run, metric = Scores.CODES[cell.value]
            own = settings(runs[run])
            assert cell.paper.model in (None, own["model"])
            assert cell.paper.method in (None, own["method"], {"fasa_c": "fasa"}.get(own["method"])) or "=" in metric
            assert cell.paper.budget in (None, own["budget"], column), (grid.title, row, column)
            assert cell.paper.dataset in (None, metric), (grid.title, row, column)


def test_calibrations_and_their_spread(exhibits: dict[str, Exhibit], runs: dict[str, Run]) -> None:
    for grid in exhibits["table6"].grids:
        assert grid.rows == ("fkv", "narrativeqa", "qasper", "musique", "self", "cv")
        for dataset in grid.columns:
            values = []
            for row in grid.rows[:-1]:
                run, metric = Scores.CODES[grid.cell(row, dataset).value]  # type: ignore[index]
                own = settings(runs[run])
                assert metric == dataset
                assert own["method"] == ("fkv" if row == "fkv" else "fasa_c")
                assert row == "fkv" or own["calibration.text"] == (dataset if row == "self" else row)
                values.append(grid.cell(row, dataset).value)
            spread = np.std(values[1:], ddof=1) / np.mean(values[1:])  # type: ignore[arg-type]
            assert grid.cell("cv", dataset).value == pytest.approx(spread)
            assert grid.unit_of("cv", dataset) == "ratio"


def test_the_papers_own_spread_is_that_of_its_rows() -> None:
    """So that ours is computed as theirs was: sample standard deviation by mean, full KV left out."""
    place = PAPER["table6"]
    for printed in place.find(metric="cv"):
        rows = [
            place.number(dataset=printed.dataset, calibration=row, method="fasa", metric=printed.dataset)
            for row in ("narrativeqa", "qasper", "musique", "self")
        ]
        assert np.std(rows, ddof=1) / np.mean(rows) == pytest.approx(printed.value, abs=7e-4)


# --- grids of artefacts -------------------------------------------------------------------------------------------


def best(*chunks: int) -> np.ndarray[Any, Any]:
    """CA [2 layers, 3 heads, 8 FCs] whose best FCs are these, in all heads."""
    agreement = np.full((2, 3, 8), 0.1, dtype=np.float32)
    agreement[..., list(chunks)] = 0.9
    return agreement


def observed(root: Path, planned: Planned, texts: Mapping[str, list[np.ndarray[Any, Any]]]) -> Run:
    """A stored run of task=calibration with these CA, by source."""
    run = fake(planned)
    folder = root / "runs" / run.folder.name
    rows = []
    for source, samples in texts.items():
        for index, agreement in enumerate(samples):
            name = f"agreement/{source}/{index}.safetensors"
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(save({"agreement": agreement}))
            rows.append({"id": f"{source}/{index}", "fields": {"dataset": source}, "files": {name: "its hash"}})
    return Run(folder, run.config, run.summary, rows, {})


def test_overlap_of_the_dominant_chunks_by_hand(tmp_path: Path) -> None:
    experiment = EXPERIMENTS["table10"]
    [planned] = experiment.plan("mini")
    # 2 of 8 are dominant; of musique's two texts the mean counts: 1 is best in both, 5 beats 2 and 3
    musique = [best(1) + 0.3 * best(5), best(1) + 0.1 * best(2)]
    texts = {"qasper": [best(0, 1)], "gov_report": [best(0, 1)], "musique": musique, "narrativeqa": [best(6, 7)]}
    run = observed(tmp_path, planned, texts)
    grid = build(experiment, PAPER["table10"], Stored([run])).grids[-1]
    name = run.folder.name
    assert grid.keys == {"model": "smollm2_135m"}
    found = {column: grid.cell("qasper", column).value for column in grid.columns}
    assert found == {
        "qasper": 100, "gov_report": 100, "musique": 50, "narrativeqa": 0, "2wikimqa": None, "mean": None,
    }  # fmt: skip
    assert grid.cell("musique", "qasper") == Cell(50.0, n=6, runs=(name,), state="complete")
    assert grid.cell("2wikimqa", "qasper").state == "not run"
    whole = build(experiment, None, Stored([observed(tmp_path, planned, texts | {"2wikimqa": [best(1, 7)]})])).grids[-1]
    assert whole.cell("qasper", "mean").value == (100 + 100 + 50 + 0 + 50) / 5


def test_a_damaged_artefact_is_told_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    experiment = EXPERIMENTS["table10"]
    [planned] = experiment.plan("mini")
    run = observed(tmp_path, planned, {"qasper": [best(0, 1)], "musique": [best(0, 1)]})
    damaged = run.folder / "agreement" / "qasper" / "0.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:50])
    grid = build(experiment, None, Stored([run])).grids[-1]
    assert grid.cell("qasper", "musique").state == "not run"
    assert grid.cell("musique", "musique").value == 100
    assert "agreement/qasper/0.safetensors cannot be read" in caplog.text


def test_ties_have_no_more_dominant_chunks() -> None:
    assert dominant(np.zeros((1, 2, 8)), 0.25).sum(-1).tolist() == [[2, 2]]
    assert in_common(dominant(best(0, 1), 0.25), dominant(best(1, 2), 0.25)) == 50


def test_spread_over_calibration_samples_by_hand(tmp_path: Path) -> None:
    experiment = EXPERIMENTS["calibration_size"]
    [planned] = experiment.plan("mini")
    samples = [best(0, 1), best(0, 1), best(0, 2), best(0, 3)]
    grid = build(experiment, None, Stored([observed(tmp_path, planned, {"docs": samples})])).grids[0]
    # pairs of single samples: one of six has both in common, the others half; the mean's best are 0 and 1
    assert grid.cell(1, "docs · each other").value == pytest.approx((100 + 5 * 50) / 6)
    assert (grid.cell(1, "docs · each other").low, grid.cell(1, "docs · each other").high) == (50, 100)
    assert grid.cell(1, "docs · each other").n == 6
    assert grid.cell(1, "docs · all samples").value == pytest.approx((100 + 100 + 50 + 50) / 4)
    assert grid.cell(2, "docs · each other").value == 50  # 0 and 1 against 0 and 2: of ties the first
    assert grid.cell(4, "docs · each other") == Cell()  # no second set of four
    assert grid.cell(4, "docs · all samples").value == 100
    assert grid.cell(1, "stdlib · each other") == Cell()


def test_stages_by_context_are_those_of_the_rows() -> None:
    def row(context: int, tip: float) -> dict[str, Any]:
        part = {"step_ms": [1.0, 2.0, 3.0, 4.0], "stages_ms": {"tip": tip, "modules": 2 * tip}}
        return {"id": str(context), "fields": {"context": context}, "measured": {"method": part, "weight_bytes": 1}}

    summary = {"model": "smollm2_135m", "method": "fasa_plus", "task": "latency", "budget": 256, "status": "complete"}
    run = Run(Path("t"), {}, summary, [row(8192, 2.0), row(1024, 0.5)], {"cpu": "A CPU", "threads": 2})
    [grid] = build(EXPERIMENTS["stages"], None, Stored([run])).grids
    assert (grid.rows, grid.columns) == (("tip", "modules", "step"), (1024, 8192))
    assert [grid.cell("tip", context).value for context in grid.columns] == [0.5, 2.0]
    assert grid.cell("modules", 8192) == Cell(4.0, n=4, runs=("t",), state="complete")
    assert grid.cell("step", 1024) == Cell(2.5, 1.75, 3.25, 4, ("t",), "complete")
    assert grid.unit_of("tip", 1024) == "ms"


# --- the experiments themselves -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"row": "method", "colunm": "budget"}, "x: layout='colunm' is not allowed: unknown key; known keys are"),
        ({"derived": "magic"}, "x: derived='magic' is not allowed: must be one of calibrations, overlap"),
    ],
)
def test_an_unknown_layout_is_one_clear_error(layout: dict[str, Any], message: str) -> None:
    experiment = Experiment("x", "X", layout, {"mini": [{"task": "stdlib"}]})
    with pytest.raises(UserError, match=message):
        build(experiment, None, Stored([]))


def test_every_planned_run_passes_the_checks_of_a_run() -> None:
    """Methods, tasks and models as Hydra composes them, put together as `composed` does it."""
    base = OmegaConf.to_container(composed([]))
    models = {name: composed([f"model={name}"]) for name in {planned.given["model"] for _, planned in PLANNED}}
    checked = set()
    for _, planned in PLANNED:
        key = tuple(pair for pair in planned.settings if pair[0] != "model")
        if key not in checked:
            checked.add(key)
            model = OmegaConf.to_container(models[planned.given["model"]].model)
            cfg = OmegaConf.create({**base, **planned.config, "model": model, "budget": planned.given["budget"]})  # type: ignore[dict-item]
            job = Job.of(cfg)
            assert (job.method.name, job.model.name) == (planned.get("method"), planned.given["model"])


def test_sections_put_together_are_those_that_hydra_composes() -> None:
    for name, profile in (
        ("table3", "mini"),
        ("table5", "paper"),
        ("table8", "paper"),
        ("table10", "mini"),
        ("sinks", "mini"),
    ):
        planned = EXPERIMENTS[name].plan(profile)[-1]
        whole: Any = OmegaConf.to_container(composed(planned.overrides), resolve=True)
        assert planned.config == {key: whole[key] for key in planned.config}


def test_an_unknown_key_of_a_run_is_one_clear_error() -> None:
    [planned] = Experiment("x", "", {}, {"mini": [{"task": "stdlib", "task.windwos": 3}]}).plan("mini")
    with pytest.raises(UserError, match=r"task\.windwos=3 is not allowed: conf/ has no such key"):
        _ = planned.config


# --- files --------------------------------------------------------------------------------------------------------


def paper_value(value: float | None, low: float | None = None, high: float | None = None, **more: Any) -> Value:
    told: dict[str, Any] = dict.fromkeys(("model", "method", "task", "dataset", "budget"))
    told |= {"metric": "m", "unit": "%", "source": "Table 2", "how": "printed", "confidence": "exact"}
    return Value(value=value, low=low, high=high, keys={}, caveats=(), **(told | more))


@pytest.fixture
def small() -> Exhibit:
    difference = {"difference": -1.5, "ci_low": -3.0, "ci_high": 0.25, "p_value": 0.125, "n": 5}
    mine = {
        ("fkv", 64): Cell(50.0, 40.0, 60.0, 5, ("aa",), "complete", None, paper_value(55.0)),
        ("fkv", 128): Cell(50.0, 40.0, 60.0, 5, ("aa",), "complete", None, paper_value(61.5)),
        ("fasa_c", 64): Cell(
            48.5, 38.0, 58.0, 5, ("bb",), "partial", difference, paper_value(None, 10, None, confidence="approx")
        ),
        ("fasa_c", 128): Cell(paper=paper_value(52)),
    }
    grid = Grid("A model", {"model": "m"}, "mini", "method", "budget", ("fkv", "fasa_c"), (64, 128), mine)
    return Exhibit("table2", "A & B", (grid,), ("a caveat_1",))


def test_markdown_by_hand(small: Exhibit) -> None:
    assert exhibit_tables.markdown(small).splitlines() == [
        "# Table 2: A & B",
        "",
        "## A model",
        "",
        "In %, higher is better. The paper's number lies in our 95 % interval in 1 of 2 cells.",
        "",
        "| budget |  | 64 (n=5) | 128 (n=5) |",
        "| :-- | :-- | --: | --: |",
        "| Full KV | ours | 50.0 [40.0, 60.0] | 50.0 [40.0, 60.0] |",
        "|  | paper | 55.0 | 61.5 |",
        "|  | ours − paper | -5.0 | -11.5* |",
        "| FASA | ours | 48.5† [38.0, 58.0] | not run |",
        "|  | paper | ≈≥10 | 52 |",
        "|  | − full KV | -1.50 [-3.00, 0.25] p=0.125 |  |",
        "",
        "In brackets: 95 % bootstrap interval over examples. "
        "− full KV: ours less full KV's on the same examples, with the difference's own 95 % interval. "
        "p: two-sided paired permutation test. "
        "≈: read off a drawing, or its row was inferred. †: some examples are missing. "
        "*: the paper's number is outside our interval.",
        "",
        "## Notes",
        "",
        "- a caveat_1",
        "",
        "The runs behind every cell: [table2.json](table2.json).",
    ]


def test_latex_by_hand(small: Exhibit) -> None:
    latex = exhibit_tables.latex(small)
    assert r"\caption{A \& B (Table 2 of the paper). A model. In \%, higher is better." in latex
    assert r"FASA & ours & 48.5\textdagger{} [38, 58] & not run \\" in latex
    assert r" & $-$ full KV & -1.5 [-3.0, 0.2] &  \\" in latex
    assert r" & paper & $\approx$$\ge$10 & 52 \\" in latex
    assert r"A caveat\_1.\par" in latex
    assert r"\begin{tabular}{llrr}" in latex
    assert latex.count(r"\toprule") == latex.count(r"\bottomrule") == latex.count(r"\resizebox") == 1


def test_csv_and_json_have_every_cell_at_full_precision(small: Exhibit) -> None:
    lines = list(csv.DictReader(io.StringIO(exhibit_tables.as_csv(small))))
    assert [(line["row"], line["column"], line["ours"], line["paper"], line["state"]) for line in lines] == [
        ("fkv", "64", "50.0", "55.0", "complete"), ("fkv", "128", "50.0", "61.5", "complete"),
        ("fasa_c", "64", "48.5", "", "partial"), ("fasa_c", "128", "", "52", "not run"),
    ]  # fmt: skip
    assert (lines[2]["minus_full_kv"], lines[2]["p_value"], lines[2]["runs"]) == ("-1.5", "0.125", "bb")
    [grid] = json.loads(exhibit_tables.as_json(small, {"aa": "runs/aa", "bb": "mini/runs/bb"}))["grids"]
    assert [cell["runs"] for cell in grid["cells"]] == [["runs/aa"], ["runs/aa"], ["mini/runs/bb"], []]
    assert grid["cells"][1]["ours_minus_paper"] == -11.5
    assert grid["cells"][1]["verdict"] == "differs"
    assert grid["cells"][3]["value"] is None


def test_a_wide_table_is_turned() -> None:
    mine = {("a", column): Cell(float(column), runs=("x",), state="complete") for column in range(9)}
    grid = Grid("", {}, "mini", "method", "dataset", ("a",), tuple(range(9)), mine)
    markdown = exhibit_tables.markdown(Exhibit("own", "Own", (grid,)))
    assert "## The embedded model" in markdown
    assert "|  | a |" in markdown
    assert "| 8 | 8.0 |" in markdown


def test_tables_are_files_that_name_the_runs_of_every_cell(tmp_path: Path) -> None:
    """Runs are read from the user's own folder and from the committed one; the bytes are the same each time."""
    planned = [one for one in EXPERIMENTS["table2"].plan("mini") if one.get("method") in ("fkv", "fasa_c")]
    places = {}
    for one, root in zip(planned, (tmp_path, tmp_path / "mini"), strict=True):
        run = fake(one)
        names = EXPERIMENTS["table2"].layout["values"]  # type: ignore[index]
        metrics = {name: run.summary["metrics"].get(name) for name in names[:-1]}
        with RunStore(root, run.folder.name, run.config) as store:
            store.write_summary({**run.summary, "metrics": metrics})
        places[one.get("method")] = store.folder.relative_to(tmp_path).as_posix()
    written = {path.name: path.read_bytes() for path in write_tables(tmp_path)}
    assert written == {path.name: path.read_bytes() for path in write_tables(tmp_path)}
    for name, experiment in EXPERIMENTS.items():
        if not name.startswith("figure"):
            assert {f"{name}.{kind}" for kind in ("md", "tex", "csv", "json")} <= written.keys(), experiment.title
    [grid] = [one for one in json.loads(written["table2.json"])["grids"] if one["keys"] == {"model": "smollm2_135m"}]
    for cell in grid["cells"]:
        there = cell["row"] in places and cell["column"] not in ("repobench-p", "avg_table2")
        assert cell["runs"] == ([places[cell["row"]]] if there else [])
        assert (cell["value"] is not None) == there
        assert all((tmp_path / folder).is_dir() for folder in cell["runs"])
    markdown = written["table2.md"].decode()
    assert "SmolLM2-135M\n" in markdown
    assert "Llama3.1-8B: not run" in markdown
    assert b"0.0" not in written["table7.md"].replace(b"49.0", b"")


def test_signs_of_markdown_and_latex() -> None:
    assert markdown_table(["a|b"], [["c"]], "r") == "| a\\|b |\n| --: |\n| c |"
    latex = booktabs(["a_b", "−"], [[["x", "-"]], [["y", "1 %"], ["", "2"]]], "lr", "c", ["n & m"])
    assert r"a\_b & $-$ \\" in latex
    assert "x & -- \\\\\n\\addlinespace[2pt]\ny & 1 \\% \\\\" in latex
    assert r"n \& m\par" in latex
