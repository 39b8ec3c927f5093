"""Perplexity of long text under teacher forcing: a dense prefill, then tokens scored as decode steps.

Source: FASA (arXiv 2602.03152), Figure 4; window layout and sizes are those of its code (AMAP-ML/FASA-ICLR2026 at
215dbe20, perplexity/evaluate_ppl.py).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from fasa_bench.errors import UserError
from fasa_bench.statistics import Sample, bootstrap
from fasa_bench.task import Example, Metric, Prediction, Task
from fasa_bench.tasks.perplexity_text import (
    SOURCES,
    Corpus,
    Format,
    find,
    read,
    wikitext_articles,
    wikitext_raw,
    wikitext_rows,
)

if TYPE_CHECKING:
    from fasa_bench.models import Model

SEPARATOR = "\n\n"


@dataclass
class Perplexity(Task):
    """Parameters
    corpus: pg19, wikitext, c4 or c4_en: which data set this is. Without `path` its test or validation file is fetched
        from the hub; WikiText is cut into articles, or into lines for documents="joined", wherever it comes from.
    path: a file, or a folder whose .txt, .raw, .md, .jsonl, .json (each also .gz) and .parquet files are read in the
        order of their names.
    prefill, decode: tokens of a window that are prefilled, then scored. Windows do not overlap.
    windows: the first so many windows, None for all.
    documents: "separate" cuts each document into windows on its own (what is left over is not used); "joined" makes
        one text of all, with a blank line in between.
    text_format: "lines" takes each row of a file as JSON with its document under "text", "plain" takes a file as one
        document; "auto" goes by the file's ending.
    special_tokens: the begin token in front of each window, on top of `prefill`: True, False, or "auto", which is
        whether the tokenizer puts one in front of a text. "once": the tokenizer's own at the start of each text only,
        as one of the first window's tokens.
    mode: "stepwise" scores one decode step at a time; "parallel" all at once, for methods whose choice depends only on
        the query and the keys before it, with the same result.
    drop_first: leave out each window's first scored token, which the dense prefill predicts whatever the method.

    `warnings` collects how local files differ from the corpus they are said to be.
    """

    name: ClassVar[str] = "ppl"
    unit: ClassVar[str] = "token"
    places: ClassVar[tuple[str, ...]] = ("path",)
    notes: ClassVar[dict[str, str]] = {
        "corpus": "The paper names PG-19, WikiText and C4 only; the authors' code takes the test parts of PG-19 and "
        "WikiText-2 and C4's en.noblocklist validation file 0, as here; others mostly take C4's en (c4_en).",
        "documents": "The authors' code joins all documents (WikiText: lines) by blank lines before cutting; default "
        "here: separate (WikiText: articles).",
        "special_tokens": "The paper does not say; the authors' code lets the tokenizer begin the joined text, once; "
        "default here: each window begins as the tokenizer begins a text.",
        "drop_first": "The first scored token comes from the dense prefill, in the authors' code as here: kept.",
        "mode": "The paper and the authors' code score step by step; parallel gives the same numbers to 1e-4.",
        "windows": "The authors' script takes the first 60; the paper gives no number.",
        "prefill": "The authors' script prefills 8,000 tokens; the paper gives no number.",
        "decode": "The authors' script scores 256 tokens; the paper gives no number.",
        "unit": "Perplexity is per token of the model's tokenizer, here and in the authors' code, not per word.",
    }

    corpus: Corpus | None = None
    path: str | None = None
    prefill: int = 8000
    decode: int = 256
    windows: int | None = 60
    documents: Literal["separate", "joined"] = "separate"
    text_format: Format = "auto"
    special_tokens: bool | Literal["auto", "once"] = "auto"
    mode: Literal["stepwise", "parallel"] = "stepwise"
    drop_first: bool = False

    def __post_init__(self) -> None:
        if self.path is None and self.corpus is None:
            allowed = f"give a text file or a folder of them, or task.corpus={'|'.join(SOURCES)}"
            raise UserError.of("task.path", None, allowed)
        for key, least in (("prefill", 1), ("decode", 2 if self.drop_first else 1), ("windows", 1)):
            value = getattr(self, key)
            if value is not None and value < least:
                raise UserError.of(f"task.{key}", value, f"must be at least {least}")
        self.warnings: list[str] = []

    @property
    def parallel(self) -> bool:
        return self.mode == "parallel"

    def examples(self, model: Model, limit: int | None) -> Iterator[Example]:
        begin, first = self._begin(model)
        check_window(model, "task.prefill", self.prefill + len(begin), self.decode)
        wanted = min((n for n in (self.windows, limit) if n is not None), default=None)
        size = self.prefill + self.decode
        made = longest = 0
        for name, text_ids in self._token_ids(model.tokenizer, None if wanted is None else wanted * size):
            ids = first + text_ids
            longest = max(longest, len(ids))
            for window in range(len(ids) // size):
                start = window * size
                yield Example(
                    id=f"{name}/{window}",
                    prompt_ids=begin + ids[start : start + self.prefill],
                    target_ids=ids[start + self.prefill : start + size],
                    parallel=self.parallel,
                    fields={
                        "corpus": self.corpus,
                        "document": name,
                        "documents": self.documents,
                        "window": window,
                        "window_tokens": size,
                        "unit": self.unit,
                        "begin_token": bool(begin or (first and window == 0)),
                        "first_token": "left out" if self.drop_first else "counted",
                    },
                )
                made += 1
                if made == wanted:
                    return
        if made == 0:
            raise UserError(
                f"task.prefill={self.prefill} plus task.decode={self.decode} needs documents of {size} tokens; "
                f"the longest in {self.path or self.corpus} has {longest}"
            )

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name, path in find(self.path, self.corpus):
            digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
        return digest.hexdigest()

    def score(self, example: Example, prediction: Prediction) -> dict[str, Any]:
        return nll_score(prediction, drop_first=self.drop_first)

    def samples(self, rows: list[dict[str, Any]]) -> dict[str, Sample]:
        return {"perplexity": perplexity_sample(rows)}

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Metric]:
        return {"perplexity": perplexity(rows)}

    def _begin(self, model: Model) -> tuple[list[int], list[int]]:
        """The begin token in front of each window, and at the start of each text: no id or one."""
        if self.special_tokens is False:
            return [], []
        token = model.tokenizer.bos_token_id
        if self.special_tokens is True:
            if token is None:
                raise UserError.of("task.special_tokens", True, f"the tokenizer of {model.name} has no begin token")
            return [token], []
        usual = [token] if token is not None and model.tokenizer("a")["input_ids"][0] == token else []
        return (usual, []) if self.special_tokens == "auto" else ([], usual)

    def _token_ids(self, tokenizer: Any, needed: int | None) -> Iterator[tuple[str, list[int]]]:
        """Name and ids of each text; of joined documents the first ones only that hold more than `needed` ids."""

        def ids_of(text: str) -> list[int]:
            ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            return ids

        if self.documents == "separate":
            yield from ((name, ids_of(text)) for name, text in self._documents())
            return
        parts: list[str] = []
        held, enough = 0, 16 * (needed or 0)  # characters: a token rarely has more than 16 of them
        for _, text in self._documents():
            if needed is not None and held > enough:  # all 100 MB of C4's file would take minutes
                ids = ids_of(SEPARATOR.join(parts))
                if len(ids) > needed:
                    yield "joined", ids
                    return
                enough *= 2
            parts.append(text)
            held += len(text) + len(SEPARATOR)
        yield "joined", ids_of(SEPARATOR.join(parts))

    def _documents(self) -> Iterator[tuple[str, str]]:
        """Name and text of each document, or of each piece that is joined."""
        texts = (text for name, path in find(self.path, self.corpus) for text in read(name, path, self.text_format))
        source = SOURCES[self.corpus] if self.corpus else None
        if self.corpus == "wikitext":
            raw = wikitext_raw(text for _, text in texts)
            rows = wikitext_rows(raw)
            pieces = rows if self.documents == "joined" else wikitext_articles(raw)
            texts, count = ((f"wikitext/{number}", piece) for number, piece in enumerate(pieces)), len(rows)
        elif source and source.rows:
            every = list(texts)
            texts, count = (one for one in every), len(every)
        elif source and self.path:
            self.warnings[:] = [
                f"task.path is taken for {source.file} of {source.repo} unchecked: numbers may not compare with others'"
            ]
        if source and source.rows and count != source.rows:
            self.warnings[:] = [
                f"{count:,} rows instead of the {source.rows:,} of {source.repo}: numbers may not compare with others'"
            ]
        yield from texts


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
