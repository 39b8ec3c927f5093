"""Time decode steps: a method in turns with full KV, and with transformers as it comes, on one and the same cache.

A machine's speed drifts, so what is compared takes turns in short blocks, and a ratio is that of two neighbours.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from fasa_bench.attention import Dense, dense, faster_dense
from fasa_bench.clock import Clock
from fasa_bench.filling import filled
from fasa_bench.method import Method, Observation
from fasa_bench.plain import Plain
from fasa_bench.roofline import bandwidth, free_bytes
from fasa_bench.session import Decoder, Prefilled, Session
from fasa_bench.task import Timing

MODULES = "modules"  # stage: projections, MLP, norms, embedding, head: all modules without others inside
GLUE = "glue"  # stage: what layers do besides: rotation, residuals, appending, the calls themselves
SPARE = 1.05  # of the bytes of a cache, for what else a step needs


class DoesNotFitError(Exception):
    """An example needs more memory than is free."""


def begin(session: Session, prompt_ids: Sequence[int], timing: Timing, observe: Observation) -> Prefilled:
    """The cache that is decoded from, filled as `timing` says; its `seconds` are those of a real pass, else NaN.

    Raises DoesNotFitError: by what a token takes and what is free, or when the device says so.
    """
    reserve = timing.warmup + timing.steps + timing.turns
    ids = torch.tensor(prompt_ids).expand(timing.batch, -1)
    with _refusing():
        one = session.prefill(ids[:, :16])  # the pass's warm-up as well
        token = sum(layer.keys[:, :, 0].nbytes + layer.values[:, :, 0].nbytes for layer in one.cache.full)
        # the prompt's; of those that append all but one, which goes on in the prompt's; transformers'
        faster = faster_dense(one.cache.full[0].keys) is not None
        copies = 2 + (timing.baseline and faster) + timing.plain
        del one
        _check_room(session, int(SPARE * copies * token * (timing.context + reserve)))
        if timing.fill == "prefill":
            return session.prefill(ids, observe=observe, reserve=reserve)
        seconds = session.prefill(ids).seconds if timing.prompt_pass else None
        prefilled = filled(session, timing.context, timing.batch, seed=timing.seed, observe=observe, reserve=reserve)
        prefilled.seconds = prefilled.seconds if seconds is None else seconds
        return prefilled


class Stepping:
    """A decoder that takes part: steps that are timed whole, and steps whose stages are timed, which takes longer."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.stages_ms: dict[str, list[float]] = defaultdict(list)
        self.read_bytes = 0

    def step(self, token_ids: Tensor) -> float:
        """Seconds of a step over the next tokens [b, 1]."""
        before = self.decoder.read_bytes
        self.decoder.step(token_ids)
        self.read_bytes = self.decoder.read_bytes - before
        return self.decoder.step_seconds[-1]

    def staged(self, token_ids: Tensor) -> None:
        """A step more, for the table of stages."""
        clock = self.decoder.state.clock
        fine, clock.fine = clock.fine, True
        clock.seconds.clear()
        with _timed_modules(self.decoder.session.network, clock):
            self.decoder.step(token_ids)
        for name, seconds in clock.seconds.items():
            self.stages_ms[name].append(1e3 * seconds)
        clock.seconds.clear()
        clock.fine = fine

    def found(self) -> dict[str, Any]:
        return {
            "stages_ms": {name: round(statistics.median(times), 4) for name, times in self.stages_ms.items()},
            "read_bytes": self.read_bytes,
            "device_bytes": self.decoder.cache.device_bytes,
            "host_bytes": self.decoder.cache.host_bytes,
        }


def measure(decoder: Decoder, timing: Timing) -> dict[str, Any]:
    """Time a method's decoder, and in turns with it those that `timing` asks for; raises DoesNotFitError.

    Returns, in JSON types, for each of "method", "full", "sdpa" (as "full", by PyTorch, where that has another way),
    "plain": step_ms, as they were taken, `block` to a turn. For all but the last: stages_ms of one step, medians (their
    names are the clock's, MODULES and GLUE); read_bytes of the last step; device_bytes and host_bytes of the cache.
    And weight_bytes that a step reads; bandwidth, bytes/s of this device (fasa_bench.roofline).
    """
    session = decoder.session
    with _refusing(), contextlib.ExitStack() as stack:
        taking: dict[str, Stepping | Plain] = {"method": Stepping(decoder)}
        if timing.baseline:
            for name, way in _full_kv(decoder.prefilled).items():
                full = stack.enter_context(decoder.prefilled.fork(Method("fkv"), None))
                full.state.dense = way
                taking[name] = Stepping(full)
        if timing.plain:
            taking["plain"] = Plain(decoder.prefilled)
        step_ms = take_turns(taking, decoder.logits.shape[-1], timing)
        found: dict[str, dict[str, Any]] = {
            name: {"step_ms": step_ms[name], **each.found()} for name, each in taking.items()
        }
        taking.clear()
    rates = {name: round(rate) for name, rate in bandwidth(session.device).items()}
    return {**found, "weight_bytes": _weight_bytes(session.network), "bandwidth": rates}


def _full_kv(prefilled: Prefilled) -> dict[str, Dense]:
    """Dense attention of those that read everything: the fastest, and beside it PyTorch's where that is another."""
    faster = faster_dense(prefilled.cache.layers[0].keys)
    return {"full": dense} if faster is None else {"full": faster, "sdpa": dense}


def _random_tokens(vocabulary: int, timing: Timing) -> Iterator[Tensor]:
    """Token ids [b, 1] without end: which ones does not matter."""
    generator = torch.Generator().manual_seed(timing.seed)
    while True:
        yield torch.randint(vocabulary, (timing.batch, 1), generator=generator)


def take_turns(taking: Mapping[str, Stepping | Plain], vocabulary: int, timing: Timing) -> dict[str, list[float]]:
    """Milliseconds of `timing.steps` steps of each; a turn ends with the step for the table of stages.

    Who comes first changes from turn to turn.
    """
    tokens = _random_tokens(vocabulary, timing)
    found: dict[str, list[float]] = {name: [] for name in taking}
    for each in taking.values():
        for _ in range(timing.warmup):
            each.step(next(tokens))
    order = list(taking)
    for _ in range(timing.turns):
        for name in order:
            found[name] += [round(1e3 * taking[name].step(next(tokens)), 4) for _ in range(timing.block)]
            taking[name].staged(next(tokens))
        order.reverse()
    return found


@contextlib.contextmanager
def _timed_modules(network: torch.nn.Module, clock: Clock) -> Iterator[None]:
    """Two stages more: modules that have no others inside, and what whole layers take besides all other stages."""
    leaves = [module for module in network.modules() if not list(module.children())]
    layers = [layer for part in network.modules() if isinstance(part, torch.nn.ModuleList) for layer in part]
    hooks = [hook for module in layers for hook in _timed(module, clock, GLUE)]
    hooks += [hook for module in leaves for hook in _timed(module, clock, MODULES)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _timed(module: torch.nn.Module, clock: Clock, stage: str) -> list[RemovableHandle]:
    running = contextlib.ExitStack()

    def before(*_: Any) -> None:
        running.enter_context(clock.stage(stage))

    def after(*_: Any) -> None:
        running.close()

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]


def _weight_bytes(network: PreTrainedModel) -> int:
    """Weights that a step reads: all but the rows of the embedding, unless it is the head too."""
    embedding: Tensor = network.get_input_embeddings().weight  # type: ignore[assignment]
    head = network.get_output_embeddings()
    total = sum(weight.nbytes for weight in network.parameters())
    return total if head is not None and head.weight is embedding else total - embedding.nbytes


def _check_room(session: Session, needed: int) -> None:
    free = free_bytes(session.device)
    if free is not None and needed > free:
        raise DoesNotFitError(f"needs {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free")


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """What the device itself refuses is reported alike."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DoesNotFitError(str(error).split("\n")[0]) from error
