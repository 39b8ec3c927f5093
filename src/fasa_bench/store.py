"""The run folder: what was asked, what came out and where it ran. A kill at any moment costs at most the row in hand.

<results_dir>/runs/<run_id>/config.yaml        settings of the run
                            predictions.jsonl  one row per finished example, appended and synced one by one
                            summary.json       metrics, latency, memory; written whole or not at all
                            env.json           versions and hardware that computed the rows
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any

import yaml
from filelock import FileLock, Timeout

from fasa_bench.errors import UserError

log = logging.getLogger("fasa_bench")

STATUSES = ("complete", "failed", "interrupted", "partial")


class BusyError(UserError):
    """Another process is writing the run folder."""


def run_id(identity: Mapping[str, Any]) -> str:
    """16 hex digits of the SHA-256 of `identity`: all that can change an output, in JSON types.

    The order of keys does not matter; 1 and 1.0 differ (a budget of one token is not a ratio of one).
    Raises UserError for NaN or infinity, which compare unequal to themselves and have no JSON form.
    """
    try:
        text = json.dumps(identity, sort_keys=True, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        bad = {key: value for key, value in flatten(identity).items() if isinstance(value, float)}
        names = ", ".join(f"{key}={value}" for key, value in bad.items() if not math.isfinite(value))
        raise UserError(f"a setting of the run is no finite number: {names or error}") from error
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def plain(value: Any) -> Any:
    """The same in JSON types: NaN and infinities become None, numpy and torch values Python ones, tuples lists."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, str):
        return str.__str__(value)  # torch.__version__ and string enums are more than strings, which YAML refuses
    if hasattr(value, "tolist"):  # numpy and torch, scalars included
        return plain(value.tolist())
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, PurePath) else value


class RunStore:
    """The one writer of a run folder; a context manager.

    rows: what the folder holds, in file order; failed: rows with an "error" instead of scores, which the next start
    drops to try them again; done: ids of both; env: where the rows were computed.
    is_whole: whether a stored row has all that its reader needs; one that has not counts as not there.
    Entering raises UserError when the folder cannot be used, BusyError when another process is writing it.
    """

    def __init__(
        self,
        results_dir: str | Path,
        run_id: str,
        config: Mapping[str, Any],
        is_whole: Callable[[dict[str, Any]], bool] = lambda row: True,
    ) -> None:
        self.results_dir = Path(results_dir)
        self.run_id = run_id
        self.config: dict[str, Any] = plain(config)
        self.folder = self.results_dir / "runs" / run_id
        self.rows: list[dict[str, Any]] = []
        self.failed: list[dict[str, Any]] = []
        self.done: set[str] = set()
        self.env: dict[str, Any] = {}
        self._here: dict[str, Any] = {}
        self._is_whole = is_whole
        self._file = -1

    def __enter__(self) -> RunStore:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock()
            try:
                self._open()
            except BaseException:
                self._close()
                raise
        except OSError as error:
            reason = error.strerror or error
            raise UserError.of(
                "results_dir", str(self.results_dir), f"{reason} ({error.filename}); give a folder that can be written"
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row and wait until it is on the disk.

        A row's "files" ({path inside the run folder: bytes}) are written before it, which then tells their sha256: a
        row is never there without them. Raises ValueError for a row without id or with one that is stored already,
        UserError when it cannot be written; the file then ends with the last whole row.
        """
        row = dict(plain(row))
        key = row.get("id")
        if not isinstance(key, str) or key in self.done:
            raise ValueError(f"the id of a row must be a new string, not {key!r}")
        if "files" in row:
            row["files"] = {name: self._keep_file(name, content) for name, content in row["files"].items()}
        # A lone surrogate has no UTF-8 form; its backslash escape is JSON for the same character.
        line = json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        try:
            self._update_env()
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._file, rest) :]
            os.fsync(self._file)
        except BaseException as error:
            with suppress(OSError):  # else the next start drops the half-written line
                os.ftruncate(self._file, self._size)
            if isinstance(error, OSError):
                raise UserError(
                    f"{self.folder / 'predictions.jsonl'} cannot be written: {error.strerror or error}. "
                    f"{len(self.rows)} finished examples are kept: once that is mended, start the same command again "
                    "and it goes on from there"
                ) from error
            raise
        self._size += len(line)
        kept = self.failed if "error" in row else self.rows
        kept.append(json.loads(line))  # as a later start will read it, so that both sum up alike
        self.done.add(key)

    def _keep_file(self, name: str, content: bytes) -> str:
        path = self.folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, content)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
        return hashlib.sha256(content).hexdigest()

    def take(self, part: Run) -> list[dict[str, Any]]:
        """Append the rows of another run that are missing here, under the environment that computed them."""
        new = [_with_files(part.folder, row) for row in part.rows if row["id"] not in self.done]
        here, self._here = self._here, {key: value for key, value in part.env.items() if key != "earlier"}
        try:
            for row in new:
                self.append(row)
        finally:
            self._here = here
        return new

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace summary.json; run_id, env and config are filled in. Raises UserError if it cannot be written."""
        if summary.get("status") not in STATUSES:
            raise ValueError(f"status={summary.get('status')!r} is not one of {', '.join(STATUSES)}")
        whole = {"run_id": self.run_id, **summary}
        whole.setdefault("env", self.env)
        whole.setdefault("config", self.config)
        try:
            write_whole(self.folder / "summary.json", _json(whole))
        except OSError as error:
            raise UserError(
                f"{self.folder / 'summary.json'} cannot be written: {error.strerror or error}. All rows are kept: "
                "once that is mended, start the same command again"
            ) from error

    def _lock(self) -> None:
        holder = self.folder / ".writer"  # beside the lock, because the lock file itself belongs to filelock
        self._filelock = FileLock(self.folder / ".lock")
        try:
            self._filelock.acquire(timeout=0)  # the system drops it when its holder dies, also by kill -9
        except Timeout as error:
            try:
                who = holder.read_text().strip()
            except OSError:  # it has the lock, and has not yet said who it is
                who = "another process"
            raise BusyError(
                f"{self.folder} is being written by {who}: wait until it ends, or end it, and start this command again"
            ) from error
        with suppress(OSError):  # only for the message; a full disk is reported where it matters
            holder.write_text(f"process {os.getpid()} (since {time.strftime('%Y-%m-%d %H:%M:%S')})\n")

    def _open(self) -> None:
        path = self.folder / "predictions.jsonl"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
        data = path.read_bytes()
        self.rows, good, dropped = _scan(data, lambda row: self._is_whole(row) and has_files(self.folder, row))
        for problem in dropped:
            log.warning("%s: %s", path, problem)
        if good != data and data.startswith(good):
            os.ftruncate(self._file, len(good))  # needs no free space
            os.fsync(self._file)
        elif good != data:
            os.close(self._file)
            write_whole(path, good)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0))
        self._size = len(good)
        self.done = {row["id"] for row in self.rows}
        write_whole(
            self.folder / "config.yaml", yaml.safe_dump(self.config, sort_keys=False, allow_unicode=True).encode()
        )
        from fasa_bench.environment import environment  # not at the top: reading stored runs needs no torch

        self._here = plain(environment())
        self.env = (self.rows and _read_json(self.folder / "env.json")) or self._here
        if self.env is self._here:
            write_whole(self.folder / "env.json", _json(self.env))

    def _update_env(self) -> None:
        """Record a changed environment with the first row computed in it, not when a finished run is only looked at."""
        before = {key: value for key, value in self.env.items() if key != "earlier"}
        if before == self._here:
            return
        if not self.rows:
            self.env = self._here
            write_whole(self.folder / "env.json", _json(self.env))
            return
        old, new = flatten(before), flatten(self._here)
        changes = [f"{key} {old.get(key)} -> {new.get(key)}" for key in new | old if old.get(key) != new.get(key)]
        log.warning(
            "%s: the %d stored rows come from another environment (%s)", self.folder, len(self.rows), "; ".join(changes)
        )
        self.env = {**self._here, "earlier": [*self.env.get("earlier", []), before]}
        write_whole(self.folder / "env.json", _json(self.env))

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        with suppress(OSError):
            (self.folder / ".writer").unlink()
        self._filelock.release()


@dataclass(frozen=True)
class Run:
    """A stored run, finished or not. summary is {} while there is none; failed: rows that hold an error, no scores."""

    folder: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    rows: list[dict[str, Any]]
    env: dict[str, Any]
    failed: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_part(self) -> bool:
        """A shard, whose rows are part of another run."""
        return bool(self.config.get("shard"))

    def name(self, section: str) -> str:
        """Name of the run's "model", "method" or "task"; without a summary yet, as good as its config tells."""
        return str(self.summary.get(section) or section_name(self.config.get(section)))

    @property
    def status(self) -> str:
        """One of STATUSES; a run without a summary is still going on or was killed, hence partial."""
        return str(self.summary.get("status", "partial"))


def section_name(section: Any) -> str:
    """What a config section is called: its name, else the module of its class."""
    if not isinstance(section, Mapping):
        return str(section or "?")
    return str(section.get("name") or str(section.get("_target_", "?")).split(".")[-2:][0])


def load_run(folder: str | Path) -> Run:
    """Read a run folder without locking or changing it. Raises OSError or ValueError if it is none."""
    folder = Path(folder)
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text("utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{folder / 'config.yaml'} is damaged: {error}") from error
    path = folder / "predictions.jsonl"
    rows, _, _ = _scan(path.read_bytes() if path.exists() else b"")
    whole, failed = [row for row in rows if "error" not in row], [row for row in rows if "error" in row]
    summary = _read_json(folder / "summary.json")
    env = _read_json(folder / "env.json") or summary.get("env") or {}
    return Run(folder, config if isinstance(config, dict) else {}, summary, whole, env, failed)


def has_files(folder: Path, row: Mapping[str, Any]) -> bool:
    """Whether the files that a stored row tells of are there, as they were written."""
    files = row.get("files")
    if not isinstance(files, Mapping):
        return files is None
    return all(_sha256(folder / name) == digest for name, digest in files.items())


def _sha256(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _with_files(folder: Path, row: dict[str, Any]) -> dict[str, Any]:
    """A stored row as it was before it was stored."""
    return row | {"files": {name: (folder / name).read_bytes() for name in row["files"]}} if "files" in row else row


def find_runs(results_dir: str | Path) -> list[Run]:
    """All runs under `results_dir`, in the order of their ids. Folders that are no runs are left out with a message."""
    runs = []
    for folder in sorted(path for path in Path(results_dir).glob("runs/*") if path.is_dir()):
        try:
            runs.append(load_run(folder))
        except (OSError, ValueError) as error:
            log.warning("%s is not a run folder (%s); left out", folder, error)
    return runs


def report_runs(results_dir: str | Path) -> list[Run]:
    """What tables and figures are made of: the user's own runs, those of `make bench`, those that were committed.

    A run that is stored in two places counts where it comes first; shards are left out.
    """
    found: dict[str, Run] = {}
    root = Path(results_dir)
    for folder in (root, root / "bench", root / "bench-gpu", root / "mini", *sorted(root.glob("measured/*"))):
        found = {run.folder.name: run for run in without_parts(find_runs(folder))} | found
    return list(found.values())


def without_parts(runs: Sequence[Run]) -> Sequence[Run]:
    """Without shards, unless there is nothing else."""
    return [run for run in runs if not run.is_part] or runs


def _scan(
    data: bytes, is_whole: Callable[[dict[str, Any]], bool] | None = None
) -> tuple[list[dict[str, Any]], bytes, list[str]]:
    """Rows of a predictions file, the bytes that hold them, and what is wrong with the others.

    is_whole: given by a writer, who drops failed rows too, so that their examples run again.
    """
    rows: list[dict[str, Any]] = []
    good: list[bytes] = []
    dropped: list[str] = []
    seen: set[str] = set()
    *lines, tail = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line.decode())
            key = row["id"]
        except (ValueError, TypeError, KeyError, RecursionError):
            key = None
        if not isinstance(key, str):
            dropped.append(f"line {number} is damaged; dropped, its example runs again")
        elif is_whole and "error" in row:
            dropped.append(f"example {key!r} failed before ({row['error']}); it runs again")
        elif is_whole and not is_whole(row):
            dropped.append(f"line {number} ({key}) lacks parts of a row; dropped, its example runs again")
        elif key in seen:
            dropped.append(f"line {number} repeats the id {key!r}; dropped, the first one counts")
        else:
            seen.add(key)
            rows.append(row)
            good.append(line + b"\n")
    if tail:
        dropped.append("the last line is half-written; dropped, its example runs again")
    return rows, b"".join(good), dropped


def _json(value: Any) -> bytes:
    return (json.dumps(plain(value), indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes().decode())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read (%s); taken as missing", path, error)
        return {}
    return value if isinstance(value, dict) else {}


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or a power cut, sees the old one or the new one and nothing between."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    with suppress(OSError):  # the new name is on the disk too; Windows cannot open folders
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
