"""The KV cache: one growing buffer a layer, with the true position of every cached token.

Notation in all shapes: b batch, H KV heads, Hq query heads, G = Hq / H, n cached tokens, d head dimension.
A *slot* is an index into the n cached tokens; a *position* is the token's place in the text. Eviction changes slots,
never positions. Position -1 marks padding, which is never attended.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

BLOCK = 64  # tokens; a buffer grows by whole blocks, at least by an eighth of itself, so that appending is cheap


class _Buffer:
    """Storage of one layer, possibly shared by several forks of one prompt.

    `used` is the number of rows that somebody wrote. A fork whose own length equals `used` may write in place; any
    other fork would overwrite its sibling's rows and copies first.
    """

    def __init__(self, keys: Tensor, values: Tensor, positions: Tensor, used: int) -> None:
        self.keys, self.values, self.positions, self.used = keys, values, positions, used

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, positions: Tensor, spare: int) -> _Buffer:
        """Copy the given rows into new storage that has room for at least `spare` more."""
        used = keys.shape[2]
        capacity = -(-(used + spare) // BLOCK) * BLOCK

        def grown(source: Tensor, dim: int) -> Tensor:
            shape = list(source.shape)
            shape[dim] = capacity
            target = source.new_zeros(shape)
            target.narrow(dim, 0, used).copy_(source)
            return target

        return cls(grown(keys, 2), grown(values, 2), grown(positions, 2), used)


class KVLayer:
    """Cached keys and values of one attention layer, for every sequence of the batch.

    index: the layer's place in the model. scale: factor of the attention logits (usually d ** -0.5).
    budget: tokens a head may read at a step (None: all), set when a method is attached.
    seen: tokens that have passed through, padding included; also the default position of the next one.
    prompt_queries: the last queries of the prompt [b, Hq, w, d], as many as the attached methods observe.
    state: whatever tensors a method keeps for this layer and sequence; counted in the bytes.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.scale = 1.0
        self.budget: int | None = None
        self.seen = 0
        self.length = 0
        self.padded = False
        self.prompt_queries: Tensor | None = None
        self.state: dict[str, Tensor] = {}
        self._buffer: _Buffer | None = None
        self._forked_at: int | None = None

    # what is cached ---------------------------------------------------------------------------------------------

    @property
    def buffer(self) -> _Buffer:
        if self._buffer is None:
            raise RuntimeError(f"layer {self.index} is empty")
        return self._buffer

    @property
    def keys(self) -> Tensor:
        """[b, H, n, d], rotated as the model rotated them."""
        return self.buffer.keys[:, :, : self.length]

    @property
    def values(self) -> Tensor:
        """[b, H, n, d]."""
        return self.buffer.values[:, :, : self.length]

    @property
    def positions(self) -> Tensor:
        """[b, H or 1, n], ascending; -1 is padding. One row serves all heads until they keep different tokens."""
        return self.buffer.positions[:, :, : self.length]

    @property
    def real(self) -> Tensor | None:
        """[b, H or 1, n] bool, False where the token is padding; None when the layer holds no padding."""
        return self.positions >= 0 if self.padded else None

    @property
    def device_bytes(self) -> int:
        """Bytes of all tensors held on the layer's device, reserved rows included."""
        tensors = [self.buffer.keys, self.buffer.values, self.buffer.positions, *self.state.values()]
        device = self.buffer.keys.device
        return sum(tensor.nbytes for tensor in tensors if tensor.device == device)

    @property
    def host_bytes(self) -> int:
        """Bytes of tensors held elsewhere than on the layer's device."""
        device = self.buffer.keys.device
        return sum(tensor.nbytes for tensor in self.state.values() if tensor.device != device)

    # changing it ------------------------------------------------------------------------------------------------

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, reserve: int = 0) -> None:
        """Add tokens at the end: keys, values [b, H, m, d], positions [b, m]. `reserve`: tokens expected later."""
        added = keys.shape[2]
        rows = positions[:, None]
        if self._buffer is None:
            self._buffer = _Buffer.of(keys, values, rows, spare=reserve)
        else:
            buffer = self._buffer
            end = self.length + added
            if buffer.used != self.length or end > buffer.capacity:
                spare = max(added + reserve, self.length // 8)
                self._buffer = buffer = _Buffer.of(self.keys, self.values, self.positions, spare)
            buffer.keys[:, :, self.length : end] = keys
            buffer.values[:, :, self.length : end] = values
            buffer.positions[:, :, self.length : end] = rows
            buffer.used = end
        self.length += added
        self.seen += added

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the given slots: [b, heads, m] -> two of [b, heads, m, d].

        `heads` is 1, H, or a multiple of H (query heads: head h reads KV head h // G).
        """
        buffer = self.buffer
        batch, heads, capacity, dim = buffer.keys.shape
        wanted = max(slots.shape[1], heads)
        # row number in the flattened buffer: a plain row copy, the fastest gather there is
        row = torch.arange(batch, device=slots.device)[:, None] * heads
        row = (row + torch.arange(wanted, device=slots.device) // (wanted // heads)) * capacity
        index = (row[:, :, None] + slots).flatten()
        shape = (batch, wanted, slots.shape[2], -1)
        keys = buffer.keys.view(-1, dim).index_select(0, index).view(shape)
        values = buffer.values.view(-1, buffer.values.shape[3]).index_select(0, index).view(shape)
        return keys, values

    def positions_of(self, slots: Tensor) -> Tensor:
        """True positions of the given slots: [b, heads, m] -> [b, heads, m], heads 1 widened where they differ."""
        positions = self.positions
        heads = max(positions.shape[1], slots.shape[1])
        if 1 < positions.shape[1] < heads:
            positions = positions.repeat_interleave(heads // positions.shape[1], dim=1)
        return positions.expand(-1, heads, -1).gather(2, slots.expand(len(positions), heads, -1))

    def keep(self, slots: Tensor) -> None:
        """Evict all but the given slots [b, heads, m], ascending, without repeats; frees the rest.

        With as many heads as query heads the layer holds one copy per query head from then on.
        """
        positions = self.positions_of(slots)
        keys, values = self.gather(slots)
        self._buffer = _Buffer.of(keys, values, positions, spare=1)
        self.length = slots.shape[2]

    # sharing one prompt -----------------------------------------------------------------------------------------

    def fork(self) -> KVLayer:
        """A layer that starts with the same tokens; storage is shared until one of the two has to write."""
        twin = KVLayer(self.index)
        twin.scale, twin.seen, twin.length, twin.padded = self.scale, self.seen, self.length, self.padded
        twin.prompt_queries, twin._buffer, twin._forked_at = self.prompt_queries, self._buffer, self.length
        return twin

    def release(self, parent: KVLayer) -> None:
        """End a fork: rows it appended in shared storage are free for the next fork. The fork is unusable then."""
        if self._buffer is parent._buffer and self._buffer is not None and self._buffer.used == self.length:
            self._buffer.used = parent.length
        self._buffer = None
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

    def fork(self) -> Cache:
        return Cache([layer.fork() for layer in self.layers])

    @property
    def device_bytes(self) -> int:
        return sum(layer.device_bytes for layer in self.layers)

    @property
    def host_bytes(self) -> int:
        return sum(layer.host_bytes for layer in self.layers)
