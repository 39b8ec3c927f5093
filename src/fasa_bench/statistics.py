"""Uncertainty of scores: percentile bootstrap over examples, paired comparison of two methods, spread of timings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasa_bench.task import Metric

Array = NDArray[Any]
Statistic = Callable[[Array], Any]  # the examples' numbers [n], or rows of numbers [n, k] -> one number
Difference = dict[str, float | int | None]  # {"difference", "ci_low", "ci_high", "p_value", "n"}
CHUNK = 1_000_000  # resampled numbers held at once


@dataclass(frozen=True)
class Sample:
    """What one metric is made of: the mean over `groups` (data sets) of the statistic of each group's examples.

    groups: {example id: its number, or the row of numbers that the statistic takes}. weights: of the groups, relative
    to each other; None weighs them alike. With an empty group there is no value; with a group of one example, which has
    no spread to show, no interval.
    """

    groups: Sequence[Mapping[str, Any]]
    statistic: Statistic = np.mean
    weights: Sequence[float] | None = None

    def metric(self) -> Metric:
        """The value and its 95 % bootstrap interval, examples being resampled within every group."""
        return _bootstrap([_array(group.values()) for group in self.groups], self.statistic, self.weights)

    def minus(self, other: Sample) -> Difference:
        """This value less that of another run, over the examples that both have: see `paired_bootstrap`."""
        pairs = []
        for mine, theirs in zip(self.groups, other.groups, strict=True):
            common = sorted(mine.keys() & theirs.keys())  # in one order, whichever the rows were stored in
            pairs.append((_array(mine[key] for key in common), _array(theirs[key] for key in common)))
        return _paired(pairs, self.statistic, self.weights)


def bootstrap(
    values: Sequence[Any] | Array,
    statistic: Statistic = np.mean,
    *,
    n_resamples: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> Metric:
    """Statistic of per-example values with its percentile bootstrap interval (Efron & Tibshirani 1993, ch. 13).

    values: [n] numbers or [n, k] rows; whole examples are resampled with replacement.
    statistic: gets [n] or [n, k] and returns one number, e.g. a ratio of sums.
    Returns value, ci_low, ci_high, n. Bounds are None for one example; None also stands for a result that is not
    finite and for the value of no example at all.
    """
    return _bootstrap([np.asarray(values, dtype=float)], statistic, None, n_resamples, seed, confidence)


def paired_bootstrap(
    a: Sequence[float],
    b: Sequence[float],
    *,
    n_resamples: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> Difference:
    """Mean difference a - b over the same examples: is one method better than the other, or is it the examples?

    a, b: [n] values, item i of both from example i. Returns difference, ci_low, ci_high, p_value, n.
    The interval is the percentile bootstrap over examples, each drawn with both its values. The two-sided p-value is
    Fisher's (1935) paired permutation test: if the methods are alike, the two values of an example could as well be
    the other way round. All 2^n ways are taken if they are at most `n_resamples`, else random ones, counting the
    observed one (Phipson & Smyth 2010), so that p is never 0. Raises ValueError if a and b differ in length.
    """
    if len(a) != len(b):
        raise ValueError(f"paired values must be of the same examples: {len(a)} and {len(b)} were given")
    return _paired(
        [(np.asarray(a, dtype=float), np.asarray(b, dtype=float))], np.mean, None, n_resamples, seed, confidence
    )


def quantiles(values: Sequence[float]) -> Metric:
    """median, p25, p75 (linear interpolation) and n of e.g. step times; None where there are no values."""
    if len(values) == 0:
        return {"median": None, "p25": None, "p75": None, "n": 0}
    p25, median, p75 = (float(q) for q in np.quantile(np.asarray(values, dtype=float), [0.25, 0.5, 0.75]))
    return {"median": median, "p25": p25, "p75": p75, "n": len(values)}


def _bootstrap(
    groups: Sequence[Array],
    statistic: Statistic,
    weights: Sequence[float] | None,
    n_resamples: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> Metric:
    smallest, total = min(map(len, groups), default=0), sum(map(len, groups))
    value = _finite(_mean([statistic(group) for group in groups], weights)) if smallest else None
    low = high = None
    if value is not None and smallest > 1:
        rng = np.random.default_rng(seed)
        draws = [
            np.concatenate(
                [
                    _each(data[rng.integers(0, len(data), (rows, len(data)))], statistic)
                    for _, rows in _chunks(n_resamples, data.size)
                ]
            )
            for data in groups
        ]
        low, high = _interval(_mean(draws, weights), confidence)
    return {"value": value, "ci_low": low, "ci_high": high, "n": total}


def _paired(
    pairs: Sequence[tuple[Array, Array]],
    statistic: Statistic,
    weights: Sequence[float] | None,
    n_resamples: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> Difference:
    if statistic is np.mean:  # the differences are enough, and equal ones stay exactly equal
        pairs = [(a - b, np.zeros_like(a)) for a, b in pairs]
    sizes = [len(a) for a, _ in pairs]
    value = low = high = p_value = None
    if min(sizes, default=0):
        value = _finite(_mean([statistic(a) - statistic(b) for a, b in pairs], weights))
    if value is not None and min(sizes) > 1:
        rng = np.random.default_rng(seed)
        draws = []
        for a, b in pairs:
            taken = (rng.integers(0, len(a), (rows, len(a))) for _, rows in _chunks(n_resamples, a.size))
            draws.append(np.concatenate([_each(a[rows], statistic) - _each(b[rows], statistic) for rows in taken]))
        low, high = _interval(_mean(draws, weights), confidence)
        p_value = _permutation(pairs, statistic, weights, abs(value), n_resamples, rng)
    return {"difference": value, "ci_low": low, "ci_high": high, "p_value": p_value, "n": sum(sizes)}


def _permutation(
    pairs: Sequence[tuple[Array, Array]],
    statistic: Statistic,
    weights: Sequence[float] | None,
    observed: float,
    n_resamples: int,
    rng: np.random.Generator,
) -> float:
    """Share of the ways to swap the two values of examples that make a difference as large as the observed one."""
    total = sum(len(a) for a, _ in pairs)
    exact = 2**total <= n_resamples
    every = np.array(list(itertools.product([False, True], repeat=total))) if exact else None
    draws, start = [], 0
    for a, b in pairs:
        parts = []
        for first, rows in _chunks(2**total if exact else n_resamples, a.size):
            if every is None:
                swap = rng.integers(0, 2, (rows, len(a))).astype(bool)
            else:
                swap = every[first : first + rows, start : start + len(a)]
            swap = swap.reshape(*swap.shape, *[1] * (a.ndim - 1))
            parts.append(_each(np.where(swap, b, a), statistic) - _each(np.where(swap, a, b), statistic))
        draws.append(np.concatenate(parts))
        start += len(a)
    as_large = np.count_nonzero(abs(_mean(draws, weights)) >= observed * (1 - 1e-9))  # ties count, rounded or not
    return float(as_large / 2**total if exact else (1 + as_large) / (1 + n_resamples))


def _each(resampled: Array, statistic: Statistic) -> Array:
    """The statistic of each resample: [r, n] or [r, n, k] -> [r]."""
    if statistic is np.mean:
        return resampled.mean(axis=tuple(range(1, resampled.ndim)))
    return np.array([statistic(sample) for sample in resampled], dtype=float)


def _mean(of_groups: Sequence[Any], weights: Sequence[float] | None) -> Any:
    return np.average(np.asarray(of_groups, dtype=float), axis=0, weights=weights)


def _array(values: Iterable[Any]) -> Array:
    return np.asarray(list(values), dtype=float)


def _chunks(total: int, width: int) -> Iterator[tuple[int, int]]:
    """Split `total` resamples of `width` numbers so that memory stays bounded: start and length of each part."""
    step = max(1, CHUNK // width)
    for start in range(0, total, step):
        yield start, min(step, total - start)


def _interval(results: Array, confidence: float) -> tuple[float | None, float | None]:
    if not np.isfinite(results).all():
        return None, None
    low, high = np.quantile(results, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _finite(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
