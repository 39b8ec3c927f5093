"""What a stored row says of its prompt and its answers, with their text or without."""

from __future__ import annotations

import hashlib
from typing import Any

from fasa_bench.task import Example, Prediction

ENDS = 48


def prompt(example: Example) -> dict[str, Any]:
    """Hash and length of the prompt as the model gets it, and its length before the task cut it.

    The hash is a sha256 of the token ids, written as decimal numbers with commas in between.
    """
    length = len(example.prompt_ids)
    return {
        "prompt_ids_sha256": hashlib.sha256(",".join(map(str, example.prompt_ids)).encode()).hexdigest(),
        "prompt_tokens": length,
        "prompt_tokens_before": example.fields.get("prompt_tokens_before", length),
        "prompt_truncated": bool(example.fields.get("truncated")),
    }


def prompt_ends(example: Example, tokenizer: Any) -> dict[str, str]:
    """The first and the last ENDS tokens of the prompt as text, for readers; the whole prompt is not stored."""
    ids = example.prompt_ids
    ends = {"prompt_head": ids[:ENDS], "prompt_tail": ids[max(ENDS, len(ids) - ENDS) :]}
    return {name: tokenizer.decode(part) for name, part in ends.items() if part}


def answers(prediction: Prediction) -> dict[str, Any]:
    """Text, length and end of the answer; lists, one item a sample, if answers were drawn."""
    samples = prediction.samples
    if not samples:
        return {
            "prediction": prediction.text,
            "finish_reason": prediction.finish_reason,
            "generated_tokens": len(prediction.token_ids),
            "truncated": prediction.finish_reason == "length",
        }
    return {
        "prediction": [sample.text for sample in samples],
        "finish_reason": [sample.finish_reason for sample in samples],
        "generated_tokens": [len(sample.token_ids) for sample in samples],
        "truncated": [sample.finish_reason == "length" for sample in samples],
    }


def without_texts(row: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The row of an example without its prediction and the texts that its task names; scores, if any, stay."""
    parts: dict[str, Any] = {
        part: {key: value for key, value in row[part].items() if key not in names}
        for part in ("fields", "scores")
        if part in row
    }
    prediction = "" if row.get("prediction") == "" else None  # where there is no text, none is left out
    return {**row, "prediction": prediction, **parts}
