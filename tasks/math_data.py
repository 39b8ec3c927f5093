"""Where mathematical problems come from: a local JSONL or parquet file, or a data set of the hub."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasa_bench.errors import UserError


@dataclass(frozen=True)
class Source:
    """A benchmark's file on the hub, and what is known of its content.

    rows: number of problems. sha256: `content_hash` of the pinned copy, Zefan-Cai/R-KV at commit d15c9767, data/.
    """

    repo: str
    file: str
    rows: int
    sha256: str


def find(data_file: str | None, source: Source) -> Path:
    """The local file if one is named, else the hub's, which stays in the hub's cache."""
    if data_file is not None:
        path = Path(data_file).expanduser()
        if not path.is_file():
            raise UserError.of("task.data_file", data_file, "no such file; leave it out for the hub's")
        return path
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(source.repo, source.file, repo_type="dataset"))
    except Exception as error:  # the hub library has dozens of kinds: offline, proxy, refused, gone
        reason = str(error).split("\n")[0]
        raise UserError(
            f"{source.file} of https://huggingface.co/datasets/{source.repo} could not be had "
            f"({type(error).__name__}: {reason}). Offline, set task.data_file to a .jsonl file of rows with "
            '"problem" and "answer"'
        ) from error


def read(path: Path) -> list[dict[str, Any]]:
    """Rows with the texts "problem" and "answer", whatever else and in whatever case their names are written."""
    rows = [{str(key).lower(): value for key, value in row.items()} for row in _rows(path)]
    for number, row in enumerate(rows, start=1):
        for key in ("problem", "answer"):
            value = row.get(key)
            if not isinstance(value, str | int) or isinstance(value, bool) or not str(value).strip():
                raise UserError(f'{path}, row {number}: "{key}" must be a text')
            row[key] = str(value)
    if not rows:
        raise UserError(f"{path} has no rows")
    return rows


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """JSON objects, one a line; blank lines are skipped."""
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number}: must be a JSON object, not {type(row).__name__}")
        rows.append(row)
    return rows


def content_hash(rows: list[dict[str, Any]]) -> str:
    """sha256 of problems and answers in their order, blanks and leading zeros aside: the same for JSONL and parquet."""
    content = [["".join(row["problem"].split()), "".join(row["answer"].split()).lstrip("0") or "0"] for row in rows]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def differences(rows: list[dict[str, Any]], source: Source) -> list[str]:
    """What to warn of: copies with wrong rows are about."""
    if len(rows) != source.rows:
        return [f"{len(rows)} problems instead of {source.rows}: scores do not compare with others'"]
    if content_hash(rows) != source.sha256:
        return ["problems, answers or their order differ from the pinned copy: scores may not compare with others'"]
    return []


def _rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix != ".parquet":
        return read_jsonl(path)
    import pandas as pd

    try:
        frame = pd.read_parquet(path)
    except ImportError as error:
        raise UserError(
            f"{path.name} needs pyarrow: pip install pyarrow, or set task.data_file to a .jsonl file"
        ) from error
    return frame.astype(object).to_dict("records")  # type: ignore[return-value]
