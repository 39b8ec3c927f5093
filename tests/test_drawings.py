"""Figures of experiments: what is drawn and recorded is what the runs and the paper say, and nothing else."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import textwrap
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.image import AxesImage
from safetensors.numpy import save_file
from transformers import LlamaForCausalLM

from fasa_bench import attention, drawings, method
from fasa_bench.drawings import curves, heatmaps, listing
from fasa_bench.drawings.style import LOOKS, Drawing, files
from fasa_bench.errors import UserError
from fasa_bench.exhibits import Stored, build
from fasa_bench.experiments import Planned, load_experiments
from fasa_bench.methods import fasa
from fasa_bench.methods.fasa import FasaC
from fasa_bench.paper import load
from fasa_bench.report import main, write_figures
from fasa_bench.rope import Rope
from fasa_bench.store import Run
from tests.test_methods import FakeCalibration, decode
from tests.test_report import PPL, make

EXPERIMENTS = load_experiments()
PAPER = load()
SMALL = "SmolLM2-135M"


def fake(planned: Planned, value: float | None, metric: str, **more: Any) -> Run:
    """As a run of these settings is stored, with this value, an interval of one on both sides, and two examples."""
    budget = None if planned.get("method") == "fkv" else planned.get("budget")
    config = {"model": {"name": planned.given["model"]}, **planned.config, "budget": budget}
    entry = {} if value is None else {metric: {"value": value, "ci_low": value - 1, "ci_high": value + 1, "n": 2}}
    summary = {"status": "complete", "model": planned.given["model"], "method": planned.get("method"), "budget": budget}
    name = "-".join(str(planned.given.get(key)) for key in ("model", "task.corpus", "method", "method.n_tip", "budget"))
    return Run(Path(name), config, {**summary, "task": planned.given["task"], "metrics": entry}, **more or RAW)


RAW: dict[str, Any] = {"rows": [], "env": {}}


def draw_curves(name: str, runs: list[Run]) -> tuple[Drawing, dict[str, Axes]]:
    place = PAPER.get(name)
    drawing = curves.draw(build(EXPERIMENTS[name], place, Stored(runs)), place)
    return drawing, {ax.get_title().replace("\n", ", "): ax for ax in drawing.figure.axes}


def texts(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def filled(ax: Axes, method: str) -> list[tuple[float, float]]:
    """Points of ours in this method's colour."""
    lines = [line for line in ax.lines if line.get_color() == LOOKS[method].colour and line.get_marker() != "None"]
    own = [line for line in lines if line.get_markerfacecolor() != "none"]
    return [(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in own if len(line.get_xdata()) == 1]


def hollow(ax: Axes) -> dict[str, list[tuple[float, float]]]:
    """By colour, the paper's points."""
    found: dict[str, list[tuple[float, float]]] = {}
    for line in ax.lines:
        if line.get_marker() not in ("None", "_") and line.get_markerfacecolor() == "none":
            at = (float(line.get_xdata()[0]), float(line.get_ydata()[0]))
            found.setdefault(to_hex(line.get_markeredgecolor()).upper(), []).append(at)
    return found


@pytest.fixture(scope="module")
def perplexities() -> list[Run]:
    """Figure 4's runs of the embedded model on WikiText, each with a value of its own."""
    planned = [one for one in EXPERIMENTS["figure4"].plan("mini") if one.given["task.corpus"] == "wikitext"]
    runs = [fake(one, 20 + index / 8, "perplexity") for index, one in enumerate(planned)]
    return [run for run in runs if run.summary["method"] != "fkv" or run is runs[0]]  # full KV has no budget


def test_curves_are_the_values_of_their_runs(perplexities: list[Run]) -> None:
    drawing, axes = draw_curves("figure4", perplexities)
    ax = axes[f"{SMALL}, WikiText"]
    for name in ("oracle", "streamingllm", "quest", "fasa_c", "fasa_plus"):
        own = [run for run in perplexities if run.summary["method"] == name]
        drawn = filled(ax, name)
        assert [y for _, y in drawn] == [run.summary["metrics"]["perplexity"]["value"] for run in own]
        assert [x for x, _ in drawn] == pytest.approx([run.summary["budget"] for run in own], abs=0.02)
    recorded = [point for point in drawing.points if "value" in point]
    by_id = {run.folder.name: run for run in perplexities}
    assert len(recorded) == 36
    for point in recorded:
        (name,) = point["runs"]
        entry = by_id[name].summary["metrics"]["perplexity"]
        assert [point["value"], point["low"], point["high"]] == [entry["value"], entry["ci_low"], entry["ci_high"]]
        assert by_id[name].summary["budget"] in (point["x"], None)
    assert [texts(axes[f"{SMALL}, {corpus}"]) for corpus in ("PG19", "C4")] == [["not run"], ["not run"]]
    assert texts(ax) == []


def test_full_kv_is_a_line_with_its_interval(perplexities: list[Run]) -> None:
    _, axes = draw_curves("figure4", perplexities)
    ax = axes[f"{SMALL}, WikiText"]
    full = next(run for run in perplexities if run.summary["method"] == "fkv").summary["metrics"]["perplexity"]
    lines = [line for line in ax.lines if line.get_linestyle() == "--"]
    assert [set(line.get_ydata()) for line in lines] == [{full["value"]}]
    (band,) = [patch for patch in ax.patches if patch.get_alpha() == 0.12]
    assert (band.get_y(), band.get_y() + band.get_height()) == (full["ci_low"], full["ci_high"])


def test_a_run_that_is_missing_takes_only_its_point_away(perplexities: list[Run]) -> None:
    lost = next(run for run in perplexities if (run.summary["method"], run.summary["budget"]) == ("quest", 0.3))
    whole, _ = draw_curves("figure4", perplexities)
    rest, axes = draw_curves("figure4", [run for run in perplexities if run is not lost])
    gone = [point for point in whole.points if point not in rest.points]
    assert [point["runs"] for point in gone] == [[lost.folder.name]]
    assert len(rest.points) == len(whole.points) - 1
    assert len(filled(axes[f"{SMALL}, WikiText"], "quest")) == 5
    without = [run for run in perplexities if run.summary["method"] != "quest"]
    _, axes = draw_curves("figure4", without)
    assert texts(axes[f"{SMALL}, WikiText"]) == ["not run: Quest"]
    assert filled(axes[f"{SMALL}, WikiText"], "quest") == []


def test_the_papers_points_are_hollow_and_say_where_they_come_from() -> None:
    drawing, axes = draw_curves("figure4", [])
    ax = axes["Llama-3.2-3B, WikiText"]
    colours = {name: look.colour.upper() for name, look in LOOKS.items()}
    assert hollow(ax) == {
        colours["fasa_c"]: [(0.2, 10.75)],  # the middle of 10.5 to 11
        colours["streamingllm"]: [(0.2, 14.0)],
        colours["quest"]: [(0.2, 12.25)],
    }
    assert texts(ax) == ["ours: not run"]
    assert {float(line.get_ydata()[0]) for line in ax.lines if line.get_linestyle() == ":"} == {10.0, 10.5}
    assert texts(axes["Qwen2.5-14B, PG19"]) == ["not run"]
    point = next(point for point in drawing.points if point["series"] == "Stream" and "WikiText" in point["panel"])
    assert point["paper"]["value"] == 14.0
    assert point["paper"]["confidence"] == "approx"
    assert point["paper"]["source"].startswith("Figure 4: ")
    assert not any("value" in point for point in drawing.points)
    doubtful = texts(axes["Meta-Llama-3.1-8B, WikiText"])
    assert doubtful.count("?") == 6  # two readings of three methods


def test_ranges_over_all_budgets_stand_apart_in_per_cent() -> None:
    """Figure 6 gives shares of one, our scores are per cent."""
    drawing, axes = draw_curves("figure6", [])
    ax = axes["Qwen2.5-32B, HotpotQA"]
    assert [label.get_text() for label in ax.get_xticklabels()][-1] == "all"
    bars = [path.vertices[:, 1].tolist() for part in ax.collections for path in part.get_paths()]
    assert sorted(bars) == [pytest.approx([34, 42]), pytest.approx([42, 52]), pytest.approx([52, 58])]
    assert all(x > 2048 for points in hollow(ax).values() for x, _ in points)
    assert {point["x"] for point in drawing.points if point["series"] != "FKV"} == {"all"}


def test_numbers_of_chunks_share_a_look_over_models() -> None:
    """The embedded model's heads have half as many chunks; the paper's unplaced numbers stand over a question mark."""
    planned = [one for one in EXPERIMENTS["figure5"].plan("mini") if one.get("method.n_tip") == 5]
    _, axes = draw_curves("figure5", [fake(one, 50, "trec") for one in planned])
    looks = {to_hex(line.get_color()) for line in axes[f"{SMALL}, TREC"].lines}
    theirs = axes["Qwen2.5-14B-Instruct-1M, TREC"]
    (ten,) = [colour for colour, points in hollow(theirs).items() if (500.0, 80.5) in points]
    assert looks == {ten.lower()}
    assert sorted(at for points in hollow(theirs).values() for at in points) == [(300, 80.5), (500, 80.5), (700, 80.5)]
    assert sum(line.get_marker() == "_" for line in theirs.lines) == 30
    (note,) = texts(axes[f"{SMALL}, TREC"])
    assert note.replace("\n", " ") == "not run: FASA · 4, FASA · 6, FASA · 7, Full KV"


def test_sparq_is_compared_though_the_paper_names_no_model() -> None:
    _, axes = draw_curves("figure17", [])
    sparq = hollow(axes["Paper (model not stated)"])[LOOKS["sparq"].colour.upper()]
    assert sparq == [(250, 15), (2000, 55)]
    assert texts(axes[SMALL]) == ["not run"]


def test_figures_of_one_list_share_their_runs() -> None:
    """So that make reproduce makes them once."""
    plans = {name: {one.settings for one in each.plan("mini")} for name, each in EXPERIMENTS.items()}
    assert plans["figure6"] == plans["figure15"] == plans["figure16"]
    assert len(plans["figure17"] - plans["figure6"]) == 5  # SparQ at each budget
    for name in ("figure1", "figure11", "figure12", "figure13"):
        assert plans[name] == plans["table9"], name
    assert all(f"figure{number}" in plans for number in range(1, 18))


# heat maps ----------------------------------------------------------------------------------------------------------


def calibrated(folder: Path, model: str = "smollm2_135m", layers: int = 30, profile: str = "mini") -> Run:
    """A run of task=calibration; CA of layer, head and chunk is 0.1 + layer / 100 + head / 1000 + chunk / 10000."""
    planned = next(one for one in EXPERIMENTS["figure12"].plan(profile) if one.given["model"] == model)
    rows = []
    for place, dataset in enumerate(("qasper", "gov_report")):
        steps = (np.arange(size, dtype=np.float32) / scale for size, scale in ((layers, 100), (9, 1000), (32, 10000)))
        mean = 0.1 + sum(np.meshgrid(*steps, indexing="ij"))
        name = f"agreement/{dataset}.safetensors"
        (folder / "agreement").mkdir(parents=True, exist_ok=True)
        save_file({"agreement": mean if place == 0 else mean[..., ::-1].copy()}, folder / name)
        row = {"id": dataset, "fields": {"dataset": dataset}, "files": {name: "x"}, "prompt_tokens": 1024}
        rows.append(row)
    return replace(fake(planned, None, "dominant"), folder=folder, rows=rows)


def draw_heatmaps(name: str, runs: list[Run]) -> tuple[Drawing, list[Axes]]:
    place, stored = PAPER[name], Stored(runs)
    drawing = heatmaps.draw(EXPERIMENTS[name], build(EXPERIMENTS[name], place, stored), place, stored)
    return drawing, [ax for ax in drawing.figure.axes if ax.get_title()]


def image(ax: Axes) -> AxesImage | None:
    return ax.images[0] if ax.images else None


def test_heat_maps_show_the_layer_at_the_papers_depth(tmp_path: Path) -> None:
    run = calibrated(tmp_path / "run")
    drawing, axes = draw_heatmaps("figure13", [run])
    assert [image(ax) is None for ax in axes] == [True] * 5 + [False] * 5
    assert texts(axes[0]) == ["not run\npaper:\n64 FCs × 40 heads"]
    depths = [round(layer / 47 * 29) for layer in (0, 10, 17, 31, 41)]
    for ax, layer in zip(axes[5:], depths, strict=True):
        assert ax.get_title() == f"{SMALL}\nlayer {layer}, Qasper"
        shown = image(ax)
        assert shown is not None
        values = shown.get_array()
        assert values is not None
        assert values.shape == (9, 32)
        assert float(values[8, 31]) == pytest.approx(0.1 + layer / 100 + 0.008 + 0.0031)
    assert [point["runs"] for point in drawing.points] == [["run"]] * 5
    assert drawing.points[1]["highest"] == pytest.approx(0.1 + depths[1] / 100 + 0.008 + 0.0031, abs=1e-4)
    assert "by chance 0.24" in drawing.caption  # 256 of 1,056


def test_heat_maps_take_the_papers_colours_and_data_set(tmp_path: Path) -> None:
    drawing, axes = draw_heatmaps("figure11", [calibrated(tmp_path / "run")])
    shown = [image(ax) for ax in axes]
    assert [one and one.get_clim() for one in shown] == [None, None, (0.05, 0.4), (0.1, 0.5)]
    drawing, axes = draw_heatmaps("figure12", [calibrated(tmp_path / "run")])
    first, second = (image(ax) for ax in axes[2:])
    assert first is not None
    assert second is not None
    assert np.array_equal(first.get_array()[:, ::-1], second.get_array())  # type: ignore[index]
    assert [ax.get_title().split(", ")[1] for ax in axes[2:]] == ["Qasper", "GovReport"]
    assert "0% of each head's best quarter of FCs the same" in drawing.caption  # one's best are the other's worst


def test_heat_maps_of_files_that_are_gone_say_so(tmp_path: Path) -> None:
    run = calibrated(tmp_path / "run")
    (tmp_path / "run" / "agreement" / "qasper.safetensors").unlink()
    drawing, axes = draw_heatmaps("figure1", [run])
    assert [texts(ax)[0].split("\n")[0] for ax in axes] == ["not run"] * 4
    assert drawing.points == []
    drawing, axes = draw_heatmaps("figure8", [run])
    assert "the embedded model lacks what it needs: ALiBi" in drawing.caption


def test_a_model_stands_in_for_one_that_cannot_be_loaded(tmp_path: Path) -> None:
    (planned,) = EXPERIMENTS["figure8"].plan("paper")
    (tmp_path / "agreement").mkdir()
    mean = np.arange(30, dtype=np.float32)[:, None, None] / 100 + np.zeros((30, 32, 128), dtype=np.float32)
    save_file({"agreement": mean}, tmp_path / "agreement" / "a.safetensors")
    row = {"id": "a", "fields": {"dataset": "qasper"}, "files": {"agreement/a.safetensors": "x"}}
    _, axes = draw_heatmaps("figure8", [replace(fake(planned, None, "dominant"), folder=tmp_path, rows=[row])])
    titles = [ax.get_title() for ax in axes]
    assert titles == [
        *("Baichuan-13B\nlayer 8, Qasper", "BLOOMZ-7B1\nlayer 6, Qasper"),
        *("Baichuan-13B\nlayer 22, Qasper", "BLOOMZ-7B1\nlayer 16, Qasper"),
    ]
    shown = axes[1].images[0].get_array()
    assert shown is not None
    assert float(shown[0, 0]) == pytest.approx(0.06)
    assert axes[1].get_xlabel() == "dimension"


def test_a_model_of_the_papers_is_shown_at_its_own_layer(tmp_path: Path) -> None:
    _, axes = draw_heatmaps("figure12", [calibrated(tmp_path / "run", "mistral_7b", 32, "paper")])
    assert axes[0].get_title() == "Mistral-7B-v0.3\nlayer 10, Qasper"
    values = axes[0].images[0].get_array()
    assert values is not None
    assert float(values[0, 0]) == pytest.approx(0.2)
    assert [texts(ax) for ax in axes[2:]] == [["not run"], ["not run"]]


# the listing --------------------------------------------------------------------------------------------------------


def test_the_listing_is_the_source_without_docstrings() -> None:
    parts = {part.name: part for part in listing.parts()}
    for name, function in {
        "forward": attention.forward,
        "_step": attention._step,
        "TopTokens.select": method.TopTokens.select,
        "FasaC.scores": FasaC.scores,
    }.items():
        source, first = inspect.getsourcelines(function)
        assert (parts[name].first, parts[name].last) == (first, first + len(source) - 1)
        listed = ast.parse("\n".join(line for _, line in parts[name].lines))
        whole = ast.parse(textwrap.dedent("".join(source)))
        body = whole.body[0].body  # type: ignore[attr-defined]
        if ast.get_docstring(whole.body[0]):  # type: ignore[arg-type]
            del body[0]
        assert ast.dump(listed) == ast.dump(whole), name
    assert [line for _, line in parts["AttentionInterface.register"].lines] == [
        "AttentionInterface.register(NAME, forward)"
    ]


def test_the_listing_runs(network: LlamaForCausalLM, prompt: list[int]) -> None:
    """Its lines, compiled by themselves, decode the same tokens; what they say of stages is heard."""
    model = SimpleNamespace(config=network.config, rope=Rope.of(network))
    source = {part.name: "\n".join(line for _, line in part.lines) for part in listing.parts()}
    heard: list[str] = []
    names: dict[str, dict[str, Any]] = {
        path: {**vars(module), "stage": lambda name: (heard.append(name), nullcontext())[1]}
        for path, module in (("attention", attention), ("method", method), ("fasa", fasa))
    }
    for name, text in source.items():
        path = "fasa" if name == "FasaC.scores" else "method" if name == "TopTokens.select" else "attention"
        if "register" not in name:
            exec(compile(text, "listing", "exec"), names[path])
    methods = {"select": names["method"]["select"], "scores": names["fasa"]["scores"]}
    Listed = type("Listed", (FasaC,), methods)
    expected, listed = (kind("fasa_c", n_tip=3, backend="torch") for kind in (FasaC, Listed))
    for one in (expected, listed):
        one.prepare(model, FakeCalibration())  # type: ignore[arg-type]
    wanted, _ = decode(network, expected, 8, prompt, 33)
    try:
        for name in ("AttentionInterface.register", "AttentionMaskInterface.register"):
            exec(compile(source[name], "listing", "exec"), names["attention"])
        found, _ = decode(network, listed, 8, prompt, 33)
    finally:
        attention.AttentionInterface.register(attention.NAME, attention.forward)
    assert torch.equal(found, wanted)
    assert {"select", "attend", "update", "tip", "top_k"} <= set(heard)


# files --------------------------------------------------------------------------------------------------------------


def test_files_are_the_same_each_time_and_name_the_run_folders(tmp_path: Path) -> None:
    planned = [one for one in EXPERIMENTS["figure17"].plan("mini") if one.given["method"] == "fasa"]
    runs = {run.folder.name: run for run in (fake(one, index, "avg") for index, one in enumerate(planned))}
    runs = {name: replace(run, folder=tmp_path / "runs" / name) for name, run in runs.items()}
    drawing, _ = draw_curves("figure17", list(runs.values()))
    made = files("figure17", "t", drawing, runs, tmp_path)
    assert set(made) == {"figure17.pdf", "figure17.png", "figure17.json"}
    record = json.loads(made["figure17.json"])
    assert record["runs"] == {name: f"runs/{name}" for name in runs}
    assert record["points"] == drawing.points
    assert [point["value"] for point in record["points"] if "value" in point] == [0, 1, 2, 3, 4]
    again, _ = draw_curves("figure17", list(runs.values()))
    assert files("figure17", "t", again, runs, tmp_path) == made


def test_the_command_draws_figures_that_no_run_is_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, "fkv", None, PPL)
    names = ["figure2", "figure8", "figure17"]
    assert main(["figures", "--results-dir", str(tmp_path), "--only", *names]) == 0
    written = capsys.readouterr().out.split()
    assert written == [
        str(tmp_path / "figures" / f"{name}.{kind}") for name, kind in itertools.product(names, ("png", "pdf", "json"))
    ]
    assert all(Path(path).stat().st_size > 100 for path in written)
    with pytest.raises(UserError, match=r"--only='figure18'.*figure1, figure2"):
        write_figures(tmp_path, only=["figure18"])


def test_a_layout_that_nobody_draws_is_refused() -> None:
    odd = replace(EXPERIMENTS["figure2"], layout={"draw": "pie"})
    with pytest.raises(UserError, match=r"figure2: layout.draw='pie'.*curves, heatmaps"):
        drawings.drawn(odd, PAPER, Stored([]))
