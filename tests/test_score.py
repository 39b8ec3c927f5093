"""python -m fasa_bench.score, on invented predictions and on published ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fasa_bench.score import main

SHARED = Path(os.environ.get("FASA_BENCH_SHARED") or Path(__file__).resolve().parents[2] / "shared")
PUBLISHED = SHARED / "data" / "pred" / "qwen3-8b"


def write(folder: Path, dataset: str, *rows: dict[str, Any]) -> None:
    lines = [json.dumps({"answers": ["x"], "all_classes": None, "length": 1, **row}) for row in rows]
    (folder / f"{dataset}.jsonl").write_text("\n".join(lines), encoding="utf-8")


def test_prints_one_json_object(tmp_path: Path) -> None:
    write(tmp_path, "qasper", {"pred": "x"}, {"pred": "x y"}, {"pred": ""})
    write(tmp_path, "triviaqa", {"pred": "\nx\ny"})
    write(
        tmp_path, "trec", {"pred": "ab", "answers": ["ab"], "all_classes": ["ab"]}, {"pred": "ab", "all_classes": ["a"]}
    )
    (tmp_path / "result.json").write_text("{}")
    command = [sys.executable, "-m", "fasa_bench.score", "longbench", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # trec: the last row's classes count for every row, and "ab" is not one of them
    assert json.loads(done.stdout) == {"qasper": 55.56, "trec": 0.0, "triviaqa": 100.0}
    assert done.stderr == "note: result.json is not a LongBench data set: ignored\n"


def test_recursion_of_the_official_scorer_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = " ".join(map(str, range(1000)))
    write(tmp_path, "gov_report", {"pred": long, "answers": [long]}, {"pred": "x"})
    assert main(["longbench", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"gov_report": 100.0}
    assert err.startswith("note: gov_report: ")
    assert err.endswith(" 50.0\n")


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="no shared/data/pred/qwen3-8b beside the checkout")
def test_equals_all_published_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["longbench", str(PUBLISHED)]) == 0
    expected = json.loads((PUBLISHED / "result.json").read_text())
    assert len(expected) == 21
    assert json.loads(capsys.readouterr().out) == pytest.approx(expected, abs=0.01 + 1e-9)


def test_bad_input_is_one_line_and_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(message: str, *arguments: str) -> None:
        assert main(arguments or ["longbench", str(tmp_path)]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert message in err

    fails("benchmark='nope' is not allowed: one of ", "nope", str(tmp_path))
    fails("longbench", "nope", str(tmp_path))
    fails("no such folder", "longbench", str(tmp_path / "gone"))
    fails("holds no file <dataset>.jsonl of narrativeqa, ")
    file = tmp_path / "qasper.jsonl"
    good = '{"pred": "x", "answers": ["x"], "all_classes": null}\n'
    for content, message in (
        (good + "{", "qasper.jsonl, line 2: not JSON"),
        (good + '{"answers": ["x"]}', 'qasper.jsonl, row 2: "pred" must be a text'),
        ('{"pred": "x"}', 'qasper.jsonl, line 1: "answers" must be a list of texts'),
        ("", "qasper.jsonl has no rows"),
    ):
        file.write_text(content)
        fails(message)
    file.unlink()
    write(tmp_path, "passage_retrieval_en", {"pred": "1", "answers": ["one"]})
    fails("passage_retrieval_en.jsonl, row 1: the reference 'one' does not name a paragraph")


def test_wrong_usage_is_status_2() -> None:
    with pytest.raises(SystemExit) as error:
        main([])
    assert error.value.code == 2
