"""The decode engine: one dense pass over a prompt, then forks of it that decode with any method and budget."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fasa_bench import layer_budget
from fasa_bench.alibi import family_of, hooked, slopes_of
from fasa_bench.allocator import keep_freed_memory
from fasa_bench.attention import Reading, installed, reading
from fasa_bench.cache import KVLayer
from fasa_bench.clock import Clock
from fasa_bench.errors import UserError
from fasa_bench.latent import expansions_of
from fasa_bench.method import Method, Observation, resolve_budget
from fasa_bench.model_cache import Cache
from fasa_bench.sampling import Sampler
from fasa_bench.segments import Packing
from fasa_bench.task import Sampling
from fasa_bench.windows import windows

TOGETHER = 512  # tokens that are scored in one forward pass: logits of a whole vocabulary take room


@dataclass
class Prefilled:
    """A prompt after its dense pass. logits [b, vocabulary] of the last prompt token; seconds: the pass's time.

    next_position [b, 1]: the true position of the first token after the prompt, per row of the batch.
    """

    session: Session
    cache: Cache
    logits: Tensor
    next_position: Tensor
    padding: Tensor | None
    seconds: float

    @property
    def tokens(self) -> int:
        return self.cache.layers[0].seen

    @contextlib.contextmanager
    def fork(
        self, method: Method, budget: int | float | None, samples: int = 1, packing: Packing | None = None
    ) -> Iterator[Decoder]:
        """Decode from here with `method`; the prompt's cache is shared and as it was when the block ends.

        samples: so many continuations are decoded together; what the method keeps of the prompt is stored once.
        packing: how the cache is quantised, after the method has acted on the prompt.
        """
        if self.padding is not None and not method.padding:
            raise UserError.of("method", method.name, "cannot decode prompts of different lengths in one batch")
        cache = self.cache.fork()
        budgets = self.budgets(method, budget)
        for layer in cache.full:
            layer.budget, layer.packing = budgets[layer.index], packing or Packing()
        decoder = Decoder(self, cache, method)
        try:
            decoder.compress()
            decoder.expand(samples)
            yield decoder
        finally:
            for twin, layer in zip(cache.layers, self.cache.layers, strict=True):
                twin.release(layer)

    def budgets(self, method: Method, budget: int | float | None) -> dict[int, int | None]:
        """Tokens of each layer of full attention, by its index; never below what the method needs."""
        indices = [layer.index for layer in self.cache.full]
        return dict(zip(indices, self._spread(method, budget, len(indices)), strict=True))

    def _spread(self, method: Method, budget: int | float | None, layers: int) -> Sequence[int | None]:
        tokens, least = resolve_budget(budget, self.tokens), method.smallest_budget()
        if tokens is None:
            return [None] * layers
        tokens = max(tokens, least)
        if method.layer_budget == "uniform":
            return layer_budget.uniform(tokens, layers)
        return layer_budget.pyramid(
            tokens,
            layers,
            length=self.tokens,
            window=method.observes().window,
            smallest=least,
            beta=method.pyramid_beta,
            rounding=method.pyramid_rounding,
        )


@dataclass
class Generation:
    """Token ids of one generated answer, end token included if one was chosen, and why it ended."""

    token_ids: list[int]
    finish_reason: Literal["stop", "length"]


@dataclass
class Decoder:
    """One sequence (or batch) being decoded by one method.

    step_seconds: time of each decode step; the first is warm-up and not counted in `timed_steps`.
    feed_seconds: time of what was fed before the first step.
    parallel_seconds: time of the passes that scored many tokens at once, which are no decode steps.
    """

    prefilled: Prefilled
    cache: Cache
    method: Method
    compress_seconds: float = 0.0
    feed_seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    parallel_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.session = self.prefilled.session
        self.logits = self.prefilled.logits
        self.position = self.prefilled.next_position
        self.padding = self.prefilled.padding
        self.state = Reading(self.cache, self.method, clock=Clock.on(self.session.device))
        self.peak_device_bytes = 0
        self.peak_host_bytes = 0

    @property
    def timed_steps(self) -> list[float]:
        return self.step_seconds[1:]

    def compress(self) -> None:
        """Let the method act on the prompt's cache, layer by layer, then quantise what it leaves."""
        with self.state.clock.whole("compress"):
            for layer in self.cache.full:
                window, query = self.method.observes().window, layer.prompt_queries
                if query is not None:  # another method of the group may have asked for more
                    query = query[:, :, -window:] if window else None
                self.method.prefill(layer, query)
                layer.prompt_queries = layer.prompt_mass = None  # the prompt's own copy stays
                layer.pack()
        for layer in self.cache.layers:
            layer.read_bytes = layer.moved_bytes = 0  # counted from the first decode step on
        self.compress_seconds = self.state.clock.seconds.pop("compress")
        self._note_bytes()

    @property
    def read_bytes(self) -> int:
        """Bytes of keys, values and indices that all decode steps read, over all layers."""
        return sum(layer.read_bytes for layer in self.cache.layers)

    @property
    def moved_bytes(self) -> int:
        """Bytes of keys and values that went between the device and the host's memory in all decode steps."""
        return sum(layer.moved_bytes for layer in self.cache.layers)

    def expand(self, samples: int) -> None:
        """Go on with `samples` sequences instead of one."""
        if samples == 1:
            return
        for layer in self.cache.layers:
            layer.expand(samples)
        self.logits, self.position = self.logits.expand(samples, -1), self.position.expand(samples, -1)

    def feed(self, token_ids: Sequence[int]) -> None:
        """Feed the rest of the prompt, the same to every sequence, one token after another under the method.

        These are no decode steps: neither their time nor what they read and move is counted there.
        """
        if not token_ids:
            return
        self._feed(torch.tensor([list(token_ids)]).expand(len(self.logits), -1), keep=1)
        self.feed_seconds = self.state.clock.seconds.pop("step")
        self.state.clock.seconds.clear()
        for layer in self.cache.layers:
            layer.read_bytes = layer.moved_bytes = 0

    def step(self, token_ids: Tensor) -> Tensor:
        """Feed the next tokens [b, q] (q is usually 1); returns logits [b, vocabulary] after the last of them."""
        self._feed(token_ids, keep=1)
        self.step_seconds.append(self.state.clock.seconds.pop("step"))
        if len(self.step_seconds) == 1:  # warm-up: its stages are not counted either
            self.state.clock.seconds.clear()
        return self.logits

    def _feed(self, token_ids: Tensor, keep: int) -> Tensor:
        """One forward pass over the next tokens [b, q]: logits [b, keep, vocabulary] after the last `keep` of them."""
        token_ids = token_ids.to(self.session.device)
        steps = torch.arange(token_ids.shape[1], device=token_ids.device)
        if self.padding is not None:
            self.padding = torch.cat([self.padding, torch.ones_like(token_ids, dtype=torch.bool)], dim=1)
        with self.state.clock.whole("step"), reading(self.state):
            logits = self.session.forward(token_ids, self.position + steps, self.cache, self.padding, keep)
        self.logits = logits[:, -1]
        self.position = self.position + token_ids.shape[1]
        self._note_bytes()
        return logits

    def force(self, target_ids: Sequence[int], parallel: bool = False) -> list[float]:
        """Negative log-likelihood (nats) of each target id, fed one step at a time; batch of one.

        The first is scored by the logits that are there already: those of the dense prompt pass.
        parallel: the same numbers from one pass over all of them (one every TOGETHER), for a method that allows it.
        """
        if parallel:
            return self._force_together(target_ids)
        losses = []
        for i, token in enumerate(target_ids):
            losses.append(-torch.log_softmax(self.logits[0].float(), dim=-1)[token])
            if i + 1 < len(target_ids):
                self.step(torch.tensor([[token]]))
        return torch.stack(losses).tolist() if losses else []

    def _force_together(self, target_ids: Sequence[int]) -> list[float]:
        if not self.method.parallel:
            raise ValueError(f"{self.method.name} decodes step by step only")
        targets = torch.tensor([list(target_ids)], device=self.session.device)
        losses, before = [], self.logits[:, None]  # logits that predict the targets from `start` on
        self.state.parallel = True
        for start in range(0, max(targets.shape[1] - 1, 0), TOGETHER):
            part = targets[:, start : min(start + TOGETHER, targets.shape[1] - 1)]
            logits = self._feed(part, keep=part.shape[1])
            losses += [_nll(before, part[:, :1]), _nll(logits[:, :-1], part[:, 1:])]
            before = logits[:, -1:]
        losses.append(_nll(before, targets[:, -1:]))
        self.state.parallel = False
        self.parallel_seconds = self.state.clock.seconds.pop("step", 0.0)
        self.state.clock.seconds.clear()  # stages are those of a decode step
        return torch.cat(losses).tolist()

    def generate(self, max_new_tokens: int, end_token_ids: Sequence[int], min_new_tokens: int = 0) -> Generation:
        """Greedy decoding of one sequence until an end token (kept in the ids) or `max_new_tokens`.

        End tokens cannot be chosen as one of the first `min_new_tokens` tokens.
        """
        chosen: list[int] = []
        ends = torch.tensor(sorted(set(end_token_ids)), dtype=torch.long, device=self.logits.device)
        while len(chosen) < max_new_tokens:
            logits = self.logits[0]
            if len(chosen) < min_new_tokens:
                logits = logits.index_fill(0, ends, float("-inf"))
            token = int(logits.argmax())
            chosen.append(token)
            if token in ends:
                return Generation(chosen, "stop")
            if len(chosen) < max_new_tokens:
                self.step(torch.tensor([[token]]))
        return Generation(chosen, "length")

    def sample(
        self, sampling: Sampling, max_new_tokens: int, end_token_ids: Sequence[int], min_new_tokens: int = 0
    ) -> list[Generation]:
        """Draw one answer for each seed, all in one batch: of a fork with as many samples. Ends as in `generate`.

        An answer that has ended is fed its end token again until the last one ends.
        """
        ends = torch.tensor(sorted(set(end_token_ids)), dtype=torch.long, device=self.logits.device)
        sampler = Sampler(sampling, self.logits.device)
        ended = torch.zeros(len(sampling.seeds), dtype=torch.bool, device=self.logits.device)
        chosen: list[Tensor] = []
        while len(chosen) < max_new_tokens and not ended.all():
            if chosen:
                self.step(chosen[-1][:, None])
            logits = self.logits
            if len(chosen) < min_new_tokens:
                logits = logits.index_fill(1, ends, float("-inf"))
            tokens = sampler.choose(logits)
            chosen.append(torch.where(ended, chosen[-1], tokens) if chosen else tokens)
            ended |= torch.isin(chosen[-1], ends)
        answers = torch.stack(chosen, dim=1).tolist() if chosen else [[] for _ in sampling.seeds]
        return [_until_end(answer, set(end_token_ids)) for answer in answers]

    def _note_bytes(self) -> None:
        self.peak_device_bytes = max(self.peak_device_bytes, self.cache.device_bytes)
        self.peak_host_bytes = max(self.peak_host_bytes, self.cache.host_bytes)


def _until_end(token_ids: list[int], ends: set[int]) -> Generation:
    for length, token in enumerate(token_ids, start=1):
        if token in ends:
            return Generation(token_ids[:length], "stop")
    return Generation(token_ids, "length")


def _nll(logits: Tensor, targets: Tensor) -> Tensor:
    """[1, n, vocabulary] and ids [1, n] -> nats [n]; a few rows at a time, which stay in a CPU's caches."""
    rows = zip(logits[0].split(32), targets[0].split(32), strict=True)
    return torch.cat([torch.nn.functional.cross_entropy(some.float(), ids, reduction="none") for some, ids in rows])


class Session:
    """Runs a network with our attention installed; a context manager that leaves the network as it found it."""

    def __init__(self, network: PreTrainedModel, backend: str = "sdpa") -> None:
        self.network, self.backend = network, backend
        embedding: Tensor = network.get_input_embeddings().weight  # type: ignore[assignment]
        self.device = embedding.device
        # transformers renamed the argument in 5.2x
        names = inspect.signature(inspect.unwrap(network.forward)).parameters
        self.cache_argument = "cache" if "cache" in names else "past_key_values"
        self.hooked = family_of(network.config) is not None
        self._keeps = "logits_to_keep" in names  # BLOOM and MPT do not before 5.x
        self._slopes = slopes_of(network)
        self._expansions = expansions_of(network)
        self._stack = contextlib.ExitStack()
        keep_freed_memory()

    def __enter__(self) -> Session:
        self._stack.enter_context(torch.inference_mode())
        self._stack.enter_context(hooked(self.network) if self.hooked else installed(self.network))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def prefill(
        self,
        prompt_ids: Sequence[int] | Tensor,
        padding: Tensor | None = None,
        observe: Observation | None = None,
        reserve: int = 0,
    ) -> Prefilled:
        """The dense pass over a prompt: ids [n] or [b, n]; padding [b, n] bool, False where a row is left-padded.

        observe: what to record for the methods that will decode. reserve: tokens to be decoded later.
        """
        ids = torch.as_tensor(prompt_ids, device=self.device)
        ids = ids[None] if ids.dim() == 1 else ids
        if ids.shape[1] == 0:
            raise ValueError("the prompt is empty")
        if padding is None:
            positions = torch.arange(ids.shape[1], device=self.device).expand(ids.shape)
        else:
            padding = padding.to(self.device)
            positions = (padding.long().cumsum(1) - 1).clamp(min=0)
        sizes = enumerate(windows(self.network.config))
        layers = [KVLayer(index, window, self._expansions.get(index), self._slopes) for index, window in sizes]
        cache = Cache(layers, self.hooked)
        clock = Clock.on(self.device)
        observe = observe or Observation()
        state = Reading(cache, None, self.backend, observe=observe, reserve=reserve, clock=clock)
        with clock.whole("prefill"), reading(state):
            logits = self.forward(ids, positions, cache, padding)[:, -1]
        if any(layer.seen != ids.shape[1] for layer in cache.layers):
            name = type(self.network).__name__
            raise UserError(f"{name} is not supported: some layers do not go through transformers' attention interface")
        return Prefilled(self, cache, logits, positions[:, -1:] + 1, padding, clock.seconds["prefill"])

    def arguments(self, positions: Tensor, padding: Tensor | None, keep: int) -> dict[str, Any]:
        """What of these the network's forward pass takes; the attention of a hooked one is asked in vain."""
        if self.hooked:
            return {"logits_to_keep": keep} if self._keeps else {}
        return {"position_ids": positions, "attention_mask": padding, "logits_to_keep": keep}

    def forward(
        self, token_ids: Tensor, positions: Tensor, cache: Cache, padding: Tensor | None, keep: int = 1
    ) -> Tensor:
        """Logits [b, keep, vocabulary] after the last tokens. Positions are always passed: they are the true ones."""
        if self.hooked:
            padded = padding is not None and not padding.all()
            cache.arriving = positions, padding if padded else None
        output = self.network(
            input_ids=token_ids,
            use_cache=True,
            **self.arguments(positions, padding, keep),
            **{self.cache_argument: cache},
        )
        logits = output.logits[:, -keep:]
        if not logits.sum(dtype=torch.float32).isfinite():  # many times faster than to ask each of them
            raise FloatingPointError("the model's logits are not finite")
        return logits
