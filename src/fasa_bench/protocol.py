"""Where the dense prompt pass ends and the method begins: switches of the protocol that hold for every task."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from fasa_bench.errors import UserError
from fasa_bench.task import Example

if TYPE_CHECKING:
    from fasa_bench.models import Model


@dataclass
class Protocol:
    """The config section `protocol`.

    first_token: "dense" takes the first answer token from the logits of the dense prompt pass; "sparse" leaves the
        last prompt token out of that pass and feeds it as a decode step: the method acts on the first token too.
    question: "decode" prefills the context only; what comes after it is fed by decode steps under the method, which
        therefore knows nothing of the question when it builds its index or evicts. The first answer token is then
        sparse as well. Needs examples that say where the question begins.
    begin_token: "auto" is what tokenizer and chat template do; "on" and "off" put one begin token in front of every
        prompt, or none.
    """

    notes: ClassVar[dict[str, str]] = {
        "first_token": "Dense in the authors' code, which selects only at steps of one query; the paper does not say.",
        "question": "Paper and code prefill it with the context.",
        "begin_token": "The paper does not say; official code leaves it to tokenizer and chat template, as auto does.",
    }

    first_token: Literal["dense", "sparse"] = "dense"
    question: Literal["prefill", "decode"] = "prefill"
    begin_token: Literal["auto", "on", "off"] = "auto"

    def __post_init__(self) -> None:
        if self.question == "decode":
            self.first_token = "sparse"  # what follows a question that is fed: one name and one run id for it

    def apply(self, examples: list[Example], model: Model) -> list[Example]:
        """The examples as they are to be run; UserError for one that does not allow it."""
        if any(example.timing is not None for example in examples):
            if self != Protocol():
                raise UserError("protocol: a timing has no prompt that could be split or begun; leave it as it is")
            return examples
        ready = [self._begin(example, model) for example in examples]
        for example in ready:
            self.split(example)
        return ready

    def split(self, example: Example) -> tuple[list[int], list[int]]:
        """Prompt tokens of the dense pass, and those that are fed under the method afterwards."""
        ids, end = example.prompt_ids, len(example.prompt_ids)
        if self.question == "decode":
            if example.context_tokens is None:
                allowed = f"{example.id} has no mark where its question begins; use prefill, or a task that sets one"
                raise UserError.of("protocol.question", "decode", allowed)
            end = example.context_tokens
        elif self.first_token == "sparse":
            end -= 1
        if end < 1:
            key = "question" if self.question == "decode" else "first_token"
            allowed = f"nothing of {example.id} ({len(ids)} tokens) is left to prefill"
            if example.fields.get("truncated"):
                allowed += ", since it was cut to the model's limit; raise model.max_input"
            raise UserError.of(f"protocol.{key}", getattr(self, key), allowed)
        return ids[:end], ids[end:]

    def _begin(self, example: Example, model: Model) -> Example:
        token: int | None = getattr(model.tokenizer, "bos_token_id", None)
        if self.begin_token == "on" and token is None:
            raise UserError.of("protocol.begin_token", "on", f"the tokenizer of {model.name} has no begin token")
        ids = example.prompt_ids
        there = bool(ids) and ids[0] == token
        change = 0
        if self.begin_token == "on" and not there:
            ids, change = [int(token or 0), *ids], 1
        elif self.begin_token == "off" and there and ids.count(ids[0]) == 1:  # else it marks the turns of a chat
            ids, change = ids[1:], -1
        context = None if example.context_tokens is None else example.context_tokens + change
        return replace(
            example,
            prompt_ids=ids,
            context_tokens=context,
            fields={**example.fields, "begin_token": bool(ids) and ids[0] == token},
        )
