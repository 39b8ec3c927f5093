"""What kind of token an id is, from its text: so that what methods miss can be told by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

KINDS = ("word", "part", "digit", "punctuation", "newline", "blank", "special", "generated")


def kinds_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """One of KINDS for each id: a word's first token, a part of a word (also bytes of a character), ...

    Chinese and other scripts without blanks have parts only.
    """
    known: dict[int, str] = {}
    special = set(tokenizer.all_special_ids)
    for token in set(ids) - special:
        known[token] = _kind(tokenizer.decode([token]), str(tokenizer.convert_ids_to_tokens(token)))
    return ["special" if token in special else known[token] for token in ids]


def _kind(text: str, piece: str) -> str:
    """text: as it is printed; piece: as the vocabulary has it, where a mark stands for the blank before a word."""
    if "\n" in text:
        return "newline"
    if not text.strip():
        return "blank"
    if any(char.isdigit() for char in text):
        return "digit"
    if any(char.isalpha() for char in text):
        return "word" if piece.startswith(("Ġ", "▁", " ")) else "part"
    return "part" if "\N{REPLACEMENT CHARACTER}" in text else "punctuation"
