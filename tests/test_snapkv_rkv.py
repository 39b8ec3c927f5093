"""SnapKV and R-KV against loops written from their formulas; every switch; when they evict, and by which queries."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from fasa_bench.attention import attend
from fasa_bench.cache import KVLayer
from fasa_bench.errors import UserError
from fasa_bench.layer_budget import pyramid
from fasa_bench.method import check_budget
from fasa_bench.methods.rkv import RKV, redundancy
from fasa_bench.methods.snapkv import SnapKV
from fasa_bench.methods.window import WindowEviction
from fasa_bench.session import Session

H, HQ, D = 2, 4, 8


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer_of(keys: Tensor, budget: int) -> KVLayer:
    """keys [b, H, n, d]; a key's value is the key itself."""
    layer = KVLayer(0)
    layer.append(keys, keys, torch.arange(keys.shape[2]).expand(len(keys), -1))
    layer.budget, layer.scale = budget, 0.5
    return layer


def step(method: WindowEviction, layer: KVLayer, query: Tensor, key: Tensor) -> None:
    """One decode step as the engine does it: query [b, Hq, 1, d], key [b, H, 1, d]."""
    layer.append(key, key, torch.full((len(key), 1), layer.seen))
    method.decoded(layer, query, attend(layer, query, None)[1])


def softmax(values: list[float]) -> list[float]:
    parts = [math.exp(value - max(values)) for value in values]
    return [part / sum(parts) for part in parts]


def pooled(values: list[float], kernel: int, pooling: str) -> list[float]:
    half = kernel // 2
    near = [values[max(0, j - half) : j + half + 1] for j in range(len(values))]
    return [max(part) if pooling == "max" else sum(part) / kernel for part in near]


def logit(queries: Tensor, keys: Tensor, head: int, row: int, j: int) -> float:
    return 0.5 * float(queries[0, head, row].double() @ keys[0, head // (HQ // H), j].double())


def snapkv_by_hand(queries: Tensor, keys: Tensor, method: SnapKV) -> list[list[float]]:
    """Scores of the past, per head that keeps a set."""
    n, w = keys.shape[2], queries.shape[2]
    scores = []
    for head in range(HQ):
        mass = [0.0] * (n - w)
        for row in range(w):
            seen = n - w + row + 1  # the window's own causal triangle
            weights = softmax([logit(queries, keys, head, row, j) for j in range(seen)])
            mass = [total + weight for total, weight in zip(mass, weights[: n - w], strict=True)]
        scores.append(mass)
    if method.heads == "kv_head":
        together: Any = {"mean": fmean, "max": max, "sum": sum}[method.group]
        groups = [scores[head : head + HQ // H] for head in range(0, HQ, HQ // H)]
        scores = [[together(column) for column in zip(*group, strict=True)] for group in groups]
    return [pooled(row, method.kernel, method.pooling) for row in scores]


def importance_by_hand(queries: Tensor, keys: Tensor, kernel: int) -> list[list[float]]:
    n, w, scores = keys.shape[2], queries.shape[2], []
    for head in range(H):
        group = range(head * HQ // H, (head + 1) * HQ // H)
        rows = [
            softmax([max(logit(queries, keys, g, row, j) for g in group) for j in range(n - w)]) for row in range(w)
        ]
        scores.append(pooled([sum(column) / w for column in zip(*rows, strict=True)], kernel, "max"))
    return scores


def redundancy_by_hand(keys: Tensor, threshold: float, retain: str, ratio: float) -> list[list[float]]:
    """keys [H, n, d]."""
    found = []
    for head in keys.double():
        n = len(head)
        columns = [0.0] * n
        for i in range(n):
            row = (head @ head[i] / head.norm(dim=-1) / head[i].norm()).tolist()
            row[i] = 0.0
            alike = sorted(j if row[j] > threshold else 0 for j in range(n))
            row[alike[-1] if retain == "last" else alike[max(1, int(n * ratio)) - 1]] = 0.0
            columns = [total + value / n for total, value in zip(columns, row, strict=True)]
        found.append(softmax(columns))
    return found


def kept_by_hand(scores: list[list[float]], n: int, capacity: int) -> list[list[int]]:
    """Positions that stay: the best past ones and the window."""
    kept = []
    for row in scores:
        best = sorted(range(len(row)), key=lambda j: -row[j])[: capacity - (n - len(row))]
        kept.append(sorted([*best, *range(len(row), n)]))
    return kept


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"pooling": "avg"},
        {"group": "max", "pooling": "avg"},
        {"group": "sum", "kernel": 1},
        {"heads": "query_head", "pooling": "avg"},
        {"heads": "query_head", "window": 1, "kernel": 5},
    ],
)
def test_snapkv_by_hand(switches: dict[str, Any]) -> None:
    method = SnapKV("snapkv", **{"window": 4, "kernel": 3, **switches})
    keys, queries = drawn(1, H, 24, D), drawn(1, HQ, method.window, D, seed=1)
    scores = snapkv_by_hand(queries, keys, method)
    layer = layer_of(keys, budget=13)
    torch.testing.assert_close(method.scores(layer, queries)[0], torch.tensor(scores), rtol=1e-5, atol=1e-6)
    method.prefill(layer, queries)
    assert layer.heads == (HQ if method.heads == "query_head" else H)
    assert layer.length == 12
    for row, kept in zip(scores, layer.positions[0].tolist(), strict=True):
        past = kept[: -method.window]  # max pooling makes equal scores, any of which may stay
        assert min(row[j] for j in past) >= max(row[j] for j in range(len(row)) if j not in past) - 1e-6
    if method.pooling == "avg":
        assert layer.positions[0].tolist() == kept_by_hand(scores, 24, 12)
    assert (layer.positions[0, :, -method.window :] == torch.arange(24 - method.window, 24)).all()
    for head in range(layer.heads):  # the keys of the kept positions, in the order of the text
        rows = keys[0, head if layer.heads == H else head // 2, layer.positions[0, head]]
        assert torch.equal(layer.keys[0, head], rows)


def test_snapkv_as_in_rkvs_repository() -> None:
    keys, queries = drawn(1, H, 24, D), drawn(1, HQ, 4, D, seed=1)
    method = SnapKV("snapkv", window=4, kernel=3, group="max_logit")
    found = method.scores(layer_of(keys, 13), queries)[0]
    torch.testing.assert_close(found, torch.tensor(importance_by_hand(queries, keys, 3)), rtol=1e-5, atol=1e-6)


def test_a_needle_stays_with_its_neighbours() -> None:
    """What pooling is for: the tokens around an important one stay too, three on each side with a kernel of 7."""
    keys = torch.zeros(1, H, 40, D)
    keys[0, 0, 11], keys[0, 1, 25] = 9.0, 9.0
    layer = layer_of(keys, budget=4 + 7 + 1)
    SnapKV("snapkv", window=4).prefill(layer, torch.ones(1, HQ, 4, D))
    assert layer.positions[0, 0].tolist() == [*range(8, 15), 36, 37, 38, 39]
    assert layer.positions[0, 1].tolist() == [*range(22, 29), 36, 37, 38, 39]


@pytest.mark.parametrize(
    "switches",
    [{"pooling": "avg"}, {"kernel": 5}, {"group": "max"}, {"group": "max_logit"}, {"window": 3}],
)
def test_every_switch_of_snapkv_changes_what_is_kept(switches: dict[str, Any]) -> None:
    keys, queries = drawn(1, H, 60, D), 2 * drawn(1, HQ, 8, D, seed=1)
    kept = []
    for method in (SnapKV("snapkv", window=8, kernel=3), SnapKV("snapkv", **{"window": 8, "kernel": 3, **switches})):
        layer = layer_of(keys, budget=20)
        method.prefill(layer, queries[:, :, -method.window :])
        kept.append(layer.positions)
    assert not torch.equal(*kept)


@pytest.mark.parametrize("n", [24, 141])  # 141: more than one block of rows, and not a whole number of them
@pytest.mark.parametrize(
    ("retain", "ratio", "threshold"), [("last", 0.0, 0.5), ("last", 0.0, 0.3), ("first", 0.0, 0.3), ("first", 0.9, 0.1)]
)
def test_redundancy_by_hand(n: int, retain: str, ratio: float, threshold: float) -> None:
    keys = drawn(1, H, n, D)
    keys[0, :, 5], keys[0, :, 9], keys[0, :, n - 3] = keys[0, :, 2], 2 * keys[0, :, 2], keys[0, :, 2]
    found = redundancy(keys, threshold, retain, ratio)[0]
    expected = redundancy_by_hand(keys[0], threshold, retain, ratio)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-8)


def test_the_last_repetition_is_spared() -> None:
    """Slots 1, 3 and 6 hold the same key, the others nothing alike: each of the three spares the last of the others."""
    keys = torch.eye(8)[None, None].clone()
    keys[0, 0, 3] = keys[0, 0, 6] = keys[0, 0, 1]
    means = redundancy(keys, 0.5).log()[0, 0]
    means = means - means[0]  # nothing resembles slot 0
    # column 1: from 3 and 6; column 3: from 1 and 6, and 6 spares it; column 6: from 1 and 3, both spare it
    torch.testing.assert_close(means, torch.tensor([0, 2, 0, 1, 0, 0, 0, 0]) / 8)
    means = redundancy(keys, 0.5, "first").log()[0, 0]
    torch.testing.assert_close(means - means[0], torch.tensor([0, 2, 0, 2, 0, 0, 2, 0]) / 8)


def test_each_row_of_a_batch_has_its_own_redundancy() -> None:
    """R-KV's code takes the similarities of the first row for all rows."""
    keys = drawn(3, H, 40, D)
    alone = torch.cat([redundancy(keys[i : i + 1], 0.5) for i in range(3)])
    torch.testing.assert_close(redundancy(keys, 0.5), alone)


@pytest.mark.parametrize("mix", [0.0, 0.1, 1.0])
def test_rkv_by_hand(mix: float) -> None:
    method = RKV("rkv", window=4, kernel=1, mix_lambda=mix)
    keys, queries = drawn(1, H, 24, D), drawn(1, HQ, 4, D, seed=1)
    parts = zip(
        importance_by_hand(queries, keys, 1), redundancy_by_hand(keys[0], 0.5, "last", 0.0), strict=True
    )  # fmt: skip
    scores = [[mix * a - (1 - mix) * b for a, b in zip(i, r[:20], strict=True)] for i, r in parts]
    layer = layer_of(keys, budget=13)
    torch.testing.assert_close(method.scores(layer, queries)[0], torch.tensor(scores), rtol=1e-5, atol=1e-8)
    method.prefill(layer, queries)
    assert layer.positions[0].tolist() == kept_by_hand(scores, 24, 12)


@pytest.mark.parametrize(
    "switches", [{"mix_lambda": 0.9}, {"threshold": 0.2}, {"retain": "first"}, {"kernel": 1}, {"window": 3}]
)
def test_every_switch_of_rkv_changes_what_is_kept(switches: dict[str, Any]) -> None:
    topics = drawn(1, H, 10, D, seed=2).repeat(1, 1, 10, 1)
    keys, queries = topics + drawn(1, H, 100, D), drawn(1, HQ, 8, D, seed=1) / 4
    kept = []
    for method in (RKV("rkv"), RKV("rkv", **switches)):
        layer = layer_of(keys, budget=30)
        method.prefill(layer, queries[:, :, -method.window :])
        kept.append(layer.positions)
    assert not torch.equal(*kept)


def lengths(method: WindowEviction, prompt: int, steps: int, budget: int) -> tuple[list[int], KVLayer]:
    """Tokens that each step reads, after a prompt of that many."""
    keys, queries = drawn(1, H, prompt + steps, D), drawn(1, HQ, prompt + steps, D, seed=1)
    layer = layer_of(keys[:, :, :prompt], budget)
    method.prefill(layer, queries[:, :, max(prompt - method.window, 0) : prompt])
    read = []
    for now in range(prompt, prompt + steps):
        read.append(layer.length + 1)
        step(method, layer, queries[:, :, now : now + 1], keys[:, :, now : now + 1])
    return read, layer


def test_snapkv_evicts_every_interval() -> None:
    method = SnapKV("snapkv", window=3, kernel=3, interval=5)
    assert lengths(method, 20, 12, budget=8)[0] == [8, 9, 10, 11, 12, 8, 9, 10, 11, 12, 8, 9]
    assert lengths(method, 2, 12, budget=8)[0] == [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 8, 9]
    once = SnapKV("snapkv", window=3, kernel=3, interval=None)
    assert lengths(once, 20, 12, budget=8)[0] == list(range(8, 20))
    assert lengths(SnapKV("snapkv", window=3, kernel=3, interval=1), 20, 12, budget=8)[0] == [8] * 12


def test_rkv_evicts_in_the_step_after_a_full_interval_of_the_text() -> None:
    method = RKV("rkv", window=3, kernel=3, interval=5)
    for _ in range(2):  # the official counter runs on into the next sequence
        assert lengths(method, 20, 12, budget=8)[0] == [8, 8, 9, 10, 11, 12, 8, 9, 10, 11, 12, 8]
    assert lengths(method, 18, 7, budget=8)[0] == [8, 9, 10, 8, 9, 10, 11]
    assert lengths(method, 2, 16, budget=8)[0] == [3, 4, 5, 6, 7, 8, 9, 10, 11, 8, 9, 10, 11, 12, 8, 9]
    assert lengths(RKV("rkv", window=3, interval=None), 20, 12, budget=8)[0] == list(range(8, 20))


@pytest.mark.parametrize("method", [SnapKV("snapkv", window=4, kernel=1, interval=6), RKV("rkv", window=4, kernel=1)])
@pytest.mark.parametrize("prompt", [1, 3, 30])
def test_decoding_evicts_by_the_last_queries(method: WindowEviction, prompt: int) -> None:
    """Those of the prompt, then those of the steps; a prompt shorter than the window is filled up."""
    method.interval = 6
    steps = 17 if prompt == 1 else 16 if isinstance(method, SnapKV) else 20
    keys, queries = drawn(1, H, prompt + steps, D), drawn(1, HQ, prompt + steps, D, seed=1)
    layer = layer_of(keys[:, :, :prompt], 10)
    method.prefill(layer, queries[:, :, max(prompt - 4, 0) : prompt])
    events = 0
    for now in range(prompt, prompt + steps):
        before = layer.positions.expand(1, H, -1)
        step(method, layer, queries[:, :, now : now + 1], keys[:, :, now : now + 1])
        if layer.length > before.shape[2]:
            continue
        events += 1
        held = torch.cat([before, torch.full((1, H, 1), now)], dim=-1)
        cached = keys.gather(2, held[..., None].expand(-1, -1, -1, D))
        expected = method.scores(layer_of(cached, 10), queries[:, :, now - 3 : now + 1])
        for head in range(H):
            best = held[0, head, :-4][expected[0, head].topk(5).indices].sort().values
            assert layer.positions[0, head].tolist() == [*best.tolist(), *range(now - 3, now + 1)]
    assert events >= 1
    assert layer.state["queries"].shape[2] == 4


def test_rkv_in_score_order_differs_from_the_second_eviction_on() -> None:
    found = {}
    for order in ("position", "score"):
        method = RKV("rkv", window=3, kernel=5, interval=8, order=order)
        _, first = lengths(method, 40, 0, budget=20)
        _, second = lengths(method, 40, 10, budget=20)
        found[order] = [first.positions, second.positions]
    assert torch.equal(found["position"][0], found["score"][0].sort(-1).values)
    assert not torch.equal(found["score"][0], found["score"][0].sort(-1).values)
    assert (found["position"][1].diff(dim=-1) > 0).all()
    assert not torch.equal(found["position"][1], found["score"][1].sort(-1).values)


def test_dense_layers_and_no_budget_keep_everything() -> None:
    for method in (SnapKV("snapkv", [0], window=3, interval=1), RKV("rkv", [0], window=3, interval=1)):
        _, layer = lengths(method, 20, 5, budget=8)
        assert (layer.length, layer.state) == (25, {})
    _, layer = lengths(RKV("rkv"), 20, 5, budget=None)  # type: ignore[arg-type]
    assert (layer.length, layer.state) == (25, {})


@pytest.mark.parametrize("method", [SnapKV, RKV])
def test_values_that_mean_nothing_are_refused(method: Callable[..., WindowEviction]) -> None:
    for wrong in ({"window": 0}, {"kernel": 0}, {"kernel": 4}, {"interval": 0}):
        (key,) = wrong
        with pytest.raises(UserError, match=f"method.{key}={wrong[key]} .* must be"):
            method("x", **wrong)
    with pytest.raises(UserError, match="needs at least 34 tokens"):
        check_budget(33, SnapKV("snapkv"))
    with pytest.raises(UserError, match=r"method.mix_lambda=1.5 .* from 0 to 1"):
        RKV("rkv", mix_lambda=1.5)


def test_the_cache_holds_one_copy_per_kv_head_unless_told_otherwise(
    network: LlamaForCausalLM, prompt: list[int]
) -> None:
    shapes = {}
    for heads in ("kv_head", "query_head"):
        method = SnapKV("snapkv", window=4, heads=heads, interval=None)
        with (
            Session(network) as session,
            session.prefill(prompt, observe=method.observes()).fork(method, 10) as decoder,
        ):
            shapes[heads] = [tuple(layer.keys.shape) for layer in decoder.cache.layers]
            decoder.step(torch.tensor([[3]]))
            assert torch.isfinite(decoder.logits).all()
    assert shapes == {"kv_head": [(1, 2, 9, 16)] * 2, "query_head": [(1, 4, 9, 16)] * 2}


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_snapkv_with_a_pyramid_of_budgets(
    network_of: Callable[..., LlamaForCausalLM], prompt: list[int], layers: int
) -> None:
    network = network_of(layers=layers)
    method = SnapKV("snapkv_pyramidkv", layer_budget="pyramid", window=4, kernel=3)
    with Session(network) as session, session.prefill(prompt, observe=method.observes()).fork(method, 12) as decoder:
        budgets = pyramid(12, layers, length=40, window=4, smallest=6)
        assert sum(budgets) == 12 * layers
        assert [layer.length for layer in decoder.cache.layers] == [tokens - 1 for tokens in budgets]
        assert layers == 1 or budgets[0] > 12 > budgets[-1]


def test_prompts_of_different_lengths_are_refused(network: LlamaForCausalLM) -> None:
    """Rows would be due at different steps."""
    padding = torch.tensor([[False] * 5 + [True] * 15, [True] * 20])
    ids = torch.randint(0, 101, (2, 20), generator=torch.Generator().manual_seed(0))
    for method in (SnapKV("snapkv", window=3), RKV("rkv", window=3)):
        with (
            Session(network) as session,
            pytest.raises(UserError, match="different lengths"),
            session.prefill(ids, padding=padding, observe=method.observes()).fork(method, 10),
        ):
            pass


def test_samples_that_share_a_prompt_equal_single_ones(network: LlamaForCausalLM, prompt: list[int]) -> None:
    tokens = torch.randint(0, 101, (3, 9), generator=torch.Generator().manual_seed(0))
    for method in (SnapKV("snapkv", window=3, kernel=3, interval=4), RKV("rkv", window=3, kernel=3, interval=4)):
        with Session(network) as session:
            prefilled = session.prefill(prompt[:11], observe=method.observes())
            with prefilled.fork(method, 12, samples=3) as decoder:  # the prompt stays whole, then is evicted
                together = torch.stack([decoder.step(tokens[:, i : i + 1]) for i in range(9)])
                assert decoder.cache.layers[0].length < 20
            for row in range(3):
                with prefilled.fork(method, 12) as decoder:
                    alone = torch.stack([decoder.step(tokens[row : row + 1, i : i + 1])[0] for i in range(9)])
                torch.testing.assert_close(together[:, row], alone, atol=1e-4, rtol=1e-4)
