"""Experiments as lists of runs: what is planned, which stored run is which, what they will cost, and running them."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from fasa_bench import cli, reproduce
from fasa_bench.calibration import Calibration
from fasa_bench.errors import UserError
from fasa_bench.estimate import cost, task_size, total
from fasa_bench.exhibits import Cell, Stored, build
from fasa_bench.experiments import Experiment, load_experiments
from fasa_bench.reproduce import Clock, configs, data_overrides, given, main, plan
from fasa_bench.store import Run, find_runs

SMALL: dict[str, Any] = {"task": "stdlib", "model": "tiny", "task.parts": [["perplexity"]], "task.windows": 1}
SMALL |= {"task.context": 64, "task.decode": 8}


def toy(**entry: Any) -> Experiment:
    layout = {"row": "method", "column": "budget", "metric": "perplexity"}
    return Experiment("toy", "A toy", layout, {"mini": [{**SMALL, **entry}], "paper": []})


def test_a_plan_is_the_product_of_what_is_listed() -> None:
    planned = toy(method=["fkv", "oracle"], budget=[8, 16]).plan("mini")
    assert [(one.get("method"), one.get("budget")) for one in planned] == [
        ("fkv", 8), ("fkv", 16), ("oracle", 8), ("oracle", 16),
    ]  # fmt: skip
    assert "task.parts=[perplexity]" in planned[0].overrides


def test_what_the_command_line_gives_replaces_what_is_listed() -> None:
    values, _ = given(["budget=32", "model=llama31_8b"])
    planned = toy(method=["oracle", "quest"], budget=[8, 16]).plan("mini", values)
    assert [(one.get("model"), one.get("budget")) for one in planned] == [("llama31_8b", 32)] * 2


def test_equal_runs_of_several_experiments_are_one_and_those_that_share_prompts_lie_together() -> None:
    other = Experiment("other", "", {}, {"mini": [{**SMALL, "limit": 1}], "paper": []})
    first, second = toy(method=["fkv", "oracle"]), toy(method=["oracle", "quest"])
    planned = plan([first, other, second], "mini")
    assert [(one.get("method"), one.get("limit")) for one in planned] == [
        ("fkv", None), ("oracle", None), ("quest", None), ("fasa_c", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["budget=1,2", "+x=1", "~limit", "method=fkv,fasa"])
def test_a_sweep_over_an_experiment_is_one_clear_error(text: str) -> None:
    with pytest.raises(UserError, match="must be key=value with one value"):
        given([text])


def test_every_experiment_composes_and_has_known_costs() -> None:
    for experiment in load_experiments().values():
        for profile in ("mini", "paper"):
            for planned in experiment.plan(profile):
                assert planned.config["task"]["_target_"].startswith("fasa_bench.tasks.")
                assert cost(planned).gib > 0


def test_the_cost_of_a_run_by_hand() -> None:
    wanted = load_experiments()["table2"].plan("paper", {"model": "llama31_8b", "method": "fkv"})
    assert len(wanted) == 1
    size = task_size(wanted[0])
    assert size.examples == 12 * 200 + 150 + 2 * 500
    assert cost(wanted[0]).decode_s == pytest.approx(size.examples * size.answer * 26.5 / 1000)
    assert cost(wanted[0]).prefill_s == pytest.approx(size.examples * size.prompt * 16e9 / 4e14)
    both = wanted + load_experiments()["table2"].plan("paper", {"model": "llama31_8b", "method": "oracle"})
    shared = cost(both[0]).prefill_s + cost(both[0]).decode_s + cost(both[1]).decode_s
    assert total(both) == pytest.approx(shared)  # prompts are shared: not twice the prompt pass


def test_a_calibration_text_is_told_by_its_name_wherever_it_lies(tmp_path: Path) -> None:
    """And what it holds is taken from the key that data sets have their text under."""
    path = tmp_path / "qasper.jsonl"
    path.write_text('{"context": "One.", "input": "?"}\n\n{"text": "Two."}\n', "utf-8")
    entry = {"task": "stdlib", "method": "fasa", "calibration.text": ["qasper", "lcc"]}
    mine, other = Experiment("x", "", {}, {"mini": [entry]}).plan("mini")
    stored = deepcopy(mine.config)
    stored["calibration"]["text"] = str(path)
    summary = {"model": "smollm2_135m", "method": "fasa_c", "task": "stdlib", "budget": 256}
    run = Run(tmp_path, stored, summary, [], {})
    assert mine.matches(run)
    assert not other.matches(run)
    assert Calibration(text=str(path)).sample == "One.\n\nTwo."
    path.write_text('{"words": "One."}\n', "utf-8")
    with pytest.raises(
        UserError, match=r"calibration.text=.*qasper.jsonl.* must be a text file, or a .jsonl whose rows"
    ):
        _ = Calibration(text=str(path)).sample


def test_data_below_one_folder(tmp_path: Path) -> None:
    (tmp_path / "ppl" / "c4").mkdir(parents=True)
    [planned] = Experiment("x", "", {}, {"mini": [{"task": "ppl", "task.corpus": "c4_en"}]}).plan("mini")
    assert data_overrides(planned, tmp_path) == [f'task.path="{tmp_path / "ppl" / "c4"}"']
    assert data_overrides(planned, None) == []
    [planned] = Experiment("x", "", {}, {"mini": [{"task": "math500"}]}).plan("mini")
    assert data_overrides(planned, tmp_path) == []  # not there: the hub has it
    (tmp_path / "math500.jsonl").touch()
    [planned] = Experiment("x", "", {}, {"mini": [{"task": "ppl", "calibration.text": "math500"}]}).plan("mini")
    assert data_overrides(planned, tmp_path) == [f'calibration.text="{tmp_path / "math500.jsonl"}"']


def test_runs_are_found_again_and_only_by_their_own_settings(tmp_path: Path) -> None:
    experiment = toy(method=["fkv", "fasa"], budget=[16, 24], **{"calibration.k": 16, "calibration.prefill": 64})
    planned = experiment.plan("mini")
    ends = cli.run_jobs(
        configs(planned, [f'results_dir="{tmp_path}"', "logger=none", "calibration.decode=8"]), quiet=True
    )
    assert [end.error for end in ends] == [None] * 4
    runs = find_runs(tmp_path)
    assert len(runs) == 3  # full KV is one run for all budgets
    found = [one.find(runs) for one in planned]
    assert found[0] is found[1]
    assert found[0].name("method") == "fkv"  # type: ignore[union-attr]
    # calibration.decode differs from what the experiment says: another calibration, so not its run
    assert found[2:] == [None, None]
    same = toy(
        method="fasa", budget=16, **{"calibration.k": 16, "calibration.prefill": 64, "calibration.decode": 8}
    ).plan("mini")
    assert same[0].find(runs) is not None
    assert not any(same[0].matches(run) for run in runs if run.summary["budget"] != 16)
    [other] = toy(method="fasa", budget=16, **{"method.n_tip": 2, "calibration.k": 16, "calibration.decode": 8}).plan(
        "mini"
    )
    assert other.find(runs) is None

    exhibit = build(experiment, None, Stored(runs))
    [grid] = exhibit.grids
    assert (grid.rows, grid.columns) == (("fkv", "fasa_c"), (16, 24))
    assert (
        grid.cell("fkv", 16).value == grid.cell("fkv", 24).value == found[0].summary["metrics"]["perplexity"]["value"]
    )
    assert grid.cell("fasa_c", 16) == Cell()
    assert grid.better == "low"


def test_reproduce_runs_what_is_missing_and_says_how_much_is_left(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(reproduce, "load_experiments", lambda: {"toy": toy(method=["fkv", "oracle"], budget=16)})
    command = ["--results-dir", str(tmp_path), "toy", "logger=none"]
    with caplog.at_level("INFO", "fasa_bench"):
        assert main([*command, "--dry-run"]) == 0
        assert not (tmp_path / "runs").exists()
        assert main(command) == 0
        assert "[1 of 1] stdlib, 2 runs for toy; about 0 min left in all" in caplog.text
        assert main(command) == 0
        assert caplog.text.count("is complete") == 2
        assert main(["toy", "logger=none", f"results_dir={tmp_path}"]) == 0  # as run.py has it
        assert caplog.text.count("is complete") == 4
    assert "2 of 2 runs are complete" in capsys.readouterr().err


def test_unknown_names_are_one_clear_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--dry-run", "table99"]) == 1
    assert "EXPERIMENT='table99' is not allowed: must be one of table" in capsys.readouterr().err
    assert main(["--dry-run", "model=foo", "table2"]) == 1
    assert "model='foo' is not allowed" in capsys.readouterr().err
    assert main(["--data", str(tmp_path / "no"), "--dry-run"]) == 1
    assert "must be a folder" in capsys.readouterr().err


def test_the_clock_corrects_its_estimate(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    entries = [{"task": "stdlib", "limit": 1}, {"task": "stdlib", "limit": 2}]
    planned = Experiment("x", "", {}, {"mini": entries}).plan("mini")
    now = [0.0]
    monkeypatch.setattr("fasa_bench.reproduce.time.monotonic", lambda: now[0])
    clock = Clock(planned)
    with caplog.at_level("INFO", "fasa_bench"):
        clock.tell(planned[:1])
        now[0] += 3 * total(planned[:1])  # three times as long as estimated
        clock.done(planned[:1])
        clock.tell(planned[1:])
    minutes = [total(planned) / 60, 3 * total(planned[1:]) / 60]
    for text, expected in zip(caplog.messages, minutes, strict=True):
        assert f"about {expected:.0f} min left" in text
