"""Intervals against scipy, hand-computed values and simulated coverage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import scipy.stats

from fasa_bench import statistics
from fasa_bench.statistics import Sample, bootstrap, paired_bootstrap, quantiles


def ratio(sample: np.ndarray) -> float:
    return float(np.exp(sample[:, 0].sum() / sample[:, 1].sum()))


def test_two_values_by_hand() -> None:
    # Of [0, 1] with replacement the mean is 0, 0.5, 0.5 or 1: the 2.5 % and 97.5 % quantiles are 0 and 1,
    # and the quartiles of 0, 0.5, 0.5, 1 (each a quarter) lie at the steps, so 40 % in the middle is 0.5 alone.
    assert bootstrap([0, 1]) == {"value": 0.5, "ci_low": 0.0, "ci_high": 1.0, "n": 2}
    assert bootstrap([0, 1], confidence=0.4) == {"value": 0.5, "ci_low": 0.5, "ci_high": 0.5, "n": 2}


def test_perplexity_is_a_ratio_of_sums_not_a_mean_of_ratios() -> None:
    # one window of 1 token at nll 3, one of 3 tokens at nll 1 each: exp(6 / 4), not the mean of exp(3) and exp(1)
    metric = bootstrap([[3.0, 1.0], [3.0, 3.0]], ratio)
    assert metric["value"] == pytest.approx(math.exp(1.5))
    assert metric["ci_low"] == pytest.approx(math.exp(1.0))
    assert metric["ci_high"] == pytest.approx(math.exp(3.0))
    assert metric["n"] == 2


@pytest.mark.parametrize("statistic", [np.mean, np.median])
def test_interval_agrees_with_scipy(statistic: object) -> None:
    values = np.random.default_rng(3).gamma(2.0, size=60)
    ours = bootstrap(values, statistic, n_resamples=4000)  # type: ignore[arg-type]
    theirs = scipy.stats.bootstrap(
        (values,), statistic, n_resamples=4000, method="percentile", rng=np.random.default_rng(7)
    ).confidence_interval
    width = theirs.high - theirs.low
    assert ours["value"] == statistic(values)  # type: ignore[operator]
    assert ours["ci_low"] == pytest.approx(theirs.low, abs=0.06 * width)
    assert ours["ci_high"] == pytest.approx(theirs.high, abs=0.06 * width)


def test_the_fast_path_for_means_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(size=(30, 2))
    slow = bootstrap(values, lambda sample: sample.mean())
    fast = bootstrap(values, np.mean)
    assert fast == pytest.approx(slow)
    monkeypatch.setattr(statistics, "CHUNK", 600)  # ten resamples at a time
    assert bootstrap(values, np.mean) == pytest.approx(fast)


def test_seed_decides() -> None:
    values = np.random.default_rng(0).normal(size=50)
    assert bootstrap(values, seed=1) == bootstrap(values, seed=1)
    assert bootstrap(values, seed=1) != bootstrap(values, seed=2)


def test_coverage_of_the_true_mean() -> None:
    # The percentile interval of n = 40 normal values covers in about 94 % (a little narrow by sqrt(39 / 40) and by
    # the normal instead of the t quantile); 1000 samples tell it to 0.8 %.
    rng = np.random.default_rng(11)
    hits = 0
    for seed in range(1000):
        metric = bootstrap(rng.normal(5.0, 2.0, size=40), n_resamples=500, seed=seed)
        assert metric["ci_low"] is not None
        assert metric["ci_high"] is not None
        hits += metric["ci_low"] <= 5.0 <= metric["ci_high"]
    assert 0.92 <= hits / 1000 <= 0.965


def test_too_few_examples_have_no_interval() -> None:
    assert bootstrap([]) == {"value": None, "ci_low": None, "ci_high": None, "n": 0}
    assert bootstrap([2.5]) == {"value": 2.5, "ci_low": None, "ci_high": None, "n": 1}
    assert bootstrap([[6.0, 4.0]], ratio)["value"] == pytest.approx(math.exp(1.5))


def test_a_result_that_is_not_finite_is_none() -> None:
    assert bootstrap([1.0, math.inf]) == {"value": None, "ci_low": None, "ci_high": None, "n": 2}
    assert bootstrap([1.0, math.nan])["value"] is None


def test_paired_difference_by_hand() -> None:
    # differences 1, 2, 3: of the 8 sign patterns only +++ and --- reach |mean| = 2
    result = paired_bootstrap([2, 4, 6], [1, 2, 3])
    assert result["difference"] == 2.0
    assert result["p_value"] == 0.25
    assert (result["ci_low"], result["ci_high"], result["n"]) == (1.0, 3.0, 3)
    assert paired_bootstrap([1, 2, 3], [2, 4, 6])["difference"] == -2.0
    assert paired_bootstrap([0.1, 0.7, 0.3], [0.1, 0.7, 0.3]) == {
        "difference": 0.0,
        "ci_low": 0.0,
        "ci_high": 0.0,
        "p_value": 1.0,
        "n": 3,
    }


@pytest.mark.parametrize(("size", "tolerance"), [(9, 1e-12), (60, 0.02)])
def test_p_value_agrees_with_scipy(size: int, tolerance: float) -> None:
    rng = np.random.default_rng(2)
    b = rng.normal(size=size)
    a = b + rng.normal(0.15, 1.0, size=size)
    theirs = scipy.stats.permutation_test(
        (a - b,), np.mean, permutation_type="samples", n_resamples=20_000, rng=np.random.default_rng(0)
    )
    assert paired_bootstrap(a, b)["p_value"] == pytest.approx(theirs.pvalue, abs=tolerance)


def test_pairing_sees_what_unpaired_intervals_hide() -> None:
    rng = np.random.default_rng(4)
    hard = rng.normal(50, 20, size=40)  # examples differ far more than the methods do
    a, b = hard + 1, hard + rng.normal(0, 0.5, size=40)
    assert bootstrap(a)["ci_low"] < bootstrap(b)["ci_high"]  # type: ignore[operator]
    result = paired_bootstrap(a, b)
    assert result["ci_low"] > 0.5  # type: ignore[operator]
    assert result["p_value"] == pytest.approx(1 / 2001)  # as small as 2000 resamples can tell, never 0


def test_p_values_of_equal_methods_are_uniform() -> None:
    rng = np.random.default_rng(5)
    p_values = [
        paired_bootstrap(rng.normal(size=25), rng.normal(size=25), n_resamples=300)["p_value"] for _ in range(400)
    ]
    assert 0.03 <= np.mean([p <= 0.05 for p in p_values if p is not None]) <= 0.08
    assert 0.42 <= np.mean([p <= 0.5 for p in p_values if p is not None]) <= 0.58


def test_paired_values_must_match() -> None:
    with pytest.raises(ValueError, match="3 and 2"):
        paired_bootstrap([1, 2, 3], [1, 2])
    assert paired_bootstrap([1], [3]) == {"difference": -2.0, "ci_low": None, "ci_high": None, "p_value": None, "n": 1}
    assert paired_bootstrap([], [])["difference"] is None


def test_quantiles_by_hand() -> None:
    assert quantiles([4, 1, 3, 2]) == {"median": 2.5, "p25": 1.75, "p75": 3.25, "n": 4}
    assert quantiles([7.0]) == {"median": 7.0, "p25": 7.0, "p75": 7.0, "n": 1}
    assert quantiles([]) == {"median": None, "p25": None, "p75": None, "n": 0}


def named(values: Sequence[Any], prefix: str = "") -> dict[str, Any]:
    return {f"{prefix}{place}": value for place, value in enumerate(values)}


def test_mean_of_groups_has_the_interval_of_its_standard_error() -> None:
    rng = np.random.default_rng(0)
    groups = [rng.normal(mean, spread, size) for mean, spread, size in ((0, 1, 200), (10, 5, 50), (20, 2, 400))]
    for weights in (None, [2, 1, 1]):
        shares = np.array(weights or [1, 1, 1]) / sum(weights or [1, 1, 1])
        result = Sample([named(group) for group in groups], weights=weights).metric()
        error = np.sqrt(sum((shares * [np.std(group) / np.sqrt(len(group)) for group in groups]) ** 2))
        assert result["value"] == pytest.approx(shares @ [np.mean(group) for group in groups])
        assert result["ci_low"] == pytest.approx(result["value"] - 1.96 * error, abs=0.15 * error)
        assert result["ci_high"] == pytest.approx(result["value"] + 1.96 * error, abs=0.15 * error)
        assert result["n"] == 650


def test_groups_without_value_or_spread() -> None:
    blank = {"value": None, "ci_low": None, "ci_high": None}
    assert Sample([{}, {"a": 1.0}]).metric() == {**blank, "n": 1}
    assert Sample([]).metric() == {**blank, "n": 0}
    assert Sample([named([1.0, 2.0]), {"c": 3.0}]).metric() == {**blank, "value": 2.25, "n": 3}


def test_a_sample_pairs_what_both_have() -> None:
    ours = Sample([{"a": 2.0, "b": 4.0, "c": 6.0, "only ours": 90.0}])
    theirs = Sample([{"only theirs": -50.0, "c": 3.0, "b": 2.0, "a": 1.0}])
    assert ours.minus(theirs) == paired_bootstrap([2, 4, 6], [1, 2, 3])
    assert ours.minus(Sample([{"x": 1.0}])) == {
        "difference": None,
        "ci_low": None,
        "ci_high": None,
        "p_value": None,
        "n": 0,
    }


def test_a_difference_of_averages_by_hand() -> None:
    """Two data sets of two examples: differences 1, 3 and 0, 0; the mean is 1, weights make it 1.5."""
    ours = [{"a": 2.0, "b": 5.0}, {"c": 7.0, "d": 8.0}]
    theirs = [{"a": 1.0, "b": 2.0}, {"c": 7.0, "d": 8.0}]
    plain = Sample(ours).minus(Sample(theirs))
    assert (plain["difference"], plain["n"]) == (1.0, 4)
    # of the 16 swaps the last two examples do not matter, and of the first two only none and both reach 1
    assert plain["p_value"] == 0.5
    assert (plain["ci_low"], plain["ci_high"]) == (0.5, 1.5)
    weighted = Sample(ours, weights=[0.75, 0.25]).minus(Sample(theirs, weights=[0.75, 0.25]))
    assert weighted["difference"] == 1.5
    missing = Sample([*ours, {}]).minus(Sample([*theirs, {"e": 1.0}]))
    assert (missing["difference"], missing["p_value"]) == (None, None)
    single = Sample([*ours, {"e": 1.0}]).minus(Sample([*theirs, {"e": 1.0}]))
    assert single["difference"] == pytest.approx(2 / 3)
    assert (single["ci_low"], single["p_value"]) == (None, None)


def test_the_order_of_rows_makes_no_difference() -> None:
    """A run in shards, or one that was stopped, has its rows in another order than the full-KV run."""
    rng = np.random.default_rng(1)
    ours, theirs = named(list(rng.normal(size=12))), named(list(rng.normal(size=12)))
    turned = Sample([dict(reversed(ours.items()))])
    assert turned.minus(Sample([theirs])) == Sample([ours]).minus(Sample([theirs]))


def test_a_difference_of_perplexities_is_of_totals() -> None:
    """exp(6/4) - exp(4/4), not a mean of the windows' differences; both values of a window are drawn together."""
    ours, theirs = Sample([{"a": (3, 1), "b": (3, 3)}], ratio), Sample([{"a": (1, 1), "b": (3, 3)}], ratio)
    result = ours.minus(theirs)
    assert result["difference"] == pytest.approx(math.exp(1.5) - math.exp(1.0))
    assert result["ci_low"] == 0  # window b twice: the same in both runs
    assert result["ci_high"] == pytest.approx(math.exp(3) - math.exp(1))
    assert result["p_value"] == 1.0  # window a alone differs, either way round
    rng = np.random.default_rng(0)
    hard = rng.normal(300, 40, 30)  # windows differ far more than the methods do
    full = Sample([named([(nll, 100) for nll in hard])], ratio)
    worse = Sample([named([(nll + extra, 100) for nll, extra in zip(hard, rng.normal(3, 1, 30), strict=True)])], ratio)
    result = worse.minus(full)
    assert result["difference"] == pytest.approx(
        ratio(np.array([(n, 100) for n in hard])) * (math.exp(0.03) - 1), rel=0.2
    )
    assert 0 < result["ci_low"] < result["difference"] < result["ci_high"]
    assert result["p_value"] == pytest.approx(1 / 2001)
