"""Grading of mathematical answers: what counts as the answer, what counts as equal, and what must not stop a run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from fasa_bench.tasks.math_grading import Grader, last_box, pass_at_k


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    grader = Grader(workers=1)
    yield grader
    grader.close()


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"so \boxed{\frac{1}{\sqrt{2}}}.", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{7} or \boxed{8", "7"),
        (r"{ \boxed{7}", "7"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed {5}", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{ }", ""),
        (r"\boxed{1}} {", "1"),
        (r"\boxed{unclosed", None),
        (r"\boxed 5", None),
        ("the answer is 5", None),
        ("", None),
    ],
)
def test_the_last_balanced_box(text: str, box: str | None) -> None:
    assert last_box(text) == box


def test_long_texts_are_read_once() -> None:
    start = time.perf_counter()
    assert last_box(r"\boxed{" * 50_000) is None
    assert last_box(r"\boxed{1}" + "{" * 100_000 + "x" * 100_000) == "1"
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        (r"\frac{14}{3}", r"\dfrac{14}{3}", True),
        (r"\frac{14}{3}", "14/3", True),
        (r"\frac{1}{2}", "0.5", True),
        (r"\frac{1}{3}", "0.3", False),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)", True),
        ("(1,2)", "(2,1)", False),
        ("p - q", "-q+p", True),
        (r"3\sqrt{13}", r"\sqrt{117}", True),
        ("6 - 5i", "-5i + 6", True),
        ("x^2+2x+1", "(x+1)^2", True),
        (r"\{1,2,3\}", r"\{3,2,1\}", True),
        (r"\{1,2,3\}", r"\{1,2\}", False),
        ("1,-2", "-2, 1", True),
        ("[0,1)", "[0, 1)", True),
        ("[0,1)", "[0,1]", False),
        (r"(-\infty,3]", r"(-\infty, 3]", True),
        ("10", r"10\text{ cm}", True),
        ("10", r"100\text{ cm}", False),
        (r"90^\circ", "90", True),
        (r"\$32,348", "32348", True),
        ("x=5", "5", True),
        (r"\text{Evelyn}", r"\text{Bob}", False),
        ("2", "200", False),
        ("2", r"200\%", False),
        ("200", "2", False),
        ("50", r"50\%", True),
        (r"10\%", "10", True),
        ("073", "73", True),
        ("73", "073", True),
        ("073", "730", False),
        ("25", "1025", False),
        (r"\boxed{42}", "42", True),
        ("42", r"\boxed{42}", True),
        ("5", "", False),
        ("", "5", False),
        ("", "", False),
        ("5", r"\frac{", False),
    ],
)
def test_what_is_equal(grader: Grader, gold: str, answer: str, right: bool) -> None:
    assert grader.grade([rf"Final answer: \boxed{{{answer}}}"], gold) == [right]


def test_only_a_box_is_an_answer(grader: Grader) -> None:
    assert grader.grade(["42", "the answer is 42", "", r"\boxed{42", r"\boxed{41} \boxed{42}"], "42") == [
        False,
        False,
        False,
        False,
        True,
    ]


def test_hostile_answers_cost_seconds_and_are_wrong() -> None:
    """A huge power, 100,000 characters, deep nesting; and after each a usual answer is graded as ever."""
    grader = Grader(seconds=2, workers=1)
    hostile = ["9^{9^{9^{9}}}", "9" * 100_000, "1+" * 50_000 + "1", "{" * 20_000 + "1" + "}" * 20_000, "1000000!!"]
    try:
        for answer in hostile:
            start = time.perf_counter()
            assert grader.grade([rf"\boxed{{{answer}}}"], r"\frac{1}{2}") == [False]
            assert time.perf_counter() - start < 20  # with the time to replace the process
            assert grader.grade([r"\boxed{0.5}"], r"\frac{1}{2}") == [True]
    finally:
        grader.close()


def test_an_answer_is_never_run(grader: Grader, tmp_path: Path) -> None:
    """A text of a model is read as mathematics, whatever Python it may be."""
    trace = tmp_path / "trace"
    for answer in (f"__import__('pathlib').Path('{trace}').touch()", f"open('{trace}', 'w')", "().__class__.__base__"):
        assert grader.grade([rf"\boxed{{{answer}}}"], r"\frac{1}{2}") == [False]
    assert not trace.exists()
    assert grader.grade([r"\boxed{0.5}"], r"\frac{1}{2}") == [True]


def test_a_killed_process_is_replaced(grader: Grader) -> None:
    assert grader.grade([r"\boxed{0.5}"], r"\frac{1}{2}") == [True]
    worker = grader._idle.get()
    assert worker is not None
    worker.kill()
    grader._idle.put(worker)
    assert grader.grade([r"\boxed{0.5}"], r"\frac{1}{2}") == [True]


def test_answers_keep_their_order_over_several_processes() -> None:
    grader = Grader(workers=2)
    try:
        texts = [rf"\boxed{{\frac{{{i}}}{{4}}}}" for i in range(8)]
        assert grader.grade(texts, "0.5") == [i == 2 for i in range(8)]
    finally:
        grader.close()


def test_solutions_of_math500_are_right_for_their_own_problem_only(grader: Grader, shared_data: Path) -> None:
    text = (shared_data / "math500.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    assert len(rows) == 500
    assert [row["answer"] for row in rows if grader.grade([row["solution"]], row["answer"]) != [True]] == []
    wrong = [
        (one["answer"], other["answer"])
        for one, other in pairwise(rows[:101])
        if one["answer"] != other["answer"] and grader.grade([one["solution"]], other["answer"]) == [True]
    ]
    assert wrong == [("5", "x=5")]  # which are the same answer


def test_pass_at_k_by_hand() -> None:
    assert pass_at_k([1, 0, 1, 0], 1) == 0.5
    assert pass_at_k([1, 0, 0, 0], 2) == 0.5  # 1 - C(3,2)/C(4,2) = 1 - 3/6
    assert pass_at_k([1, 1, 0, 0, 0], 3) == pytest.approx(0.9)  # 1 - C(3,3)/C(5,3) = 1 - 1/10
    assert pass_at_k([0, 0, 0], 3) == 0
    assert pass_at_k([0, 0, 1], 3) == 1
    # the paper's AIME24: 3 right of 16
    three = [1] * 3 + [0] * 13
    assert pass_at_k(three, 1) == pytest.approx(3 / 16)
    assert pass_at_k(three, 4) == pytest.approx(1 - (13 * 12 * 11 * 10) / (16 * 15 * 14 * 13))  # 1 - 715/1820
    assert (pass_at_k(three, 13), pass_at_k(three, 14)) == (pytest.approx(1 - 1 / 560), 1)
    # 8 samples where 16 were asked for, 4 of them right: the real count is what counts
    eight = [True] * 4 + [False] * 4
    assert pass_at_k(eight, 1) == 0.5
    assert pass_at_k(eight, 16) == 1
    assert pass_at_k([False] * 8, 16) == 0
    for bad in ([], 1), ([1], 0):
        with pytest.raises(ValueError, match="samples"):
            pass_at_k(*bad)
