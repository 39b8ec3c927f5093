"""FASA's attention for one decode step on the split cache: TIP, selection, attention over the chosen tokens.

Four launches whose grids and buffers depend on the capacity, never on the number of tokens held, which the kernels read
from the device: nothing waits for the host, and a step captured in a CUDA graph stays right while the cache grows (the
caller advances `end` in place). Run a step once before the capture: the first use of a shape compiles and tunes.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .attend import AttendScratch, attend, attend_reference
from .select import SelectScratch, group_reference, select, select_reference
from .tip import tip, tip_parts, tip_reference

Share = Literal["none", "max", "softmax"]


class Workspace:
    """Buffers of `fasa_step`, one set for all layers of a model that run one after the other.

    share: who reads the same tokens, and by which score: "none" chooses for each query head (the paper's form), "max"
    for each KV head by the highest score of its query heads, "softmax" by the mean of their softmax.
    """

    def __init__(
        self,
        batch: int,
        query_heads: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        k: int,
        device: torch.device,
        share: Share = "none",
    ) -> None:
        self.share = share
        self.rows = query_heads if share == "none" else kv_heads
        scored = kv_heads if share == "max" else query_heads
        self.scores = torch.empty(batch, scored, capacity, device=device)
        parts = tip_parts(batch, kv_heads, capacity, device)
        self.peaks, self.sums = torch.empty(2, batch, scored, parts, device=device).unbind()
        self.select = SelectScratch(batch, self.rows, capacity, k, device)
        self.attend = AttendScratch.for_slots(batch, self.rows, k, query_heads, head_dim, device)

    @property
    def slots(self) -> Tensor:
        """The tokens chosen at the last step: int32 [b, R, k]."""
        return self.select.slots


def fasa_step(
    tip_query: Tensor,
    query: Tensor,
    lead: Tensor,
    rest: Tensor | None,
    values: Tensor,
    first: Tensor,
    end: Tensor,
    scale: float,
    workspace: Workspace,
    sinks: int = 0,
    recent: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """The attention output [b, Hq, d] of one new token, whose own key and value are already in the cache.

    Shapes as in `tip`, `select` and `attend`; the workspace says how many tokens are chosen, and for which heads.
    """
    buffers = workspace.scores, workspace.peaks, workspace.sums
    scores, peaks, sums = tip(tip_query, lead, first, end, scale, buffers, best=workspace.share == "max")
    k = workspace.slots.shape[2]
    rows = workspace.rows if workspace.share == "softmax" else None  # the scores are one row for each choice already
    slots = select(scores, peaks, sums, first, end, k, scale, sinks, recent, rows, workspace.select)
    return attend(query, lead, rest, values, slots, scale, workspace.attend, out)


def fasa_step_reference(
    tip_query: Tensor,
    query: Tensor,
    lead: Tensor,
    rest: Tensor | None,
    values: Tensor,
    first: Tensor,
    end: Tensor,
    scale: float,
    k: int,
    sinks: int = 0,
    recent: int = 0,
    share: Share = "none",
) -> Tensor:
    """`fasa_step` in plain torch and float32."""
    scores = tip_reference(tip_query, lead, first, end, best=share == "max")
    if share == "softmax":
        scores = group_reference(scores, lead.shape[1], scale)
    slots = select_reference(scores, k, first, end, sinks, recent)
    return attend_reference(query, lead, rest, values, slots, scale)
