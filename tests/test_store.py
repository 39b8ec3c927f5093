"""The run folder under kill -9, cut files, a full disk and a second writer."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import signal
import subprocess
import sys
from enum import StrEnum
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from fasa_bench import environment, store
from fasa_bench.errors import UserError
from fasa_bench.store import RunStore, find_runs, load_run, run_id

ID = "0123456789abcdef"
CONFIG = {"budget": 256, "method": {"_target_": "x.Y", "n_tip": 16}, "note": "1e-5", "text": "日本 ${a}"}


def row(name: str, score: float = 1.0) -> dict:
    return {"id": name, "scores": {"f1": score}, "text": "a\nb\u2028 汉字"}


def open_store(folder: Path) -> RunStore:
    return RunStore(folder, ID, CONFIG)


def lines(folder: Path) -> list[dict]:
    text = (folder / "runs" / ID / "predictions.jsonl").read_bytes()
    return [json.loads(line) for line in text.split(b"\n")[:-1]]


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, logger="fasa_bench")
    return caplog


# --- identity


def test_run_id_is_the_hash_of_canonical_json() -> None:
    # printf %s '{"a":{"b":2,"c":[1,null]},"d":0.5}' | sha256sum
    assert run_id({"d": 0.5, "a": {"c": [1, None], "b": 2}}) == "cdaa82df0ce8f947"
    assert run_id({"a": {"b": 2, "c": [1, None]}, "d": 0.5}) == "cdaa82df0ce8f947"


def test_run_id_tells_one_token_from_a_ratio_of_one() -> None:
    assert run_id({"budget": 1}) != run_id({"budget": 1.0})


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_run_id_refuses_what_has_no_json_form(value: float) -> None:
    with pytest.raises(UserError, match=r"method\.ratio="):
        run_id({"method": {"ratio": value}})


# --- folder


def test_folder_holds_config_rows_summary_and_environment(tmp_path: Path) -> None:
    with open_store(tmp_path) as run:
        run.append(row("a", 0.25))
        run.append({"id": "b", "scores": {"f1": np.float32(0.5)}, "nll": np.array([1.0, np.nan]), "path": Path("x")})
        run.write_summary({"status": "complete", "metrics": {"f1": {"value": math.inf, "n": 2}}})
    folder = tmp_path / "runs" / ID
    assert sorted(path.name for path in folder.iterdir() if path.name != ".lock") == [
        "config.yaml",
        "env.json",
        "predictions.jsonl",
        "summary.json",
    ]
    assert yaml.safe_load((folder / "config.yaml").read_text("utf-8")) == CONFIG
    assert lines(tmp_path) == [
        row("a", 0.25),
        {"id": "b", "scores": {"f1": 0.5}, "nll": [1.0, None], "path": "x"},
    ]
    summary = json.loads((folder / "summary.json").read_text(), parse_constant=pytest.fail)
    assert summary["run_id"] == ID
    assert summary["config"] == CONFIG
    assert summary["metrics"] == {"f1": {"value": None, "n": 2}}  # never Infinity, which is no JSON
    env = json.loads((folder / "env.json").read_text())
    assert summary["env"] == env
    assert env["python"] == ".".join(map(str, sys.version_info[:3]))
    assert env["packages"]["torch"]
    assert os.uname().nodename not in json.dumps(env)


def test_strings_that_are_more_than_strings_are_stored_as_strings(tmp_path: Path) -> None:
    class Kind(StrEnum):
        A = "a"

    settings = {"torch": torch.__version__, "kind": Kind.A, "numpy": np.str_("n"), "tuple": (1, torch.tensor(2))}
    with RunStore(tmp_path, ID, settings) as run:
        assert load_run(run.folder).config == {
            "torch": str(torch.__version__),
            "kind": "a",
            "numpy": "n",
            "tuple": [1, 2],
        }


def test_rows_in_memory_equal_rows_read_back(tmp_path: Path) -> None:
    """Else a resumed run could sum up to another score than an uninterrupted one."""
    with open_store(tmp_path) as run:
        run.append({"id": "a", "scores": {1: (1, 2)}, "text": "half a pair: \ud83d", "x": 0.1 + 0.2, "nan": math.nan})
        kept = run.rows
    with open_store(tmp_path) as run:
        assert run.rows == kept == [{**kept[0], "scores": {"1": [1, 2]}, "text": "half a pair: \ud83d", "nan": None}]
        assert run.done == {"a"}


def test_append_refuses_a_second_row_of_the_same_id(tmp_path: Path) -> None:
    with open_store(tmp_path) as run:
        run.append(row("a"))
        with pytest.raises(ValueError, match="'a'"):
            run.append(row("a"))
        with pytest.raises(ValueError, match="None"):
            run.append({"scores": {}})
    with open_store(tmp_path) as run, pytest.raises(ValueError, match="'a'"):
        run.append(row("a"))
    assert len(lines(tmp_path)) == 1


def test_a_value_without_json_form_leaves_the_file_alone(tmp_path: Path) -> None:
    with open_store(tmp_path) as run:
        run.append(row("a"))
        with pytest.raises(TypeError):
            run.append({"id": "b", "scores": object()})
        run.append(row("c"))
    assert [r["id"] for r in lines(tmp_path)] == ["a", "c"]


def test_summary_status_is_one_of_four(tmp_path: Path) -> None:
    with open_store(tmp_path) as run:
        for status in ("complete", "failed", "interrupted", "partial"):
            run.write_summary({"status": status})
            assert load_run(run.folder).status == status
        with pytest.raises(ValueError, match="done"):
            run.write_summary({"status": "done"})


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_unusable_results_folder_is_named(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"results_dir='.*file.*can be written"), open_store(tmp_path / where):
        pass


def test_read_only_results_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o555)
    if os.access(tmp_path, os.W_OK):  # root may write anywhere: let the system call say what it says to others

        def refuse(self: Path, *args: object, **kwargs: object) -> None:
            raise OSError(errno.EROFS, "Read-only file system", str(self))

        monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError, match=r"results_dir=.*(Read-only|Permission denied)"), open_store(tmp_path):
        pass
    tmp_path.chmod(0o755)


# --- crash safety


def test_cut_at_every_byte_keeps_the_whole_lines(tmp_path: Path, messages: pytest.LogCaptureFixture) -> None:
    with open_store(tmp_path) as run:
        for name in "abc":
            run.append(row(name))
    path = tmp_path / "runs" / ID / "predictions.jsonl"
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        messages.clear()
        expected = whole[:size].count(b"\n")
        with open_store(tmp_path) as run:
            assert [r["id"] for r in run.rows] == list("abc")[:expected], size
            assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:expected])
            assert ("half-written" in messages.text) == (whole[:size] != path.read_bytes())
            if size % 40 == 0 and expected < 3:  # and it goes on from there
                run.append(row("c"))
                assert path.read_bytes().endswith(whole.splitlines(keepends=True)[2])


def test_damaged_lines_are_dropped_with_a_message(tmp_path: Path, messages: pytest.LogCaptureFixture) -> None:
    with open_store(tmp_path) as run:
        for name in "abc":
            run.append(row(name))
    path = tmp_path / "runs" / ID / "predictions.jsonl"
    a, b, c = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(a + b"\0" * 50 + b"\n" + b"\xff\xfe\n" + b"[1]\n" + b'{"no": "id"}\n' + c + b'{"id": "d", "sc\n')
    with open_store(tmp_path) as run:
        assert [r["id"] for r in run.rows] == ["a", "c"]
        run.append(row("b"))
    assert messages.text.count("is damaged") == 5
    assert path.read_bytes() == a + c + b
    messages.clear()
    with open_store(tmp_path) as run:
        assert run.done == {"a", "b", "c"}
    assert not messages.records


def test_of_two_rows_with_one_id_the_first_counts(tmp_path: Path, messages: pytest.LogCaptureFixture) -> None:
    with open_store(tmp_path) as run:
        run.append(row("a", 0.5))
    path = tmp_path / "runs" / ID / "predictions.jsonl"
    first = path.read_bytes()
    path.write_bytes(first + first.replace(b"0.5", b"0.9"))
    with open_store(tmp_path) as run:
        assert run.rows == [row("a", 0.5)]
    assert "repeats the id 'a'" in messages.text
    assert path.read_bytes() == first


@pytest.mark.parametrize("fault", ["write", "short write", "fsync"])
def test_full_disk_keeps_the_whole_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    real = os.write

    def write(file: int, data: memoryview) -> int:
        if fault == "short write" and len(data) > 20:
            return real(file, data[:20])
        raise full

    def fsync(file: int) -> None:
        raise full

    with open_store(tmp_path) as run:
        run.append(row("a"))
        run.append(row("b"))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync" if fault == "fsync" else "write", fsync if fault == "fsync" else write)
            with pytest.raises(UserError, match=r"No space left on device.*2 finished examples are kept.*same command"):
                run.append(row("c"))
        assert [r["id"] for r in lines(tmp_path)] == ["a", "b"]
        assert (run.folder / "predictions.jsonl").read_bytes().endswith(b"}\n")
        run.append(row("c"))  # space was freed
    assert [r["id"] for r in lines(tmp_path)] == ["a", "b", "c"]


def test_ctrl_c_inside_a_write_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write

    def write(file: int, data: memoryview) -> int:
        real(file, data[:10])
        raise KeyboardInterrupt

    with open_store(tmp_path) as run:
        run.append(row("a"))
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write)
            with pytest.raises(KeyboardInterrupt):
                run.append(row("b"))
    assert lines(tmp_path) == [row("a")]


def test_full_disk_keeps_the_old_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with open_store(tmp_path) as run:
        run.write_summary({"status": "partial"})
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            with pytest.raises(UserError, match=r"summary\.json.*No space left"):
                run.write_summary({"status": "complete"})
        assert load_run(run.folder).status == "partial"
        assert not list(run.folder.glob("*.new")) + list(run.folder.glob(".*.new"))


# --- processes

WRITER = """
import sys
from fasa_bench.store import RunStore
with RunStore(sys.argv[1], sys.argv[2], {}) as run:
    print("ready", flush=True)
    number = len(run.rows)
    while True:
        run.append({"id": str(number), "text": "x" * 20000})
        number += 1
        print(number, flush=True)
"""


def start_writer(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), ID], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()[1]
    return process


def test_kill_9_between_and_inside_appends_loses_no_finished_row(tmp_path: Path) -> None:
    told = 0
    for _ in range(2):
        process = start_writer(tmp_path)
        assert process.stdout is not None
        for _ in range(5):
            told = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)  # it is in the middle of one of the next appends
        output, _ = process.communicate()
        told = max([told, *map(int, output.split())])
    assert told >= 10
    with open_store(tmp_path) as run:  # the lock died with its holder
        count = len(run.rows)
        assert count in (told, told + 1)  # the last one may be stored and not yet told
        assert [r["id"] for r in run.rows] == [str(number) for number in range(count)]
        run.append({"id": str(count)})
    assert len(lines(tmp_path)) == count + 1


def test_second_writer_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    process = start_writer(tmp_path)
    try:
        with pytest.raises(UserError, match=rf"{ID} is being written by process {process.pid} .*start this command"):
            open_store(tmp_path).__enter__()
        assert load_run(tmp_path / "runs" / ID).status == "partial"  # reading needs no lock
    finally:
        process.kill()
        process.communicate()
    with open_store(tmp_path), pytest.raises(UserError, match=f"process {os.getpid()} "):
        open_store(tmp_path).__enter__()
    with open_store(tmp_path):
        pass


def test_a_failed_start_gives_the_lock_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(store.yaml, "safe_dump", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            open_store(tmp_path).__enter__()
    with open_store(tmp_path):
        pass


# --- environment


def test_a_changed_environment_is_recorded_with_the_first_new_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(environment, "environment", lambda: {"gpu": ["A"], "packages": {"torch": "1"}})
    with open_store(tmp_path) as run:
        run.append(row("a"))
    monkeypatch.setattr(environment, "environment", lambda: {"gpu": ["B"], "packages": {"torch": "1"}})
    path = tmp_path / "runs" / ID / "env.json"
    with open_store(tmp_path) as run:  # a look changes nothing: the rows still come from A
        assert run.env["gpu"] == ["A"]
        assert json.loads(path.read_text())["gpu"] == ["A"]
        assert not messages.records
        run.append(row("b"))
        run.append(row("c"))
        assert run.env == {
            "gpu": ["B"],
            "packages": {"torch": "1"},
            "earlier": [{"gpu": ["A"], "packages": {"torch": "1"}}],
        }
    assert json.loads(path.read_text()) == run.env
    assert len(messages.records) == 1
    assert "gpu ['A'] -> ['B']" in messages.text
    assert "torch" not in messages.text


# --- reading


def test_find_runs_reads_finished_running_and_damaged_folders(
    tmp_path: Path, messages: pytest.LogCaptureFixture
) -> None:
    assert find_runs(tmp_path) == []
    with RunStore(tmp_path, "b" * 16, {"budget": 1}) as run:
        run.append(row("a"))
        run.write_summary({"status": "complete", "model": "m"})
    with RunStore(tmp_path, "a" * 16, {}) as run:  # still going on, its last row half on the disk
        run.append(row("a"))
        with (run.folder / "predictions.jsonl").open("ab") as file:
            file.write(b'{"id": "b", "sco')
        (tmp_path / "runs" / "empty").mkdir()
        (tmp_path / "runs" / "note.txt").write_text("not a run")
        runs = find_runs(tmp_path)
        assert (run.folder / "predictions.jsonl").read_bytes().endswith(b'{"id": "b", "sco')
    assert [(r.folder.name, r.status, len(r.rows)) for r in runs] == [
        ("a" * 16, "partial", 1),
        ("b" * 16, "complete", 1),
    ]
    assert runs[1].config == {"budget": 1}
    assert runs[1].summary["model"] == "m"
    assert "empty is not a run folder" in messages.text
    with pytest.raises(FileNotFoundError):
        load_run(tmp_path / "nowhere")
    (tmp_path / "runs" / "empty" / "config.yaml").write_text("a: [")
    with pytest.raises(ValueError, match=r"config\.yaml is damaged"):
        load_run(tmp_path / "runs" / "empty")


def test_names_come_from_the_summary_else_from_the_config(tmp_path: Path) -> None:
    config = {"model": {"name": "m"}, "method": {"name": "fasa_c"}, "task": {"_target_": "fasa_bench.tasks.ppl.Ppl"}}
    with RunStore(tmp_path, ID, config) as run:
        stored = load_run(run.folder)
        assert [stored.name(part) for part in ("model", "method", "task")] == ["m", "fasa_c", "ppl"]
        run.write_summary({"status": "partial", "method": "fasa", "task": "perplexity"})
        stored = load_run(run.folder)
        assert [stored.name(part) for part in ("model", "method", "task")] == ["m", "fasa", "perplexity"]
    assert [store.section_name(part) for part in (None, "x", {})] == ["?", "x", "?"]
