"""Perplexity of long text under teacher forcing: a dense prefill, then tokens scored as decode steps.

Source: FASA (arXiv 2602.03152), Figure 4; window layout and defaults are those of its code.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from fasa_bench.errors import UserError
from fasa_bench.statistics import Sample, bootstrap
from fasa_bench.task import Example, Metric, Prediction, Task

if TYPE_CHECKING:
    from fasa_bench.models import Model

PLAIN, ROWS = (".txt", ".raw", ".md"), ".jsonl"


@dataclass
class Perplexity(Task):
    """Parameters
    path: a text file, or a folder whose .txt, .raw, .md and .jsonl files are read in the order of their names.
    prefill, decode: tokens of a window that are prefilled, then scored. Windows do not overlap.
    windows: the first so many windows, None for all.
    documents: "separate" cuts each document into windows on its own (what is left over is not used); "joined" makes
        one text of all, with a blank line in between.
    text_format: "lines" takes each row of a file as JSON with its document under "text", "plain" takes a file as one
        document; "auto" goes by the file's ending (.jsonl is "lines").
    special_tokens: put the tokenizer's begin token in front of each window; it comes on top of `prefill`.
    mode: "stepwise" scores one decode step at a time; "parallel" all at once, for methods whose choice depends only on
        the query and the keys before it, with the same result.
    drop_first: leave out each window's first scored token, which the dense prefill predicts whatever the method.
    """

    name: ClassVar[str] = "ppl"
    places: ClassVar[tuple[str, ...]] = ("path",)
    notes: ClassVar[dict[str, str]] = {
        "documents": "The authors' code joins all documents by blank lines before cutting; default here: separate.",
        "special_tokens": "The paper does not say; here windows start without a begin token unless asked for.",
        "drop_first": "The first scored token comes from the dense prefill, in the authors' code as here: kept.",
        "mode": "The paper and the authors' code score step by step; parallel gives the same numbers to 1e-4.",
        "windows": "The authors' code takes the first 60; the paper gives no number.",
    }

    path: str | None = None
    prefill: int = 8000
    decode: int = 256
    windows: int | None = 60
    documents: Literal["separate", "joined"] = "separate"
    text_format: Literal["auto", "plain", "lines"] = "auto"
    special_tokens: bool = False
    mode: Literal["stepwise", "parallel"] = "stepwise"
    drop_first: bool = False

    def __post_init__(self) -> None:
        if self.path is None:
            raise UserError.of("task.path", None, "give a text file or a folder of them: task.path=FILE")
        for key, least in (("prefill", 1), ("decode", 2 if self.drop_first else 1), ("windows", 1)):
            value = getattr(self, key)
            if value is not None and value < least:
                raise UserError.of(f"task.{key}", value, f"must be at least {least}")

    @property
    def parallel(self) -> bool:
        return self.mode == "parallel"

    def examples(self, model: Model, limit: int | None) -> Iterator[Example]:
        check_window(model, "task.prefill", self.prefill + self.special_tokens, self.decode)
        begin = [model.tokenizer.bos_token_id] if self.special_tokens else []
        if None in begin:
            raise UserError.of("task.special_tokens", True, f"the tokenizer of {model.name} has no begin token")
        wanted = min((n for n in (self.windows, limit) if n is not None), default=None)
        size = self.prefill + self.decode
        made = longest = 0
        for name, text in self._documents():
            if made == wanted:
                return
            ids = model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            longest = max(longest, len(ids))
            for window in range(len(ids) // size):
                if made == wanted:
                    return
                start = window * size
                yield Example(
                    id=f"{name}/{window}",
                    prompt_ids=begin + ids[start : start + self.prefill],
                    target_ids=ids[start + self.prefill : start + size],
                    parallel=self.parallel,
                    fields={"document": name, "window": window, "unit": "token", "begin_token": bool(begin)},
                )
                made += 1
        if made == 0:
            raise UserError(
                f"task.prefill={self.prefill} plus task.decode={self.decode} needs documents of {size} tokens; "
                f"the longest in {self.path} has {longest}"
            )

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name, path in self._files():
            digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
        return digest.hexdigest()

    def score(self, example: Example, prediction: Prediction) -> dict[str, Any]:
        return nll_score(prediction, drop_first=self.drop_first)

    def samples(self, rows: list[dict[str, Any]]) -> dict[str, Sample]:
        return {"perplexity": perplexity_sample(rows)}

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Metric]:
        return {"perplexity": perplexity(rows)}

    def _files(self) -> list[tuple[str, Path]]:
        """Name and path of each file, in order; a name holds no part of where the files lie."""
        assert self.path is not None
        root = Path(self.path).expanduser()
        if root.is_file():
            return [(root.name, root)]
        files = [path for path in sorted(root.rglob("*")) if path.suffix in (*PLAIN, ROWS) and path.is_file()]
        if not files:
            allowed = f"must be a text file, or a folder with {', '.join(PLAIN)} or {ROWS} files"
            raise UserError.of("task.path", self.path, allowed)
        return [(path.relative_to(root).as_posix(), path) for path in files]

    def _documents(self) -> Iterator[tuple[str, str]]:
        """Name and text of each document."""
        documents = (document for name, path in self._files() for document in self._read(name, path))
        if self.documents == "separate":
            yield from documents
        else:
            yield "joined", "\n\n".join(text for _, text in documents)

    def _read(self, name: str, path: Path) -> Iterator[tuple[str, str]]:
        if self.text_format == "plain" or (self.text_format == "auto" and path.suffix != ROWS):
            yield name, path.read_text(encoding="utf-8")
            return
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file):
                if not line.strip():
                    continue
                try:
                    yield f"{name}/{number}", str(json.loads(line)["text"])
                except (ValueError, KeyError, TypeError) as error:
                    raise UserError(f'{path}, line {number + 1}: not a JSON object with a "text"') from error


def check_window(model: Model, key: str, prompt: int, decode: int) -> None:
    """UserError, naming `key`, if a prompt of so many tokens and what is decoded after it do not fit the model."""
    if prompt > model.max_input:
        raise UserError.of(key, prompt, f"{model.name} takes at most {model.max_input} tokens of input")
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and prompt + decode > positions:
        raise UserError.of(key, prompt, f"with {decode} tokens after it, {model.name} has {positions} positions only")


def nll_score(prediction: Prediction, *, drop_first: bool = False) -> dict[str, Any]:
    """nll: total negative log-likelihood (nats) of `tokens` scored tokens; perplexity: exp of their mean.

    first_nll: of the first token, which the dense prefill predicted.
    """
    assert prediction.nll is not None
    scored = prediction.nll[1:] if drop_first else prediction.nll
    total = math.fsum(scored)
    return {
        "nll": total,
        "tokens": len(scored),
        "perplexity": math.exp(total / len(scored)),
        "first_nll": prediction.nll[0],
    }


def perplexity(rows: list[dict[str, Any]]) -> Metric:
    """exp(total nats / total tokens) over windows, with the bootstrap interval over windows."""
    return bootstrap([_totals(row) for row in rows], _of_totals)


def perplexity_sample(rows: list[dict[str, Any]]) -> Sample:
    """The same for a comparison with another run, window by window."""
    return Sample([{row["id"]: _totals(row) for row in rows}], _of_totals)


def _totals(row: dict[str, Any]) -> tuple[float, int]:
    return row["scores"]["nll"], row["scores"]["tokens"]


def _of_totals(windows: np.ndarray) -> float:
    return float(np.exp(windows[:, 0].sum() / windows[:, 1].sum()))
