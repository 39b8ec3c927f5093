"""The KV cache: what one layer holds for a batch of sequences, with the true position of every cached token.

Notation in all shapes: b batch, H KV heads, Hq query heads, G = Hq / H, n cached tokens, d head dimension; values may
have another dimension than queries and keys.
A *slot* is an index into the n cached tokens; a *position* is the token's place in the text. Eviction changes slots,
never positions. Position -1 marks padding, which is never attended.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fasa_bench.clock import stage
from fasa_bench.errors import UserError
from fasa_bench.latent import Expansion, LatentRows
from fasa_bench.lead import BLOCKS, ROWS, Layout
from fasa_bench.near import Near, Prefetch
from fasa_bench.quantised import pick
from fasa_bench.segments import Chosen, Packed, Packing, Rows, Segment, pack_oldest
from fasa_bench.split import Split, SplitRows, at, in_one
from fasa_bench.tail import HostTail


class KVLayer:
    """Cached keys and values of one attention layer, for every sequence of the batch.

    index: the layer's place in the model. window: it attends to so many newest tokens only; no method acts on it then.
    scale: factor of the attention logits (usually d ** -0.5). cap, sinks [Hq], slopes [Hq]: see
        fasa_bench.softmax.
    budget: tokens a head may read at a step (None: all), set when a method is attached.
    seen: tokens that have passed through, padding included; also the default position of the next one.
    prompt_queries, prompt_mass: what the attached methods observe of the prompt pass (fasa_bench.method.Observation).
    state: whatever tensors a method keeps for this layer and sequence; counted in the bytes. They may be views that
        several samples share: replace them, never write into them.
    packing: how rows that are not recent will be stored, from `pack` on.
    read_bytes: keys and values read so far by `dot`, `mix` and `gather`, and what a method adds for its own index.
    moved_bytes: keys and values that went between the device and the host's memory, where rows are kept there.
    asked_rows, found_rows: rows that were wanted from there, and how many of them lay on the device already.
    after: the layer that computes next, the first one again after the last; a weak reference.
    offered: what the model handed its cache in the pass under way. expansion: that of a layer whose model caches
        latents (fasa_bench.latent), as long as they are kept.

    Tokens lie in segments: frozen ones (a prompt that several samples share, packed rows), then the layer's own rows.
    """

    def __init__(
        self,
        index: int,
        window: int | None = None,
        expansion: Expansion | None = None,
        slopes: Tensor | None = None,
    ) -> None:
        self.index, self.window = index, window
        self.expansion, self.slopes = expansion, slopes
        self.offered: tuple[Tensor, Tensor] | None = None
        self.scale = 1.0
        self.cap: float | None = None
        self.sinks: Tensor | None = None
        self.budget: int | None = None
        self.seen = 0
        self.padded = False
        self.prompt_queries: Tensor | None = None
        self.prompt_mass: Tensor | None = None
        self.state: dict[str, Tensor] = {}
        self.read_bytes = self.moved_bytes = self.asked_rows = self.found_rows = 0
        self.after: Callable[[], KVLayer | None] = lambda: None
        self._frozen: list[Segment] = []
        self._own: Rows | SplitRows | LatentRows | None = None
        self._samples = 1
        self.packing = Packing()
        self._packed = False
        self._split: Split | None = None
        self._near: Near | None = None
        self._parts: tuple[Tensor, tuple[Tensor, Tensor]] | None = None  # of the last query
        self._products: Tensor | None = None  # of the query of the step with the leading dimensions

    # what is cached ---------------------------------------------------------------------------------------------

    @property
    def segments(self) -> list[Segment]:
        """Where the tokens lie, oldest first; at least one."""
        found = [*self._frozen, *([] if self._own is None else [self._own])]
        if not found:
            raise RuntimeError(f"layer {self.index} is empty")
        return found

    @property
    def length(self) -> int:
        """Tokens held."""
        return sum(segment.tokens for segment in self._frozen) + (0 if self._own is None else self._own.tokens)

    @property
    def batch(self) -> int:
        return max(self._samples, *(segment.batch for segment in self.segments), 1)

    @property
    def heads(self) -> int:
        """Heads that hold tokens of their own: the KV heads, or the query heads after an eviction per query head."""
        return self.segments[0].heads

    @property
    def device(self) -> torch.device:
        return self.segments[0].device

    @property
    def keys(self) -> Tensor:
        """[b, H, n, d], rotated as the model rotated them. A copy while tokens are shared or packed."""
        return self._joined([segment.keys for segment in self.segments])

    @property
    def values(self) -> Tensor:
        """[b, H, n, d]. A copy while tokens are shared or packed."""
        return self._joined([segment.values for segment in self.segments])

    @property
    def positions(self) -> Tensor:
        """[b, H or 1, n], ascending; -1 is padding. One row serves all heads until they keep different tokens."""
        return self._joined([segment.positions for segment in self.segments])

    def _joined(self, parts: list[Tensor]) -> Tensor:
        if len(parts) == 1 and len(parts[0]) == self.batch:
            return parts[0]
        return torch.cat([part.expand(self.batch, *part.shape[1:]) for part in parts], dim=2)

    @property
    def is_plain(self) -> bool:
        """Its softmax has neither a soft cap, sinks nor a position bias, as fused attention takes it."""
        return self.cap is None and self.sinks is None and self.slopes is None

    @property
    def real(self) -> Tensor | None:
        """[b, H or 1, n] bool, False for padding and what has left the window; None when all tokens count."""
        if self.window is not None and self.length > self.window:
            held = self.positions
            return (held >= 0) & (held > held[..., -1:] - self.window)
        return self.positions >= 0 if self.padded else None

    def read_whole(self) -> tuple[Tensor, Tensor] | None:
        """All keys and values (of the window) as they lie, if in one piece and without padding; counted as read."""
        own = self._own
        if self._frozen or not isinstance(own, Rows) or self.padded:
            return None
        keys, values = own.keys, own.values
        if self.window is not None and own.tokens > self.window:
            keys, values = keys[:, :, -self.window :], values[:, :, -self.window :]
        self.read_bytes += keys.nbytes + values.nbytes
        return keys, values

    def dot(self, query: Tensor) -> Tensor:
        """Products of each query head with the keys of its KV head, unscaled: [b, Hq, q, d] -> [b, Hq, q, n]."""
        self.read_bytes += sum(segment.key_bytes for segment in self.segments)
        if self._near is not None:
            self.moved_bytes += sum(segment.key_bytes - segment.lead_bytes for segment in self._split_segments)
        parts = [segment.dot(query) for segment in self.segments]
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]

    def mix(self, weights: Tensor) -> Tensor:
        """Values of each query head's KV head, summed with these weights: [b, Hq, q, n] -> [b, Hq, q, d]."""
        segments = self.segments
        self.read_bytes += (moved := sum(segment.value_bytes for segment in segments))
        self.moved_bytes += 0 if self._near is None else moved
        parts = weights.split([segment.tokens for segment in segments], dim=-1)
        return functools.reduce(torch.add, (segment.mix(part) for segment, part in zip(segments, parts, strict=True)))

    def lead_dot(self, query: Tensor, whole: bool = False) -> Tensor:
        """Products over the leading dimensions: `query_parts`' first part, [b, Hq, q, r] -> [B, b, Hq, q, C].

        The tokens come in B blocks of C; B * C >= n, and what lies behind the last token is not defined. In a layer
        that is not split all dimensions are leading, and B is 1.
        whole: this is the query of the step and no dimension of it is masked, so that the products are a part of its
        logits. `choose` then does not read the leading dimensions again; do not write into the result.
        """
        if self._split is None:
            return self.dot(query)[None]
        segments = self._split_segments
        self.read_bytes += sum(segment.lead_bytes for segment in segments)
        if len(segments) == 1:
            products = segments[0].lead_dot(query)
            self._products = products if whole else None
            return products
        parts = [in_one(segment.lead_dot(query), segment.tokens) for segment in segments]
        return torch.cat(parts, dim=-1)[None]

    def query_parts(self, query: Tensor, last: bool = False) -> tuple[Tensor, ...]:
        """A query [b, Hq, q, d] in the parts in which keys are stored: one, or leading and other dimensions apart.

        last: nobody will ask for it again.
        """
        if self.expansion is not None:
            return self.expansion.absorb(query)
        if self._split is None:
            return (query,)
        known, self._parts = self._parts, None
        if known is not None and known[0] is query:
            return known[1]
        parts = self._split.parts(query)
        if not last:
            self._parts = query, parts
        return parts

    def read_split(self, numbers: int) -> SplitRows | None:
        """The rows of a split layer, for a kernel; None if they lie in several pieces, hold padding, or their values
        are not as wide as their keys.

        Counts as read: the leading dimensions of all tokens, and so many numbers of keys and values of each sequence.
        """
        if self._frozen or self.padded or not isinstance(self._own, SplitRows) or self.expansion is not None:
            return None
        if self._own.value_dim != self._own.split.order.shape[1]:
            return None
        rows = self._own
        self.read_bytes += rows.lead_bytes + self.batch * numbers * rows.buffer.tail.storage.itemsize
        return rows

    def remember(self, products: Tensor) -> None:
        """What `lead_dot` would give for the whole query of the step, found by a kernel: for `choose`."""
        self._products = products

    def choose(self, slots: Tensor) -> Chosen:
        """Keys, in the parts in which they are stored, and values of the given slots [b, heads, m].

        `heads` is 1, H, or a multiple of H (query heads: head h reads KV head h // G).
        """
        products, self._products = self._products, None
        if products is None:
            chosen = self._chosen(slots)
        else:
            rest, values = self._split_segments[0].parts_of(self._tails(slots))
            chosen = Chosen((rest,), values, at(products, slots))
        self.read_bytes += chosen.nbytes
        return chosen

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The keys in one, and the values: [b, heads, m] -> two of [b, heads, m, d]."""
        chosen = self._chosen(slots)
        self.read_bytes += chosen.nbytes
        return self._whole(chosen)

    def _whole(self, chosen: Chosen) -> tuple[Tensor, Tensor]:
        if self.expansion is not None:
            return self.expansion.whole(*chosen.keys)
        keys = chosen.keys
        return keys[0] if self._split is None else self._split.undo(torch.cat(keys, dim=-1)), chosen.values

    def _chosen(self, slots: Tensor) -> Chosen:
        parts = self._found(slots, lambda segment, some: segment.pick(some))
        if self.expansion is not None:
            return Chosen(parts, parts[0], up=self.expansion.values)
        if self._split is None:
            return Chosen(parts[:1], parts[1])
        lead, tails = parts if len(parts) == 2 else (parts[0], self._tails(slots))
        rest, values = self._split_segments[0].parts_of(tails)
        return Chosen((lead, rest), values)

    def _tails(self, slots: Tensor) -> Tensor:
        """What a split layer stores of these tokens besides the leading dimensions, on the device."""
        if self._near is None:
            return self._found(slots, lambda segment, some: (pick(segment.buffer.tail.storage, some),))[0]
        with stage("transfer"):
            wanted = slots.expand(self.batch, max(self.heads, slots.shape[1]), -1)
            fetched = self._near.fetch(wanted, self._host_pieces)
        self.asked_rows += wanted.numel()
        self.found_rows += fetched.found
        self.moved_bytes += fetched.nbytes
        return fetched.rows

    def _found(self, slots: Tensor, take: Callable[[Any, Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What `take` finds for each slot from the segment in which it lies."""
        segments = [segment for segment in self.segments if segment.tokens]
        if len(segments) == 1:
            return take(segments[0], slots)
        found: tuple[Tensor, ...] = ()
        start = 0
        for segment in segments:
            part = take(segment, (slots - start).clamp(0, segment.tokens - 1))
            here = (slots >= start)[..., None]
            found = tuple(torch.where(here, *pair) for pair in zip(part, found, strict=True)) if start else part
            start += segment.tokens
        return found

    @property
    def _split_segments(self) -> list[SplitRows]:
        return self.segments  # type: ignore[return-value]

    @property
    def _host_pieces(self) -> list[tuple[HostTail, int]]:
        return [(segment.buffer.tail, segment.tokens) for segment in self._split_segments]  # type: ignore[misc]

    def prefetch(self) -> None:
        """Start to fetch what the layer will probably want at its next step, if it works like that."""
        if self._near is not None:
            with stage("transfer"):
                self.moved_bytes += self._near.ahead(self._host_pieces, self.device)

    def positions_of(self, slots: Tensor) -> Tensor:
        """True positions of the given slots: [b, heads, m] -> [b, heads, m], heads 1 widened where they differ."""
        positions = self.positions
        heads = max(positions.shape[1], slots.shape[1])
        if 1 < positions.shape[1] < heads:
            positions = positions.repeat_interleave(heads // positions.shape[1], dim=1)
        return positions.expand(-1, heads, -1).gather(2, slots.expand(len(positions), heads, -1))

    @property
    def device_bytes(self) -> int:
        """Bytes of all tensors held on the device, reserved rows included; what is shared counts once.

        Of rows that are kept in the host's memory, those that lie on the device now; on a CPU too, where both are one.
        """
        near = [] if self._near is None or self._near.rows is None else [self._near.rows]
        held = [tensor for segment in self.segments for tensor in segment.tensors]
        return _bytes([*held, *near, *self.state.values()])

    @property
    def host_bytes(self) -> int:
        """Bytes of the tensors that are kept in the host's memory."""
        near = [] if self._near is None or self._near.slots is None else [self._near.slots]
        return _bytes([*near, *(tensor for segment in self.segments for tensor in segment.host_tensors)])

    # changing it ------------------------------------------------------------------------------------------------

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, reserve: int = 0) -> None:
        """Add tokens at the end: keys, values [b, H, m, d], positions [b, m]. `reserve`: tokens expected later.

        A layer with an `expansion` takes latents [b, 1, m, R] and rotary keys [b, 1, m, P].
        """
        self.seen += keys.shape[2]
        rows = positions[:, None]
        if self.expansion is None and (
            self._frozen or self._own is not None
        ):  # which may hold more heads than come in, after an eviction per head
            held = self.segments[0]
            rows = rows.expand(-1, held.positions.shape[1], -1)
            group = held.heads // keys.shape[1]
            if group > 1:
                keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        if self._split is not None and self._near is not None:
            self.moved_bytes += keys.nbytes + values.nbytes - keys.nbytes * self._split.lead // keys.shape[3]
        if self._own is None:
            self._own = self._fresh(keys, values, rows, spare=reserve)
        else:
            self._own = self._own.append(keys, values, rows, reserve)
        if self._packed:
            self._pack()

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Keys and values, or latents and rotary keys, of an unsplit layer whose tokens lie in one piece: writable."""
        own = self._own.rows if isinstance(self._own, LatentRows) else self._own
        assert isinstance(own, Rows)
        assert not self._frozen
        return own.keys, own.values

    @property
    def spare(self) -> int:
        """Tokens that can come before the layer's own rows have to grow."""
        return 0 if self._own is None else self._own.spare

    def _fresh(self, keys: Tensor, values: Tensor, positions: Tensor, spare: int) -> Rows | SplitRows | LatentRows:
        if self._split is None:
            rows = Rows.of(keys, values, positions, spare)
            return rows if self.expansion is None else LatentRows(self.expansion, rows)
        return SplitRows.of(self._split, keys, values, positions, spare)

    @property
    def is_split(self) -> bool:
        return self._split is not None

    def split(self, order: Tensor, lead: int, layout: Layout | None = None, offload: Prefetch | None = None) -> None:
        """Store the first `lead` of the key dimensions `order` [H, d] apart from the others, from now on.

        layout: as a kernel wants it; None for what PyTorch's products are fastest with here. offload: keep all but the
        leading dimensions in the host's memory, and what is fetched from there for a step as this says
        (fasa_bench.near). Rows that are packed or going to be stay as they are; so do latents, and a prompt that
        samples share already, unless it is to leave the device.
        """
        shared = self._frozen or self.expansion is not None
        if self.packing.bits < 16 or (shared and offload is None):
            return
        if layout is None:
            layout = BLOCKS if self.device.type == "cpu" else ROWS
        parts = [(part.keys, part.values, part.positions) for part in self._frozen]
        own, self.expansion = self._own, None  # what is split are the keys of each head
        self._split = Split(order.to(self.device), lead, layout, offload is not None)
        self._near = None if offload is None else Near(offload)
        self._frozen = [self._fresh(*part, spare=0) for part in parts]
        if own is not None:
            self._own = self._fresh(own.keys, own.values, own.positions, own.spare)

    def keep(self, slots: Tensor) -> None:
        """Evict all but the given slots [b, heads, m], ascending, without repeats; frees the rest.

        With as many heads as query heads the layer holds one copy per query head from then on. Latents, which all
        heads share, stay latents while all heads keep the same tokens; else each head gets keys and values of its own.
        """
        if self._packed:
            allowed = "16 for a method that evicts while decoding: packed rows cannot be dropped one by one"
            raise UserError.of("cache.bits", self.packing.bits, f"must be {allowed}")
        slots = slots.expand(self.batch, -1, -1)
        positions = self.positions_of(slots)
        chosen = self._chosen(slots)
        if self.expansion is not None and slots.shape[1] == 1:
            keys, values = chosen.keys
        else:
            keys, values = self._whole(chosen)
            self.expansion = None
        self._frozen, self._own = [], self._fresh(keys, values, positions, spare=1)
        self._forget()

    def trim(self, slack: int = 0) -> None:
        """Drop what no later token can attend to, once so many more tokens are held than the window has."""
        if self.window is not None and self.length >= self.window + slack:
            self.keep(torch.arange(self.length + 1 - self.window, self.length, device=self.device)[None, None])

    def pack(self) -> None:
        """Store what is not recent in few bits if `packing` says so, now and as more tokens come."""
        self._packed = self.packing.bits < 16
        if self._packed and self.expansion is not None:
            raise UserError.of(
                "cache.bits", self.packing.bits, "must be 16: this model's cache of latents is not packed"
            )
        if self._packed:
            self._pack()

    def _pack(self) -> None:
        assert self._own is None or isinstance(self._own, Rows)
        parts = None if self._own is None else pack_oldest(self._own, self.packing)
        if parts is None:
            return
        packed, self._own = parts
        last = self._frozen[-1] if self._frozen else None
        if isinstance(last, Packed) and last.batch == packed.batch:
            self._frozen = [*self._frozen[:-1], last.append(packed)]
        else:
            self._frozen = [*self._frozen, packed]

    def _forget(self) -> None:
        """Slots mean other tokens, or another sequence, from now on."""
        if self._near is not None:
            self._near = Near(self._near.prefetch)

    # sharing one prompt -----------------------------------------------------------------------------------------

    def fork(self) -> KVLayer:
        """A layer that starts with the same tokens; storage is shared until one of the two has to write."""
        twin = copy.copy(self)
        twin.state = {}
        twin._forget()
        return twin

    def expand(self, samples: int) -> None:
        """Let `samples` sequences go on from the one that is cached, which is shared by all of them and not copied."""
        if samples == 1:
            return
        if self.batch != 1:
            raise ValueError("only a batch of one can be expanded to several samples")
        self._frozen, self._own, self._samples = self.segments, None, samples
        self.state = {name: tensor.expand(samples, *tensor.shape[1:]) for name, tensor in self.state.items()}
        self._forget()

    def release(self, parent: KVLayer) -> None:
        """End a fork: rows it appended in shared storage are free for the next fork. The fork is unusable then."""
        own, theirs = self._own, parent._own
        if own is not None and theirs is not None and own.buffer is theirs.buffer and own.buffer.used == own.tokens:
            own.buffer.used = theirs.tokens
        self._frozen, self._own = [], None
        self.state.clear()
        self._forget()


def _bytes(tensors: list[Tensor]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
