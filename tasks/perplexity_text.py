"""Where the texts of perplexity come from: local files, or the data sets of the hub that the authors' code names.

PG-19's and WikiText's own repositories held loading scripts, which `datasets` 4 and later refuses; what is named here
are copies of their test parts in parquet, and C4's own compressed JSON, at fixed commits. One file is fetched of each.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fasa_bench.errors import UserError

Corpus = Literal["pg19", "wikitext", "c4", "c4_en"]
Format = Literal["auto", "plain", "lines"]

PLAIN, ROWS = (".txt", ".raw", ".md"), (".jsonl", ".json", ".parquet")  # and all but parquet also with .gz
HEADING = re.compile(r"^ = [^=\n].*? = \n(?= \n)", re.MULTILINE)  # a blank line follows: two lines of prose look alike


@dataclass(frozen=True)
class Source:
    """One file of a data set on the hub. rows: how many it has, where that is known."""

    repo: str
    revision: str
    file: str
    rows: int | None = None


_C4 = ("allenai/c4", "1588ec454efa1a09f29cd18ddd04fe05fc8653a2")
SOURCES: dict[Corpus, Source] = {
    "pg19": Source(
        "emozilla/pg19-test",
        "c5e39bf32e33f9111323aa68d7d9000d22722035",
        "data/test-00000-of-00001-29a571947c0b5ccc.parquet",
        rows=100,
    ),
    "wikitext": Source(
        "Salesforce/wikitext",
        "b08601e04326c79dfdd32d625aee71d232d685c3",
        "wikitext-2-raw-v1/test-00000-of-00001.parquet",
        rows=4358,  # lines; WikiText-103's test part is the same text
    ),
    "c4": Source(*_C4, "en.noblocklist/c4-validation.00000-of-00008.json.gz"),
    "c4_en": Source(*_C4, "en/c4-validation.00000-of-00008.json.gz"),
}


def find(path: str | None, corpus: Corpus | None) -> list[tuple[str, Path]]:
    """Name and path of each file, in order: local ones if a path is given, else the hub's, which stays in its cache.

    A name holds no part of where the files lie.
    """
    if path is None:
        assert corpus is not None
        return [(corpus, _download(SOURCES[corpus]))]
    root = Path(path).expanduser()
    if root.is_file():
        return [(root.name, root)]
    files = [file for file in sorted(root.rglob("*")) if _ending(file) in (*PLAIN, *ROWS) and file.is_file()]
    if not files:
        allowed = f"must be a text file, or a folder with {', '.join(PLAIN)} or {', '.join(ROWS)} files"
        raise UserError.of("task.path", path, allowed)
    return [(file.relative_to(root).as_posix(), file) for file in files]


def read(name: str, path: Path, text_format: Format = "auto") -> Iterator[tuple[str, str]]:
    """Name and text of each document of a file: the "text" of its rows, or all of it.

    text_format: "plain" takes any file as one document, "lines" as JSON objects, one a line; "auto" goes by its ending.
    """
    ending = _ending(path) if text_format == "auto" else {"plain": ".txt", "lines": ".jsonl"}[text_format]
    if ending == ".parquet":
        texts: Iterable[object] = _parquet(path)
    elif ending in ROWS:
        texts = _json(path)
    else:
        yield name, _content(path).decode("utf-8")
        return
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise UserError(f'{path}, row {number + 1}: its "text" must be a text')
        yield f"{name}/{number}", text


def wikitext_raw(texts: Iterable[str]) -> str:
    """WikiText as it was published, of its rows on the hub (a line each, a blank one empty), file or articles."""
    return "".join(text if text.endswith("\n") else f"{text} \n" for text in texts)


def wikitext_rows(raw: str) -> list[str]:
    """The hub's rows of the published text: a line each with its "\\n", a blank one empty."""
    return ["" if line == " " else f"{line}\n" for line in raw.split("\n")[:-1]]


def wikitext_articles(raw: str) -> list[str]:
    """The text cut before each heading of the first level."""
    cuts = [*(match.start() for match in HEADING.finditer(raw)), len(raw)]
    return [raw[start:end] for start, end in itertools.pairwise(cuts)]


def _ending(path: Path) -> str:
    """The suffix, without .gz."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def _content(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as file:
            return file.read()
    except (OSError, EOFError) as error:
        raise UserError(f"{path} is no complete gzip file ({error})") from error


def _json(path: Path) -> Iterator[object]:
    """The "text" of each object of a JSON array, or of one object a line; blank lines are skipped."""
    content = _content(path)
    if content.lstrip()[:1] == b"[":
        try:
            rows = json.loads(content)
        except ValueError as error:
            raise UserError(f"{path} is not JSON ({error})") from error
    else:
        rows = _lines(path, content)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or "text" not in row:
            raise UserError(f'{path}, row {number}: not a JSON object with a "text"')
        yield row["text"]


def _lines(path: Path, content: bytes) -> Iterator[object]:
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise UserError(f'{path}, line {number}: not a JSON object with a "text" ({error})') from error


def _parquet(path: Path) -> Iterator[object]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path.name} needs pyarrow: pip install pyarrow, or set task.path to other files") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=64, columns=["text"]):
                yield from batch.column("text").to_pylist()
    except (pyarrow.ArrowException, KeyError) as error:
        raise UserError(f'{path}: not a parquet file with a column "text" ({error})') from error


def _download(source: Source) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(source.repo, source.file, repo_type="dataset", revision=source.revision))
    except Exception as error:  # the hub library has dozens of kinds: offline, proxy, refused, gone
        reason = str(error).split("\n")[0]
        url = f"https://huggingface.co/datasets/{source.repo}/resolve/{source.revision}/{source.file}"
        raise UserError(
            f"{source.file} of {source.repo} could not be had from the hub ({type(error).__name__}: {reason}). Get "
            f"{url} on a machine that is online, and name it (or other files) with task.path"
        ) from error
