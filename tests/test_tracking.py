"""W&B in offline mode, read back from the files it writes; and what happens when it fails."""

from __future__ import annotations

import json
import logging
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import wandb
import yaml
from wandb.proto import wandb_internal_pb2

from fasa_bench import tracking
from fasa_bench.errors import UserError
from fasa_bench.tracking import Logger, Tracker, WandbTracker

ROOT = Path(__file__).resolve().parents[1]
KEY = "0123456789" * 4


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever runs the tests may have an account; nothing may be sent there."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")  # its telemetry waits for a network at exit
    monkeypatch.setattr(WandbTracker, "unreachable", False)


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, logger="fasa_bench")
    return caplog


def make(folder: Path, run_id: str = "run", **logger: Any) -> Tracker:
    config = {
        "model": {"name": "m"},
        "method": {"name": f"of {run_id}"},
        "task": {"_target_": "x.ppl.Ppl"},
        "budget": 64,
    }
    return Tracker.of(logger, run_id, config, folder)


def stored(folder: Path) -> dict[str, Any]:
    """What an offline run folder holds: run, history rows, summary, exit code.

    The file is a LevelDB log (after 7 bytes of head: CRC 4, length 2, type 1, then data; type 1 is a whole record,
    2 to 4 are first, middle and last part) of protobuf records.
    """
    wandb.teardown()  # its service writes behind our back; this waits for it
    (path,) = folder.glob("*.wandb")
    data = path.read_bytes()[7:]
    result: dict[str, Any] = {"history": [], "summary": {}}
    position, parts = 0, b""
    while position + 7 <= len(data):
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        assert position + 7 < 32768, "longer than one block of the log: this small reader cannot"
        if kind not in (1, 4):
            continue
        record = wandb_internal_pb2.Record.FromString(parts)
        parts = b""
        if record.WhichOneof("record_type") == "run":
            result |= {"id": record.run.run_id, "project": record.run.project, "name": record.run.display_name}
        for item in record.history.item:
            result["history"].append((item.key or ".".join(item.nested_key), json.loads(item.value_json)))
        for item in record.summary.update:
            result["summary"][item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
        if record.HasField("exit"):
            result["exit"] = record.exit.exit_code
    return result


def test_three_runs_of_one_process_are_three_and_the_broken_one_failed(tmp_path: Path) -> None:
    """A sweep runs several in one process; pitfall: W&B merges them into the first."""
    for number in range(3):
        try:
            with make(tmp_path, f"run{number}", project="demo") as run:
                run.log_row({"id": "x", "scores": {"f1": number + 0.5, "nll": [1.0, 2.0], "text": "no number"}})
                if number == 1:
                    raise RuntimeError("broken")
                metrics = {"f1": {"value": number + 0.5, "ci_low": None, "n": 1}}
                run.log_summary({"status": "complete", "metrics": metrics, "env": {"threads": 2}})
        except RuntimeError:
            pass
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"), key=lambda path: path.name[-1])
    runs = [stored(folder) for folder in folders]
    assert [(run["id"], run["name"], run["exit"]) for run in runs] == [
        ("run0", "m of run0 ppl 64", 0),
        ("run1", "m of run1 ppl 64", 1),
        ("run2", "m of run2 ppl 64", 0),
    ]
    assert {run["project"] for run in runs} == {"demo"}
    for number, run in enumerate(runs):
        logged = [item for item in run["history"] if not item[0].startswith("_")]
        assert logged == [("example/f1", number + 0.5)]
    assert runs[2]["summary"] | {"status": "complete", "metrics.f1.value": 2.5, "metrics.f1.n": 1} == runs[2]["summary"]
    assert not [key for key in runs[2]["summary"] if key.startswith("env") or "ci_low" in key]
    assert wandb.run is None


def test_a_run_that_says_failed_is_failed_and_a_resumed_one_keeps_its_id(tmp_path: Path) -> None:
    with make(tmp_path, "same") as run:
        run.log_summary({"status": "failed"})
    first = next((tmp_path / "wandb").glob("offline-run-*-same"))
    assert stored(first)["exit"] == 1
    other = tmp_path / "again"
    other.mkdir()
    with make(other, "same"):
        pass
    again = stored(next((other / "wandb").glob("offline-run-*-same")))
    assert (again["id"], again["exit"]) == ("same", 0)


def test_a_run_of_the_users_own_stays_open(tmp_path: Path) -> None:
    mine = wandb.init(mode="offline", dir=tmp_path, settings=wandb.Settings(silent=True))
    with make(tmp_path) as run:
        assert isinstance(run, WandbTracker)
        assert run._run is not mine
    assert wandb.run is mine
    mine.log({"still": 1})
    mine.finish()


def test_standard_output_stays_empty(tmp_path: Path) -> None:
    script = f"""
from fasa_bench.tracking import Tracker
with Tracker.of({{}}, "quiet", {{}}, {str(tmp_path)!r}) as run:
    run.log_row({{"id": "x", "scores": {{"f1": 1}}}})
    run.log_summary({{"status": "complete"}})
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == ""
    assert result.stderr == ""
    assert list((tmp_path / "wandb").glob("offline-run-*-quiet"))


# --- mode


def netrc(path: Path) -> None:
    path.write_text(f"machine 127.0.0.1:9\nlogin user\npassword {KEY}\n")
    path.chmod(0o600)


def test_no_server_is_asked_for_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`wandb.login` does, and waits for one that never answers."""
    netrc(tmp_path / "netrc")
    monkeypatch.setattr(wandb, "login", lambda **_: pytest.fail("asked"))
    monkeypatch.setattr(wandb, "init", lambda **_: None)
    with make(tmp_path):
        pass
    (tmp_path / "netrc").write_text("machine 127.0.0.1:9\n  password \n nonsense")
    with make(tmp_path):
        pass


@pytest.mark.parametrize(
    ("asked", "key", "environment", "expected"),
    [
        ("auto", "", None, "offline"),
        ("auto", "env", None, "online"),
        ("auto", "netrc", None, "online"),
        ("offline", "env", None, "offline"),
        ("auto", "env", "offline", "offline"),
        ("offline", "env", "online", "online"),
        ("auto", "", "disabled", "disabled"),
        ("online", "", None, "offline"),  # rather than a question in a batch job
    ],
)
def test_the_settings_the_environment_and_a_key_decide_the_mode(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    messages: pytest.LogCaptureFixture,
    asked: Any,
    key: str,
    environment: str | None,
    expected: str,
) -> None:
    if key == "env":
        monkeypatch.setenv("WANDB_API_KEY", KEY)
    if key == "netrc":
        netrc(tmp_path / "netrc")
    if environment:
        monkeypatch.setenv("WANDB_MODE", environment)
    given: list[str] = []

    def init(**arguments: Any) -> Any:
        given.append(arguments["mode"])
        raise ConnectionError("not in a test")

    monkeypatch.setattr(wandb, "init", init)
    with make(tmp_path, mode=asked):
        pass
    assert given[0] == expected
    assert ("no API key is configured (run `wandb login`)" in messages.text) == (asked == "online" and not key)


# --- trouble


def test_trouble_never_stops_a_run_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: pytest.LogCaptureFixture
) -> None:
    class Broken:
        finished = 0

        def log(self, values: object) -> None:
            raise ConnectionError("gone\nand more")

        def finish(self, exit_code: int) -> None:
            self.finished += 1

    with make(tmp_path) as run:
        assert isinstance(run, WandbTracker)
        run._run.finish()
        monkeypatch.setattr(run, "_run", Broken())
        for _ in range(3):
            run.log_row({"id": "x", "scores": {"f1": 1}})
        run.log_summary({"status": "complete"})
    assert [record.message for record in messages.records] == ["W&B: ConnectionError: gone; the run goes on without it"]


def test_a_body_that_raises_is_not_hidden_by_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "no such mode")
    with pytest.raises(KeyboardInterrupt), make(tmp_path):
        raise KeyboardInterrupt


def test_a_dead_network_means_offline_for_the_whole_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    real, modes = wandb.init, []

    def init(**arguments: Any) -> Any:
        modes.append(arguments["mode"])
        if arguments["mode"] == "online":
            raise wandb.errors.CommError("timed out")
        return real(**arguments)

    monkeypatch.setattr(wandb, "init", init)
    for name in ("one", "two"):
        with make(tmp_path, name) as run:
            run.log_row({"id": "x", "scores": {"f1": 1}})
    assert modes == ["online", "offline", "offline"]
    assert messages.text.count("cannot be reached (CommError: timed out)") == 1
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 2


def test_finishing_cannot_hang(tmp_path: Path) -> None:
    with make(tmp_path) as run:
        assert isinstance(run, WandbTracker)
        assert 0 < run._run.settings.finish_timeout == tracking.FINISH_TIMEOUT


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"kind": "tensorboard"}, r"logger\.kind='tensorboard'.*'wandb' or 'none'"),
        ({"team": 1}, r"logger\.team=1.*unknown"),
    ],
)
def test_a_wrong_setting_is_one_clear_error(tmp_path: Path, setting: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(tmp_path, **setting)


# --- none


def test_none_follows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would raise
    with make(tmp_path, kind="none") as run:
        run.log_row({"id": "x", "scores": {"f1": 1}})
        run.log_summary({"status": "complete"})
    assert list(tmp_path.iterdir()) == []


def test_a_missing_wandb_is_no_reason_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with make(tmp_path) as run:
        run.log_row({"id": "x", "scores": {"f1": 1}})
    assert len(messages.records) == 1
    assert "ModuleNotFoundError" in messages.text


@pytest.mark.parametrize("kind", ["wandb", "none"])
def test_yaml_gives_the_declared_defaults(kind: Any) -> None:
    settings = yaml.safe_load((ROOT / "conf" / "logger" / f"{kind}.yaml").read_text())
    assert Logger(**settings) == Logger(kind=kind)
