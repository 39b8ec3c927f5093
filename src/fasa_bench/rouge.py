"""ROUGE-L as LongBench's official scorer gets it, from the formula of the package `rouge` 1.0.1 (pltrdy).

That formula is neither Lin's ROUGE-L nor Google's. Sentences are the pieces between "." characters, words are cut at
blanks, and with L the set of all words on one longest common subsequence (LCS) of any reference sentence with any
candidate sentence, r and c the sets of all words of reference and candidate:

    precision = |L| / |c|     recall = |L| / |r|     F = 2 * precision * recall / (precision + recall + 1e-8)

Because only the words of *one* LCS of a pair count, its trace must be walked with the package's own preference among
equally long subsequences (below). The package walks it by recursion and keeps the table of lengths in a dict; here both
are replaced by bit vectors (Hyyrö 2004), so long sentences neither fail nor take minutes.
"""

from __future__ import annotations

from typing import NamedTuple


class RougeL(NamedTuple):
    """f: the F score in [0, 1]. trace: steps of the longest LCS trace of any pair of sentences; it tells whether the
    package, which walks the trace by recursion, would have hit Python's recursion limit (see OFFICIAL_TRACE)."""

    f: float
    trace: int


# Longest trace that the official scorer survives, run as `python eval.py` with Python's default recursion limit of
# 1000; measured with rouge 1.0.1 on Python 3.11. A longer one raises RecursionError there, which it scores as 0.
# A scorer started deeper in the stack (Hydra, a notebook) gives up earlier, so this is the only reproducible value.
OFFICIAL_TRACE = 990


def rouge_l(prediction: str, reference: str) -> RougeL:
    """ROUGE-L F of rouge 1.0.1. A text of nothing but periods has no sentence and scores 0 (the package raises)."""
    candidate, target = _sentences(prediction), _sentences(reference)
    if not candidate or not target:
        return RougeL(0.0, 0)
    common: set[str] = set()
    longest = 0
    columns = [(len(sentence), _positions(sentence)) for sentence in candidate]
    for sentence in target:
        for width, positions in columns:
            words, steps = _lcs(sentence, width, positions)
            common |= words
            longest = max(longest, steps)
    precision = len(common) / len(set().union(*candidate))
    recall = len(common) / len(set().union(*target))
    return RougeL(2.0 * (precision * recall / (precision + recall + 1e-8)), longest)


def _sentences(text: str) -> list[list[str]]:
    """Words of each sentence. A blank sentence, as after a final ". ", is kept and holds one empty word, as in the
    package: that word counts, and matches a blank sentence of the other text."""
    return [" ".join(piece.split()).split(" ") for piece in text.split(".") if piece]


def _positions(sentence: list[str]) -> dict[str, int]:
    """word -> bit vector of the places where it stands."""
    bits: dict[str, int] = {}
    for place, word in enumerate(sentence):
        bits[word] = bits.get(word, 0) | 1 << place
    return bits


def _lcs(rows: list[str], width: int, positions: dict[str, int]) -> tuple[set[str], int]:
    """Words on the LCS of `rows` with a sentence of `width` words, and the steps of the trace that found them.

    With T[i, j] the LCS length of the first i row words and the first j column words, bit j-1 of vectors[i] is 0 where
    T[i, j] = T[i, j-1] + 1, and one addition makes a whole row of T from the row above it.

    The trace goes from the end: diagonally where the words are equal; else to row i-1 where T[i-1, j] > T[i, j-1]; else
    to column j-1. Where the words differ, T[i, j] is the larger of those two, so the condition is T[i, j] > T[i, j-1].
    """
    full = (1 << width) - 1
    vector = full
    vectors = [vector]
    for word in rows:
        match = vector & positions.get(word, 0)
        vector = ((vector + match) | (vector - match)) & full
        vectors.append(vector)

    words: set[str] = set()
    i, j, steps = len(rows), width, 0
    while i and j:
        steps += 1
        bit = 1 << (j - 1)
        if positions.get(rows[i - 1], 0) & bit:
            words.add(rows[i - 1])
            i, j = i - 1, j - 1
        elif not vectors[i] & bit:
            i -= 1
        else:
            j -= 1
    return words, steps
