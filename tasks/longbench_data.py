"""LongBench v1's files: the rows of its data sets, and its prompt templates.

The templates are the benchmark's own text and stay data: a file that the user names, a cached copy, or a download from
the official repository at a fixed commit, checked by its hash.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

from fasa_bench.errors import UserError
from fasa_bench.paths import cache_folder

HUB_REPO = "THUDM/LongBench"
PROMPTS_URL = (
    "https://raw.githubusercontent.com/THUDM/LongBench/"
    "2e00731f8d0bff23dc4325161044d0ed8af94c1e/LongBench/config/dataset2prompt.json"
)
PROMPTS_SHA256 = "56d22ad4f382169c2b8a11ff4c982a4a1bea096c8152b0f0b85b64686b157c30"


def read_rows(path: Path, text: bytes | None = None) -> list[dict[str, Any]]:
    """JSON objects of a JSONL file, blank lines skipped; `text` is its content where that was read already.

    Lines end at "\\n" only: contexts hold other characters that str.splitlines would take for line ends.
    """
    rows = []
    for number, line in enumerate((path.read_bytes() if text is None else text).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:  # also a line that is not UTF-8
            raise UserError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number}: must be a JSON object, not {type(row).__name__}")
        check_answers(row, f"{path}, line {number}")
        rows.append(row)
    if not rows:
        raise UserError(f"{path} has no rows")
    return rows


def check_answers(row: dict[str, Any], where: str) -> None:
    """The fields that scoring needs and that data files and prediction files share."""
    answers, classes = row.get("answers"), row.get("all_classes")
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise UserError(f'{where}: "answers" must be a list of texts')
    if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        raise UserError(f'{where}: "all_classes" must be a list of texts or null')


def read_file(data_dir: str | None, dataset: str) -> tuple[Path, bytes]:
    """Path (for messages) and content of one data set's file; LongBench-E's are called <dataset>_e.

    data_dir: a folder of <dataset>.jsonl, a zip file of them, or None for the hub's official data.zip.
    """
    root = Path(data_dir).expanduser() if data_dir is not None else _hub_zip()
    path = root / f"{dataset}.jsonl"
    if root.is_file():
        return _read_zip(root, path.name)
    if not root.is_dir():
        raise UserError.of("task.data_dir", data_dir, f"no such folder or zip file; expected {path}")
    if not path.is_file():
        raise UserError.of("task.data_dir", data_dir, f"it has no file for {dataset}; expected {path}")
    return path, path.read_bytes()


def _read_zip(path: Path, name: str) -> tuple[Path, bytes]:
    try:
        with zipfile.ZipFile(path) as archive:
            # The official zip keeps its files in data/, beside other folders' copies that some systems add.
            members = [item for item in archive.namelist() if Path(item).name == name and "__MACOSX" not in item]
            if not members:
                raise UserError(
                    f"task.data_dir={str(path)!r} has no {name}: expected it as data/{name} in the zip file"
                )
            return path / members[0], archive.read(members[0])
    except zipfile.BadZipFile as error:
        raise UserError.of("task.data_dir", str(path), f"neither a folder nor a zip file ({error})") from error


def _hub_zip() -> Path:
    """The official zip; `datasets` 4 and later cannot load the hub's script data set itself."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(HUB_REPO, "data.zip", repo_type="dataset"))
    except Exception as error:  # the hub library has dozens of kinds: offline, proxy, refused, gone
        raise UserError(
            f"LongBench's data.zip could not be had from the hub ({type(error).__name__}: {error}). Offline, set "
            f"task.data_dir to a folder of <dataset>.jsonl files or to a copy of "
            f"https://huggingface.co/datasets/{HUB_REPO}/resolve/main/data.zip"
        ) from error


def prompts_bytes(prompts_file: str | None) -> bytes:
    """Content of dataset2prompt.json: the given file, else the cached copy, else the official one, which is cached."""
    if prompts_file is not None:
        path = Path(prompts_file).expanduser()
        if not path.is_file():
            raise UserError.of("task.prompts_file", prompts_file, "no such file; leave it out for the official prompts")
        return path.read_bytes()
    cached = cache_folder("longbench") / "dataset2prompt.json"
    if cached.is_file() and is_official(content := cached.read_bytes()):
        return content
    try:
        with urllib.request.urlopen(PROMPTS_URL, timeout=30) as answer:
            content = answer.read()
    except OSError as error:
        raise UserError(
            f"LongBench's prompts could not be downloaded ({error}). Get {PROMPTS_URL} (sha256 {PROMPTS_SHA256}) on a "
            f"machine that is online, then save it as {cached} or name it with task.prompts_file"
        ) from error
    if not is_official(content):
        raise UserError(f"{PROMPTS_URL} does not have the expected sha256 {PROMPTS_SHA256}; nothing was kept")
    _write(cached, content)
    return content


def is_official(prompts: bytes) -> bool:
    """Whether this is the official dataset2prompt.json, byte for byte."""
    return hashlib.sha256(prompts).hexdigest() == PROMPTS_SHA256


def templates(prompts: bytes) -> dict[str, str]:
    """Data set -> template text, a format string over the fields of a row."""
    try:
        found = json.loads(prompts)
    except ValueError as error:
        raise UserError(f"task.prompts_file is not JSON ({error})") from error
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise UserError("task.prompts_file must be one JSON object {dataset: template text}")
    return found


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all: another process may read at the same time."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
        part.write(content)
    Path(part.name).replace(path)
