"""The LongBench metrics against hand-computed values and against the libraries of the official scorer."""

from __future__ import annotations

import difflib
import itertools
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import pytest
from rouge import Rouge

from fasa_bench import metrics
from fasa_bench.errors import UserError
from fasa_bench.rouge import OFFICIAL_TRACE
from fasa_bench.rouge import rouge_l as rouge_l_with_trace


def random_text(rng: random.Random, words: int, vocabulary: int) -> str:
    """Words, blank runs and periods, also doubled and trailing ones."""
    glue = [" ", " ", " ", " ", ". ", ".", "\n", "  "]
    parts = (rng.choice(glue) + (f"w{rng.randrange(vocabulary)}" if rng.random() < 0.95 else "") for _ in range(words))
    return "".join(parts)


def package_f(prediction: str, reference: str) -> float:
    """The value as the official scorer takes it: any exception of the package is a 0."""
    try:
        return float(Rouge(metrics=["rouge-l"]).get_scores([prediction], [reference], avg=True)["rouge-l"]["f"])
    except ValueError:
        return 0.0


def test_rouge_equals_the_package_bit_for_bit() -> None:
    rng = random.Random(0)
    positive = 0
    for _ in range(1500):
        vocabulary = rng.choice([2, 4, 10, 40])
        prediction, reference = (random_text(rng, rng.choice([0, 1, 3, 10, 40]), vocabulary) for _ in range(2))
        expected = package_f(prediction, reference)
        positive += expected > 0
        assert metrics.rouge_l(prediction, reference) == expected, (prediction, reference)
    assert positive > 700, positive  # the texts do overlap


def test_rouge_of_a_long_sentence_equals_the_package_with_room_to_recurse() -> None:
    rng = random.Random(1)
    prediction, reference = (" ".join(f"w{rng.randrange(200)}" for _ in range(n)) for n in (600, 700))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    try:
        expected = package_f(prediction, reference)
    finally:
        sys.setrecursionlimit(limit)
    f, trace = rouge_l_with_trace(prediction, reference)
    assert trace > OFFICIAL_TRACE
    assert f == expected > 0.2
    assert metrics.rouge_l(prediction, reference) == expected
    assert metrics.rouge_l(prediction, reference, recursion_limit=True) == 0


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the official limit was measured on Python 3.11")
@pytest.mark.parametrize("chinese", [False, True])
def test_recursion_limit_is_where_the_package_gives_up(chinese: bool) -> None:
    # The call depth of the official eval.py: module, scorer, metric (one more for Chinese), then the package.
    script = """
from rouge import Rouge
def metric(a, b):
    try:
        return Rouge(metrics=["rouge-l"]).get_scores([a], [b], avg=True)["rouge-l"]["f"]
    except RecursionError:
        return 0.0
def metric_zh(a, b):
    return metric(a, b)
def scorer(n, f):
    text = " ".join(map(str, range(n)))
    return f(text, text)
"""
    longest = OFFICIAL_TRACE - chinese
    for n in (longest, longest + 1):
        script += f"print(scorer({n}, {'metric_zh' if chinese else 'metric'}) > 0)\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]

    ours = metrics.rouge_l_zh if chinese else metrics.rouge_l
    for n, scored in ((longest, True), (longest + 1, False)):
        text = " ".join(map(str, range(n)))
        assert (ours(text, text, recursion_limit=True) > 0.99) is scored
        assert ours(text, text) > 0.99


def test_rouge_is_fast_enough_for_a_whole_data_set() -> None:
    rng = random.Random(2)
    texts = [" ".join(f"w{rng.randrange(400)}" for _ in range(500)) for _ in range(41)]
    start = time.perf_counter()
    for prediction, reference in itertools.pairwise(texts):
        metrics.rouge_l(prediction, reference)
    assert time.perf_counter() - start < 2  # 40 pairs of 500-word sentences; takes 0.02 s


def test_rouge_by_hand() -> None:
    # L = {the, cat}: precision 2/2, recall 2/3
    assert metrics.rouge_l("the cat", "the fat cat") == pytest.approx(2 * (2 / 3) / (5 / 3), abs=1e-7)
    # words are sets, and sentence order does not matter: the union over all pairs has both words
    assert metrics.rouge_l("b b b. a", "a. b.") == pytest.approx(1, abs=1e-7)
    # a final ". " makes a blank sentence, which counts as one more word: precision 1/2, recall 1
    assert metrics.rouge_l("a. ", "a") == pytest.approx(2 / 3, abs=1e-7)


@pytest.mark.parametrize("text", ["", "...", "\n", " "])
def test_empty_predictions_score_0_without_an_exception(text: str) -> None:
    assert metrics.is_empty(text)
    assert metrics.qa_f1(text, "yes") == 0
    assert metrics.qa_f1_zh(text, "北京") == 0
    assert metrics.rouge_l(text, "yes. no.") == 0
    assert metrics.rouge_l_zh(text, "北京。") == 0
    assert metrics.classification(text, "City", ["City"]) == 0
    assert metrics.retrieval(text, "Paragraph 3") == 0
    assert metrics.retrieval_zh(text, "段落3") == 0
    assert metrics.count(text, "3") == 0
    assert metrics.code_similarity(text, "return x") <= 0.23  # a blank is a character of code
    assert metrics.rouge_l_google(text, "yes") == 0


def test_is_empty_sees_text() -> None:
    assert not metrics.is_empty(" a.")
    assert not metrics.is_empty("。")


def test_qa_f1_by_hand() -> None:
    assert metrics.qa_f1("The Blue-green algae!", "a bluegreen algae") == 1  # case, articles, punctuation
    assert metrics.qa_f1("Paris, France", "Paris") == pytest.approx(2 / 3)
    assert metrics.qa_f1("to to be", "to be") == pytest.approx(2 * (2 / 3) / (5 / 3))  # words are counted, not a set
    assert metrics.qa_f1("“yes”", "yes") == 0  # curly quotes are no ASCII punctuation
    assert metrics.qa_f1("the", "a") == 0  # nothing is left of either
    # F1, not substring match: one right word in a sentence of ten is 2 * 0.1 / 1.1
    assert metrics.qa_f1("I think that it must have been Paris or so", "Paris") == pytest.approx(0.2 / 1.1)


def test_qa_f1_zh_by_hand() -> None:
    # jieba: 他 / 住 / 在 / 北京 and 北京; the full stop is dropped
    assert metrics.qa_f1_zh("他住在北京。", "北京") == pytest.approx(0.4)
    assert metrics.qa_f1_zh("《北京》", "北京") == pytest.approx(2 / 3)  # 《 stays, 》 goes


def test_classification_by_hand() -> None:
    assert metrics.classification("City or State", "City", ["City", "State", "Date"]) == 0.5
    assert metrics.classification("Type: Date", "City", ["City", "Date"]) == 0
    assert metrics.classification("Other number", "Other number", ["number", "Other number"]) == 1
    # The quirk: of the nested a, b, c only a and c are looked at, so b stays and halves the score.
    assert metrics.classification("abc", "abc", ["a", "b", "c", "abc"]) == 0.5


def test_numbers_by_hand() -> None:
    assert metrics.retrieval("Paragraph 12, not 3 and not 4", "Paragraph 12") == pytest.approx(1 / 3)
    assert metrics.retrieval_zh("段落7", "段落7") == 1
    assert metrics.count("08", "8") == 0
    assert metrics.count("8.0", "8") == 0.5
    with pytest.raises(UserError, match="does not name a paragraph"):
        metrics.retrieval("3", "Section 3")


def test_first_line() -> None:
    assert metrics.first_line("\n\nParis\nfoo") == "Paris"
    assert metrics.first_line(" Paris ") == " Paris "  # nothing else is stripped
    assert metrics.first_line("\n") == ""


def fuzzywuzzy_ratio(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks for python-Levenshtein
        from fuzzywuzzy import fuzz
    monkeypatch.setattr(fuzz, "SequenceMatcher", difflib.SequenceMatcher)  # also where python-Levenshtein is installed
    return fuzz.ratio


def test_code_similarity_equals_fuzzywuzzy_on_difflib(monkeypatch: pytest.MonkeyPatch) -> None:
    ratio = fuzzywuzzy_ratio(monkeypatch)
    rng = random.Random(3)
    pieces = ["self", ".", "(", ")", " ", "=", "value", "index", "return ", ",", "x", "é", "  "]
    for _ in range(600):
        reference = "".join(rng.choice(pieces) for _ in range(rng.choice([0, 1, 5, 20, 100])))
        prediction = "".join(rng.choice(pieces) if rng.random() < 0.3 else char for char in reference)
        assert metrics.code_similarity(prediction, reference) == ratio(prediction, reference) / 100


def test_code_similarity_by_hand() -> None:
    assert metrics.code_similarity("", "") == 1
    assert metrics.code_similarity("\n\n# comment\n`x`\na // b\nfoo()\nbar", "foo()") == 1
    assert metrics.code_similarity("# only a comment", "foo()") == 0
    assert metrics.code_similarity("foo", "foo()") == 0.75  # 2 * 3 / 8
    # Past 200 characters difflib ignores frequent characters; python-Levenshtein would say 0.99.
    assert metrics.code_similarity("ab" * 120 + "c", "b" + "ab" * 120) < 0.05


def test_google_rouge_by_hand() -> None:
    assert metrics.rouge_l_google("the cat", "the fat cat") == pytest.approx(0.8)
    # 5 words with 3 in common order: no sets, no sentences
    assert metrics.rouge_l_google("a b. a b c", "b. a. c d e") == pytest.approx(3 / 5)
    # jieba: 他 / 住 / 在 / 北京, so 2 * 1/4 / (5/4); the package's own words would be none
    assert metrics.rouge_l_google("他住在北京。", "北京", chinese=True) == pytest.approx(0.4)
