"""What a task is: examples in, scores out. It never sees a method or the network's weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from fasa_bench.method import Method
    from fasa_bench.models import Model
    from fasa_bench.statistics import Sample
    from fasa_bench.study import Study

Metric = dict[str, float | int | None]  # {"value", "ci_low", "ci_high", "n"}; None where nothing could be computed


@dataclass
class Sampling:
    """How several answers to one prompt are drawn: one for each of `seeds`, all decoded together.

    temperature: 0 is greedy. top_p, top_k: only the most likely tokens that reach this probability together, and at
    most so many; 1.0 and 0 leave all.
    """

    seeds: list[int]
    temperature: float
    top_p: float = 1.0
    top_k: int = 0


@dataclass
class Timing:
    """A decode step to be timed, on a cache of `context` tokens in `batch` rows: see fasa_bench.timing.

    steps: decode steps that are timed, in blocks of `block` that take turns with those of the others; warmup: steps
    before them that are not. fill: "random" keys and values, or those of a real prompt pass. baseline: time full KV in
    turns with the method. plain: time transformers as it comes too. prompt_pass: time a real prompt pass.
    """

    context: int
    batch: int = 1
    steps: int = 32
    block: int = 4
    warmup: int = 3
    fill: Literal["random", "prefill"] = "random"
    baseline: bool = True
    plain: bool = False
    prompt_pass: bool = False
    seed: int = 0

    @property
    def turns(self) -> int:
        return -(-self.steps // self.block)


@dataclass
class Example:
    """One unit of work: a prompt, then either free generation or a given continuation that is scored.

    prompt_ids: token ids of the prompt, special tokens included where the task wants them.
    target_ids: if given, these ids are fed one decode step at a time (teacher forcing) and their negative
        log-likelihoods are the prediction. The first of them is predicted by the dense prompt pass.
    parallel: score the target ids in one pass instead, which only some methods allow.
    stop_token_ids: end generation besides the model's own end tokens.
    min_new_tokens: end tokens cannot be chosen before this many tokens.
    sampling: if given, several answers are drawn; else there is one, and it is greedy.
    timing: if given, nothing is answered: the time of a decode step is the result.
    study: if given, full KV decodes, and what this records of it is the result (fasa_bench.study).
    context_tokens: how many tokens of the prompt come before the question; None where it does not fall into these two
        parts, which `protocol.question` may want apart.
    fields: what the task wants stored in the row (data set, answers, prompt hash, ...); JSON types only. A task that
        cuts prompts says so in "truncated", and the length before in "prompt_tokens_before".
    """

    id: str
    prompt_ids: list[int]
    target_ids: list[int] | None = None
    parallel: bool = False
    max_new_tokens: int = 0
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    sampling: Sampling | None = None
    timing: Timing | None = None
    study: Study | None = None
    context_tokens: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def room(self) -> int:
        """Tokens to reserve behind the prompt; none for drawn answers, most of which end far below their limit."""
        if self.sampling:
            return 0
        return len(self.target_ids) if self.target_ids is not None else self.max_new_tokens


@dataclass
class Prediction:
    """What decoding gave: token_ids and text are the generated part only, without the prompt.

    nll: negative log-likelihood (nats) of each target id when the example was teacher-forced, else None.
    samples: all answers of an example with `sampling`; the fields above are then those of the first.
    measured: what an example with `timing` (fasa_bench.timing) or `study` gave, else None.
    """

    token_ids: list[int]
    text: str
    finish_reason: Literal["stop", "length", "forced", "timed"]
    nll: list[float] | None = None
    samples: list[Prediction] = field(default_factory=list)
    measured: dict[str, Any] | None = None


@dataclass
class Task:
    """Base of every task. Parameters are dataclass fields, set from conf/task/*.yaml and checked by their types."""

    name: ClassVar[str] = ""
    # field name -> how paper, official code and ours differ there; logged with every run
    notes: ClassVar[dict[str, str]] = {}
    # fields that say where data lies: its content counts for a run id (`fingerprint`), its place does not
    places: ClassVar[tuple[str, ...]] = ()
    # names under a row's "fields" and "scores" that hold text of the data or of an answer: see `store_text`
    texts: ClassVar[tuple[str, ...]] = ()
    # its examples have a `study`: full KV decodes step by step, whatever the method of the run
    studies: ClassVar[bool] = False

    @property
    def uses_calibration(self) -> bool:
        """Whether what is measured depends on the calibration, though the method of the run may not."""
        return False

    def check(self, method: Method) -> None:
        """UserError unless the task makes sense with this method."""

    @property
    def parallel(self) -> bool:
        """Whether examples are scored in one pass (`Example.parallel`): then the method must allow it."""
        return False

    def examples(self, model: Model, limit: int | None) -> Iterator[Example]:
        """Yield the examples in a fixed order, at most `limit` of each group (data set, part).

        `model` gives tokenizer, max_input and chat template; its weights are not needed.
        """
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """The parameters that can change an output."""
        return {key: value for key, value in asdict(self).items() if key not in self.places}

    def fingerprint(self) -> str:
        """Hash of the data and prompt files this task reads: it goes into the run id."""
        raise NotImplementedError

    def score(self, example: Example, prediction: Prediction) -> dict[str, Any]:
        """Scores of one example, stored in its row under "scores"; JSON types only."""
        raise NotImplementedError

    def samples(self, rows: list[dict[str, Any]]) -> dict[str, Sample]:
        """What each metric is made of, from stored rows: intervals and differences to another run come from that.

        Each row has at least "id", "scores" and "fields", the latter without those in `texts` if the run stores none.
        """
        return {}

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Metric]:
        """Sum stored rows up, with 95 % bootstrap intervals. Override it for numbers that no sample gives."""
        return {name: sample.metric() for name, sample in self.samples(rows).items()}
