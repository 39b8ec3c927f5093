"""Whatever happens to a run, nothing computed is lost, nothing counts twice, and no failure looks like a score."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from fasa_bench import cli, group, runner
from fasa_bench.errors import FailedExamplesError, UserError
from fasa_bench.interrupt import finishing
from fasa_bench.models import Model
from fasa_bench.runner import Job
from fasa_bench.session import Session
from fasa_bench.store import BusyError, RunStore, load_run
from fasa_bench.tables import numbers, table
from tests.conftest import ROOT
from tests.test_run import SMALL, SMALL_TASK, rows_of
from tests.test_sweep import run_all, without_times

STABLE = ("run_id", "status", "metrics", "realised", "examples", "failed_examples", "budget")
PROMISED = ["config.yaml", "env.json", "predictions.jsonl", "summary.json"]


@pytest.fixture(scope="module")
def template() -> Iterator[Callable[..., Job]]:
    """Jobs that share one model."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        models: dict[str, Model] = {}

        def make(*overrides: str) -> Job:
            job = Job.of(compose("config", [*SMALL, *SMALL_TASK, "limit=2", *overrides]), " ".join(overrides))
            return replace(job, model=models.setdefault("tiny", job.model))

        yield make


@pytest.fixture
def make(template: Callable[..., Job], tmp_path: Path) -> Callable[..., Job]:
    return lambda *overrides: replace(template(*overrides), results_dir=tmp_path)


def content(folder: Path) -> Any:
    """All of a run that does not depend on the clock."""
    summary = json.loads((folder / "summary.json").read_text())
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))  # those are the writer's
    return names, without_times(folder), {key: summary[key] for key in STABLE}


def folder_of(job: Job) -> Path:
    (folder,) = (job.results_dir / "runs").iterdir()
    return folder


def failing(on: str, error: Callable[[], Exception], times: int = 10**9) -> Callable[..., Any]:
    """`evaluate` that raises for the example `on`, so many times."""
    evaluate, raised = runner.evaluate, []

    def wrapped(session: Any, job: Job, example: Any, *more: Any) -> Any:
        if example.id == on and len(raised) < times:
            raised.append(1)
            raise error()
        return evaluate(session, job, example, *more)

    return wrapped


# --- killed, cut, busy, full

KILLER = """
import os, random, signal, sys, time
from pathlib import Path
from hydra import compose, initialize_config_dir
import torch
torch.set_num_threads(1)
from fasa_bench import environment, group
from fasa_bench.runner import Job

conf, results, kills, *overrides = sys.argv[1:]
with initialize_config_dir(conf, version_base="1.3"):
    template = [Job.of(compose("config", [*overrides, f"method={name}"])) for name in ("oracle", "streamingllm")]
jobs = group.grouped(template)[0]
jobs[0].model.network, list(jobs[0].task.examples(jobs[0].model, 1)), environment.environment()  # loaded once
[job.identity for job in jobs]

def start(folder):
    child = os.fork()
    if child == 0:
        for job in jobs:
            job.results_dir = Path(folder)
        ends = []
        group.run_group(jobs, lambda job, folder, error: ends.append(error))
        os._exit(int(ends != [None, None]))
    return child

before = time.monotonic()
assert os.waitpid(start(f"{results}/undisturbed"), 0)[1] == 0
whole = time.monotonic() - before
draw, done, run = random.Random(0), 0, 0
while done < int(kills):
    child = start(f"{results}/{run}")
    time.sleep(draw.uniform(0, whole))
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended == 0:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        done += os.WIFSIGNALED(status)
    if os.WIFEXITED(status):
        assert status == 0
        run += 1
assert os.waitpid(start(f"{results}/{run}"), 0)[1] == 0
print(done, run + 1)
"""


def test_killed_at_50_random_moments(tmp_path: Path) -> None:
    """Two runs that share prompts; after each kill they start again. All that is left equals an undisturbed run."""
    lines = [*SMALL, *SMALL_TASK, "task.windows=4", "task.decode=8", "task.parts=[perplexity]"]
    line = [sys.executable, "-c", KILLER, str(ROOT / "conf"), str(tmp_path), "50", *lines]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(line, capture_output=True, text=True, timeout=500, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    kills, runs = map(int, done.stdout.split())
    assert kills == 50
    expected = {folder.name: content(folder) for folder in (tmp_path / "undisturbed" / "runs").iterdir()}
    assert [names for names, *_ in expected.values()] == [PROMISED] * 2
    for number in range(runs):
        found = {folder.name: content(folder) for folder in (tmp_path / str(number) / "runs").iterdir()}
        assert found == expected, number


def test_every_file_cut_anywhere(make: Any, tmp_path: Path) -> None:
    """As a power cut may leave them; the next start mends it."""
    job = make("method=oracle")
    folder = runner.run(job)
    expected = content(folder)
    shutil.copytree(folder, tmp_path / "kept")
    for name in [*PROMISED, ".lock"]:
        size = (tmp_path / "kept" / name).stat().st_size
        for cut in sorted({0, size // 3, max(size - 1, 0)}):
            (folder / name).write_bytes((tmp_path / "kept" / name).read_bytes()[:cut])
            assert runner.run(job) == folder
            assert content(folder) == expected, (name, cut)
            run = load_run(folder)
            assert run.config["method"]["name"] == "oracle"
            assert run.env["packages"]["torch"] == torch.__version__


def test_two_starts_at_once(tmp_path: Path) -> None:
    """One works, the other says so; or it comes when all is done. No row twice."""
    lines = [*SMALL, *SMALL_TASK, "method=oracle", "task.windows=60", "task.parts=[perplexity]"]
    line = [sys.executable, str(ROOT / "run.py"), *lines, f"results_dir={tmp_path}"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    both = [subprocess.Popen(line, **pipes) for _ in range(2)]
    outputs = [process.communicate(timeout=200) for process in both]
    assert 0 in [process.returncode for process in both]
    for process, (output, errors) in zip(both, outputs, strict=True):
        if process.returncode:
            assert output == ""
            assert "is being written by process" in errors.splitlines()[-1]
        else:
            assert output.startswith("run: ")
    (folder,) = (tmp_path / "runs").iterdir()
    assert len({row["id"] for row in rows_of(folder)}) == len(rows_of(folder)) == 60
    assert load_run(folder).status == "complete"


def test_a_busy_run_leaves_the_others_of_its_group_alone(make: Any) -> None:
    jobs = [make("method=oracle"), make("method=fkv")]
    with RunStore(jobs[0].results_dir, group.run_id(jobs[0].identity), {}):
        first, second = run_all(jobs)
    assert isinstance(first[2], BusyError)
    assert "is being written by process" in str(first[2])
    assert second[2] is None


@pytest.mark.parametrize("fault", ["write", "summary"])
def test_a_full_disk(make: Any, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """What is stored stays, the error names the file, and the same command goes on."""
    expected = content(runner.run(replace(make("method=oracle"), results_dir=make().results_dir / "other")))
    job, written = make("method=oracle"), []
    write, replace_file = os.write, Path.replace

    def full(file: int, data: Any) -> int:
        written.append(1)
        if len(written) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    def no_room(self: Path, target: Path) -> Path:
        if target.name == "summary.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        return replace_file(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full) if fault == "write" else patch.setattr(Path, "replace", no_room)
        with pytest.raises(UserError, match=r"No space left on device.*same command"):
            runner.run(job)
    folder = next(path for path in (job.results_dir / "runs").iterdir())
    assert len(rows_of(folder)) == (2 if fault == "write" else 6)
    assert load_run(folder).status == ("failed" if fault == "write" else "partial")
    assert content(runner.run(job)) == expected


def test_a_read_only_folder_is_named(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = runner.run(make("method=fkv"))
    mkdir = Path.mkdir

    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:  # for root, too
        if "runs" in self.parts and not self.exists():
            raise OSError(errno.EROFS, "Read-only file system", str(self))
        mkdir(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(runner, "evaluate", lambda *args: pytest.fail("nothing to compute"))
    ends = run_all([make("method=oracle"), make("method=fkv")])
    assert [folder for _, folder, _ in ends] == [None, finished]  # what is there can be read
    with pytest.raises(UserError, match=r"results_dir=.*Read-only file system"):
        raise ends[0][2]  # type: ignore[misc]


# --- failed examples


def cpu_allocator() -> Exception:
    with pytest.raises(RuntimeError) as found:
        torch.empty(1 << 55, dtype=torch.uint8)
    return found.value


SHORT = {
    "accelerator": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    "python": MemoryError,
    "torch on a CPU": cpu_allocator,
}


@pytest.mark.parametrize("kind", SHORT)
def test_out_of_memory_is_tried_again_alone(make: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    expected = content(runner.run(replace(make("method=oracle"), results_dir=make().results_dir / "other")))
    with monkeypatch.context() as patch:
        patch.setattr(runner, "evaluate", failing("code/0", SHORT[kind], times=1))
        names, rows, summary = content(runner.run(make("method=oracle")))
    assert (names, sorted(rows, key=str), summary) == (expected[0], sorted(expected[1], key=str), expected[2])


@pytest.mark.parametrize("kind", SHORT)
def test_out_of_memory_twice_is_a_failed_row(make: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """It is in no score, the summary counts it, the exit status tells, and the next start tries it again."""
    job = make("method=oracle")
    with monkeypatch.context() as patch:
        patch.setattr(runner, "evaluate", failing("code/0", SHORT[kind]))
        with pytest.raises(FailedExamplesError, match=r"1 of 6 examples failed.*tries them again"):
            runner.run(job)
    run = load_run(folder_of(job))
    assert (run.status, run.summary["examples"], run.summary["failed_examples"]) == ("partial", 5, 1)
    assert run.summary["metrics"]["code_similarity"]["n"] == 1
    assert [row["id"] for row in run.failed] == ["code/0"]
    assert "scores" not in run.failed[0]
    assert run.failed[0]["error"].startswith(type(SHORT[kind]()).__name__)
    assert "code/0" not in [row["id"] for row in run.rows]
    assert table([run])["status"].tolist() == ["partial (5 done, 1 failed)"]
    assert numbers([run])["failed_examples"].tolist() == [1]
    computed: list[str] = []
    evaluate = runner.evaluate
    monkeypatch.setattr(runner, "evaluate", lambda *args: computed.append(args[2].id) or evaluate(*args))
    whole = load_run(runner.run(job))
    assert computed == ["code/0"]
    assert (whole.status, whole.summary["failed_examples"], len(whole.rows), whole.failed) == ("complete", 0, 6, [])
    assert whole.summary["metrics"]["code_similarity"]["n"] == 2


def test_a_shared_pass_without_memory_is_made_for_each_job_alone(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together the methods want more recorded than each of them."""
    prefill, asked = Session.prefill, []

    def short(self: Session, ids: Any, padding: Any = None, observe: Any = None, reserve: int = 0) -> Any:
        asked.append((observe.window > 0, observe.mass))
        if observe.window and observe.mass:
            raise torch.OutOfMemoryError("too much is recorded")
        return prefill(self, ids, padding, observe, reserve)

    jobs = [make(f"method={name}", "budget=64", "limit=1", "task.parts=[code]") for name in ("snapkv", "h2o", "fkv")]
    monkeypatch.setattr(Session, "prefill", short)
    assert [error for *_, error in run_all(jobs)] == [None] * 3
    assert asked == [(True, True), (True, False), (False, True), (False, False)]


def test_logits_that_are_no_numbers(make: Any) -> None:
    """A NaN in the third step of the second example: a failed row; the others stand."""
    job = make("method=oracle", "task.parts=[perplexity]")
    seen = []

    def poison(module: Any, inputs: Any, output: Any) -> Any:
        seen.append(output.logits.shape)
        if len(seen) == 24 + 4:
            output.logits[0, 0, 0] = float("nan")
        return output

    hook = job.model.network.register_forward_hook(poison)
    try:
        with pytest.raises(FailedExamplesError, match=r"1 of 2 examples failed \(FloatingPointError: .*not finite"):
            runner.run(job)
    finally:
        hook.remove()
    run = load_run(folder_of(job))
    assert (run.status, run.summary["metrics"]["perplexity"]["n"], run.failed[0]["id"]) == (
        "partial",
        1,
        "perplexity/1",
    )


def test_a_run_without_any_row_has_failed(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the shared pass may give no numbers: it is made once, and each job's row has failed."""
    jobs = [make(f"method={name}", "limit=1", "task.parts=[code]") for name in ("oracle", "fkv")]
    asked = []

    def broken(self: Session, *args: Any, **kwargs: Any) -> Any:
        asked.append(1)
        raise FloatingPointError("the model's logits are not finite")

    monkeypatch.setattr(Session, "prefill", broken)
    assert [type(error) for *_, error in run_all(jobs)] == [FailedExamplesError] * 2
    assert len(asked) == 1
    runs = [load_run(folder) for folder in (jobs[0].results_dir / "runs").iterdir()]
    assert [(run.status, run.rows, len(run.failed), run.summary["metrics"]) for run in runs] == [
        ("failed", [], 1, {})
    ] * 2


def test_a_failed_row_has_no_text_either(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise FloatingPointError("the model's logits are not finite")

    monkeypatch.setattr(Session, "prefill", broken)
    found = []
    for text in ("true", "false"):
        job = make("method=fkv", "limit=1", "task.parts=[code]", f"store_text={text}")
        with pytest.raises(FailedExamplesError):
            runner.run(job)
        found.append(load_run(folder_of(job)).failed[0]["fields"])
    assert found[0].pop("answer")
    assert found[0] == found[1]


def test_failed_examples_on_the_command_line(
    make: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The run folder is named, and the error too."""
    monkeypatch.setattr(runner, "evaluate", failing("code/0", MemoryError))
    monkeypatch.setattr(cli, "_ends", [])
    config = make("method=oracle").config | {"results_dir": str(tmp_path)}
    (end,) = cli.run_jobs([("method=oracle", OmegaConf.create(config))])
    output = capsys.readouterr()
    assert output.out == f"run: {end.folder}\n"
    assert "error: 1 of 6 examples failed (MemoryError" in output.err
    assert end.error in output.err


# --- Ctrl-C


@pytest.fixture
def listening() -> Iterator[None]:
    """A program that a shell starts in the background ignores Ctrl-C, and so would these tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listening")
def test_the_row_in_hand_is_finished(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job, evaluate = make("method=oracle"), runner.evaluate

    def pressed(session: Any, job: Job, example: Any, *more: Any) -> Any:
        if example.id == "perplexity/1":
            signal.raise_signal(signal.SIGINT)
        return evaluate(session, job, example, *more)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "evaluate", pressed)
        with pytest.raises(KeyboardInterrupt):
            runner.run(job)
    run = load_run(folder_of(job))
    assert (run.status, [row["id"] for row in run.rows]) == ("interrupted", ["perplexity/0", "perplexity/1"])
    assert load_run(runner.run(job)).status == "complete"


@pytest.mark.usefixtures("listening")
def test_a_second_ctrl_c_stops_at_once() -> None:
    before, reached = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with finishing("this"):
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
                reached.append("after the first")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["after the first"]
    assert signal.getsignal(signal.SIGINT) is before


# --- memory


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


LONG = ("limit=200", "task.context=256", "task.decode=4")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_memory_stays_flat_over_200_examples(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs with 200 examples each; a prompt's cache is 128 KiB, so one that is kept an example would be 19 MiB."""
    jobs = [
        make(
            f"method={name}",
            "task.parts=[perplexity]",
            "task.windows=200",
            "limit=200",
            "task.context=256",
            "task.decode=4",
        )
        for name in ("h2o", "oracle")
    ]
    evaluate, sizes = runner.evaluate, []

    def measured(*args: Any) -> Any:
        sizes.append(resident())
        return evaluate(*args)

    monkeypatch.setattr(runner, "evaluate", measured)
    assert [error for *_, error in run_all(jobs)] == [None, None]
    assert len(sizes) == 400
    assert max(sizes[200:]) - max(sizes[60:120]) < 8 * 2**20
