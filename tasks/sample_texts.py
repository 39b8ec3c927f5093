"""Texts that a model is observed on: embedded ones, files, and prompts of benchmarks; one example a text."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fasa_bench.errors import UserError
from fasa_bench.study import Study
from fasa_bench.task import Example, Task
from fasa_bench.tasks import stdlib_code
from fasa_bench.tasks.longbench import LongBench
from fasa_bench.tasks.longbench_score import DATA_SETS
from fasa_bench.tasks.math import Math500
from fasa_bench.tasks.perplexity import check_window
from fasa_bench.tasks.perplexity_text import find, read
from fasa_bench.texts import calibration_text, documentation

if TYPE_CHECKING:
    from fasa_bench.models import Model

EMBEDDED = ("docs", "docs_evaluated", "stdlib")
Ids = list[int]


@dataclass
class SampledTask(Task):
    """Parameters
    sources: where the texts come from. docs: the part of Python's documentation that methods are calibrated on, from
        its end, since calibration begins at its beginning; docs_evaluated: the part that tasks score; stdlib: source
        code of Python's library; math500, and LongBench's data sets by their names: prompts of examples; or a text
        file, or a folder of them.
    n_samples: texts from each source. prefill: tokens of a text's dense pass, the usual begin token included; longer
        prompts lose their middle. decode: the steps that are observed.
    queries: what is decoded. forced: the text's own next tokens, of a prompt its last ones; generated: what the model
        answers, greedily and without an end.
    data_dir, prompts_file: LongBench's files; data_file: MATH500's, as in those tasks.
    """

    studies: ClassVar[bool] = True
    places: ClassVar[tuple[str, ...]] = ("data_dir", "prompts_file", "data_file")
    notes: ClassVar[dict[str, str]] = {
        "sources": "paper: Qasper and other LongBench sets, MATH500; ours: Python's documentation, always at hand",
        "n_samples": "paper: one sample; authors' code up to 8",
        "prefill": "paper and authors' code: the whole prompt",
        "queries": "paper: tokens the full-KV model generates; ours: the text's own, as small models fall into loops",
    }

    sources: list[str] = field(default_factory=lambda: ["docs"])
    n_samples: int = 4
    prefill: int = 4096
    decode: int = 64
    queries: Literal["forced", "generated"] = "forced"
    data_dir: str | None = None
    prompts_file: str | None = None
    data_file: str | None = None

    def __post_init__(self) -> None:
        for key in ("n_samples", "prefill", "decode"):
            if getattr(self, key) < 1:
                raise UserError.of(f"task.{key}", getattr(self, key), "must be at least 1")
        self.warnings: list[str] = []
        self.labels = {_label(source): source for source in self.sources}
        if not self.sources or len(self.labels) < len(self.sources):
            raise UserError.of("task.sources", self.sources, "at least one text, each with a name of its own")
        if "math500" in self.labels and self.queries == "forced":
            raise UserError.of("task.queries", "forced", "math500's questions are short: use generated")

    def study(self) -> Study:
        """What is measured; its examples share it."""
        raise NotImplementedError

    def least(self) -> int:
        """Tokens that a prompt and what is decoded must have for anything to be measured."""
        return 1

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "sources": list(self.labels)}

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for label, source in self.labels.items():
            digest.update(f"{label} {self._hash(source)}\n".encode())
        return digest.hexdigest()

    def examples(self, model: Model, limit: int | None) -> Iterator[Example]:
        check_window(model, "task.prefill", self.prefill, self.decode)
        study, wanted = self.study(), min(self.n_samples, limit or self.n_samples)
        for label, source in self.labels.items():
            usable = (named for named in self._texts(model, source) if self._length(named[1]) >= self.least())
            index = -1
            for index, (name, ids) in enumerate(itertools.islice(usable, wanted)):
                yield self._example(f"{label}/{index}", label, name, ids, study)
            if index < 0:
                raise UserError.of("task.sources", source, f"has no text of {self.least()} tokens")
            if index + 1 < wanted:
                self.warnings.append(f"{label} has {index + 1} texts of {wanted}")

    def _example(self, where: str, label: str, document: str, ids: Ids, study: Study) -> Example:
        size = self._size
        end = min(len(ids), size) - (self.decode + 1 if self.queries == "forced" else 0)
        kept = ids if len(ids) <= size else ids[: (size + 1) // 2] + ids[-(size // 2) :]
        return Example(
            id=where,
            prompt_ids=kept[:end],
            target_ids=kept[end:] if self.queries == "forced" else None,
            max_new_tokens=self.decode + 1,
            min_new_tokens=self.decode + 1,
            study=study,
            fields={
                "group": label,
                "dataset": label,
                "document": document,
                "truncated": len(ids) > size,
                "prompt_tokens_before": len(ids) - len(kept) + end,
            },
        )

    @property
    def _size(self) -> int:
        """Most tokens of a text that are used."""
        return self.prefill + (self.decode + 1 if self.queries == "forced" else 0)

    def _length(self, ids: Ids) -> int:
        """Tokens in the cache at the last step; less than 1 for a text of which no prompt would be left."""
        length = min(len(ids), self._size) - (1 if self.queries == "forced" else -self.decode)
        return length if length > self.decode else 0

    def _texts(self, model: Model, source: str) -> Iterator[tuple[str, Ids]]:
        """Name and ids of each text, begin token included."""
        if source == "math500":
            yield from _prompts(Math500(data_file=self.data_file, max_new_tokens=1).examples(model, None))
        elif source in DATA_SETS:
            task = self._longbench(source)
            yield from _prompts(task.examples(model, None))
            self.warnings += [text for text in task.warnings if text not in self.warnings]
        else:
            begin = model.tokenizer("")["input_ids"]
            size = self._size - len(begin)
            windows = _windows(list(_documents(source)), size, partial(_tokens, model), backwards=source == "docs")
            yield from ((name, begin + ids) for name, ids in windows)

    def _longbench(self, source: str) -> LongBench:
        return LongBench(datasets=[source], data_dir=self.data_dir, prompts_file=self.prompts_file)

    def _hash(self, source: str) -> str:
        if source == "math500":
            return Math500(data_file=self.data_file).fingerprint()
        if source in DATA_SETS:
            return self._longbench(source).fingerprint()
        digest = hashlib.sha256()
        for name, text in _documents(source):
            digest.update(f"{name}\n{text}\n".encode("utf-8", "backslashreplace"))
        return digest.hexdigest()


def _label(source: str) -> str:
    """What a source is called in results: a name, whatever folder a file lies in."""
    if source in (*EMBEDDED, "math500", *DATA_SETS):
        return source
    if not Path(source).expanduser().exists():
        allowed = f"{', '.join((*EMBEDDED, 'math500'))}, a data set of LongBench, or the path of a text file or folder"
        raise UserError.of("task.sources", source, f"must be {allowed}")
    return re.sub(r"[^\w.-]", "_", Path(source).stem)


def _documents(source: str) -> Iterable[tuple[str, str]]:
    if source == "docs":
        return [("docs", calibration_text())]
    if source == "docs_evaluated":
        return [("docs_evaluated", documentation())]
    if source == "stdlib":
        return ((module, stdlib_code.source(module)) for module in stdlib_code.MODULES)
    return (text for name, path in find(source, None) for text in read(name, path))


def _windows(
    documents: list[tuple[str, str]], size: int, tokens: Callable[[str], Ids], backwards: bool
) -> Iterator[tuple[str, Ids]]:
    """Pieces of `size` ids: the first of each document, then the second of each, and so on; backwards: from its end."""
    ids_of = cache(lambda name: tokens(dict(documents)[name]))  # only of the documents that are asked for
    names = [name for name, _ in documents]
    for number in itertools.count():
        long_enough = []
        for name in names:
            ids = ids_of(name)
            if len(ids) < (number + 1) * size:
                continue
            long_enough.append(name)
            start = len(ids) - (number + 1) * size if backwards else number * size
            yield f"{name}/{number}", ids[start : start + size]
        names = long_enough
        if not names:
            return


def _prompts(examples: Iterator[Example]) -> Iterator[tuple[str, Ids]]:
    return ((example.id, example.prompt_ids) for example in examples)


def _tokens(model: Model, text: str) -> Ids:
    return list(model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
