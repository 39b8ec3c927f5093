"""FASA's decode step by kernels, where they can run: Triton's on CUDA, the compiled ones on a CPU."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fasa_bench.cache import KVLayer
from fasa_bench.clock import stage
from fasa_bench.errors import UserError
from fasa_bench.kernels import cpu
from fasa_bench.kernels.backend import INTERPRETED, unavailable
from fasa_bench.lead import ROWS, Layout
from fasa_bench.methods.dominant import Dominant
from fasa_bench.methods.fused_cpu import CpuKernels, missing
from fasa_bench.methods.fused_cuda import TritonKernels

Backend = Literal["auto", "torch", "triton", "cpp"]
Share = Literal["none", "max", "softmax"]
LAYOUTS = {"triton": ROWS, "cpp": Layout(cpu.BLOCK, cpu.append)}


def resolve(backend: Backend, tensor: Tensor) -> Literal["torch", "triton", "cpp"]:
    """Who computes on this tensor's device and in its type: what is asked for, or the fastest that can be had."""
    if backend == "torch":
        return backend
    reasons: dict[Literal["triton", "cpp"], str | None] = {}
    if backend == "triton" or (backend == "auto" and not INTERPRETED):
        reasons["triton"] = unavailable(tensor)
    if backend != "triton":
        reasons["cpp"] = missing(tensor)
    for name, reason in reasons.items():
        if reason is None:
            return name
    if backend != "auto":
        raise UserError.of("method.backend", backend, f"cannot be used: {reasons[backend]}; auto or torch can")
    return "torch"


class Kernels:
    """The kernels of one method. share: who chooses and by what; sinks, recent: tokens that are always chosen."""

    def __init__(self, backend: Backend, share: Share, sinks: int, recent: int) -> None:
        self.backend = backend
        self._triton = TritonKernels(share, sinks, recent)
        self._cpu = CpuKernels(share, sinks, recent)

    def layout(self, layer: KVLayer) -> Layout | None:
        """How a layer's leading dimensions are to lie, which is going to be split."""
        return None if layer.padded else LAYOUTS.get(resolve(self.backend, layer.segments[0].tensors[0]))

    def step(self, layer: KVLayer, query: Tensor, dominant: Dominant) -> tuple[Tensor, int] | None:
        """As fasa_bench.method.Method.step; None where PyTorch's operations have to do."""
        name = resolve(self.backend, query) if layer.is_split and layer.is_plain else "torch"
        if name == "torch":
            return None
        with stage("kernels"):
            return (self._triton if name == "triton" else self._cpu).step(layer, query, dominant)

    def select(self, layer: KVLayer, query: Tensor, dominant: Dominant) -> Tensor | None:
        """As fasa_bench.method.Method.select, of a layer whose other rows lie elsewhere; None as above."""
        if not (layer.is_split and layer.is_plain) or resolve(self.backend, query) != "cpp":
            return None
        with stage("kernels"):
            return self._cpu.select(layer, query, dominant)
