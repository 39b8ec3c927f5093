"""How a budget is spread over the layers: the same for all, or PyramidKV's linear decrease with depth."""

from __future__ import annotations

from typing import Literal

from fasa_bench.errors import UserError


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
    window, and never more than the `length` - window tokens that there are. A prompt of less than 2 C or budget tokens
    is spread evenly, and so is a model of one layer, for which the official code divides by zero.

    smallest: tokens that every layer needs, window included. rounding: `exact` sums to layers * budget and is within
    half a token of the line; `official` floors the step between two layers, and so spends more.
    """
    if beta < 1:
        raise UserError.of("method.pyramid_beta", beta, "must be at least 1")
    if beta < 1:
        raise UserError.of("method.pyramid_beta", beta, "must be at least 1")
    past = budget - window
    if layers < 2 or past < 1 or length < max(budget, 2 * past):
        return uniform(budget, layers)
    least = min(max(past // beta, smallest - window), past)
    most = 2 * past - least
    if most >= length - window:
        most = length - window
        least = 2 * past - most
    if rounding == "official":
        step = (most - least) // (layers - 1)
        return [most - step * layer + window for layer in range(layers)]
    # the line is symmetric about its middle, where it is the budget: what one half rounds up, the other rounds down
    first = [most - round((most - least) * layer / (layers - 1)) + window for layer in range(layers // 2)]
    return [*first, *[budget] * (layers % 2), *(2 * budget - tokens for tokens in reversed(first))]
