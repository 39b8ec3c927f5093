"""Tables and figures of fake runs: the right numbers in the right cells, and never a 0 where nothing was run."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fasa_bench import report
from fasa_bench.comparison import differences
from fasa_bench.errors import UserError
from fasa_bench.figures import GREY, figure
from fasa_bench.report import main, print_table, update_document, write_figures, write_tables
from fasa_bench.store import Run, RunStore, find_runs, load_run, run_id
from fasa_bench.tables import difference, grouped, interval, number, table

MIB = 2**20
PPL = {"perplexity": {"value": 16.703, "ci_low": 15.94, "ci_high": 17.61, "n": 8}}


def make(
    root: Path,
    method: str,
    budget: int | float | None,
    metrics: dict[str, Any] | None,
    *,
    model: str = "m",
    task: str = "ppl",
    status: str | None = "complete",
    speed: str = "physical",
    ms: float = 41.25,
    host: int = 0,
    examples: int = 2,
    rows: list[dict[str, Any]] | None = None,
    config: dict[str, Any] | None = None,
    **settings: Any,
) -> Run:
    """Store a run; status None: it is going on and has no summary. config: more of it."""
    section = {"name": method, **settings}
    whole = {"model": {"name": model}, "task": {"_target_": f"x.{task}.T"}, "method": section, "budget": budget}
    whole |= config or {}
    with RunStore(root, run_id(whole), whole) as run:
        for index in range(examples):
            run.append({"id": str(index), "prompt_tokens": 700 + 300 * index, **(rows[index] if rows else {})})
        if status is not None:
            time = {"median": ms, "p25": ms - 1, "p75": ms + 2, "n": 50}
            run.write_summary(
                {
                    "status": status,
                    "model": model,
                    "method": method,
                    "task": task,
                    "budget": budget,
                    "speed": speed,
                    "metrics": metrics or {},
                    "latency": {"prefill_s": 0.5, "decode_ms_per_token": time, "stages": {}},
                    "memory": {"device_bytes": 46 * MIB, "host_bytes": host * MIB, "peak_bytes": 9},
                    "realised": {"attended_tokens": budget or 1000.4, "cached_tokens": 1000.4, "sparse_steps": 0},
                }
            )
    return load_run(run.folder)


def score(value: float | None, n: int = 5, spread: float = 2.0) -> dict[str, Any]:
    low, high = (None, None) if value is None else (value - spread, value + spread)
    return {"value": value, "ci_low": low, "ci_high": high, "n": n}


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    for name, budget, values in [
        ("fkv", None, (8.9, 55.0)),
        ("fasa_c", 64, (12.1, 48.0)),
        ("oracle", 64, (9.7, 54.0)),
    ]:
        metrics = {"perplexity": score(values[0]), "code_similarity": score(values[1], n=6)}
        make(tmp_path, name, budget, metrics, task="stdlib", speed="simulated" if name == "oracle" else "physical")
    make(tmp_path, "h2o", 64, None, task="stdlib", status=None, examples=1)
    return tmp_path


# --- text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (16.7034, "16.70"),
        (8.9123, "8.912"),
        (100.0, "100.0"),
        (12345.6, "12,346"),
        (0.5, "0.500"),
        (0.0, "0.000"),
        (0.00001234, "1.2e-05"),
        (7, "7"),
        (None, "-"),
    ],
)
def test_numbers_are_printed_with_four_digits(value: float | int | None, text: str) -> None:
    assert number(value) == text


def test_an_interval_or_why_there_is_none() -> None:
    assert interval(PPL["perplexity"]) == "16.70 [15.9, 17.6]"
    assert interval({"value": 3.25, "ci_low": None, "ci_high": None, "n": 1}) == "3.250"
    assert interval(None) == "not run"
    assert interval({"value": None, "n": 0}) == "not run"
    assert interval({"value": None, "n": 4}) == "-"  # run, and no number came out


# --- table


def test_a_row_has_every_number(tmp_path: Path) -> None:
    runs = [make(tmp_path, "fasa_m", 256, PPL, host=30)]
    assert table(runs).to_dict("records") == [
        {
            "model": "m",
            "task": "ppl",
            "method": "fasa_m",
            "budget": "256",
            "perplexity": "16.70 [15.9, 17.6]",
            "decode ms/token": "41.2",
            "prefill s": "0.50",
            "cache MiB": "46.0 + 30.0 host",
            "tokens read": "256",
            "cached tokens": "1,000",
            "sparse steps": "0",
            "status": "complete",
        }
    ]


def test_what_was_not_run_is_never_a_zero(demo: Path) -> None:
    make(demo, "fkv", None, PPL, status="failed")
    frame = table(find_runs(demo)).set_index(["task", "method"])
    running = frame.loc[("stdlib", "h2o")]
    assert running["perplexity"] == running["code_similarity"] == "not run"
    assert set(running[["decode ms/token", "prefill s", "cache MiB", "tokens read", "sparse steps"]]) == {"-"}
    assert running["status"] == "partial (1 done)"
    assert frame.loc[("ppl", "fkv"), "code_similarity"] == "-"  # that task has no such score
    assert frame.loc[("ppl", "fkv"), "status"] == "failed (2 done)"
    assert frame.loc[("stdlib", "fkv"), "cache MiB"] == "46.0"


def test_full_kv_comes_first_and_budgets_in_order(tmp_path: Path) -> None:
    for budget in (1024, 128, 0.5, 256):
        make(tmp_path, "a", budget, PPL)
    make(tmp_path, "fkv", None, PPL)
    make(tmp_path, "b", 64, PPL, model="earlier")
    frame = table(find_runs(tmp_path))
    assert list(frame["budget"]) == ["64", "full", "128", "256", "1024", "0.5"]


def test_a_simulated_method_shows_no_speed(demo: Path) -> None:
    frame = table(find_runs(demo)).set_index("method")
    assert frame.loc["oracle", "decode ms/token"] == frame.loc["oracle", "prefill s"] == "simulated"
    assert frame.loc["fasa_c", "decode ms/token"] == "41.2"


def test_runs_that_differ_in_a_setting_say_so(tmp_path: Path) -> None:
    make(tmp_path, "fasa_c", 64, PPL, pairing="rope", n_tip=8)
    make(tmp_path, "fasa_c", 64, PPL, pairing="adjacent", n_tip=8)
    make(tmp_path, "fasa_c", 128, PPL, pairing="rope", n_tip=8)
    make(tmp_path, "snapkv", 64, PPL, window=32)
    make(tmp_path, "snapkv", 128, PPL, window=64)  # goes with the budget: still one method
    assert list(table(find_runs(tmp_path))["method"]) == [
        "fasa_c (pairing=adjacent)",
        "fasa_c (pairing=rope)",
        "fasa_c (pairing=rope)",
        "snapkv",
        "snapkv",
    ]


def test_headline_metrics_leave_out_parts_and_counts(tmp_path: Path) -> None:
    names = ["qasper", "qasper/0-4k", "hotpotqa", "lcc", "trec", "avg", "n_empty"]
    runs = [make(tmp_path, "fkv", None, {name: score(50.0) for name in names}, task="longbench")]
    (group,) = grouped(runs)
    assert group.metrics == ["qasper", "hotpotqa", "lcc", "trec", "avg"]
    assert group.main_metrics(3) == ["qasper", "hotpotqa", "avg"]
    names += ["avg_table2", "avg_english", "avg_chinese"]
    runs = [make(tmp_path, "fkv", None, {name: score(50.0) for name in names}, task="all")]
    assert grouped(runs)[0].main_metrics(3) == ["avg", "avg_table2", "avg_english"]
    assert "n_empty" not in table(runs)


# --- output


def test_printed_table_fits_120_columns_and_cuts_nothing(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["a_long_data_set_name", "hotpotqa", "lcc", "trec", "avg"]
    for method, budget in [("fkv", None), ("streamingllm", 2048)]:
        metrics = {name: score(55.55) for name in names}
        make(demo, method, budget, metrics, model="llama31_8b", task="longbench", host=300, status="interrupted")
    print_table(find_runs(demo))
    output = capsys.readouterr()
    assert output.out == ""  # standard output names the run folders and nothing else
    lines = output.err.splitlines()
    assert max(map(len, lines)) <= 120
    assert "…" not in output.err
    assert any("a_long_data_set_name ↑" in line for line in lines)
    row = next(line for line in lines if line.strip().startswith("fasa_c"))
    assert " ".join(row.split()) == "fasa_c 64 12.10 [10.1, 14.1] 48.00 [46.0, 50.0] 41.2 46.0 64 complete"
    assert "2 more metrics" in output.err
    assert "1–2 examples, prompts of 700–1,000 tokens" in output.err


def test_tables_are_written_for_people_and_programs(demo: Path) -> None:
    paths = write_tables(demo)
    assert [path.relative_to(demo).as_posix() for path in paths[:4]] == [
        "tables/runs.md",
        "tables/runs.tex",
        "tables/runs.csv",
        "tables/table1.md",
    ]
    markdown, latex, csv = (path.read_text("utf-8") for path in paths[:3])
    assert "| fasa_c | 64 | 12.10 [10.1, 14.1] | 48.00 [46.0, 50.0] | 41.2 |" in markdown
    assert "| perplexity ↓ (n=5) | code_similarity ↑ (n=6) |" in markdown
    assert r"fasa\_c & 64 & 12.10 [10.1, 14.1] & 48.00 [46.0, 50.0] & 41.2 & 46.0 & 64 & complete \\" in latex
    assert r"perplexity $\downarrow$ (n=5)" in latex
    assert latex.count(r"\toprule") == latex.count(r"\bottomrule") == 1
    assert not [line for line in latex.splitlines()[1:] if "_" in line.replace(r"\_", "")]
    frame = pd.read_csv(io.StringIO(csv)).set_index("method")
    assert frame.loc["fasa_c", "perplexity.value"] == 12.1
    assert frame.loc["fasa_c", "latency.decode_ms_per_token.median"] == 41.25
    assert frame.loc["fasa_c", "memory.device_bytes"] == 46 * MIB
    assert pd.isna(frame.loc["fkv", "budget"])
    assert pd.isna(frame.loc["oracle", "latency.decode_ms_per_token.median"])  # simulated
    assert (
        frame.loc["h2o"]
        .drop(["run_id", "model", "task", "budget", "status", "examples", "failed_examples", "speed", "machine"])
        .isna()
        .all()
    )


def test_latex_signs_are_escaped(tmp_path: Path) -> None:
    runs = [make(tmp_path, "a&b%c#d$e{f}g~h^i\\j", 1, PPL)]
    latex = write_tables(tmp_path, runs)[1].read_text("utf-8")
    assert r"a\&b\%c\#d\$e\{f\}g\textasciitilde{}h\textasciicircum{}i\textbackslash{}j & 1 &" in latex


# --- difference to full KV


def passkeys(root: Path, method: str, budget: int | None, found: dict[str, int], **identity: Any) -> Run:
    """A run of the embedded task's pass keys; found: {number of the key: 0 or 1}."""
    rows = [
        {"id": f"passkey/{key}", "fields": {"group": "passkey"}, "scores": {"passkey": value}}
        for key, value in found.items()
    ]
    task = {"_target_": "fasa_bench.tasks.stdlib.Stdlib", "parts": ["passkey"]}
    same = {"model": 1, "task": 2, "protocol": 3, "seed": 0, "cache": None, "limit": len(rows)}
    config = {"task": task, "identity": {**same, **identity}}
    metrics = {"passkey": score(100 * sum(found.values()) / len(found), n=len(found))}
    return make(root, method, budget, metrics, rows=rows, examples=len(rows), task="stdlib", config=config)


def all_right(count: int) -> dict[str, int]:
    return {str(key): 1 for key in range(count)}


def test_differences_are_over_the_examples_that_both_have(tmp_path: Path) -> None:
    passkeys(tmp_path, "fkv", None, all_right(6))
    passkeys(tmp_path, "fasa_c", 64, {"0": 1, "1": 0, "2": 0, "3": 0, "4": 1, "99": 0})
    passkeys(tmp_path, "oracle", 64, all_right(6))
    markdown, latex, csv = (path.read_text("utf-8") for path in write_tables(tmp_path)[:3])
    # of 5 pairs three differ by 100: of their 8 signs two reach that; five pairs have 32 signs: p = 8/32
    assert "| method | budget | passkey ↑ (n=5–6) |" in markdown
    assert "| fasa_c | 64 | -60.0 [-100, -20.0] p=0.250 |" in markdown
    assert "| oracle | 64 | 0.00 [0.00, 0.00] p=1.000 |" in markdown
    assert r"fasa\_c & 64 & -60.0 [-100, -20.0] p=0.250 \\" in latex
    frame = pd.read_csv(io.StringIO(csv)).set_index("method")
    row = frame.loc["fasa_c"]
    assert row[["passkey.difference", "passkey.difference_low", "passkey.p_value", "passkey.pairs"]].tolist() == [
        -60,
        -100,
        0.25,
        5,
    ]
    assert pd.isna(frame.loc["fkv", "passkey.difference"])


def test_the_run_to_compare_with_has_the_same_settings(tmp_path: Path) -> None:
    """Another model, task, data, protocol or seed, or a quantised cache, is no full KV to compare with."""
    mine = passkeys(tmp_path, "fasa_c", 64, {"0": 0, "1": 0})
    for key in ("model", "task", "protocol", "seed"):
        passkeys(tmp_path, "fkv", None, all_right(2), **{key: "other"})
    passkeys(tmp_path, "fkv", None, all_right(2), cache={"bits": 4})
    assert differences(find_runs(tmp_path)) == {}
    assert "| fasa_c | 64 | no full-KV run |" in write_tables(tmp_path)[0].read_text("utf-8")
    assert "no full-KV run" not in str(print_to_text(find_runs(tmp_path)))
    few = passkeys(tmp_path, "fkv", None, all_right(1))
    assert differences([mine, few])[mine.folder]["passkey"] == {
        "difference": -100.0,
        "ci_low": None,
        "ci_high": None,
        "p_value": None,
        "n": 1,
    }
    passkeys(tmp_path, "fkv", None, all_right(3), limit=3)  # shares more with ours, and wins
    assert differences(find_runs(tmp_path))[mine.folder]["passkey"]["n"] == 2


def print_to_text(runs: list[Run]) -> str:
    file = io.StringIO()
    print_table(runs, file)
    return file.getvalue()


def test_the_overview_has_the_differences_too(tmp_path: Path) -> None:
    passkeys(tmp_path, "fkv", None, all_right(6))
    passkeys(tmp_path, "fasa_c", 64, {"0": 1, "1": 0, "2": 0, "3": 0, "4": 1})
    text = print_to_text(find_runs(tmp_path))
    assert max(map(len, text.splitlines())) <= 120
    assert "-60.0 [-100, -20.0]" in text
    assert "p=0.250" in text


def test_damaged_rows_and_strange_tasks_do_not_stop_a_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = passkeys(tmp_path, "fkv", None, all_right(6))
    mine = passkeys(tmp_path, "fasa_c", 64, all_right(6))
    for row in full.rows[:2]:
        row.pop("scores")
    assert differences([full, mine])[mine.folder]["passkey"]["n"] == 4
    assert "lacks parts of a row and is left out" in caplog.text
    mine.config["task"]["_target_"] = "gone.Task"
    assert differences([full, mine])[mine.folder] == {}
    assert "its task cannot be made" in caplog.text


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"difference": 3.14159, "ci_low": 1.0, "ci_high": 5.0, "p_value": 0.0004998}, "+3.14 [1.00, 5.00] p<0.001"),
        ({"difference": -0.05, "ci_low": None, "ci_high": None, "p_value": None}, "-0.05"),
        ({"difference": None, "ci_low": None, "ci_high": None, "p_value": None}, "-"),
        (None, "-"),
    ],
)
def test_text_of_a_difference(entry: Any, text: str) -> None:
    assert difference(entry) == text


# --- figure


def panels(root: Path) -> dict[str, Any]:
    return {ax.get_title(): ax for ax in figure(grouped(find_runs(root))).findobj(lambda a: hasattr(a, "get_title"))}


def test_one_budget_is_drawn_as_a_line_for_each_method(demo: Path) -> None:
    axes = panels(demo)
    assert list(axes) == ["perplexity ↓", "code_similarity ↑", "decode ms/token ↓"]
    ax = axes["perplexity ↓"]
    drawn = {(line.get_xdata()[0], line.get_ydata()[0]) for line in ax.lines if line.get_marker() not in ("None", "")}
    assert drawn == {(8.9, 0), (12.1, 1), (9.7, 3)}
    assert [label.get_text() for label in ax.get_yticklabels()] == ["fkv", "fasa_c", "h2o", "oracle"]
    time = axes["decode ms/token ↓"]
    assert {line.get_ydata()[0] for line in time.lines if line.get_marker() not in ("None", "")} == {0, 1}
    assert [text.get_text() for text in time.texts] == ["simulated"]
    assert time.get_xlim()[0] == 0


def test_several_budgets_are_drawn_as_curves_over_tokens_read(tmp_path: Path) -> None:
    make(tmp_path, "fkv", None, PPL)
    for budget, value in [(256, 18.0), (64, 20.0)]:
        make(tmp_path, "fasa_c", budget, {"perplexity": score(value)}, status="partial" if budget == 64 else "complete")
    ax = panels(tmp_path)["perplexity ↓"]
    assert ax.get_xscale() == "log"
    curve = next(line for line in ax.lines if len(line.get_xdata()) == 2 and line.get_color() != GREY)
    assert list(zip(curve.get_xdata(), curve.get_ydata(), strict=True)) == [(64, 20.0), (256, 18.0)]
    full = next(line for line in ax.lines if line.get_color() == GREY)
    assert list(full.get_ydata()) == [16.703, 16.703]
    (band,) = ax.patches
    assert (band.get_y(), band.get_y() + band.get_height()) == pytest.approx((15.94, 17.61))
    bars = sorted(tuple(collection.get_segments()[0][:, 1]) for collection in ax.collections)
    assert bars == [(16.0, 20.0), (18.0, 22.0)]
    hollow = {line.get_xdata()[0] for line in ax.lines if line.get_markerfacecolor() == "white"}
    assert hollow == {64}


def test_methods_of_a_figure_can_be_told_apart(tmp_path: Path) -> None:
    for index in range(10):
        make(tmp_path, f"method{index}", 64, PPL)
        make(tmp_path, f"method{index}", 128, PPL)
    (legend,) = [part for part in figure(grouped(find_runs(tmp_path))).findobj() if type(part).__name__ == "Legend"]
    looks = [(line.get_color(), line.get_marker(), line.get_linestyle()) for line in legend.legend_handles]
    assert len(set(looks)) == 10
    assert [text.get_text() for text in legend.get_texts()] == [f"method{index}" for index in range(10)]


def test_figures_are_the_same_bytes_each_time(demo: Path) -> None:
    paths = write_figures(demo, name="runs")
    assert [path.relative_to(demo).as_posix() for path in paths] == ["figures/runs.pdf", "figures/runs.png"]
    first = [path.read_bytes() for path in paths]
    assert first[0].startswith(b"%PDF")
    assert first[1].startswith(b"\x89PNG")
    assert b"CreationDate" not in first[0]
    command = [
        sys.executable,
        "-m",
        "fasa_bench.report",
        "figures",
        "--results-dir",
        str(demo),
        "--figure-name",
        "again",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.split() == [str(demo / "figures" / "again.pdf"), str(demo / "figures" / "again.png")]
    assert [Path(path).read_bytes() for path in result.stdout.split()] == first


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run has a score"):
        write_figures(tmp_path, [make(tmp_path, "fkv", None, None, status="failed")], "runs")


# --- command line


def test_show_prints_the_runs_that_were_named(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = {run.name("method"): str(run.folder) for run in find_runs(demo)}
    assert main(["show", "--results-dir", str(demo)]) == 0
    assert "oracle" in capsys.readouterr().out
    assert main(["show", folders["fkv"], folders["fasa_c"]]) == 0
    output = capsys.readouterr().out
    assert "fasa_c" in output
    assert "oracle" not in output
    assert main(["tables", folders["fkv"], "--results-dir", str(demo)]) == 0
    assert "oracle" not in (demo / "tables" / "runs.md").read_text("utf-8")


def test_errors_are_one_line_and_a_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for what in ("show", "tables", "figures"):
        assert main([what, "--results-dir", str(tmp_path / "none")]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"error: there are no runs under {tmp_path / 'none' / 'runs'}: start one with")
    assert main(["show", str(tmp_path)]) == 1
    assert "RUN_FOLDER=" in capsys.readouterr().err
    run = make(tmp_path, "fkv", None, PPL)
    (tmp_path / "tables").write_text("in the way")
    assert main(["tables", str(run.folder), "--results-dir", str(tmp_path)]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_reading_results_loads_no_model() -> None:
    script = "import sys, fasa_bench.report, fasa_bench.figures; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
    assert report.table is table


def test_the_document_shows_what_the_committed_runs_give(tmp_path: Path) -> None:
    """docs/reproduction.md has the paper's claims beside the runs that are in the repository, and no others."""
    root = Path(__file__).resolve().parents[1]
    for folder in ("mini", "measured"):
        (tmp_path / folder).symlink_to(root / "results" / folder)
    document = tmp_path / "reproduction.md"
    document.write_text((root / "docs" / "reproduction.md").read_text("utf-8"), "utf-8")
    before = document.read_text("utf-8")
    update_document(document, tmp_path)
    assert document.read_text("utf-8") == before, "run python -m fasa_bench.report tables --update docs/reproduction.md"
    assert "SmolLM2-135M: " in before


def test_a_document_without_the_block_is_one_clear_error(tmp_path: Path) -> None:
    document = tmp_path / "README.md"
    document.write_text("# Title\n", "utf-8")
    with pytest.raises(UserError, match=r"--update=.*README.md.* must have a block from <!-- runs: claims -->"):
        update_document(document, tmp_path)
    with pytest.raises(UserError, match=r"--update=.*cannot be read"):
        update_document(tmp_path, tmp_path)
    assert document.read_text("utf-8") == "# Title\n"
