"""Text metrics of LongBench v1, value for value what its official scorer computes.

Source: THUDM/LongBench at commit 2e00731f, LongBench/metrics.py, with rouge 1.0.1, jieba 0.42.1, fuzzywuzzy 0.18.0.
Every metric takes one prediction and one reference and returns a number in [0, 1]; an empty prediction is no error.
"""

from __future__ import annotations

import difflib
import logging
import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from fasa_bench.errors import UserError
from fasa_bench.rouge import OFFICIAL_TRACE
from fasa_bench.rouge import rouge_l as _rouge_l

_ASCII_PUNCTUATION = frozenset(string.punctuation)
# The characters that the Chinese metric drops besides ASCII punctuation; 《 is not among them.
_ZH_PUNCTUATION = _ASCII_PUNCTUATION | frozenset(
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏"
)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_DIGITS = re.compile(r"\d+")


def is_empty(prediction: str) -> bool:
    """Nothing but blanks and periods: no metric can find anything in it."""
    return not prediction.replace(".", "").strip()


def first_line(prediction: str) -> str:
    """What few-shot sets score: leading newlines dropped, then the first line."""
    return prediction.lstrip("\n").split("\n")[0]


def qa_f1(prediction: str, reference: str) -> float:
    """F1 over English words: lower case, ASCII punctuation deleted (a hyphen joins its words), then a, an, the."""
    return _f1(_english_words(prediction), _english_words(reference))


def qa_f1_zh(prediction: str, reference: str) -> float:
    """F1 over jieba words, each one lowered and freed of punctuation after the cutting."""
    return _f1(_chinese_words(prediction), _chinese_words(reference))


def rouge_l(prediction: str, reference: str, *, recursion_limit: bool = False) -> float:
    """ROUGE-L F of the package `rouge` (fasa_bench.rouge), not Google's.

    recursion_limit: give 0, as the official scorer does, where the package would hit Python's recursion limit. Off by
    default: that 0 says something about the scorer's stack, nothing about the prediction.
    """
    f, trace = _rouge_l(prediction, reference)
    return 0.0 if recursion_limit and trace > OFFICIAL_TRACE else f


def rouge_l_zh(prediction: str, reference: str, *, recursion_limit: bool = False) -> float:
    """The same over jieba words. Its official function stands one call deeper in the stack."""
    f, trace = _rouge_l(" ".join(_cut(prediction)), " ".join(_cut(reference)))
    return 0.0 if recursion_limit and trace > OFFICIAL_TRACE - 1 else f


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """1 / (number of classes named in the prediction) if the reference is one of them, else 0.

    Named classes that are a proper part of the reference should not count. The official code deletes them from the list
    it is iterating over, so the class after a deleted one is never looked at and may stay. Kept, since published
    numbers have it: class names nested in the right one can cost half the point or more.
    """
    named = [name for name in classes if name in prediction]
    at = 0
    while at < len(named):
        if named[at] in reference and named[at] != reference:
            named.remove(named[at])
        at += 1
    return 1 / len(named) if reference in named else 0.0


def retrieval(prediction: str, reference: str) -> float:
    """Share of the prediction's numbers equal to N of the reference "Paragraph N"; UserError if it has none."""
    return _share_of_numbers(prediction, _paragraph(r"Paragraph (\d+)", reference))


def retrieval_zh(prediction: str, reference: str) -> float:
    """The same for "段落N"."""
    return _share_of_numbers(prediction, _paragraph(r"段落(\d+)", reference))


def count(prediction: str, reference: str) -> float:
    """Share of the prediction's digit runs that equal the reference as text: "08" is not "8", "8.0" is two numbers."""
    return _share_of_numbers(prediction, reference)


def code_similarity(prediction: str, reference: str) -> float:
    """fuzzywuzzy's `ratio` / 100 of the first line that holds no backquote, "#" or "//"; no such line counts as "".

    fuzzywuzzy computes another number when python-Levenshtein is installed (5 points more on average). The official
    requirements do not have that package, so this is the pure-Python value: difflib's ratio, as a whole percentage.
    """
    lines = prediction.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if code == reference:
        return 1.0
    if not code or not reference:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, code, reference).ratio()) / 100


def rouge_l_google(prediction: str, reference: str, *, chinese: bool = False) -> float:
    """ROUGE-L F of Google's rouge-score, without stemming, to be shown beside the official one.

    chinese: over jieba words; the package's own word cutter keeps nothing but ASCII letters and digits.
    """
    return float(_google_scorer(chinese).score(reference, prediction)["rougeL"].fmeasure)


def _f1(prediction: list[str], reference: list[str]) -> float:
    same = (Counter(prediction) & Counter(reference)).total()
    if same == 0:
        return 0.0
    precision, recall = same / len(prediction), same / len(reference)
    return 2 * precision * recall / (precision + recall)


def _english_words(text: str) -> list[str]:
    kept = "".join(char for char in text.lower() if char not in _ASCII_PUNCTUATION)
    return _ARTICLES.sub(" ", kept).split()


def _chinese_words(text: str) -> list[str]:
    words = ("".join(char for char in word.lower() if char not in _ZH_PUNCTUATION) for word in _cut(text))
    return [kept for word in words if (kept := "".join(word.split()))]


@lru_cache(maxsize=4096)  # one reference meets the same prediction in several metrics
def _cut(text: str) -> tuple[str, ...]:
    """jieba's words. Imported here: English scoring should not load its dictionary."""
    import jieba

    jieba.setLogLevel(logging.WARNING)  # it announces on stderr that it loads its dictionary
    return tuple(jieba.cut(text, cut_all=False))


def _paragraph(pattern: str, reference: str) -> str:
    found = re.search(pattern, reference)
    if found is None:
        raise UserError(f"the reference {reference!r} does not name a paragraph ({pattern})")
    return found.group(1)


def _share_of_numbers(prediction: str, wanted: str) -> float:
    numbers = _DIGITS.findall(prediction)
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


class _JiebaTokenizer:
    """The interface that rouge_score asks of a tokenizer. Blanks and punctuation are no words."""

    def tokenize(self, text: str) -> list[str]:
        return _chinese_words(text)


@cache
def _google_scorer(chinese: bool) -> Any:
    from rouge_score.rouge_scorer import RougeScorer  # loads nltk: half a second that only this number needs

    return RougeScorer(["rougeL"], use_stemmer=False, tokenizer=_JiebaTokenizer() if chinese else None)
