"""What a model gets as its cache: the layers of fasa_bench.cache, which the attention function fills."""

from __future__ import annotations

import weakref
from typing import Any

import transformers
from torch import Tensor

from fasa_bench.cache import KVLayer


class Cache(transformers.Cache):
    """What the model gets as its cache: it only hands new tokens through and tells true lengths.

    The attention function appends to the layers itself, since a method has to act between two tokens of one call.
    Without position ids the model asks `get_seq_length`, so that positions stay true after eviction.
    """

    layers: list[KVLayer]  # type: ignore[assignment]

    def __init__(self, layers: int | list[KVLayer], hooked: bool = False) -> None:
        """hooked: for a model whose own attention looks at the new tokens only, in vain (fasa_bench.alibi)."""
        made = [KVLayer(index) for index in range(layers)] if isinstance(layers, int) else layers
        super().__init__(layers=made)  # type: ignore[arg-type]
        self.only_windows = all(layer.window is not None for layer in made)
        self.hooked = hooked
        # of the tokens on their way through a model that hands neither on to attention: [b, q], and [b, n] bool
        self.arriving: tuple[Tensor, Tensor | None] | None = None
        for layer, after in zip(made, made[1:] + made[:1], strict=True):
            layer.after = weakref.ref(after)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.layers[layer_idx].offered = key_states, value_states
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0, *args: Any, **kwargs: Any) -> int:
        return 0 if self.hooked else self.layers[layer_idx].seen

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
        new = query_length if isinstance(query_length, int) else len(query_length)  # cache_position before 5.x
        return self.get_seq_length(layer_idx) + new, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before 5.x

    @property
    def is_compileable(self) -> bool:
        """Asked before 5.x."""
        return False

    @property
    def full(self) -> list[KVLayer]:
        """The layers that methods act on: those of full attention."""
        return [layer for layer in self.layers if layer.window is None]

    def fork(self) -> Cache:
        return Cache([layer.fork() for layer in self.layers], self.hooked)

    @property
    def device_bytes(self) -> int:
        return sum(layer.device_bytes for layer in self.layers)

    @property
    def hit_rate(self) -> float | None:
        """Share of the rows wanted from the host's memory that lay on the device already; None if none was wanted."""
        asked = sum(layer.asked_rows for layer in self.layers)
        return sum(layer.found_rows for layer in self.layers) / asked if asked else None

    @property
    def host_bytes(self) -> int:
        return sum(layer.host_bytes for layer in self.layers)
