"""FASA's decode step by the compiled CPU kernels, which are built at the first use where there is a compiler."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from fasa_bench.attention import register_dense
from fasa_bench.cache import KVLayer
from fasa_bench.clock import spent
from fasa_bench.compiled import NoLibraryError, shared_library
from fasa_bench.kernels import cpu
from fasa_bench.methods.dominant import Dominant

log = logging.getLogger(__name__)


def missing(tensor: Tensor) -> str | None:
    """Why the kernels cannot take this tensor; None if they can."""
    if tensor.device.type != "cpu":
        return f"compiled kernels need a cache on the CPU, and it lies on {tensor.device}"
    if tensor.dtype != torch.float32:
        return f"compiled kernels need float32, not {tensor.dtype}"
    return _load()


@functools.cache
def _load() -> str | None:
    try:
        cpu.load(shared_library(cpu.SOURCE))
    except (NoLibraryError, OSError) as error:
        log.warning("no compiled CPU kernels, PyTorch's operations do the same more slowly: %s", error)
        return str(error)
    return None


def _dense(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    return cpu.dense_step(query[:, :, 0], keys, values, scale)[:, None]


register_dense(lambda like: _dense if missing(like) is None and cpu.takes(like) else None)


class CpuKernels:
    """The compiled CPU kernels with their buffers, which all layers and sequences of one shape use in turn."""

    def __init__(self, share: cpu.Share, sinks: int, recent: int) -> None:
        self.share, self.sinks, self.recent = share, sinks, recent
        self._workspaces: dict[tuple[int, ...], cpu.Workspace] = {}

    def step(self, layer: KVLayer, query: Tensor, dominant: Dominant) -> tuple[Tensor, int] | None:
        """As fasa_bench.method.Method.step."""
        found = self._run(layer, query, dominant, attend=True)
        if found is None:
            return None
        output = found[1]
        assert output is not None
        return output[:, None], found[0].shape[2]

    def select(self, layer: KVLayer, query: Tensor, dominant: Dominant) -> Tensor | None:
        """As fasa_bench.method.Method.select; None where the kernels do not do."""
        found = self._run(layer, query, dominant, attend=False)
        return None if found is None else found[0][:, :, None]

    def _run(
        self, layer: KVLayer, query: Tensor, dominant: Dominant, attend: bool
    ) -> tuple[Tensor, Tensor | None] | None:
        batch, query_heads, queries, dim = query.shape
        assert layer.budget is not None
        heads, width = layer.heads, dominant.lead_mask.shape[-1]
        read = layer.budget * (query_heads if self.share == "none" else heads) * (2 * dim - width)
        rows = layer.read_split(read if attend else 0) if queries == 1 else None
        if rows is None:
            return None
        lead = rows.buffer.lead.storage
        key = (batch, query_heads, heads, dim, width, len(lead))
        if key not in self._workspaces:
            self._workspaces = {key: cpu.Workspace(*key[:5], len(lead) * cpu.BLOCK, self.share)}
        workspace = self._workspaces[key]
        slots, output = cpu.fasa_step(
            query[:, :, 0],
            rows.split.order.contiguous(),
            None if dominant.shared else dominant.lead_mask[:, 0],
            lead,
            rows.buffer.tail.storage if attend else None,
            rows.tokens,
            layer.budget,
            layer.scale,
            workspace,
            self.sinks,
            self.recent,
        )
        for stage, seconds in workspace.seconds.items():
            spent(stage, seconds)
        if not attend and dominant.shared:
            layer.remember(workspace.scores)
        return slots, output
