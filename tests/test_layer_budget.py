"""Budgets of single layers: they sum exactly to the whole (official numbers: tests/conformance)."""

from __future__ import annotations

import itertools
import random

import pytest

from fasa_bench.errors import UserError
from fasa_bench.layer_budget import pyramid, uniform


def test_official_rounding_by_hand() -> None:
    """C = 120 past tokens: from 240 - 6 = 234 down to 6 in steps of 228 // 3 = 76, the window of 8 on top."""
    assert pyramid(128, 4, length=4000, window=8, rounding="official") == [242, 166, 90, 14]
    # steps of 228 // 31 = 7 end at 17, not 6: 5.5 tokens a layer more than the budget
    official = pyramid(128, 32, length=4000, window=8, rounding="official")
    assert (official[0], official[-1], sum(official)) == (242, 25, 4272)
    exact = pyramid(128, 32, length=4000, window=8)
    assert (exact[0], exact[-1], sum(exact)) == (242, 14, 32 * 128)


def test_never_more_than_there_is() -> None:
    """A prompt of 130 tokens: the first layer keeps all 122 of its past, the last one 2 * 64 - 122 = 6."""
    assert pyramid(72, 2, length=130, window=8) == [130, 14]
    assert pyramid(72, 8, length=127, window=8) == [72] * 8  # less than 2 C = 128
    assert pyramid(72, 8, length=60, window=8) == [72] * 8


def test_few_layers() -> None:
    assert pyramid(64, 1, length=1000) == [64]
    assert pyramid(64, 1, length=1000, rounding="official") == [64]
    assert pyramid(64, 2, length=1000) == [125, 3]
    assert pyramid(64, 3, length=1000) == [125, 64, 3]
    assert uniform(64, 3) == [64, 64, 64]


def test_what_every_layer_needs_and_how_steep() -> None:
    assert pyramid(64, 3, length=1000, smallest=20) == [108, 64, 20]
    assert pyramid(64, 3, length=1000, window=16, smallest=20) == [108, 64, 20]
    assert pyramid(64, 3, length=1000, beta=4) == [112, 64, 16]
    assert pyramid(64, 3, length=1000, beta=1) == [64, 64, 64]
    with pytest.raises(UserError, match=r"method.pyramid_beta=0 .* at least 1"):
        pyramid(64, 3, length=1000, beta=0)


def test_the_sum_is_exact_and_the_line_is_straight() -> None:
    draw = random.Random(0)
    uneven = 0
    for _ in range(4000):
        layers = draw.choice([1, 2, 3, 7, 22, 28, 30, 32, 36, 40, 80])
        budget = draw.choice([draw.randint(1, 30), draw.randint(1, 3000), draw.randint(1, 200_000)])
        window, smallest = draw.choice([0, draw.randint(0, 64)]), draw.choice([0, draw.randint(0, budget)])
        length, beta = draw.randint(1, 6 * budget + 10), draw.randint(1, 40)
        found = pyramid(budget, layers, length=length, window=window, smallest=smallest, beta=beta)
        what = (layers, budget, window, smallest, length, beta)
        assert sum(found) == layers * budget, what
        assert len(found) == layers, what
        assert found[0] <= max(budget, length), what
        assert found[-1] >= min(budget, max(smallest, window)), what
        steps = [before - after for before, after in itertools.pairwise(found)]
        assert not steps or (min(steps) >= 0 and max(steps) - min(steps) <= 1), what
        uneven += found[0] > found[-1]
    assert uneven > 1000
