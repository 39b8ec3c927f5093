"""How a budget is spread over the layers: the same for all, or PyramidKV's linear decrease with depth."""

from __future__ import annotations

from typing import Literal


def uniform(budget: int, layers: int) -> list[int]:
    """The same number of tokens in every layer."""
    return [budget] * layers


def pyramid(
    budget: int,
    layers: int,
    *,
    length: int,
    window: int = 0,
    smallest: int = 0,
    beta: int = 20,
    rounding: Literal["exact", "official"] = "exact",
) -> list[int]:
    """Tokens per layer, `budget` on average, most in the first layer (PyramidKV, pyramidkv_utils.py).

    What is spread is the part outside of the observation window: from 2 C - C // beta down to C // beta, C = budget -
    window, and never more than the `length` - window tokens that there are. A prompt of less than 2 C tokens outside of
    the window is spread evenly, as official. smallest: tokens that every layer needs, window included. rounding: `exact` sums to layers * budget; `official` floors the step
    between two layers, and so spends more.
    """
    past = budget - window
    if layers == 1 or length < 2 * past or past < 1:
        return uniform(budget, layers)
    least = max(past // beta, smallest - window)
    most = 2 * past - least
    if most >= length - window:
        most = length - window
        least = 2 * past - most
    if rounding == "official":
        step = (most - least) // (layers - 1)
        return [most - step * layer + window for layer in range(layers)]
    # prefix sums of the exact line, rounded: each layer is within one token of it, and the whole is exact
    total = [layer * most - (most - least) * layer * (layer - 1) / (2 * (layers - 1)) for layer in range(layers + 1)]
    ends = [round(value) for value in total]
    return sorted((after - before + window for before, after in zip(ends, ends[1:], strict=False)), reverse=True)
