"""Jobs that share prompts: the same rows as single runs, one pass an example, failures apart, shards that merge."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from fasa_bench import cli, group, runner
from fasa_bench.errors import UserError
from fasa_bench.method import Observation
from fasa_bench.models import Model
from fasa_bench.runner import Job
from fasa_bench.session import Session
from fasa_bench.store import find_runs, load_run
from fasa_bench.tables import table
from tests.conftest import ROOT
from tests.test_run import SMALL, SMALL_TASK, command, rows_of

MEASURED = {"prefill_s", "compress_s", "feed_s", "decode_s", "parallel_s", "step_ms", "stages_ms"}
METHODS = (
    "fkv",
    "oracle",
    "fasa",
    "fasa_m",
    "fasa_plus",
    "streamingllm",
    "snapkv",
    "quest",
    "h2o",
    "rkv",
    "sparq",
    "tova",
)


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    """Loaded once for all tests of a file."""
    return {}


@pytest.fixture
def make(tmp_path: Path, models: dict[str, Model]) -> Iterator[Any]:
    """Compose a job as the command line does; results go to a temporary folder, or to one of its folders."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):

        def job(*overrides: str, into: str = "a") -> Job:
            task = [] if any(item.startswith("task=") for item in overrides) else SMALL_TASK
            lines = [*SMALL, *task, "budget=48", f"results_dir={tmp_path / into}", *overrides]
            made = Job.of(compose("config", lines), " ".join(overrides))
            return replace(made, model=models.setdefault(repr(made.model.spec), made.model))

        yield job


Ends = list[tuple[str, Path | None, Exception | None]]


def run_all(jobs: list[Job]) -> Ends:
    ends: Ends = []
    for some in group.grouped(jobs):
        group.run_group(some, lambda job, folder, error: ends.append((job.label, folder, error)))
    return ends


def without_times(folder: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in MEASURED} for row in rows_of(folder)]


def test_a_group_gives_what_single_runs_give(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods of all kinds, some at two budgets, quantised, by layer budget: rows and metrics, bytes included."""
    lines = [[f"method={name}", "budget=64"] for name in METHODS]
    lines += [[f"method={name}", "budget=50"] for name in ("fkv", "fasa", "snapkv")]
    lines += [["method=fasa", "cache.bits=4", "cache.residual=32"], ["method=snapkv", "method.layer_budget=pyramid"]]
    passes: list[Observation | None] = []
    prefill = Session.prefill

    def counted(self: Session, *args: Any, **kwargs: Any) -> Any:
        passes.append(kwargs["observe"])
        return prefill(self, *args, **kwargs)

    make("method=fasa").prepare()  # calibrated, which is a pass of its own
    with monkeypatch.context() as patch:
        patch.setattr(Session, "prefill", counted)
        jobs = [make(*line, "limit=1") for line in lines]
        ends = run_all(jobs)
    assert len(passes) == 3  # not 3 * 17
    assert all(observe and observe.mass and observe.window >= 32 for observe in passes)
    assert [error for _, _, error in ends] == [None] * 17
    folders = {label: folder for label, folder, _ in ends}
    for job in jobs:
        folder = folders[job.label]
        single = runner.run(replace(job, results_dir=tmp_path / "b"))
        assert folder is not None
        assert folder.name == single.name
        assert without_times(folder) == without_times(single), job.label
        one, other = (json.loads((place / "summary.json").read_text()) for place in (folder, single))
        for key in ("status", "metrics", "realised", "examples", "failed_examples", "deviations"):
            assert one[key] == other[key]


def test_rows_of_a_group_share_the_time_of_the_pass_only(make: Any) -> None:
    ends = run_all([make("method=fkv", "limit=1"), make("method=h2o", "limit=1")])
    one, other = (rows_of(folder) for _, folder, _ in ends if folder)
    assert [row["prefill_s"] for row in one] == [row["prefill_s"] for row in other]
    assert all(len(row["step_ms"]) == row["layer_steps"] // 2 - 1 for row in [*one, *other])  # its own steps, 2 layers
    assert [row["compress_s"] for row in one] != [row["compress_s"] for row in other]


def test_groups_load_each_model_once(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [
        make("method=fkv", "limit=1", "task.parts=[passkey]"),
        make("method=fkv", "limit=1", "model.layers=1"),
        make("method=oracle", "limit=1"),
        make("method=oracle", "limit=1", "task.parts=[passkey]"),
        make("method=oracle", "limit=2"),
    ]
    groups = group.grouped(jobs)
    assert [[job.label for job in some] for some in groups] == [
        [jobs[0].label, jobs[3].label],
        [jobs[2].label],
        [jobs[4].label],
        [jobs[1].label],
    ]
    assert len({id(job.model) for some in groups for job in some}) == 2


def test_weights_are_free_before_the_next_are_loaded(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[Any] = []
    prepare = Job.prepare

    def watched(self: Job) -> None:
        assert [network() for network in alive if network() not in (None, self.model.network)] == []
        alive.append(weakref.ref(self.model.network))
        prepare(self)

    monkeypatch.setattr(Job, "prepare", watched)
    monkeypatch.setattr(cli, "_ends", [])
    configs = []
    for layers in (1, 3):
        for method in ("oracle", "fkv"):
            config = make(f"method={method}", "limit=1", "task.parts=[passkey]", f"model.layers={layers}").config
            configs.append((method, OmegaConf.create(config)))
    assert [end.error for end in cli.run_jobs(configs)] == [None] * 4
    assert len(alive) == 4


def test_stored_rows_and_finished_jobs_are_left_alone(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is passed only if some job needs its example, and a job computes only what it lacks."""
    names = ("fkv", "oracle", "h2o")
    done = {name: folder for name, folder, _ in run_all([make(f"method={name}", "limit=1") for name in names])}
    oracle = done["method=oracle limit=1"]
    assert oracle
    lines = (oracle / "predictions.jsonl").read_text().splitlines(keepends=True)
    (oracle / "predictions.jsonl").write_text("".join(lines[:1]) + lines[2][:-1])  # the last line is cut
    (oracle / "summary.json").unlink()
    whole = without_times(done["method=fkv limit=1"])  # type: ignore[arg-type]
    computed = []
    evaluate = runner.evaluate
    monkeypatch.setattr(
        runner, "evaluate", lambda *args: computed.append((args[1].label, args[2].id)) or evaluate(*args)
    )
    ends = run_all([make(f"method={name}", "limit=1") for name in names])
    assert computed == [("method=oracle limit=1", row["id"]) for row in whole[1:]]
    assert {(name, folder) for name, folder, _ in ends} == set(done.items())
    with monkeypatch.context() as patch:
        patch.setattr(Session, "__enter__", lambda self: pytest.fail("nothing to compute"))
        assert [error for *_, error in run_all([make(f"method={name}", "limit=1") for name in names])] == [None] * 3


def test_one_job_that_raises_stops_no_other(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 6 jobs one raises at its second example: five complete, one is failed in its folder and in W&B."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    names = ("fkv", "oracle", "fasa", "h2o", "quest", "streamingllm")
    jobs = [make(f"method={name}", "limit=1", "logger=wandb") for name in names]
    marked: dict[str, bool] = {}
    finish = group.Tracker.finish
    for tracker in {type(group.Tracker.of(job.config["logger"], "0" * 16, {}, job.results_dir)) for job in jobs}:

        def noted(self: Any, before: Any = tracker.finish) -> None:
            marked[self.run_id] = self.failed
            before(self)

        monkeypatch.setattr(tracker, "finish", noted)
    evaluate = runner.evaluate

    def raising(session: Any, job: Job, example: Any, *more: Any) -> Any:
        if "quest" in job.label and example.id.startswith("code"):
            raise RuntimeError("boom")
        return evaluate(session, job, example, *more)

    monkeypatch.setattr(runner, "evaluate", raising)
    order: list[str] = []
    ends: Ends = []

    def report(job: Job, folder: Path | None, error: Exception | None) -> None:
        order.append(job.method.name)
        ends.append((job.label, folder, error))

    group.run_group(group.grouped(jobs)[0], report)
    assert order == ["quest", "fkv", "oracle", "fasa_c", "h2o", "streamingllm"]  # told at once
    assert str(ends[0][2]) == "boom"
    summaries = {run.name("method"): run for run in map(load_run, (jobs[0].results_dir / "runs").iterdir())}
    assert {name: run.status for name, run in summaries.items()} == {
        name: "failed" if name == "quest" else "complete" for name in order
    }
    quest = summaries["quest"]
    assert quest.summary["error"] == "RuntimeError: boom"
    assert "in raising" in quest.summary["traceback"]
    assert [row["id"] for row in quest.rows] == ["perplexity/0"]
    assert marked == {run.folder.name: name == "quest" for name, run in summaries.items()}
    assert group.Tracker.finish is finish
    monkeypatch.setattr(runner, "evaluate", evaluate)
    assert load_run(runner.run(make("method=quest", "limit=1"))).status == "complete"


def test_what_all_need_fails_all(make: Any) -> None:
    ends = run_all([make(f"method={name}", "task.context=5000") for name in ("fkv", "oracle")])
    assert [folder for _, folder, _ in ends] == [None, None]
    assert all(isinstance(error, UserError) and "task.context=5000" in str(error) for *_, error in ends)


def test_shards_make_the_whole_run(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    single = runner.run(make("method=fasa", into="b"))
    ends = []
    for shard in ("3/4", "1/4", "4/4"):
        ends += run_all([make("method=fasa", f"shard={shard}")])
    assert len(ends) == 3
    evaluate = runner.evaluate
    (part, whole) = run_all([make("method=fasa", "shard=2/4")])
    assert len({folder for _, folder, _ in [*ends, part, whole]}) == 5
    assert whole[1] is not None
    assert whole[1].name == single.name
    assert sorted(without_times(whole[1]), key=lambda row: row["id"]) == sorted(
        without_times(single), key=lambda row: row["id"]
    )
    one, other = (json.loads((folder / "summary.json").read_text()) for folder in (whole[1], single))
    for key in ("run_id", "status", "metrics", "examples", "realised", "budget"):
        assert one[key] == other[key]
    assert one["config"]["shard"] is None
    assert part[1] is not None
    ids = [row["id"] for row in rows_of(single)]
    assert [row["id"] for row in rows_of(part[1])] == ids[1::4]
    monkeypatch.setattr(runner, "evaluate", lambda *args: pytest.fail("computed again"))
    assert runner.run(make("method=fasa")) == whole[1]
    assert [folder for _, folder, _ in run_all([make("method=fasa", "shard=2/4")])] == [part[1], whole[1]]
    monkeypatch.setattr(runner, "evaluate", evaluate)


@pytest.mark.parametrize("shard", ["0/2", "3/2", "2", "a/b", "1/0", "7"])
def test_a_wrong_shard_is_one_clear_error(make: Any, shard: str) -> None:
    with pytest.raises(UserError, match=r"shard=.* must be i/n"):
        make(f"shard={shard}")


def test_more_shards_than_examples(make: Any) -> None:
    ends = run_all([make("method=fkv", "limit=1", "task.parts=[passkey]", f"shard={i}/3") for i in (1, 2, 3)])
    assert [error for *_, error in ends] == [None] * 4
    assert len(rows_of(ends[-1][1])) == 1  # type: ignore[arg-type]


# --- launchers

REFUSING = """
from hydra.plugins.launcher import Launcher

class Refusing(Launcher):
    def setup(self, **kwargs): pass
    def launch(self, *args): raise RuntimeError("sbatch: error: no such partition")
"""
BASIC = "hydra.launcher.through={_target_:hydra._internal.core_plugins.basic_launcher.BasicLauncher}"
LAUNCHERS = {"another launcher": [BASIC], "processes": ["hydra/launcher=processes"]}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_another_launcher_gets_a_job_a_group(name: str, tmp_path: Path) -> None:
    """Two shards of three methods are two groups; one job is wrong. stdout names every run once, the whole ones too."""
    if name == "processes":
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="joblib's launcher is not installed")
    small = [line for line in SMALL if not line.startswith("budget")]
    arguments = ["method=fkv,oracle,snapkv", "shard=1/2,2/2", "budget=40,3", "limit=1", "task.parts=[code,passkey]"]
    done = command("-m", *LAUNCHERS[name], *small, *SMALL_TASK, *arguments, f"results_dir={tmp_path}")
    assert done.returncode == 1
    assert "2 of 16 jobs failed" in done.stderr  # 12, and 4 whole runs
    assert done.stderr.count("budget=3 is not allowed: snapkv needs at least 34 tokens") >= 2
    folders = [line.removeprefix("run: ") for line in done.stdout.splitlines()]
    assert len(folders) == 14
    runs = [load_run(folder) for folder in set(folders)]
    whole = sorted((run.name("method"), len(run.rows)) for run in runs if not run.is_part)
    assert whole == [("fkv", 2), ("oracle", 2), ("oracle", 2), ("snapkv", 2)]
    assert "tiny · stdlib: 2 examples" in done.stderr  # the table is of the whole runs


def test_a_refused_job_of_a_sweep_has_its_own_folder(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failed there and in W&B; among the tables' rows; a single run is only told."""
    monkeypatch.setattr(cli, "_ends", [])
    configs = {}
    for name, line in {"a": "budget=3", "b": "budget=40", "c": "budget=40"}.items():
        config = make("method=snapkv", "limit=1", "task.parts=[passkey]").config | {"budget": int(line.split("=")[1])}
        configs[name] = OmegaConf.create(config)
    configs["c"].budget = "many"
    told: dict[str, bool] = {}
    finish = group.Tracker.finish
    monkeypatch.setattr(group.Tracker, "finish", lambda self: told.setdefault(str(self.failed), True) and finish(self))
    ends = cli.run_jobs(list(configs.items()))
    assert [(end.job, end.folder is None) for end in ends] == [("a", True), ("c", True), ("b", False)]
    assert told == {"True": True, "False": True}
    runs = {str(run.summary["budget"]): run for run in find_runs(tmp_path / "a")}
    assert {budget: run.status for budget, run in runs.items()} == {"3": "failed", "40": "complete", "many": "failed"}
    assert runs["3"].summary["error"] == "UserError: budget=3 is not allowed: snapkv needs at least 34 tokens"
    assert runs["3"].config["method"]["name"] == runs["3"].name("method") == "snapkv"
    text = table(list(runs.values()))
    assert text["budget"].tolist() == ["3", "40", "many"]
    assert text["status"].tolist() == ["failed (0 done)", "complete", "failed (0 done)"]
    cli.run_jobs([("a", configs["a"])])
    configs["a"].results_dir = str(tmp_path / "single")
    cli.run_jobs([("a", configs["a"])])
    assert not (tmp_path / "single").exists()


def test_a_launcher_that_gives_no_results(make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A scheduler refuses, or a worker is killed: what the folders tell, and how to go on."""
    from fasa_bench.worker import ends_by_folders

    jobs = []
    for budget in (40, 48, 3):
        config = make("method=snapkv", "limit=1", "task.parts=[passkey]").config | {"budget": budget}
        jobs.append((str(budget), OmegaConf.create(config)))
    folder = runner.run(Job.of(jobs[0][1]))
    one, other, wrong = ends_by_folders(jobs, RuntimeError("sbatch: error: no such partition\nmore"))
    assert (one.folder, one.error) == (folder, None)
    assert other.folder is None
    assert other.error is not None
    assert "(RuntimeError: sbatch: error: no such partition). Jobs that it has started may still go on" in other.error
    assert wrong.error == "error: budget=3 is not allowed: snapkv needs at least 34 tokens"
    assert capsys.readouterr().err.endswith(f"\n{other.error}\n")
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "refusing.py").write_text(REFUSING)
    through = "hydra.launcher.through={_target_:hydra_plugins.refusing.Refusing}"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)])}
    done = command("-m", through, *SMALL, "method=fkv,oracle", f"results_dir={tmp_path}/none", env=environ)
    assert done.returncode == 1
    assert done.stderr.count("error: no results came from the launcher (RuntimeError") == 3  # at once, and at the end
    assert "2 of 2 jobs failed" in done.stderr


def test_workers_take_the_devices_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    from fasa_bench import worker

    process = multiprocessing.current_process()
    before = process.name
    try:
        for number, expected in ((1, "4"), (2, "6"), (3, "4")):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
            process.name = f"LokyProcess-{number}"
            worker.take_device()
            assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
            worker.take_device()  # the same worker, its next job
            assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
    finally:
        process.name = before


def test_hydra_can_load_the_launcher_as_it_loads_plugins() -> None:
    """Its search executes the module before it is in sys.modules."""
    path = ROOT / "src" / "hydra_plugins" / "fasa_bench_launcher.py"
    spec = importlib.util.spec_from_file_location("not_yet_known", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.Together(through=None).through is None
