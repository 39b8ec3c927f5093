"""Uncertainty of scores: percentile bootstrap over examples, paired comparison of two methods, spread of timings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasa_bench.task import Metric

Array = NDArray[Any]
CHUNK = 1_000_000  # resampled numbers held at once


def bootstrap(
    values: Sequence[Any] | Array,
    statistic: Callable[[Array], Any] = np.mean,
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
    data = np.asarray(values, dtype=float)
    n = len(data)
    if n == 0:
        return {"value": None, "ci_low": None, "ci_high": None, "n": 0}
    value = _finite(statistic(data))
    if n == 1 or value is None:
        return {"value": value, "ci_low": None, "ci_high": None, "n": n}
    rng = np.random.default_rng(seed)
    results: list[Array] = []
    for rows in _chunks(n_resamples, data.size):
        resampled = data[rng.integers(0, n, (rows, n))]
        if statistic is np.mean:
            results.append(resampled.mean(axis=tuple(range(1, resampled.ndim))))
        else:
            results.append(np.array([statistic(sample) for sample in resampled], dtype=float))
    low, high = _interval(np.concatenate(results), confidence)
    return {"value": value, "ci_low": low, "ci_high": high, "n": n}


def paired_bootstrap(
    a: Sequence[float],
    b: Sequence[float],
    *,
    n_resamples: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> dict[str, float | int | None]:
    """Mean difference a - b over the same examples: is one method better than the other, or is it the examples?

    a, b: [n] values, item i of both from example i. Returns difference, ci_low, ci_high, p_value, n.
    The interval is the percentile bootstrap of the differences. The two-sided p-value is the sign-flip test (Fisher
    1935): if the methods are alike, each difference is as likely with the other sign. All 2^n sign patterns are
    taken if they are at most `n_resamples`, else random ones, counting the observed one (Phipson & Smyth 2010), so
    that p is never 0. Raises ValueError if a and b differ in length.
    """
    if len(a) != len(b):
        raise ValueError(f"paired values must be of the same examples: {len(a)} and {len(b)} were given")
    differences = np.asarray(a, dtype=float) - np.asarray(b, dtype=float)
    metric = bootstrap(differences, n_resamples=n_resamples, seed=seed, confidence=confidence)
    bounds = {"difference": metric["value"], "ci_low": metric["ci_low"], "ci_high": metric["ci_high"]}
    p_value = None if metric["ci_low"] is None else _sign_flip(differences, n_resamples, seed)
    return {**bounds, "p_value": p_value, "n": metric["n"]}


def quantiles(values: Sequence[float]) -> Metric:
    """median, p25, p75 (linear interpolation) and n of e.g. step times; None where there are no values."""
    if len(values) == 0:
        return {"median": None, "p25": None, "p75": None, "n": 0}
    p25, median, p75 = (float(q) for q in np.quantile(np.asarray(values, dtype=float), [0.25, 0.5, 0.75]))
    return {"median": median, "p25": p25, "p75": p75, "n": len(values)}


def _sign_flip(differences: Array, n_resamples: int, seed: int) -> float:
    n = len(differences)
    observed = abs(differences.mean()) * (1 - 1e-12)  # a tie counts, whatever the order of summation
    if 2**n <= n_resamples:
        signs = np.array(list(itertools.product([1.0, -1.0], repeat=n)))
        return float(np.mean(abs((signs * differences).mean(axis=1)) >= observed))
    rng = np.random.default_rng(seed)
    as_large = sum(
        int(np.count_nonzero(abs(((1 - 2 * rng.integers(0, 2, (rows, n))) * differences).mean(axis=1)) >= observed))
        for rows in _chunks(n_resamples, n)
    )
    return (1 + as_large) / (1 + n_resamples)


def _chunks(total: int, width: int) -> Iterator[int]:
    """Split `total` resamples of `width` numbers so that memory stays bounded."""
    step = max(1, CHUNK // width)
    for start in range(0, total, step):
        yield min(step, total - start)


def _interval(results: Array, confidence: float) -> tuple[float | None, float | None]:
    if not np.isfinite(results).all():
        return None, None
    low, high = np.quantile(results, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _finite(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
