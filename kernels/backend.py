"""Where the kernels can run, how they are tuned, and how many programs share a row of tokens.

Triton is optional: without it every kernel module still imports and its torch reference works. Kernels run on CUDA
and, with TRITON_INTERPRET=1 in the environment before the first import of triton, as plain Python on the CPU.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")

with suppress(ImportError):
    import triton.language as tl

    WIDEN = tl.constexpr(INTERPRETED)


def _triton() -> Any:
    try:
        return importlib.import_module("triton")
    except ImportError:
        return None


triton = _triton()


def unavailable(tensor: Tensor) -> str | None:
    """Why the kernels cannot run on this tensor's device; None if they can."""
    if triton is None:
        return "triton is not installed"
    if not (INTERPRETED or tensor.is_cuda):
        return f"Triton kernels need a CUDA device, and the cache lies on {tensor.device}"
    return None


def jit(function: Callable[..., Any]) -> Any:
    """triton.jit where there is triton: for functions that kernels call."""
    return function if triton is None else triton.jit(function)


def kernel(*varying: str) -> Callable[[Callable[..., None]], Any]:
    """triton.jit for a kernel. varying: integers that change from call to call, for which no variants are compiled."""
    return lambda function: function if triton is None else triton.jit(function, do_not_specialize=list(varying))


def autotune(configs: Sequence[tuple[dict[str, int], int, int]], key: list[str]) -> Callable[[Any], Any]:
    """triton.autotune over (block sizes, warps, stages); the first use of a key tries each for some milliseconds.

    That first use may not be inside a CUDA graph capture.
    """

    def tuned(kernel: Any) -> Any:
        if triton is None:
            return kernel
        if INTERPRETED or not torch.cuda.is_available():  # some versions' tuner looks for a GPU when it is made
            return triton.heuristics({name: lambda _, size=size: size for name, size in configs[0][0].items()})(kernel)
        return triton.autotune(
            [triton.Config(blocks, num_warps=warps, num_stages=stages) for blocks, warps, stages in configs],
            key=key,
            do_bench=lambda call, quantiles: triton.testing.do_bench(call, warmup=2, rep=10, quantiles=quantiles),
        )(kernel)

    return tuned


def power_of_2(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


@functools.cache
def _programs(device: torch.device) -> int:
    """Programs that fill the device: four for each multiprocessor, so that loads of one hide behind another's."""
    if INTERPRETED:
        return 8
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count


def parts_of(rows: int, tokens: int, smallest: int, most: int, device: torch.device) -> int:
    """Into how many parts (a power of two) to split each of `rows` rows, so that few rows still fill the device.

    A part gets at least `smallest` tokens when all `tokens` are used, and a row has at most `most` parts.
    """
    fill = power_of_2(-(-_programs(device) // rows))
    return min(fill, most, power_of_2(-(-tokens // smallest)))


def token_counts(count: int | Tensor, batch: int, device: torch.device) -> Tensor:
    """Token counts as the kernels read them: int32 [b] on the device. A tensor of that form is passed through."""
    if isinstance(count, int):
        return torch.full((batch,), count, dtype=torch.int32, device=device)
    if count.dtype != torch.int32 or count.shape != (batch,) or not count.is_contiguous():
        raise ValueError(f"token counts must be contiguous int32 [{batch}], got {count.dtype} {list(count.shape)}")
    return count


@jit
def part_of_row(
    low: tl.tensor, high: tl.tensor, part: tl.tensor, parts: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The tokens [start, stop) of one part of a row that holds [low, high); starts are multiples of BLOCK."""
    origin = low // BLOCK * BLOCK
    size = tl.cdiv(tl.cdiv(high - origin, parts), BLOCK) * BLOCK
    start = origin + part * size
    return start, tl.minimum(start + size, high)


@jit
def product(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Matrix product with float32 sums; float32 factors are not rounded to tf32."""
    if WIDEN:  # the interpreter multiplies the bit patterns of bfloat16
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")
