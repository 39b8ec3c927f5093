"""FASA's decode step by the Triton kernels."""

from __future__ import annotations

from torch import Tensor

from fasa_bench.cache import KVLayer
from fasa_bench.kernels.backend import token_counts
from fasa_bench.kernels.decode import Share, Workspace, fasa_step
from fasa_bench.methods.dominant import Dominant

MOST_HEADS = 16  # query heads of a KV head that the kernels take


class TritonKernels:
    """Triton's kernels with their buffers, which all layers and sequences of one shape use in turn."""

    def __init__(self, share: Share, sinks: int, recent: int) -> None:
        self.share, self.sinks, self.recent = share, sinks, recent
        self._workspaces: dict[tuple[object, ...], Workspace] = {}
        self._counts: dict[tuple[object, ...], Tensor] = {}

    def step(self, layer: KVLayer, query: Tensor, dominant: Dominant) -> tuple[Tensor, int] | None:
        """As fasa_bench.method.Method.step."""
        budget, heads = layer.budget, query.shape[1]
        assert budget is not None
        if query.shape[2] > 1 or heads // layer.heads > MOST_HEADS:
            return None
        # chosen keys whole, and their values
        rows = layer.read_split(2 * budget * (heads if self.share == "none" else layer.heads) * query.shape[3])
        if rows is None:
            return None
        ordered = rows.split.apply(query)[:, :, 0]
        lead, rest, values = rows.storage
        key = (query.device, *query.shape, layer.heads, lead.shape[2], budget)
        if key not in self._workspaces:
            self._workspaces.clear()  # of a cache that has grown
            self._workspaces[key] = Workspace(*_shape(query, layer), lead.shape[2], budget, query.device, self.share)
        output = fasa_step(
            ordered[..., : rows.split.lead] * dominant.lead_mask[:, 0],
            ordered,
            lead,
            rest if rest.shape[-1] else None,  # a group may use all dimensions
            values,
            self._count(0, query),
            self._count(layer.length, query),
            layer.scale,
            self._workspaces[key],
            self.sinks,
            self.recent,
        )
        return output[:, None], budget

    def _count(self, tokens: int, query: Tensor) -> Tensor:
        """A number of tokens on the device; all layers of a step have the same."""
        key = (query.device, len(query), tokens)
        if key not in self._counts:
            self._counts = {at: count for at, count in self._counts.items() if at[2] == 0}
            self._counts[key] = token_counts(tokens, len(query), query.device)
        return self._counts[key]


def _shape(query: Tensor, layer: KVLayer) -> tuple[int, int, int, int]:
    return len(query), query.shape[1], layer.heads, query.shape[3]
