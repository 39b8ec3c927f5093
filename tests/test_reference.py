"""Perplexities that an independent, mask-based implementation computed (embedded model, float32, a PG-19 book).

768 tokens are prefilled densely, the next 256 scored one decode step at a time; windows 0 and 1 of the book's ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from fasa_bench import runner
from tests.conftest import ROOT

REFERENCE = {
    "method=fkv": (16.703, 22.520),
    "method=oracle budget=64": (18.744, 24.607),
    "method=oracle budget=128": (17.594, 22.902),
    "method=streamingllm budget=128": (19.427, 25.361),
    "method=quest budget=64 limit=1": (60.13,),
    "method=quest budget=128 limit=1": (30.62,),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reference")


def perplexities(book: Path, results: Path, line: str) -> list[float]:
    protocol = ["task=ppl", f"task.path={book}", "task.prefill=768", "task.decode=256", "task.windows=2"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("config", [*protocol, "logger=none", f"results_dir={results}", *line.split()])
    folder = runner.run(runner.Job.of(cfg))
    rows: list[dict[str, Any]] = [json.loads(row) for row in (folder / "predictions.jsonl").read_text().splitlines()]
    return [row["scores"]["perplexity"] for row in rows]


@pytest.mark.parametrize("line", REFERENCE)
def test_equals_the_independent_implementation(shared_data: Path, results: Path, line: str) -> None:
    found = perplexities(shared_data / "ppl" / "pg19" / "10146.txt", results, line)
    assert found == pytest.approx(REFERENCE[line], rel=1e-3)


def test_fasa_plus_comes_close_to_full_kv_and_beats_fasa(shared_data: Path, results: Path) -> None:
    book = shared_data / "ppl" / "pg19" / "10146.txt"
    full, ours, paper = (
        perplexities(book, results, line)
        for line in ("method=fkv", "method=fasa_plus budget=64", "method=fasa_c budget=64")
    )
    assert all(a < 1.15 * b for a, b in zip(ours, full, strict=True))
    assert sum(paper) > 1.15 * sum(ours)
