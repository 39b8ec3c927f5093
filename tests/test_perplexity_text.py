"""Texts of perplexity: every file format gives the same documents, the hub is asked for one pinned file."""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hydra import compose, initialize_config_dir

from fasa_bench.config import build
from fasa_bench.errors import UserError
from fasa_bench.task import Task
from fasa_bench.tasks import perplexity_text as source
from fasa_bench.tasks.perplexity import Perplexity
from tests.conftest import ROOT

# Two articles as published; the second line that starts with " = " is no heading
RAW = (
    " \n = First = \n \n A line . \n = 1 and not a heading = \n More . \n \n = = Part = = \n \n Text . \n"
    " \n = Second ( thing ) = \n \n The end . \n"
)
ROWS = [
    "",
    " = First = \n",
    "",
    " A line . \n",
    " = 1 and not a heading = \n",
    " More . \n",
    "",
    " = = Part = = \n",
    "",
]
ROWS += [" Text . \n", "", " = Second ( thing ) = \n", "", " The end . \n"]


def texts(path: Path, **parameters: Any) -> list[str]:
    return [text for name, file in source.find(str(path), None) for _, text in source.read(name, file, **parameters)]


def documents(**parameters: Any) -> list[str]:
    return [text for _, text in Perplexity(**parameters)._documents()]


def test_every_format_gives_the_same_documents(tmp_path: Path) -> None:
    rows = [{"text": "one\u2028 é", "url": "x"}, {"text": "two"}]
    lines = "\n".join(json.dumps(row) for row in rows) + "\n\n"
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "e.txt.gz").write_bytes(gzip.compress(b"plain"))
    (tmp_path / "f.npz.gz").write_bytes(b"not text")
    assert texts(tmp_path) == ["one\u2028 é", "two"] * 4 + ["plain"]
    names = [name for name, file in source.find(str(tmp_path), None) for name, _ in source.read(name, file)]
    assert names[:3] == ["a.jsonl/0", "a.jsonl/1", "b.json/0"]
    assert names[-1] == "e.txt.gz"


def parquet(path: Path, column: list[Any], name: str = "text") -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    written = pyarrow.table({name: column, "url": ["x"] * len(column)})
    pytest.importorskip("pyarrow.parquet").write_table(written, path)
    return path


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = parquet(tmp_path / "a.parquet", [f"text {number}" for number in range(150)])
    assert texts(file) == [f"text {number}" for number in range(150)]
    with pytest.raises(UserError, match=r'a\.parquet: not a parquet file with a column "text"'):
        texts(parquet(tmp_path / "a.parquet", ["x"], name="content"))
    with pytest.raises(UserError, match=r'a\.parquet, row 2: its "text" must be a text'):
        texts(parquet(tmp_path / "a.parquet", ["x", None]))
    file.write_bytes(b"PAR1 no")
    with pytest.raises(UserError, match=r"a\.parquet: not a parquet file"):
        texts(file)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"a\.parquet needs pyarrow: pip install pyarrow, or set task\.path"):
        texts(file)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"text": "x"}, {"title": "x"}]', r'a\.json, row 2: not a JSON object with a "text"'),
        ("a.json", b'[{"text": "x"}', r"a\.json is not JSON"),
        ("a.jsonl", b'{"text": "x"}\n\n{"text"', r"a\.jsonl, line 3: not a JSON object"),
        ("a.jsonl", b'{"text": 3}', r'a\.jsonl, row 1: its "text" must be a text'),
        ("a.json.gz", gzip.compress(b'{"text": "x"}')[:-9], r"a\.json\.gz is no complete gzip file"),
        ("a.txt.gz", b"plain", r"a\.txt\.gz is no complete gzip file"),
        ("a.pdf", b"", r"task\.path=.*must be a text file, or a folder with \.txt"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        texts(tmp_path)


def test_wikitext_is_the_same_from_its_file_its_rows_and_its_articles(tmp_path: Path) -> None:
    assert source.wikitext_rows(RAW) == ROWS
    assert source.wikitext_raw(ROWS) == source.wikitext_raw([RAW]) == RAW
    articles = [RAW[2 : RAW.index(" = Second")], RAW[RAW.index(" = Second") :]]
    (tmp_path / "wiki.test.raw").write_text(RAW)
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in ROWS))
    (tmp_path / "articles.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in articles))
    for file in ("wiki.test.raw", "rows.jsonl", "articles.jsonl"):
        assert documents(corpus="wikitext", path=str(tmp_path / file)) == articles
    for file in ("wiki.test.raw", "rows.jsonl"):
        assert documents(corpus="wikitext", path=str(tmp_path / file), documents="joined") == ROWS
    assert documents(path=str(tmp_path / "wiki.test.raw")) == [RAW]  # a text like any other


def test_what_is_not_the_whole_corpus_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("A book.")
    found = {}
    for corpus in ("pg19", "wikitext", "c4", None):
        task = Perplexity(corpus=corpus, path=str(tmp_path))  # type: ignore[arg-type]
        list(task._documents())
        found[corpus] = task.warnings
    assert found.pop("pg19") == [
        "1 rows instead of the 100 of emozilla/pg19-test: numbers may not compare with others'"
    ]
    assert found.pop("wikitext")[0].startswith("1 rows instead of the 4,358 of Salesforce/wikitext")
    assert (
        "is taken for en.noblocklist/c4-validation.00000-of-00008.json.gz of allenai/c4 unchecked" in found.pop("c4")[0]
    )
    assert found == {None: []}


def test_the_hub_is_asked_for_one_pinned_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, dict[str, str]]] = []

    def download(repo: str, file: str, **options: str) -> str:
        asked.append((repo, file, options))
        path = tmp_path / Path(file).name
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(b'{"text": "A page.", "url": "x"}\n{"text": "Another."}\n'))
            return str(path)
        return str(parquet(path, ROWS if "wikitext" in repo else ["A book."] * 100))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert documents(corpus="c4") == documents(corpus="c4_en") == ["A page.", "Another."]
    assert documents(corpus="pg19", documents="joined") == ["A book."] * 100
    assert documents(corpus="wikitext") == source.wikitext_articles(RAW)
    assert len(asked) == 4
    for repo, file, options in asked:
        assert options["repo_type"] == "dataset"
        assert re.fullmatch("[0-9a-f]{40}", options["revision"])  # a branch may move
        assert file.endswith((".parquet", ".json.gz"))
        assert "/" in repo
    assert asked[0][1] == "en.noblocklist/c4-validation.00000-of-00008.json.gz"  # what the authors' code reads
    task = Perplexity(corpus="pg19")
    assert task.fingerprint() != Perplexity(corpus="c4").fingerprint()
    assert [name for name, _ in task._documents()][:2] == ["pg19/0", "pg19/1"]
    assert task.warnings == []


def test_without_the_hub_the_error_says_what_to_get(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError("no network\nlong story")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(UserError, match=r"could not be had from the hub .*no network\).* Get https://.*task\.path"):
        documents(corpus="wikitext")


def test_no_text_at_all() -> None:
    with pytest.raises(UserError, match=r"task\.path=None .*task\.corpus=pg19\|wikitext\|c4\|c4_en"):
        Perplexity()
    with pytest.raises(UserError, match=r"task\.corpus='ptb'"):
        build("task", {"_target_": "fasa_bench.tasks.perplexity.Perplexity", "corpus": "ptb"}, Task)


def test_the_authors_settings() -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("config", ["task=ppl_authors", "task.corpus=pg19"])
    task = build("task", cfg.task, Task)
    assert task == Perplexity("pg19", documents="joined", special_tokens="once", prefill=8000, decode=256, windows=60)


def test_wikitext_2(shared_data: Path) -> None:
    """The published test part: 60 articles, and the text that GPTQ and the authors' code join of the hub's rows."""
    folder = shared_data / "ppl" / "wikitext"
    task = Perplexity("wikitext", str(folder / "wiki.test.raw"))
    articles = [text for _, text in task._documents()]
    known = [json.loads(line)["text"] for line in (folder / "wikitext2_test_articles.jsonl").read_text().splitlines()]
    assert [text.rstrip() for text in articles] == [text.rstrip() for text in known]
    assert len(articles) == 60
    assert task.warnings == []
    joined = "\n\n".join(documents(corpus="wikitext", path=task.path, documents="joined"))
    assert len(joined) == 1_294_336
