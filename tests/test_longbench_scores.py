"""LongBench's scores, and which averages they give; the official scorers' own cases are in tests/conformance."""

from __future__ import annotations

from typing import Any

import pytest

from fasa_bench.errors import UserError
from fasa_bench.task import Example, Prediction
from fasa_bench.tasks.longbench import LongBench
from fasa_bench.tasks.longbench_score import AVERAGES, CHINESE, DATA_SETS, TABLE2


def scored(
    task: LongBench, dataset: str, text: str, answers: list[str], length: int = 1, **fields: Any
) -> dict[str, Any]:
    """A stored row."""
    own = {"dataset": dataset, "answers": answers, "all_classes": None, "length": length, **fields}
    return {
        "id": f"{dataset}/{text[:9]}/{length}",
        "fields": own,
        "scores": task.score(Example("x", [], fields=own), Prediction([], text, "stop")),
    }


def test_scores_by_hand() -> None:
    task = LongBench()

    def score(dataset: str, text: str, answers: list[str], **fields: Any) -> dict[str, Any]:
        return scored(task, dataset, text, answers, **fields)["scores"]

    # First line only in few-shot sets, and the best answer counts.
    assert score("triviaqa", "\nParis\nfoo", ["London", "Paris"]) == {"score": 1.0, "metric": "qa_f1", "empty": False}
    assert score("hotpotqa", "Paris\nfoo", ["Paris"])["score"] == pytest.approx(2 / 3)
    assert score("trec", "City\nState", ["City"], all_classes=["City", "State"])["score"] == 1
    summary = score("multi_news", "the cat", ["no", "the fat cat"])
    assert summary["score"] == summary["score_recursion_limited"] == pytest.approx(0.8, abs=1e-7)
    assert summary["rouge_l_google"] == pytest.approx(0.8)
    assert score("vcsum", "北京", ["北京"])["rouge_l_google"] == 1
    long = " ".join(map(str, range(1200)))
    repeated = score("gov_report", long, [long])
    assert repeated["score"] > 0.99
    assert repeated["score_recursion_limited"] == 0
    assert score("samsum", "\n\n", ["x"])["empty"]
    assert not score("qasper", "\nx", ["x"])["empty"]
    with pytest.raises(UserError, match="all_classes"):
        score("trec", "City", ["City"])


def test_averages_and_bins_of_length_by_hand() -> None:
    task = LongBench(["qasper", "gov_report"], by_length=True)
    long = " ".join(map(str, range(1200)))
    rows = [
        scored(task, "qasper", "x", ["x"], length=3999),
        scored(task, "qasper", "...", ["x"], length=4000),
        scored(task, "qasper", "x y", ["x"], length=8000),
        scored(task, "gov_report", long, [long], length=9000),
        scored(task, "gov_report", "the cat", ["the fat cat"], length=9000),
    ]
    result = task.metrics(rows)
    assert result["qasper"]["value"] == pytest.approx(100 * (1 + 0 + 2 / 3) / 3)
    assert result["qasper"]["n"] == 3
    assert 0 <= result["qasper"]["ci_low"] < result["qasper"]["value"] < result["qasper"]["ci_high"] <= 100
    assert result["gov_report"]["value"] == pytest.approx(90, abs=1e-5)
    assert result["gov_report/rouge_l_google"]["value"] == pytest.approx(90)
    assert [result[f"qasper/{part}"]["value"] for part in ("0-4k", "4-8k")] == [100, 0]
    assert result["gov_report/0-4k"] == {"value": None, "ci_low": None, "ci_high": None, "n": 0}
    assert result["avg"]["value"] == pytest.approx((500 / 9 + 90) / 2, abs=1e-5)  # of data sets, not of rows
    assert result["avg"]["n"] == 5
    assert result["n_empty"] == {"value": 1, "ci_low": None, "ci_high": None, "n": 5}
    assert result["n_recursion"]["value"] == 1


def test_average_is_blank_when_a_data_set_is_missing() -> None:
    task = LongBench(["qasper", "musique"])
    result = task.metrics([scored(task, "qasper", "x", ["x"])])
    assert result["qasper"]["value"] == 100
    assert result["musique"]["value"] is None
    assert result["avg"]["value"] is None
    assert task.metrics([])["avg"]["value"] is None


def test_averages_and_their_data_sets() -> None:
    """Each data set scores its number in the list; an average is blank as soon as one of its sets is missing."""
    task = LongBench(by_length=True)

    def rows(*left_out: str) -> list[dict[str, Any]]:
        fields = {"answers": [], "length": 5000}
        return [
            {"id": f"{name}/{i}", "fields": {**fields, "dataset": name}, "scores": {"score": (place + i) / 100} | REST}
            for place, name in enumerate(DATA_SETS)
            for i in (0, 2)
            if name not in left_out
        ]

    whole = task.metrics(rows())
    place = {name: number for number, name in enumerate(DATA_SETS, start=1)}  # the mean of each data set
    assert len(CHINESE) == 5
    assert len(TABLE2) == 15
    assert whole["avg"]["value"] == whole["avg_all"]["value"] == pytest.approx(11)
    assert whole["avg_table2"]["value"] == pytest.approx(sum(place[name] for name in TABLE2) / 15)
    assert whole["avg_chinese"]["value"] == pytest.approx((4 + 8 + 12 + 16 + 19) / 5)
    assert whole["avg_english"]["value"] == pytest.approx((231 - 59) / 16)
    assert whole["avg_retrieval"]["value"] == pytest.approx((17 + 18) / 2)
    # the leaderboard's: categories first, code in both languages
    code = (20 + 21) / 2
    english = [2, (5 + 6 + 7) / 3, (9 + 10 + 11) / 3, (13 + 14 + 15) / 3, 17.5, code]
    assert whole["official_english"]["value"] == pytest.approx(sum(english) / 6)
    assert whole["official_chinese"]["value"] == pytest.approx((4 + 8 + 12 + 16 + 19 + code) / 6)
    assert whole["avg/4-8k"]["value"] == pytest.approx(11)
    assert whole["avg/0-4k"]["value"] is None
    for name in ("avg", *AVERAGES):
        assert whole[name]["ci_low"] < whole[name]["value"] < whole[name]["ci_high"]
    missing = task.metrics(rows("passage_count"))
    blank = {name for name in ("avg", *AVERAGES) if missing[name]["value"] is None}
    assert blank == {"avg", "avg_all", "avg_table2", "avg_english", "avg_retrieval", "official_english"}
    assert {name for name in LongBench("table2").metrics([]) if name.startswith(("avg", "official"))} == {
        "avg",
        "avg_table2",
        "avg_retrieval",
    }


REST = {"empty": False, "rouge_l_google": 0.0, "score_recursion_limited": None}


def test_official_averages_are_those_of_the_leaderboard() -> None:
    """ChatGLM3-6B-32k in the benchmark's README: 48.5 English and 52.8 Chinese, from its numbers of the data sets."""
    # in the order of DATA_SETS
    published = [26.0, 43.3, 51.7, 62.3, 54.4, 44.9, 40.4, 44.78, 36.8, 23.9, 27.9, 17.8]
    published += [79.0, 87.1, 38.2, 42.0, 2.0, 99.0, 94.0, 57.66, 54.76]
    rows = [
        {"id": name, "fields": {"dataset": name}, "scores": {"score": value / 100} | REST}
        for name, value in zip(
            DATA_SETS,
            published,
            strict=True,
        )
    ]
    found = LongBench().metrics(rows)
    assert found["official_english"]["value"] == pytest.approx(48.5, abs=0.06)
    assert found["official_chinese"]["value"] == pytest.approx(52.8, abs=0.06)
    assert found["official_english"]["ci_low"] is None  # of one example each
