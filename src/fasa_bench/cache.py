"""The KV cache: what one layer holds for a batch of sequences, with the true position of every cached token.

Notation in all shapes: b batch, H KV heads, Hq query heads, G = Hq / H, n cached tokens, d head dimension.
A *slot* is an index into the n cached tokens; a *position* is the token's place in the text. Eviction changes slots,
never positions. Position -1 marks padding, which is never attended.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import transformers
from torch import Tensor

from fasa_bench.errors import UserError
from fasa_bench.segments import Chosen, Packed, Packing, Rows, Segment, pack_oldest
from fasa_bench.split import Split, SplitRows, at, in_one


class KVLayer:
    """Cached keys and values of one attention layer, for every sequence of the batch.

    index: the layer's place in the model. scale: factor of the attention logits (usually d ** -0.5).
    budget: tokens a head may read at a step (None: all), set when a method is attached.
    seen: tokens that have passed through, padding included; also the default position of the next one.
    prompt_queries, prompt_mass: what the attached methods observe of the prompt pass (fasa_bench.method.Observation).
    state: whatever tensors a method keeps for this layer and sequence; counted in the bytes. They may be views that
        several samples share: replace them, never write into them.
    packing: how rows that are not recent will be stored, from `pack` on.
    read_bytes: keys and values read so far by `dot`, `mix` and `gather`, and what a method adds for its own index.

    Tokens lie in segments: frozen ones (a prompt that several samples share, packed rows), then the layer's own rows.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.scale = 1.0
        self.budget: int | None = None
        self.seen = 0
        self.padded = False
        self.prompt_queries: Tensor | None = None
        self.prompt_mass: Tensor | None = None
        self.state: dict[str, Tensor] = {}
        self.read_bytes = 0
        self._frozen: list[Segment] = []
        self._own: Rows | SplitRows | None = None
        self._samples = 1
        self.packing = Packing()
        self._packed = False
        self._split: Split | None = None
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
    def real(self) -> Tensor | None:
        """[b, H or 1, n] bool, False where the token is padding; None when the layer holds no padding."""
        return self.positions >= 0 if self.padded else None

    def read_whole(self) -> tuple[Tensor, Tensor] | None:
        """All keys and values as they lie, if they lie in one piece and hold no padding; counted as read."""
        own = self._own
        if self._frozen or not isinstance(own, Rows) or self.padded:
            return None
        self.read_bytes += own.key_bytes + own.value_bytes
        return own.keys, own.values

    def dot(self, query: Tensor) -> Tensor:
        """Products of each query head with the keys of its KV head, unscaled: [b, Hq, q, d] -> [b, Hq, q, n]."""
        self.read_bytes += sum(segment.key_bytes for segment in self.segments)
        parts = [segment.dot(query) for segment in self.segments]
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]

    def mix(self, weights: Tensor) -> Tensor:
        """Values of each query head's KV head, summed with these weights: [b, Hq, q, n] -> [b, Hq, q, d]."""
        segments = self.segments
        self.read_bytes += sum(segment.value_bytes for segment in segments)
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
        segments: list[SplitRows] = self.segments  # type: ignore[assignment]
        self.read_bytes += sum(segment.lead_bytes for segment in segments)
        if len(segments) == 1:
            products = segments[0].lead_dot(query)
            self._products = products if whole else None
            return products
        parts = [in_one(segment.lead_dot(query), segment.tokens) for segment in segments]
        return torch.cat(parts, dim=-1)[None]

    def query_parts(self, query: Tensor) -> tuple[Tensor, ...]:
        """A query [b, Hq, q, d] in the parts in which keys are stored: one, or leading and other dimensions apart."""
        return (query,) if self._split is None else self._split.parts(query)

    def read_split(self, chosen: int) -> SplitRows | None:
        """The rows of a split layer, for a kernel; None if they lie in several pieces or hold padding.

        Counts as read: the leading dimensions of all tokens, and for `chosen` tokens of each sequence, over all heads,
        whole keys and values.
        """
        if self._frozen or self.padded or not isinstance(self._own, SplitRows):
            return None
        rows = self._own
        self.read_bytes += rows.lead_bytes + 2 * self.batch * chosen * rows.split.order.shape[1] * rows.values.itemsize
        return rows

    def choose(self, slots: Tensor) -> Chosen:
        """Keys, in the parts in which they are stored, and values of the given slots [b, heads, m].

        `heads` is 1, H, or a multiple of H (query heads: head h reads KV head h // G).
        """
        products, self._products = self._products, None
        if products is None:
            chosen = self._chosen(slots)
        else:
            (rows,) = self.segments
            assert isinstance(rows, SplitRows)
            chosen = rows.pick_rest(slots)._replace(products=at(products, slots))
        self.read_bytes += chosen.nbytes
        return chosen

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The keys in one, and the values: [b, heads, m] -> two of [b, heads, m, d]."""
        chosen = self._chosen(slots)
        self.read_bytes += chosen.nbytes
        return self._whole(chosen.keys), chosen.values

    def _whole(self, keys: tuple[Tensor, ...]) -> Tensor:
        return keys[0] if self._split is None else self._split.undo(torch.cat(keys, dim=-1))

    def _chosen(self, slots: Tensor) -> Chosen:
        segments = [segment for segment in self.segments if segment.tokens]
        chosen = segments[0].pick(slots.clamp(max=segments[0].tokens - 1) if len(segments) > 1 else slots)
        start = segments[0].tokens
        for segment in segments[1:]:
            later = (slots >= start)[..., None]
            other = segment.pick((slots - start).clamp(0, segment.tokens - 1))
            keys = tuple(torch.where(later, new, old) for new, old in zip(other.keys, chosen.keys, strict=True))
            chosen = Chosen(keys, torch.where(later, other.values, chosen.values))
            start += segment.tokens
        return chosen

    def positions_of(self, slots: Tensor) -> Tensor:
        """True positions of the given slots: [b, heads, m] -> [b, heads, m], heads 1 widened where they differ."""
        positions = self.positions
        heads = max(positions.shape[1], slots.shape[1])
        if 1 < positions.shape[1] < heads:
            positions = positions.repeat_interleave(heads // positions.shape[1], dim=1)
        return positions.expand(-1, heads, -1).gather(2, slots.expand(len(positions), heads, -1))

    @property
    def device_bytes(self) -> int:
        """Bytes of all tensors held on the layer's device, reserved rows included; what is shared counts once."""
        return self._bytes(on_device=True)

    @property
    def host_bytes(self) -> int:
        """Bytes of tensors held elsewhere than on the layer's device."""
        return self._bytes(on_device=False)

    def _bytes(self, on_device: bool) -> int:
        held = [*self.state.values(), *(tensor for segment in self.segments for tensor in segment.tensors)]
        tensors = [tensor for tensor in held if (tensor.device == self.device) is on_device]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(storages.values())

    # changing it ------------------------------------------------------------------------------------------------

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, reserve: int = 0) -> None:
        """Add tokens at the end: keys, values [b, H, m, d], positions [b, m]. `reserve`: tokens expected later."""
        self.seen += keys.shape[2]
        rows = positions[:, None]
        if self._frozen or self._own is not None:  # which may hold more heads than come in, after an eviction per head
            held = self.segments[0]
            rows = rows.expand(-1, held.positions.shape[1], -1)
            group = held.heads // keys.shape[1]
            if group > 1:
                keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        if self._own is None:
            self._own = self._fresh(keys, values, rows, spare=reserve)
        else:
            self._own = self._own.append(keys, values, rows, reserve)
        if self._packed:
            self._pack()

    @property
    def spare(self) -> int:
        """Tokens that can come before the layer's own rows have to grow."""
        return 0 if self._own is None else self._own.spare

    def _fresh(self, keys: Tensor, values: Tensor, positions: Tensor, spare: int) -> Rows | SplitRows:
        if self._split is None:
            return Rows.of(keys, values, positions, spare)
        return SplitRows.of(self._split, keys, values, positions, spare)

    @property
    def is_split(self) -> bool:
        return self._split is not None

    def split(self, order: Tensor, lead: int, kernels: bool = False) -> None:
        """Store the first `lead` of the key dimensions `order` [H, d] apart from the others, from now on.

        kernels: in the layout that kernels read. Rows that are packed or going to be, and a prompt that samples share
        already, stay as they are.
        """
        if self.packing.bits < 16 or self._frozen:
            return
        blocks = self.device.type == "cpu" and not kernels
        self._split = Split(order.to(self.device), lead, blocks)
        self._frozen, self._own = [], self._fresh(self.keys, self.values, self.positions, self.spare)

    def keep(self, slots: Tensor) -> None:
        """Evict all but the given slots [b, heads, m], ascending, without repeats; frees the rest.

        With as many heads as query heads the layer holds one copy per query head from then on.
        """
        if self._packed:
            allowed = "16 for a method that evicts while decoding: packed rows cannot be dropped one by one"
            raise UserError.of("cache.bits", self.packing.bits, f"must be {allowed}")
        slots = slots.expand(self.batch, -1, -1)
        positions = self.positions_of(slots)
        chosen = self._chosen(slots)
        self._frozen, self._own = [], self._fresh(self._whole(chosen.keys), chosen.values, positions, spare=1)

    def pack(self) -> None:
        """Store what is not recent in few bits if `packing` says so, now and as more tokens come."""
        self._packed = self.packing.bits < 16
        if self._packed:
            self._pack()

    def _pack(self) -> None:
        assert not isinstance(self._own, SplitRows)
        parts = None if self._own is None else pack_oldest(self._own, self.packing)
        if parts is None:
            return
        packed, self._own = parts
        last = self._frozen[-1] if self._frozen else None
        if isinstance(last, Packed) and last.batch == packed.batch:
            self._frozen = [*self._frozen[:-1], last.append(packed)]
        else:
            self._frozen = [*self._frozen, packed]

    # sharing one prompt -----------------------------------------------------------------------------------------

    def fork(self) -> KVLayer:
        """A layer that starts with the same tokens; storage is shared until one of the two has to write."""
        twin = copy.copy(self)
        twin.state = {}
        return twin

    def expand(self, samples: int) -> None:
        """Let `samples` sequences go on from the one that is cached, which is shared by all of them and not copied."""
        if samples == 1:
            return
        if self.batch != 1:
            raise ValueError("only a batch of one can be expanded to several samples")
        self._frozen, self._own, self._samples = self.segments, None, samples
        self.state = {name: tensor.expand(samples, *tensor.shape[1:]) for name, tensor in self.state.items()}

    def release(self, parent: KVLayer) -> None:
        """End a fork: rows it appended in shared storage are free for the next fork. The fork is unusable then."""
        own, theirs = self._own, parent._own
        if own is not None and theirs is not None and own.buffer is theirs.buffer and own.buffer.used == own.tokens:
            own.buffer.used = theirs.tokens
        self._frozen, self._own = [], None
        self.state.clear()


class Cache(transformers.Cache):
    """What the model gets as its cache: it only hands new tokens through and tells true lengths.

    The attention function appends to the layers itself, since a method has to act between two tokens of one call.
    Without position ids the model asks `get_seq_length`, so that positions stay true after eviction.
    """

    layers: list[KVLayer]  # type: ignore[assignment]

    def __init__(self, layers: int | list[KVLayer]) -> None:
        made = [KVLayer(index) for index in range(layers)] if isinstance(layers, int) else layers
        super().__init__(layers=made)  # type: ignore[arg-type]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0, *args: Any, **kwargs: Any) -> int:
        return self.layers[layer_idx].seen

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
        new = query_length if isinstance(query_length, int) else len(query_length)  # cache_position before 5.x
        return self.layers[layer_idx].seen + new, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before 5.x

    @property
    def is_compileable(self) -> bool:
        """Asked before 5.x."""
        return False

    def fork(self) -> Cache:
        return Cache([layer.fork() for layer in self.layers])

    @property
    def device_bytes(self) -> int:
        return sum(layer.device_bytes for layer in self.layers)

    @property
    def host_bytes(self) -> int:
        return sum(layer.host_bytes for layer in self.layers)
