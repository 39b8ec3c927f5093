"""From the command line to the run folder: identity, resume, errors, methods from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException, MissingConfigException

from fasa_bench import runner
from fasa_bench.cli import explain
from fasa_bench.errors import UserError
from fasa_bench.models import Model
from fasa_bench.store import run_id

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["model=tiny", "logger=none", "budget=16"]
SMALL += ["calibration.prefill=128", "calibration.decode=8", "calibration.k=32"]
SMALL_TASK = ["task.context=96", "task.decode=24", "task.code_tokens=8"]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    """Compose a job as the command line does; results go to a temporary folder."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):

        def job(*overrides: str) -> runner.Job:
            task = [] if any(item.startswith("task=") for item in overrides) else SMALL_TASK
            return runner.Job.of(compose("config", [*SMALL, *task, f"results_dir={tmp_path}", *overrides]))

        yield job


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


def command(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(ROOT / "run.py"), *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, cwd=ROOT, **settings)


def test_a_run_leaves_everything_its_folder_promises(make: Any) -> None:
    job = make("method=fasa", "limit=2", "method.backend=torch")  # compiled kernels have other stages
    folder = runner.run(job)
    assert sorted(path.name for path in folder.iterdir() if path.name != ".lock") == [
        "config.yaml",
        "env.json",
        "predictions.jsonl",
        "summary.json",
    ]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["run_id"], summary["status"]) == (folder.name, "complete")
    assert (summary["model"], summary["method"], summary["task"], summary["budget"]) == ("tiny", "fasa_c", "stdlib", 16)
    assert set(summary["metrics"]) == {"perplexity", "code_similarity", "passkey"}
    assert summary["metrics"]["perplexity"]["n"] == 2
    assert summary["realised"]["attended_tokens"] == 16
    assert summary["realised"]["sparse_steps"] > 0
    assert min(summary["realised"]["sparse_steps_by_layer"]) > 0
    rows = rows_of(folder)
    assert len({row["id"] for row in rows}) == len(rows) == 6
    timed = sum(len(row["step_ms"]) for row in rows)
    assert summary["latency"]["decode_ms_per_token"]["n"] == timed
    assert set(summary["latency"]["stages"]) == {"select", "tip", "top_k", "gather", "attend", "update"}
    assert summary["memory"]["device_bytes"] == max(row["device_bytes"] for row in rows) > 0
    assert summary["deviations"]["method.pairing"]["value"] == "rope"
    assert summary["deviations"]["calibration.k"]["value"] == 32
    assert summary["config"]["method"]["name"] == "fasa_c"
    assert summary["env"]["packages"]["torch"].startswith("2.")


def test_a_finished_run_is_not_computed_again(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = runner.run(make("method=oracle", "limit=1"))
    before = (folder / "summary.json").read_bytes()

    def fail(*args: Any) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(runner, "evaluate", fail)
    monkeypatch.setattr(Model, "network", property(fail))
    assert runner.run(make("method=oracle", "limit=1")) == folder
    assert (folder / "summary.json").read_bytes() == before
    (folder / "predictions.jsonl").write_text("")  # the rows are gone: then it is not complete
    with pytest.raises(AssertionError, match="computed again"):
        runner.run(make("method=oracle", "limit=1"))


def test_an_interrupted_run_goes_on_where_it_stopped(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rows_of(runner.run(make("method=oracle", "limit=2")))
    folder = Path(str(runner.run(make("method=oracle", "limit=2"))))
    lines = (folder / "predictions.jsonl").read_text().splitlines(keepends=True)
    (folder / "predictions.jsonl").write_text("".join(lines[:3]) + lines[3][:50])  # half a line, as a crash leaves it
    (folder / "summary.json").unlink()
    computed = []
    evaluate = runner.evaluate
    monkeypatch.setattr(runner, "evaluate", lambda *args: computed.append(args[2].id) or evaluate(*args))
    resumed = rows_of(runner.run(make("method=oracle", "limit=2")))
    assert computed == [row["id"] for row in whole[3:]]
    assert [(row["id"], row["scores"]) for row in resumed] == [(row["id"], row["scores"]) for row in whole]


def test_an_error_in_the_middle_keeps_what_is_done(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate, calls = runner.evaluate, []

    def third_fails(*args: Any) -> Any:
        calls.append(args[2].id)
        if len(calls) == 3:
            raise RuntimeError("boom")
        return evaluate(*args)

    monkeypatch.setattr(runner, "evaluate", third_fails)
    job = make("method=oracle", "limit=2")
    with pytest.raises(RuntimeError, match="boom"):
        runner.run(job)
    (folder,) = (job.results_dir / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["examples"]) == ("failed", 2)
    assert "boom" in summary["error"]
    monkeypatch.setattr(runner, "evaluate", evaluate)
    assert len(rows_of(runner.run(make("method=oracle", "limit=2")))) == 6


def test_examples_do_not_influence_each_other(make: Any) -> None:
    """The same second example after another one, and alone."""
    for method in ("fasa", "streamingllm", "oracle"):
        job = make(f"method={method}", "task.parts=[perplexity]", "limit=2")
        job.method.prepare(job.model, job.calibration)
        first, second = job.task.examples(job.model, 2)
        with runner.Session(job.model.network) as session:
            runner.evaluate(session, job, first)
            after = runner.evaluate(session, job, second)
        with runner.Session(job.model.network) as session:
            alone = runner.evaluate(session, job, second)
        assert after["scores"] == alone["scores"]


def test_what_can_change_an_output_changes_the_id(make: Any, tmp_path: Path) -> None:
    def name(*overrides: str) -> str:
        return run_id(make("method=fasa", *overrides).identity)

    base = name()
    changed = ["budget=17", "budget=0.5", "seed=1", "limit=1", "method.recent=3", "method.pairing=adjacent"]
    changed += ["task.decode=25", "calibration.k=33", "model.layers=1", "model.dtype=bfloat16", "method=fasa_plus"]
    changed += ["cache.bits=4", "method.layer_budget=pyramid"]
    names = [name(override) for override in changed]
    assert len({base, *names}) == len(changed) + 1
    assert name("method=fasa_c") == base  # an alias
    assert name(f"results_dir={tmp_path}/elsewhere", "logger=none") == base  # places do not count


def test_full_kv_takes_no_budget_and_is_run_once(make: Any) -> None:
    folders = {runner.run(make("method=fkv", "limit=1", f"budget={budget}")) for budget in (16, 64)}
    assert len(folders) == 1
    assert json.loads((folders.pop() / "summary.json").read_text())["budget"] is None


WRONG = {
    "model.attention=eager": "model.attention='eager'.*'auto', 'sdpa' or 'flash_attention_2'",
    "+nokey=3": "nokey=3 is not allowed: unknown key",
    "results_dir=null": "results_dir=None .* path of a folder",
    "results_dir=1e5": "results_dir=100000.0",
    "cache.bits=3": "cache.bits=3 .* 16",
    "budget=0": "budget=0 is not allowed",
    "budget=abc": "budget='abc'",
    "method=streamingllm budget=8": "budget=8 is not allowed: streamingllm needs at least 9",
    "+method.bogus=1": "method.bogus=1 is not allowed: unknown key",
    "method.n_tip=x": "method.n_tip='x'",
    "method.pairing=wrong": "method.pairing='wrong'.*'rope', 'adjacent' or 'single'",
    "method.recent=-1": "method.recent=-1",
    "limit=0": "limit=0",
    "limit=2.5": "limit=2.5",
    "seed=x": "seed='x'",
    "model.kv_heads=3": "model.kv_heads=3",
    "calibration.k=500": r"calibration.k=500 .* less than calibration.prefill \(128\)",
    "task=longbench task.datasets=[nope]": "task.datasets='nope'.*qasper",
    "task.parts=[x]": "task.parts.*'perplexity', 'code' or 'passkey'",
    "method._target_=no.such.Class": "method._target_='no.such.Class'",
    "method._target_=builtins.dict": "must be a dataclass derived from Method",
}


@pytest.mark.parametrize("line", WRONG)
def test_bad_input_is_one_clear_error(make: Any, line: str) -> None:
    with pytest.raises(UserError, match=WRONG[line]):
        make(*line.split())


def test_bad_input_that_shows_later(make: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"method.n_tip=9 .* from 1 to 8"):
        runner.run(make("method=fasa", "method.n_tip=9"))
    with pytest.raises(UserError, match=r"method.dense_layers=2 .* 0 to 1"):
        runner.run(make("method=oracle", "method.dense_layers=[0,2]"))
    with pytest.raises(UserError, match=r"task.context=5000 .* at most 2048"):
        runner.run(make("method=fkv", "task.context=5000"))
    with pytest.raises(UserError, match=r"calibration\.file"):
        runner.run(make("method=fasa", "calibration.file=nowhere.safetensors"))


REFUSED_BY_HYDRA = {
    "method=nope": "method='nope' is not allowed: must be one of .*fasa_c.*streamingllm",
    "model=nope": "model='nope' is not allowed: must be one of baichuan_13b, .*tiny",  # and not _base
    "nokey=3": "nokey is not allowed: unknown key; known keys are budget, seed, .*logger",
    "method.nokey=3": "method.nokey is not allowed: unknown key; known keys are .*n_tip",
    "results_dir=a=b": "results_dir=a=b cannot be read .* needs quotes",
    "results_dir=Übung": "results_dir=Übung cannot be read .* needs quotes",
    "results_dir=a,b": "Ambiguous value for argument 'results_dir=a,b'",
}


@pytest.mark.parametrize("override", REFUSED_BY_HYDRA)
def test_what_hydra_refuses_is_one_clear_line(make: Any, override: str) -> None:
    with pytest.raises(HydraException) as found:
        make(override)
    assert re.fullmatch(f"{REFUSED_BY_HYDRA[override]}.*", explain(found.value))


def test_a_launcher_that_is_not_installed_names_its_extra() -> None:
    error = MissingConfigException("Could not load 'hydra/launcher/ray'.", "hydra/launcher/ray")
    assert explain(error).startswith("hydra/launcher/ray is not installed: pip install 'fasa-bench[ray]' && ")


def test_several_processes_of_torchrun_are_refused() -> None:
    done = command("limit=1", env={**os.environ, "TORCHELASTIC_RUN_ID": "none"})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: run.py is one process")


def test_quotes_let_every_path_through(make: Any, tmp_path: Path) -> None:
    folder = tmp_path / "a=b, Übung (1)"
    assert make(f'results_dir="{folder}"').results_dir == folder


@pytest.mark.parametrize(
    "line", ["method=nope", "-m method=fkv,nope", "budget=0 model=tiny", "-m results_dir=/dev/null"]
)
def test_the_last_line_on_stderr_is_the_error(line: str) -> None:
    done = command(*line.split(), "logger=none")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.stderr


def test_interrupted_by_the_keyboard(tmp_path: Path) -> None:
    """Ctrl-C: one line, the status that a shell expects, and what is finished stays."""
    arguments = ["model=tiny", "logger=none", "method=oracle", "budget=16", "task.context=96", "task.decode=24"]
    arguments += ["task.windows=200", "task.parts=[perplexity]", f"results_dir={tmp_path}"]
    line = [sys.executable, str(ROOT / "run.py"), *arguments]

    def listen() -> None:  # a job in a shell's background ignores the signal, and its children inherit that
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    victim = subprocess.Popen(line, cwd=ROOT, text=True, preexec_fn=listen, **pipes)
    deadline = time.monotonic() + 120
    stored = 0
    while stored < 2 and time.monotonic() < deadline:  # the newest may be dropped, if the signal comes before its sync
        time.sleep(0.01)
        stored = sum(len(file.read_bytes().splitlines()) for file in tmp_path.glob("runs/*/predictions.jsonl"))
    victim.send_signal(signal.SIGINT)
    output, errors = victim.communicate(timeout=60)
    assert (victim.returncode, output) == (130, "")
    assert errors.splitlines()[-1].startswith("interrupted; finished examples are stored")
    assert "Traceback" not in errors
    (folder,) = (tmp_path / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["examples"] == len(rows_of(folder)) > 0


def test_the_command_line(tmp_path: Path) -> None:
    """A toy method from a temporary folder, a multirun with one bad job, and a second start, as a user sees them."""
    (tmp_path / "toys.py").write_text(
        "from dataclasses import dataclass\n"
        "import torch\n"
        "from fasa_bench.method import Method\n"
        "@dataclass\n"
        "class EveryOther(Method):\n"
        "    stride: int = 2\n"
        "    def select(self, layer, query):\n"
        "        slots = torch.arange(layer.length - 1, -1, -self.stride).flip(0)[-layer.budget:]\n"
        "        return slots.expand(len(query), layer.keys.shape[1], 1, -1)\n"
    )
    (tmp_path / "conf" / "method").mkdir(parents=True)
    (tmp_path / "conf" / "method" / "every_other.yaml").write_text(
        "_target_: toys.EveryOther\nname: every_other\nstride: 3\n"
    )
    arguments = ["--config-dir", f"{tmp_path}/conf", "-m", "method=every_other,oracle,fkv", "budget=16,0"]
    arguments += ["model=tiny", "logger=none", f"results_dir={tmp_path}/results", "limit=1", "task.parts=[perplexity]"]
    arguments += ["task.context=96", "task.decode=24"]
    python_path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": python_path}
    done = command(*arguments, env=environment)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["run"] * 4
    assert lines[2] == lines[3]  # full KV takes no budget: one run, and one line of the table
    assert sum(line.startswith(" fkv ") for line in done.stderr.splitlines()) == 1
    assert "2 of 6 jobs failed" in done.stderr
    assert "error: budget=0 is not allowed" in done.stderr
    assert "every_other" in done.stderr  # the table of the runs that worked
    summary = json.loads((Path(lines[0].removeprefix("run: ")) / "summary.json").read_text())
    assert summary["method"] == "every_other"
    assert summary["realised"]["attended_tokens"] == 16
    start = time.monotonic()
    again = command(*arguments, env=environment)
    assert again.stdout == done.stdout
    assert time.monotonic() - start < 120


def test_killed_and_started_again(tmp_path: Path) -> None:
    """kill -9 after some rows; the restart gives each row once, with the scores of an undisturbed run."""
    arguments = ["model=tiny", "logger=none", "method=oracle", "budget=16", "task.context=96", "task.decode=24"]
    arguments += ["task.windows=40", "task.parts=[perplexity]"]
    line = [sys.executable, str(ROOT / "run.py"), *arguments, f"results_dir={tmp_path}/a"]
    victim = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    stored = 0
    while stored < 3 and time.monotonic() < deadline and victim.poll() is None:
        found = list((tmp_path / "a").glob("runs/*/predictions.jsonl"))
        stored = len(found[0].read_bytes().splitlines()) if found else 0
        time.sleep(0.005)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert 3 <= stored < 40
    restarted = command(*arguments, f"results_dir={tmp_path}/a")
    undisturbed = command(*arguments, f"results_dir={tmp_path}/b")
    found, expected = (
        {row["id"]: row["scores"] for row in rows_of(Path(done.stdout.strip().removeprefix("run: ")))}
        for done in (restarted, undisturbed)
    )
    assert len(found) == 40
    assert found == expected
    folder = Path(restarted.stdout.strip().removeprefix("run: "))
    assert len(rows_of(folder)) == 40
    mtime = (folder / "predictions.jsonl").stat().st_mtime_ns
    third = command(*arguments, f"results_dir={tmp_path}/a")
    assert third.stdout == restarted.stdout
    assert (folder / "predictions.jsonl").stat().st_mtime_ns == mtime


def test_hugging_face_s_kernels_package_is_not_shadowed() -> None:
    """`python run.py` puts the repository first on sys.path: a package named kernels there would hide the real one."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import importlib.util as u; print(u.find_spec('kernels').origin)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(ROOT)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"  # a namespace only: any regular package of that name wins
