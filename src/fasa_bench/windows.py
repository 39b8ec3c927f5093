"""Which layers of a model attend to everything, and which only to a sliding window of the newest tokens.

Methods act on the layers of full attention; the others keep their window and read all of it.
"""

from __future__ import annotations

from typing import Any

from fasa_bench.errors import UserError


def windows(config: Any) -> list[int | None]:
    """The window of each layer in tokens, the current one included; None: full attention.

    From transformers' names: `layer_types`, or without them `sliding_window` for all layers. A window that the model's
    positions cannot exceed is none. Raises UserError for any other type of layer.
    """
    text = config.get_text_config()
    size = getattr(text, "sliding_window", None)
    types = getattr(text, "layer_types", None)
    if not types:
        types = ["sliding_attention" if size else "full_attention"] * text.num_hidden_layers
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown or (size is None and "sliding_attention" in types):
        raise UserError(
            f"{text.model_type} is not supported: layers of type {', '.join(unknown) or 'sliding_attention'} "
            f"(sliding_window={size}); full attention and sliding windows are"
        )
    bounded = size is not None and size < text.max_position_embeddings
    return [size if bounded and kind == "sliding_attention" else None for kind in types]


def full_layers(config: Any) -> list[int]:
    """Indices of the layers that methods act on."""
    return [index for index, window in enumerate(windows(config)) if window is None]


def check_window(name: str, found: int | None, expected: int | None, positions: int) -> None:
    """UserError unless the window that an attention module asks for is the one that the config gave its layer."""
    if found is not None and found >= positions:
        found = None
    if found != expected:
        raise UserError(
            f"{name} is not understood: its config gives a layer the window {expected}, but the layer uses {found}"
        )
