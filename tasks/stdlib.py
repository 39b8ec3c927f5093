"""Long-context work made from what every Python installation carries: no data set or download needed.

Three parts: perplexity of Python's documentation; completion of the next line of standard-library code, with the
protocol and metric of LCC (Guo et al. 2023, as in LongBench); a pass key to be found in the documentation (after
Mohtashami & Jaggi 2023). Prompts are plain text to be continued, so that base models can do them too.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fasa_bench import metrics
from fasa_bench.errors import UserError
from fasa_bench.statistics import Sample
from fasa_bench.task import Example, Prediction, Task
from fasa_bench.tasks import stdlib_code
from fasa_bench.tasks.perplexity import check_window, nll_score, perplexity_sample
from fasa_bench.texts import documentation

if TYPE_CHECKING:
    from fasa_bench.models import Model

Part = Literal["perplexity", "code", "passkey"]

NEEDLE = "\n\nNote: the secret pass key is {key}.\n\n"
QUESTION = "\n\nQuestion: What is the secret pass key?\nAnswer: the secret pass key is"


@dataclass
class Stdlib(Task):
    """Parameters
    parts: which of perplexity, code and passkey.
    context: prompt length in tokens, of all parts, with the tokenizer's usual begin token.
    windows, decode: perplexity windows, spread over the documentation, and tokens scored in each after the prompt.
    n_code, code_tokens: completions, and the longest line in tokens. n_passkey: keys, at evenly spaced depths.
    seed: draws the lines and the keys.
    """

    name: ClassVar[str] = "stdlib"
    texts: ClassVar[tuple[str, ...]] = ("answer",)

    parts: list[Part] = field(default_factory=lambda: ["perplexity", "code", "passkey"])
    context: int = 1024
    windows: int = 3
    decode: int = 128
    n_code: int = 6
    code_tokens: int = 32
    n_passkey: int = 6
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.parts or len(set(self.parts)) < len(self.parts):
            raise UserError.of("task.parts", self.parts, "at least one of perplexity, code, passkey, each once")
        least = {"context": 64, "windows": 1, "decode": 1, "n_code": 1, "code_tokens": 1, "n_passkey": 1}
        for key, value in least.items():
            if getattr(self, key) < value:
                raise UserError.of(f"task.{key}", getattr(self, key), f"must be at least {value}")

    def examples(self, model: Model, limit: int | None) -> Iterator[Example]:
        check_window(model, "task.context", self.context, max(self.decode, self.code_tokens))
        begin = model.tokenizer("")["input_ids"]
        for part in self.parts:
            make, count = {
                "perplexity": (self._window, self.windows),
                "code": (self._completion, self.n_code),
                "passkey": (self._passkey, self.n_passkey),
            }[part]
            for index in range(count if limit is None else min(count, limit)):
                example = make(model.tokenizer, self.context - len(begin), index)
                example.prompt_ids = begin + example.prompt_ids
                if example.context_tokens is not None:
                    example.context_tokens += len(begin)
                example.fields["group"] = part
                yield example

    def fingerprint(self) -> str:
        """sha256 of the texts, which differ between Python versions."""
        return hashlib.sha256((documentation() + stdlib_code.fingerprint()).encode()).hexdigest()

    def score(self, example: Example, prediction: Prediction) -> dict[str, Any]:
        """As in `ppl`, or code_similarity in [0, 1], or passkey 0 | 1: whether the answer holds the key."""
        group, answer = example.fields["group"], example.fields.get("answer", "")
        if group == "perplexity":
            return nll_score(prediction)
        if group == "code":
            return {"code_similarity": metrics.code_similarity(prediction.text.strip(), answer)}
        return {"passkey": int(answer in prediction.text)}

    def samples(self, rows: list[dict[str, Any]]) -> dict[str, Sample]:
        """perplexity; code_similarity and passkey x 100."""
        result: dict[str, Sample] = {}
        for part in self.parts:
            own = [row for row in rows if row["fields"]["group"] == part]
            if part == "perplexity":
                result["perplexity"] = perplexity_sample(own)
            else:
                name = "code_similarity" if part == "code" else "passkey"
                result[name] = Sample([{row["id"]: 100 * row["scores"][name] for row in own}])
        return result

    def _window(self, tokenizer: Any, length: int, index: int) -> Example:
        ids = _stretch(tokenizer, length + self.decode, index, self.windows)
        return Example(f"perplexity/{index}", ids[:length], target_ids=ids[length:])

    def _completion(self, tokenizer: Any, length: int, index: int) -> Example:
        task = stdlib_code.completion(index, tokenizer, length, self.seed)
        return Example(
            f"code/{index}",
            task.prompt_ids,
            max_new_tokens=self.code_tokens,
            min_new_tokens=1,
            stop_token_ids=_line_breaks(tokenizer),
            fields={"module": task.module, "line": task.line, "answer": task.answer},
        )

    def _passkey(self, tokenizer: Any, length: int, index: int) -> Example:
        key = str(random.Random(f"{self.seed}/{index}").randrange(10_000, 100_000))
        needle, question = (_ids(tokenizer, text) for text in (NEEDLE.format(key=key), QUESTION))
        depth = (index + 0.5) / self.n_passkey
        text = _stretch(tokenizer, length - len(needle) - len(question), index, self.n_passkey)
        at = round(depth * len(text))
        return Example(
            f"passkey/{index}",
            text[:at] + needle + text[at:] + question,
            max_new_tokens=8,
            min_new_tokens=1,
            context_tokens=len(text) + len(needle),
            fields={"answer": key, "depth": round(depth, 3)},
        )


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _stretch(tokenizer: Any, length: int, index: int, count: int) -> list[int]:
    """The index-th of `count` stretches of the documentation, evenly spaced over it."""
    ids = _documentation_ids(tokenizer)
    if length > len(ids):
        raise UserError.of("task.context", length, f"the documentation has {len(ids)} tokens")
    return ids[(len(ids) - length) * index // count :][:length]


@lru_cache(maxsize=1)
def _documentation_ids(tokenizer: Any) -> list[int]:
    return _ids(tokenizer, documentation())


@lru_cache(maxsize=1)
def _line_breaks(tokenizer: Any) -> tuple[int, ...]:
    """Ids of tokens that begin with a line break, blanks before it aside: generating one ends a line."""
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    return tuple(token for token, text in enumerate(texts) if text.lstrip(" \t").startswith("\n"))
