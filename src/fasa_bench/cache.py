"""The KV cache: one growing buffer a layer, with the true position of every cached token.

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
    shared: the first so many of the `length` tokens are one prompt's, stored once for all sequences of the batch.
    prompt_queries, prompt_mass: what the attached methods observe of the prompt pass (fasa_bench.method.Observation).
    state: whatever tensors a method keeps for this layer and sequence; counted in the bytes. They may be views that
        several samples share: replace them, never write into them.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.scale = 1.0
        self.budget: int | None = None
        self.seen = 0
        self.length = 0
        self.shared = 0
        self.padded = False
        self.prompt_queries: Tensor | None = None
        self.prompt_mass: Tensor | None = None
        self.state: dict[str, Tensor] = {}
        self._prompt: _Buffer | None = None
        self._buffer: _Buffer | None = None
        self._samples = 1

    # what is cached ---------------------------------------------------------------------------------------------

    @property
    def _segments(self) -> list[tuple[_Buffer, int]]:
        """The shared prompt, if there is one, and what this layer holds itself, each with its number of tokens."""
        parts = [(self._prompt, self.shared), (self._buffer, self.length - self.shared)]
        return [(buffer, tokens) for buffer, tokens in parts if buffer is not None]

    @property
    def _any(self) -> _Buffer:
        if not self._segments:
            raise RuntimeError(f"layer {self.index} is empty")
        return self._segments[0][0]

    @property
    def batch(self) -> int:
        return max(self._any.keys.shape[0], self._samples)

    @property
    def heads(self) -> int:
        """Heads that hold tokens of their own: the KV heads, or the query heads after an eviction per query head."""
        return self._any.keys.shape[1]

    @property
    def device(self) -> torch.device:
        return self._any.keys.device

    def _whole(self, name: str) -> Tensor:
        parts = [getattr(buffer, name)[:, :, :tokens] for buffer, tokens in self._segments]
        if self.shared:  # copies the prompt for every sample
            parts = [part.expand(self.batch, *part.shape[1:]) for part in parts]
        return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]

    @property
    def keys(self) -> Tensor:
        """[b, H, n, d], rotated as the model rotated them. A copy while a prompt is shared."""
        return self._whole("keys")

    @property
    def values(self) -> Tensor:
        """[b, H, n, d]. A copy while a prompt is shared."""
        return self._whole("values")

    @property
    def positions(self) -> Tensor:
        """[b, H or 1, n], ascending; -1 is padding. One row serves all heads until they keep different tokens."""
        return self._whole("positions")

    @property
    def real(self) -> Tensor | None:
        """[b, H or 1, n] bool, False where the token is padding; None when the layer holds no padding."""
        return self.positions >= 0 if self.padded else None

    def dot(self, query: Tensor) -> Tensor:
        """Products of each query head with the keys of its KV head, unscaled: [b, Hq, q, d] -> [b, Hq, q, n]."""
        parts = [product(query, buffer.keys[:, :, :n].transpose(2, 3)) for buffer, n in self._segments]
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]

    def mix(self, weights: Tensor) -> Tensor:
        """Values of each query head's KV head, summed with these weights: [b, Hq, q, n] -> [b, Hq, q, d]."""
        buffers, lengths = zip(*self._segments, strict=True)
        parts = zip(weights.split(list(lengths), dim=-1), buffers, lengths, strict=True)
        return functools.reduce(torch.add, (product(part, buffer.values[:, :, :n]) for part, buffer, n in parts))

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that this layer holds."""
        stored = [tensor for buffer, _ in self._segments for tensor in (buffer.keys, buffer.values, buffer.positions)]
        return [*stored, *self.state.values()]

    @property
    def device_bytes(self) -> int:
        """Bytes of all tensors held on the layer's device, reserved rows included; what is shared counts once."""
        return self._bytes(on_device=True)

    @property
    def host_bytes(self) -> int:
        """Bytes of tensors held elsewhere than on the layer's device."""
        return self._bytes(on_device=False)

    def _bytes(self, on_device: bool) -> int:
        tensors = [tensor for tensor in self.tensors if (tensor.device == self.device) is on_device]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(storages.values())

    # changing it ------------------------------------------------------------------------------------------------

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, reserve: int = 0) -> None:
        """Add tokens at the end: keys, values [b, H, m, d], positions [b, m]. `reserve`: tokens expected later."""
        added, own = keys.shape[2], self.length - self.shared
        rows = positions[:, None]
        if self._segments:  # which may hold more heads than come in, after an eviction per head
            held = self._any
            rows = rows.expand(-1, held.positions.shape[1], -1)
            group = held.keys.shape[1] // keys.shape[1]
            if group > 1:
                keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        if self._buffer is None:
            self._buffer = _Buffer.of(keys, values, rows, spare=reserve)
        else:
            buffer, end = self._buffer, own + added
            if buffer.used != own or end > buffer.capacity:
                old, spare = buffer, max(added + reserve, own // 8)
                buffer = _Buffer.of(old.keys[:, :, :own], old.values[:, :, :own], old.positions[:, :, :own], spare)
                self._buffer = buffer
            buffer.keys[:, :, own:end] = keys
            buffer.values[:, :, own:end] = values
            buffer.positions[:, :, own:end] = rows
            buffer.used = end
        self.length += added
        self.seen += added

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the given slots: [b, heads, m] -> two of [b, heads, m, d].

        `heads` is 1, H, or a multiple of H (query heads: head h reads KV head h // G).
        """
        if not self.shared:
            return self._rows(self.buffer, slots)
        first, second = self._prompt, self._buffer
        assert first is not None
        of_prompt = self._rows(first, slots.clamp(max=self.shared - 1))
        if second is None:
            return of_prompt
        own = self._rows(second, (slots - self.shared).clamp(min=0))
        inside = (slots < self.shared)[..., None]
        keys, values = (torch.where(inside, a, b) for a, b in zip(of_prompt, own, strict=True))
        return keys, values

    @staticmethod
    def _rows(buffer: _Buffer, slots: Tensor) -> tuple[Tensor, Tensor]:
        stored, heads, capacity, dim = buffer.keys.shape
        batch, wanted = slots.shape[0], max(slots.shape[1], heads)
        # row number in the flattened buffer: a plain row copy, the fastest gather there is
        row = torch.arange(batch, device=slots.device).clamp(max=stored - 1)[:, None] * heads
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
        slots = slots.expand(self.batch, -1, -1)
        positions = self.positions_of(slots)
        keys, values = self.gather(slots)
        self._buffer = _Buffer.of(keys, values, positions, spare=1)
        self._prompt, self.shared = None, 0
        self.length = slots.shape[2]

    # sharing one prompt -----------------------------------------------------------------------------------------

    @property
    def buffer(self) -> _Buffer:
        """Storage of the tokens that this layer holds itself."""
        if self._buffer is None:
            raise RuntimeError(f"layer {self.index} holds no tokens of its own")
        return self._buffer

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
        self._prompt, self.shared, self._buffer = self._buffer, self.length, None
        self._samples = samples
        self.state = {name: tensor.expand(samples, *tensor.shape[1:]) for name, tensor in self.state.items()}

    def release(self, parent: KVLayer) -> None:
        """End a fork: rows it appended in shared storage are free for the next fork. The fork is unusable then."""
        if self._buffer is parent._buffer and self._buffer is not None and self._buffer.used == self.length:
            self._buffer.used = parent.length
        self._buffer = self._prompt = None
        self.state.clear()


def product(rows: Tensor, table: Tensor) -> Tensor:
    """Grouped matrix product of query heads with KV heads: [b, Hq, q, k] by [b or 1, H, k, m] -> [b, Hq, q, m].

    A table of batch 1 is shared by all rows of the batch and read once.
    """
    batch, query_heads, queries, inner = rows.shape
    stored, heads, _, width = table.shape
    grouped = rows.reshape(batch, heads, -1, inner)
    if stored == batch:
        return torch.matmul(grouped, table).reshape(batch, query_heads, queries, width)
    folded = grouped.transpose(0, 1).reshape(1, heads, -1, inner)
    unfolded = torch.matmul(folded, table).reshape(heads, batch, -1, width).transpose(0, 1)
    return unfolded.reshape(batch, query_heads, queries, width)


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
