"""Time decode steps: a method in turns with full KV, and with transformers as it comes, on one and the same cache.

A machine's speed drifts, so what is compared takes turns in short blocks, and a ratio is that of two neighbours.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fasa_bench.filling import filled
from fasa_bench.method import Method, Observation
from fasa_bench.plain import Plain
from fasa_bench.roofline import bandwidth, free_bytes
from fasa_bench.session import Decoder, Prefilled, Session
from fasa_bench.task import Timing

MODULES = "modules"  # stage: all parts of the network but attention (projections, MLP, norms, embedding, head)
STAGE_STEPS = 8  # steps for the table of stages, after the timed ones
SPARE = 1.05  # of the bytes of a cache, for what else a step needs


class DoesNotFit(Exception):
    """An example needs more memory than is free."""


def begin(session: Session, prompt_ids: Sequence[int], timing: Timing, observe: Observation) -> Prefilled:
    """The cache that is decoded from, filled as `timing` says; its `seconds` are those of a real pass, else NaN.

    Raises DoesNotFit: by what a token takes and what is free, or when the device says so.
    """
    reserve = timing.warmup + timing.steps + STAGE_STEPS + 1
    ids = torch.tensor(prompt_ids).expand(timing.batch, -1)
    with _refusing():
        one = session.prefill(ids[:, :16])  # the pass's warm-up as well
        token = sum(layer.keys[:, :, 0].nbytes + layer.values[:, :, 0].nbytes for layer in one.cache.layers)
        del one
        copies = 2 + timing.plain  # the prompt's, the method's or full KV's where both append, transformers'
        _check_room(session, int(SPARE * copies * token * (timing.context + reserve)))
        if timing.fill == "prefill":
            return session.prefill(ids, observe=observe, reserve=reserve)
        seconds = session.prefill(ids).seconds if timing.prompt_pass else None
        prefilled = filled(session, timing.context, timing.batch, seed=timing.seed, observe=observe, reserve=reserve)
        prefilled.seconds = prefilled.seconds if seconds is None else seconds
        return prefilled


def measure(decoder: Decoder, timing: Timing) -> dict[str, Any]:
    """Time a method's decoder, and in turns with it those that `timing` asks for; raises DoesNotFit.

    Returns, in JSON types, for each of "method", "full", "plain": step_ms, as they were taken, `block` to a turn;
    stages_ms of one step (medians; their names are those of the clock, and "modules"); read_bytes a step; device_bytes
    and host_bytes of the cache. And weight_bytes that a step reads, and bandwidth (fasa_bench.roofline).
    """
    prefilled = decoder.prefilled
    decoders = {"method": decoder}
    with _refusing(), contextlib.ExitStack() as stack:
        steps: dict[str, Callable[[Tensor], float]] = {"method": _stepping(decoder)}
        if timing.baseline:
            decoders["full"] = stack.enter_context(prefilled.fork(Method("fkv"), None))
            steps["full"] = _stepping(decoders["full"])
        if timing.plain:
            steps["plain"] = Plain(prefilled).step
        tokens = _tokens(decoder, timing)
        for _ in range(timing.warmup):
            for step in steps.values():
                step(next(tokens))
        before = {name: each.read_bytes for name, each in decoders.items()}
        step_ms = _take_turns(steps, tokens, timing)
        found: dict[str, dict[str, Any]] = {name: {"step_ms": times} for name, times in step_ms.items()}
        steps.clear()  # transformers' cache is not needed any more
        for name, each in decoders.items():
            found[name] |= {
                "read_bytes": (each.read_bytes - before[name]) // len(step_ms[name]),
                "device_bytes": each.cache.device_bytes,
                "host_bytes": each.cache.host_bytes,
                "stages_ms": _stages(each, tokens),
            }
    rates = {name: round(rate) for name, rate in bandwidth(decoder.session.device).items()}
    return {**found, "weight_bytes": _weight_bytes(decoder.session), "bandwidth": rates}


def _stepping(decoder: Decoder) -> Callable[[Tensor], float]:
    def step(token_ids: Tensor) -> float:
        decoder.step(token_ids)
        return decoder.step_seconds[-1]

    return step


def _tokens(decoder: Decoder, timing: Timing) -> Iterator[Tensor]:
    """Token ids [b, 1] without end: which ones does not matter."""
    generator = torch.Generator().manual_seed(timing.seed)
    while True:
        yield torch.randint(decoder.logits.shape[-1], (timing.batch, 1), generator=generator)


def _take_turns(
    steps: dict[str, Callable[[Tensor], float]], tokens: Iterator[Tensor], timing: Timing
) -> dict[str, list[float]]:
    """Milliseconds of `timing.steps` steps of each; who comes first changes from turn to turn."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for _ in range(-(-timing.steps // timing.block)):
        for name in order:
            found[name] += [round(1e3 * steps[name](next(tokens)), 4) for _ in range(timing.block)]
        order.reverse()
    return found


def _stages(decoder: Decoder, tokens: Iterator[Tensor]) -> dict[str, float]:
    """Median milliseconds of each stage over a few steps of their own, which measuring the parts makes longer."""
    clock = decoder.state.clock
    fine, clock.fine = clock.fine, True
    kept, found = dict(clock.seconds), defaultdict(list)
    with _timed_modules(decoder):
        for _ in range(STAGE_STEPS):
            clock.seconds.clear()
            decoder.step(next(tokens))
            for name, seconds in clock.seconds.items():
                found[name].append(1e3 * seconds)
    clock.fine = fine
    clock.seconds.clear()
    clock.seconds.update(kept)
    return {name: round(statistics.median(times), 4) for name, times in found.items()}


@contextlib.contextmanager
def _timed_modules(decoder: Decoder) -> Iterator[None]:
    """Put the time of all modules that have no others inside on the decoder's clock."""
    clock = decoder.state.clock
    start = 0.0

    def before(*_: Any) -> None:
        nonlocal start
        clock.wait()
        start = time.perf_counter()

    def after(*_: Any) -> None:
        clock.wait()
        clock.seconds[MODULES] += time.perf_counter() - start

    leaves = [module for module in decoder.session.network.modules() if not list(module.children())]
    hooks = [leaf.register_forward_pre_hook(before) for leaf in leaves]
    hooks += [leaf.register_forward_hook(after) for leaf in leaves]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _weight_bytes(session: Session) -> int:
    """Weights that a step reads: all but the rows of the embedding, unless it is the head too."""
    embedding, head = session.network.get_input_embeddings().weight, session.network.get_output_embeddings().weight
    total = sum(weight.nbytes for weight in session.network.parameters())
    return total if head is embedding else total - embedding.nbytes


def _check_room(session: Session, needed: int) -> None:
    free = free_bytes(session.device)
    if free is not None and needed > free:
        raise DoesNotFit(f"needs {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free")


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """What the device itself refuses is reported alike."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DoesNotFit(str(error).split("\n")[0]) from error
