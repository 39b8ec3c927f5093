"""The network as transformers runs it by default: its own growing cache and its SDPA. For comparison of speed."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache

from fasa_bench.attention import NAME
from fasa_bench.clock import Clock
from fasa_bench.errors import UserError
from fasa_bench.session import Prefilled


class Plain:
    """Goes on from a prompt's cache, which it copies (transformers keeps keys and values of its own)."""

    def __init__(self, prefilled: Prefilled) -> None:
        self.session = prefilled.session
        self.position = prefilled.next_position
        self.clock = Clock.on(self.session.device)
        if any(layer.window or layer.cap or layer.sinks is not None for layer in prefilled.cache.layers):
            allowed = "must be false for a model with sliding windows, soft caps or sinks"
            raise UserError.of("task.plain", True, allowed)
        self.cache = DynamicCache()
        for index, layer in enumerate(prefilled.cache.layers):
            self.cache.update(*layer.tables, index)

    def step(self, token_ids: Tensor) -> float:
        """Feed the next token of each row [b, 1]; returns seconds."""
        network = self.session.network
        if not self.session.hooked:
            network.set_attn_implementation("sdpa")
        try:
            with self.clock.whole("step"):
                network(
                    input_ids=token_ids.to(self.session.device),
                    use_cache=True,
                    **self.session.arguments(self.position, None, keep=1),
                    **{self.session.cache_argument: self.cache},
                )
        finally:
            if not self.session.hooked:
                network.set_attn_implementation(NAME)
        self.position = self.position + 1
        return self.clock.seconds.pop("step")

    def staged(self, token_ids: Tensor) -> None:
        """Its parts are not timed."""

    def found(self) -> dict[str, Any]:
        held = [getattr(layer, name) for layer in self.cache.layers for name in ("keys", "values")]
        return {"device_bytes": sum(tensor.nbytes for tensor in held), "host_bytes": 0}
