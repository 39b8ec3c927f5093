"""MATH500 (Lightman et al. 2023) and AIME 2024: long chains of thought, graded by the last box of each answer.

Protocol: FASA (arXiv 2602.03152), Table 3 and appendix B, and its code; docs/protocol.md tells where they differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from fasa_bench.errors import UserError
from fasa_bench.statistics import Sample
from fasa_bench.task import Example, Prediction, Sampling, Task
from fasa_bench.tasks import math_data as data
from fasa_bench.tasks.math_grading import grader, last_box, pass_at_k

if TYPE_CHECKING:
    from fasa_bench.models import Model

PROMPT = (
    "{problem}\n\nWork the problem out step by step. Close with a line of this form, the result inside the box:\n"
    "Final answer: \\boxed{}"
)
TOP_K = 50  # transformers' default, which a checkpoint that says nothing is run with
SHOWN = 200  # characters of an answer that are kept in its scores


@dataclass
class MathTask(Task):
    """Parameters
    data_file: a .jsonl or .parquet file of rows with "problem" and "answer"; None loads the hub's.
    n: answers drawn for each problem, decoded together on one prefill. seed: with the problem's text and the number
        of the answer it makes that answer's own seed, so that the first of 16 is the one of 1.
    temperature, top_p, top_k, do_sample: None takes the checkpoint's generation config; where that is silent, do_sample
        is on, top_p 1 and top_k 50. top_k 0 is off.
    max_length: longest prompt and answer together, in tokens. max_new_tokens: of the answer, instead of that.
    prompt: its text with {problem} in it; None is PROMPT above. chat_template: auto uses the model's if it has one.
    """

    source: ClassVar[data.Source]
    integers: ClassVar[bool] = False  # answers are whole numbers from 0 to 999
    places: ClassVar[tuple[str, ...]] = ("data_file",)
    texts: ClassVar[tuple[str, ...]] = ("answer", "box")
    notes: ClassVar[dict[str, str]] = {
        "n": "Paper: MATH500 one answer a problem, AIME24 16; many of its AIME24 numbers fit 5 runs and not 16.",
        "temperature": "0.6 in the authors' code; the paper does not say.",
        "do_sample": "Left to the checkpoint, as in the authors' code; if that is silent: greedy there, drawn here.",
        "top_p": "Left to the checkpoint, as in the authors' code.",
        "top_k": "Left to the checkpoint, else transformers' 50, as in the authors' code.",
        "max_length": "Prompt included, as in the authors' code.",
        "chat_template": "On for a model that has one, as in the authors' code.",
        "prompt": "The paper prints none; it asks for what the authors' code asks for, in words of ours.",
    }

    data_file: str | None = None
    n: int = 1
    temperature: float | None = 0.6
    top_p: float | None = None
    top_k: int | None = None
    do_sample: bool | None = None
    max_length: int = 16384
    max_new_tokens: int | None = None
    prompt: str | None = None
    chat_template: Literal["auto", "on", "off"] = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("n", "max_length", "max_new_tokens"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise UserError.of(f"task.{key}", value, "must be at least 1")
        if self.temperature is not None and not 0 <= self.temperature < float("inf"):
            raise UserError.of(
                "task.temperature", self.temperature, "at least 0 (greedy), or null for the checkpoint's"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError.of("task.top_p", self.top_p, "more than 0 and at most 1, or null for the checkpoint's")
        if self.top_k is not None and self.top_k < 0:
            raise UserError.of("task.top_k", self.top_k, "at least 0 (off), or null for the checkpoint's")
        if self.prompt is not None and "{problem}" not in self.prompt:
            raise UserError.of("task.prompt", self.prompt, "must hold {problem}")
        self.warnings: list[str] = []

    def examples(self, model: Model, limit: int | None) -> Iterator[Example]:
        if self.chat_template == "on" and not model.has_chat_template:
            raise UserError.of("task.chat_template", "on", f"model {model.name} has no chat template; use auto or off")
        path = data.find(self.data_file, self.source)
        rows = data.read(path)
        self.warnings[:] = data.differences(rows, self.source)
        temperature, top_p, top_k = self._sampling(model)
        if temperature == 0 and self.n > 1:
            self.warnings.append(f"decoding is greedy: the {self.n} answers of a problem are the same")
        for index, row in enumerate(rows[:limit]):
            if self.integers and not (row["answer"].strip().isdecimal() and int(row["answer"]) <= 999):
                raise UserError(f'{path}, row {index + 1}: "answer" must be a whole number from 0 to 999')
            prompt = (self.prompt or PROMPT).replace("{problem}", row["problem"])
            ids = self._ids(model, prompt)
            names = (f"{self.seed}/{sample}/{row['problem']}" for sample in range(self.n))
            seeds = [int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") for name in names]
            yield Example(
                id=f"{self.name}/{index}",
                prompt_ids=ids,
                max_new_tokens=self._room(model, len(ids)),
                sampling=Sampling(seeds, temperature, top_p, top_k),
                fields={
                    "group": self.name,
                    "answer": row["answer"],
                    **{key: row[key] for key in ("id", "unique_id", "subject", "level") if key in row},
                    "prompt_sha256": hashlib.sha256(prompt.encode()).hexdigest(),
                    "sampling": {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seeds": seeds},
                },
            )

    def fingerprint(self) -> str:
        return hashlib.sha256(data.find(self.data_file, self.source).read_bytes()).hexdigest()

    def score(self, example: Example, prediction: Prediction) -> dict[str, Any]:
        """score: share of right answers. One item an answer: correct and truncated (0 | 1), box, decode_tokens."""
        texts = [sample.text for sample in prediction.samples]
        boxes = [last_box(text) for text in texts]
        correct = [int(right) for right in grader().grade(texts, example.fields["answer"])]
        return {
            "score": pass_at_k(correct, 1),
            "correct": correct,
            "truncated": [int(sample.finish_reason == "length") for sample in prediction.samples],
            "box": [None if box is None else box[:SHOWN] for box in boxes],
            "prefill_tokens": len(example.prompt_ids),
            "decode_tokens": [len(sample.token_ids) for sample in prediction.samples],
        }

    def samples(self, rows: list[dict[str, Any]]) -> dict[str, Sample]:
        """Means over problems, with intervals over problems, never over answers. pass@1: mean over a problem's answers,
        x 100. pass@<n>: any of them right, x 100. truncated: answers that were cut, in %. tokens/...: a problem's mean.
        """
        scores = {row["id"]: row["scores"] for row in rows}
        decoded = {key: float(np.mean(one["decode_tokens"])) for key, one in scores.items()}
        prefilled = {key: one["prefill_tokens"] for key, one in scores.items()}
        return {
            **{
                f"pass@{k}": Sample([{key: 100 * pass_at_k(one["correct"], k) for key, one in scores.items()}])
                for k in dict.fromkeys((1, self.n))
            },
            "truncated": Sample([{key: 100 * float(np.mean(one["truncated"])) for key, one in scores.items()}]),
            "tokens/prefill": Sample([prefilled]),
            "tokens/decode": Sample([decoded]),
            "tokens/total": Sample([{key: prefilled[key] + decoded[key] for key in scores}]),
        }

    def _sampling(self, model: Model) -> tuple[float, float, int]:
        """Temperature, top p and top k; temperature 0 where decoding is greedy."""
        given = model.sampling_defaults

        def setting(key: str, silent: Any) -> Any:
            own = getattr(self, key)
            return given.get(key, silent) if own is None else own

        temperature = setting("temperature", 1.0) if setting("do_sample", True) else 0.0
        return float(temperature), float(setting("top_p", 1.0)), int(setting("top_k", TOP_K))

    def _ids(self, model: Model, prompt: str) -> list[int]:
        if self.chat_template != "off" and model.has_chat_template:  # whose text has the special tokens already
            return list(model.tokenizer(model.chat(prompt), add_special_tokens=False)["input_ids"])
        return list(model.tokenizer(prompt)["input_ids"])

    def _room(self, model: Model, prompt: int) -> int:
        """Tokens that an answer may have. UserError if that is nothing, or more than the model has positions for."""
        key = "max_length" if self.max_new_tokens is None else "max_new_tokens"
        room = self.max_new_tokens or self.max_length - prompt
        positions = getattr(model.config, "max_position_embeddings", None)
        if room < 1:
            raise UserError.of("task.max_length", self.max_length, f"a prompt alone has {prompt} tokens")
        if prompt > model.max_input or (positions is not None and prompt + room > positions):
            limits = f"{model.name} takes prompts of {model.max_input} tokens and has {positions} positions"
            raise UserError.of(f"task.{key}", getattr(self, key), f"a prompt has {prompt} tokens; {limits}")
        return room


@dataclass
class Math500(MathTask):
    """500 problems of MATH (Hendrycks et al. 2021), any expression as the answer."""

    name: ClassVar[str] = "math500"
    source: ClassVar[data.Source] = data.Source(
        "HuggingFaceH4/MATH-500", "test.jsonl", 500, "9785c7b38bbd53931ad9041746e133b8f52f7bc382ca54ca665ee9320f83ecd7"
    )


@dataclass
class Aime24(MathTask):
    """The 30 problems of AIME I and II 2024; answers are whole numbers from 0 to 999."""

    name: ClassVar[str] = "aime24"
    integers: ClassVar[bool] = True
    source: ClassVar[data.Source] = data.Source(
        "HuggingFaceH4/aime_2024",
        "data/train-00000-of-00001.parquet",
        30,
        "d44191580e5a4713f9fc6aec668b2ee95d7bed9e125f6f93fdcafdef9c06fda4",
    )

    n: int = 16
    max_length: int = 32768


def score_path(path: Path) -> tuple[dict[str, float], list[str]]:
    """Grade a JSONL file of rows {"answer", "pred": text or "preds": texts}; for `fasa_bench.score math`.

    Returns pass@1 and, with several predictions a row, pass@k of the fewest, both x 100 and over the rows; then counts.
    """
    if not path.is_file():
        raise UserError(f'{path}: no such file; expected JSONL of rows with "answer" and "pred" or "preds"')
    rows = data.read_jsonl(path)
    if not rows:
        raise UserError(f"{path} has no rows")
    graded = [grader().grade(*_predictions(row, f"{path}, row {number}")) for number, row in enumerate(rows, start=1)]
    counts = [len(one) for one in graded]
    scores = {
        f"pass@{k}": round(100 * sum(pass_at_k(one, k) for one in graded) / len(rows), 2) for k in (1, min(counts))
    }
    notes = []
    if min(counts) < max(counts):
        notes.append(f"rows have {min(counts)} to {max(counts)} predictions: each counts with those it has")
    return {**scores, "n": len(rows), "predictions": sum(counts), "correct": sum(map(sum, graded))}, notes


def _predictions(row: dict[str, Any], where: str) -> tuple[list[str], str]:
    """The texts of a row, and its reference."""
    answer, texts = row.get("answer"), row.get("preds", [row.get("pred")])
    if not isinstance(answer, str | int) or isinstance(answer, bool):
        raise UserError(f'{where}: "answer" must be a text')
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise UserError(f'{where}: "pred" must be a text, or "preds" a list of texts')
    return texts, str(answer)
