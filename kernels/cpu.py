"""FASA's decode step and dense attention on a CPU in float32, compiled (cpu.cpp), each beside its reference in torch.

One call for a layer: scores of all cached tokens over the leading key dimensions (TIP), their share by the group,
the exact choice of the best, and exact attention over it. In torch this is a dozen operations, each with passes of its
own over [H, G, T].

The lead lies in blocks, [cap / BLOCK, b, H, r, BLOCK], so that it is read as it lies and all that is computed of a
block stays in registers; the other dimensions of a key and its value lie in one row, `tail` [b, H, cap, d - r + d].
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("cpu.cpp")
BLOCK = 64  # tokens; as in cpu.cpp
ROOM = 3
LOG2E = 1.4426950408889634
Share = Literal["none", "max", "softmax"]
SHARES: tuple[Share, ...] = ("none", "max", "softmax")
STAGES = ("tip", "top_k", "attend")


_loaded: ctypes.CDLL | None = None


def load(library: Path) -> None:
    """Use the library that was built from SOURCE; needed before all else but the references. OSError if it is none."""
    global _loaded
    _loaded = ctypes.CDLL(str(library))


def _library() -> ctypes.CDLL:
    if _loaded is None:
        raise RuntimeError("the compiled CPU kernels are not loaded")
    return _loaded


class _Fasa(ctypes.Structure):
    """cpu.cpp's struct Fasa.

    width: r. scale: of the logits, times log2(e). k: tokens to choose, of which the first `sinks` and the last `recent`
    are always among them. ordered [b, Hq, d], asked [2, b, Hq, r]: room for the query. scores [cap / BLOCK, b, Hq,
    BLOCK]: of the dimensions that the mask leaves; others: of the other leading ones, null without a mask. values
    [cap / BLOCK, b, H, BLOCK]: what a token is worth to a group. room: for each thread. seconds: of the first thread,
    as STAGES.
    """

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "heads", "group", "dim", "width", "k", "sinks", "recent")),
        *((name, ctypes.c_int64) for name in ("share", "threads")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("ordered", "asked", "scores", "others", "values", "room", "slots")),
        ("seconds", ctypes.c_double * len(STAGES)),
    )


class Workspace:
    """Buffers of `fasa_step` for one shape, and capacity in tokens; for all layers that run one after the other.

    share: who chooses, and by what: "none" each query head by its scores (the paper's form), "max" each KV head by the
    highest score of its query heads, "softmax" by the mean of their softmax.
    scores [cap / BLOCK, b, Hq, 1, BLOCK]: of the last step; behind the last token they mean nothing.
    """

    def __init__(
        self, batch: int, query_heads: int, kv_heads: int, head_dim: int, width: int, capacity: int, share: Share
    ) -> None:
        blocks = -(-capacity // BLOCK)
        self.rows = query_heads if share == "none" else kv_heads
        self.scores = torch.empty(blocks, batch, query_heads, 1, BLOCK)
        self._others: Tensor | None = None
        self._values = torch.empty(blocks, batch, kv_heads, BLOCK)
        self._query = torch.empty(batch * query_heads * (head_dim + 2 * width))
        self._room: dict[int, Tensor] = {}  # by number of threads
        self.fasa = _Fasa(batch, kv_heads, query_heads // kv_heads, head_dim, width, share=SHARES.index(share))
        self.fasa.ordered = self._query.data_ptr()
        self.fasa.asked = self._query[batch * query_heads * head_dim :].data_ptr()
        self.fasa.scores, self.fasa.values = self.scores.data_ptr(), self._values.data_ptr()

    def prepare(self, k: int, sinks: int, recent: int, scale: float, masked: bool) -> Tensor:
        """Set what changes from layer to layer; returns room for the slots, int64 [b, R, k]."""
        threads = torch.get_num_threads()
        if threads not in self._room:
            self._room = {threads: torch.empty(threads * ROOM * len(self.scores) * BLOCK)}
            self.fasa.room, self.fasa.threads = self._room[threads].data_ptr(), threads
        if masked and self._others is None:
            self._others = torch.empty_like(self.scores)
        fasa, others = self.fasa, self._others
        fasa.k, fasa.sinks, fasa.recent, fasa.scale = k, sinks, recent, scale * LOG2E
        fasa.others = others.data_ptr() if masked and others is not None else None
        slots = torch.empty(fasa.batch, self.rows, k, dtype=torch.long)
        fasa.slots = slots.data_ptr()
        return slots

    @property
    def seconds(self) -> dict[str, float]:
        """Of the last step's parts, by the first thread."""
        return dict(zip(STAGES, self.fasa.seconds, strict=True))


def fasa_step(
    query: Tensor,
    order: Tensor,
    mask: Tensor | None,
    lead: Tensor,
    tail: Tensor | None,
    tokens: int,
    k: int,
    scale: float,
    workspace: Workspace,
    sinks: int = 0,
    recent: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """The slots that are read at one step, int64 [b, R, k] ascending, and the attention output [b, Hq, d] over them.

    query: [b, Hq, d]. order: int64 [H, d], which dimension lies at which place of (lead, rest). mask: [Hq, r], 0 where
    a query head does not predict by a leading dimension; None if none is. lead, tail: as above; without a tail there is
    no output. tokens: how many are held, at least k. Of equal tokens the oldest is chosen.
    """
    slots = workspace.prepare(k, sinks, recent, scale, mask is not None)
    output = None if tail is None else torch.empty_like(query)
    query = query.contiguous()
    _library().fasa_step(
        ctypes.byref(workspace.fasa),
        _at(query),
        _at(order),
        _at(mask),
        _at(lead),
        _at(tail),
        ctypes.c_int64(tokens),
        ctypes.c_int64(0 if tail is None else tail.shape[2]),
        _at(output),
    )
    return slots, output


def fasa_step_reference(
    query: Tensor,
    order: Tensor,
    mask: Tensor | None,
    lead: Tensor,
    tail: Tensor,
    tokens: int,
    k: int,
    scale: float,
    share: Share,
    sinks: int = 0,
    recent: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`fasa_step` in plain torch; also what the tokens are worth, [b, R, tokens]."""
    batch, query_heads, dim = query.shape
    heads, width = lead.shape[2:4]
    index = order[None, :, None].expand(batch, -1, query_heads // heads, -1)
    ordered = query.unflatten(1, (heads, -1)).gather(3, index)
    asked = ordered[..., :width] * (1 if mask is None else mask.unflatten(0, (heads, -1)))
    leading = lead.permute(1, 2, 0, 4, 3).flatten(2, 3)[:, :, :tokens]
    scores = asked @ leading.transpose(2, 3)  # [b, H, G, tokens]
    worth = scores.flatten(1, 2)
    if share == "max":
        worth = scores.amax(2)
    elif share == "softmax":
        worth = (scores * scale).softmax(-1).mean(2)
    forced = torch.zeros(tokens, dtype=torch.bool)
    forced[:sinks] = True
    forced[max(0, tokens - recent) :] = True
    best = worth.masked_fill(forced, torch.inf).sort(dim=-1, descending=True, stable=True).indices[..., :k]
    slots = best.sort(dim=-1).values
    rest, values = tail[:, :, :tokens].tensor_split([dim - width], dim=-1)
    each = query_heads // slots.shape[1]  # query heads that read the same tokens
    keys, values = (
        rows.repeat_interleave(slots.shape[1] // heads, dim=1).gather(2, slots[..., None].expand(-1, -1, -1, dim))
        for rows in (torch.cat([leading, rest], dim=-1), values)
    )
    weights = (ordered.reshape(batch, -1, each, dim) @ keys.transpose(2, 3) * scale).softmax(-1)
    return slots, (weights @ values).view(query.shape), worth


def dense_step(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Exact attention over everything: [b, Hq, d] and two of [b, H, n, d] -> [b, Hq, d].

    A head's rows lie behind each other; between two heads there may be a gap, the same everywhere.
    """
    batch, heads, tokens, dim = keys.shape
    query = query.contiguous()
    output = torch.empty_like(query)
    integers = (batch * heads, query.shape[1] // heads, dim, tokens, keys.stride(1), values.stride(1))
    _library().dense_step(
        _at(query),
        ctypes.c_void_p(keys.data_ptr()),
        ctypes.c_void_p(values.data_ptr()),
        *map(ctypes.c_int64, integers),
        ctypes.c_float(scale * LOG2E),
        _at(output),
        ctypes.c_int64(torch.get_num_threads()),
    )
    return output


def takes(rows: Tensor) -> bool:
    """Whether keys or values [b, H, n, d] lie as `dense_step` wants them."""
    batch, heads, _, dim = rows.shape
    strides = rows.stride()
    return strides[2:] == (dim, 1) and (batch == 1 or strides[0] == heads * strides[1])


def append(key: Tensor, value: Tensor, order: Tensor, lead: Tensor, tail: Tensor, slot: int) -> None:
    """Write one token of each sequence, [b, H, d], at place `slot` of a split cache."""
    batch, heads, dim = key.shape
    key, value = key.contiguous(), value.contiguous()
    integers = (batch * heads, heads, dim, lead.shape[3], tail.shape[2], slot)
    _library().split_append(_at(key), _at(value), _at(order), _at(lead), _at(tail), *map(ctypes.c_int64, integers))


def _at(tensor: Tensor | None) -> ctypes.c_void_p:
    if tensor is None:
        return ctypes.c_void_p(None)
    if not tensor.is_contiguous():
        raise ValueError(f"the kernels read rows that lie together, not {list(tensor.shape)} by {tensor.stride()}")
    return ctypes.c_void_p(tensor.data_ptr())
