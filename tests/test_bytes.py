"""The formulas of docs/methods.md against the counters: bytes held, and bytes read at a step, for every method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from fasa_bench.cache import KVLayer
from fasa_bench.lead import BLOCK as LEAD_BLOCK
from fasa_bench.method import Method
from fasa_bench.methods.fasa import FasaC
from fasa_bench.methods.fasa_m import FasaM
from fasa_bench.methods.full import FullKV
from fasa_bench.methods.fused_cpu import missing
from fasa_bench.near import Prefetch
from fasa_bench.segments import BLOCK, Chosen, Packing
from fasa_bench.session import Session
from tests.test_methods import METHODS, prepared, ready

H, HQ, D, E = 2, 4, 16, 4  # KV heads, query heads, head dimension, bytes a number
N, B = 35, 10  # tokens at the step that is measured, budget
ROW = D * E  # a key or a value of one head

# bytes that the torch code reads at one step of one layer
ALL = 2 * H * N * ROW
KEYS = H * N * ROW  # whole keys multiplied to choose
CHOSEN = {"query": 2 * HQ * B * ROW, "kv": 2 * H * B * ROW}  # exact attention over the budget
PAGES, LAST = 8, N % 4  # full pages of 4 tokens, tokens of the newest one
BOUNDS = 2 * H * (PAGES + 1) * ROW + 2 * H * LAST * ROW  # of all pages; the newest one's come from its rows
READ = {
    "oracle": KEYS + CHOSEN["query"],
    "fasa_plus": H * N * 4 * E + CHOSEN["kv"] - H * B * 4 * E,  # the leading part of the logits is known already
    "loki": KEYS + CHOSEN["query"],
    "sparq": KEYS + CHOSEN["kv"] + 2 * 2 * H * ROW,  # the newest value, for the mean
    "sparq_plain": KEYS + CHOSEN["kv"],
    "random": CHOSEN["kv"],
    "quest": BOUNDS + 2 * HQ * 8 * ROW,  # two pages; a slot of -1 is read as row 0
    "streamingllm": 2 * H * B * ROW,
    "tova": 2 * H * B * ROW,
    "knorm": 2 * H * B * ROW,
    "h2o": 2 * H * B * ROW,
    "h2o_query_head": 2 * HQ * B * ROW,
    "snapkv": 2 * H * B * ROW + 0,
    "snapkv_query_head": 2 * HQ * B * ROW,
    "rkv": 2 * H * B * ROW,
}
# and what evicting methods multiply to choose, once an interval (here: every step)
READ |= {name: READ[name] + H * B * ROW for name in ("snapkv", "rkv")}
READ["snapkv_query_head"] += HQ * B * ROW


def rows(n: int) -> int:
    """Rows that a buffer for n tokens has."""
    return -(-n // BLOCK) * BLOCK


def cache(heads: int, n: int, position_heads: int = 1) -> int:
    """Keys, values and positions of one layer."""
    return rows(n) * (2 * heads * ROW + 8 * position_heads)


HELD = {
    "oracle": cache(H, N),
    # 4 leading dimensions, which PyTorch reads in longer blocks; the rest as ever; and the order of dimensions
    "fasa_plus": LEAD_BLOCK * H * 4 * E + rows(N) * (H * (2 * D - 4) * E + 8) + 8 * H * D,
    "random": cache(H, N),
    "loki": cache(H, N),
    "sparq": cache(H, N) + 4 * H * D + 4 * HQ,
    "quest": cache(H, N) + 2 * H * PAGES * ROW,
    "streamingllm": cache(H, B - 1),
    "tova": cache(H, B - 1),
    "knorm": cache(H, B - 1, H),
    "h2o": cache(H, B - 1, H) + 4 * HQ * (B - 1),
    "h2o_query_head": cache(HQ, B - 1, HQ) + 4 * HQ * (B - 1),
    "snapkv": cache(H, B - 1, H) + HQ * 3 * ROW,
    "snapkv_query_head": cache(HQ, B - 1, HQ) + HQ * 3 * ROW,
    "rkv": cache(H, B - 1, H) + HQ * 3 * ROW,
}


def by_torch(method: Method) -> Method:
    """PyTorch's operations in place of the compiled kernels, whose leading blocks are shorter."""
    if isinstance(method, FasaC):
        method.backend = "torch"
    return method


@pytest.mark.parametrize("name", READ)
def test_bytes_read_at_a_step(name: str, network: LlamaForCausalLM, prompt: list[int]) -> None:
    method = ready(name, network)
    with Session(network) as session:
        prefilled = session.prefill(prompt[: N - 2], observe=method.observes())
        with prefilled.fork(method, B) as decoder:
            decoder.step(torch.tensor([[prompt[N - 2]]]))
            before = decoder.read_bytes
            decoder.step(torch.tensor([[prompt[N - 1]]]))
            assert decoder.read_bytes - before == 2 * READ[name]  # two layers


def test_chunks_per_query_head_read_what_any_head_of_the_group_uses(
    network: LlamaForCausalLM, prompt: list[int]
) -> None:
    """Two query heads of a KV head use 4 dimensions each: together 4 to 8, as many in every KV head of the layer."""
    method = prepared(by_torch(METHODS["fasa_c"]()), network)
    leads = [dominant.lead for dominant in method._layers.values()]  # type: ignore[attr-defined]
    assert all(4 <= lead <= 8 for lead in leads)
    assert max(leads) > 4
    with Session(network) as session, session.prefill(prompt[: N - 2]).fork(method, B) as decoder:
        decoder.step(torch.tensor([[prompt[N - 2]]]))
        before = decoder.read_bytes
        decoder.step(torch.tensor([[prompt[N - 1]]]))
        assert decoder.read_bytes - before == sum(H * N * lead * E + CHOSEN["query"] for lead in leads)


compiled_only = pytest.mark.skipif(missing(torch.zeros(1)) is not None, reason="no compiler for the kernels")


@compiled_only
def test_compiled_kernels_read_the_leading_dimensions_once(network: LlamaForCausalLM, prompt: list[int]) -> None:
    """What TIP has multiplied is not read again for the chosen tokens, per query head neither."""
    method = ready("fasa_c", network)
    leads = [dominant.lead for dominant in method._layers.values()]  # type: ignore[attr-defined]
    with Session(network) as session, session.prefill(prompt[: N - 2]).fork(method, B) as decoder:
        decoder.step(torch.tensor([[prompt[N - 2]]]))
        before = decoder.read_bytes
        decoder.step(torch.tensor([[prompt[N - 1]]]))
        rest = [HQ * B * (2 * D - lead) * E for lead in leads]
        assert decoder.read_bytes - before == sum(H * N * lead * E for lead in leads) + sum(rest)


@pytest.mark.parametrize("name", HELD)
def test_bytes_held_after_a_step(name: str, network: LlamaForCausalLM, prompt: list[int]) -> None:
    method = prepared(by_torch(METHODS[name]()), network)
    with Session(network) as session:
        prefilled = session.prefill(prompt[: N - 1], observe=method.observes())
        with prefilled.fork(method, B) as decoder:
            decoder.step(torch.tensor([[prompt[N - 1]]]))
            assert decoder.cache.device_bytes == 2 * HELD[name]


@compiled_only
def test_compiled_kernels_reserve_as_few_leading_rows_as_others(network: LlamaForCausalLM, prompt: list[int]) -> None:
    method = ready("fasa_plus", network)
    with Session(network) as session, session.prefill(prompt[: N - 1]).fork(method, B) as decoder:
        decoder.step(torch.tensor([[prompt[N - 1]]]))
        shorter = (LEAD_BLOCK - rows(N)) * H * 4 * E
        assert decoder.cache.device_bytes == 2 * (HELD["fasa_plus"] - shorter)


TAIL = 2 * D - 4  # numbers of a token and KV head that FASA-M keeps in the host's memory


@pytest.mark.parametrize("prefetch", ["none", "last_step", "next_layer"])
def test_fasa_m_holds_what_equation_10_says(
    prefetch: Prefetch, network_of: Callable[..., LlamaForCausalLM], prompt: list[int]
) -> None:
    """Device bytes are layers * (L * d_dom + b * d_rest + b * d) * bytes, L reserved rows, plus positions and order.

    b rows of every layer are held with last_step only; with next_layer those that are fetched ahead.
    """
    layers, near = 3, {"none": 0, "last_step": 3, "next_layer": 1}[prefetch]
    switches: dict[str, Any] = {"fc_granularity": "kv_head", "token_granularity": "kv_head", "backend": "torch"}
    method = FasaM("fasa_m", prefetch=prefetch, **switches)
    network = network_of(layers=layers)
    with Session(network) as session, session.prefill(prompt[: N - 2]).fork(prepared(method, network), B) as decoder:
        for token in prompt[N - 2 : N]:
            decoder.step(torch.tensor([[token]]))
        equation_10 = layers * H * LEAD_BLOCK * 4 * E + near * (H * B * (D - 4) * E + H * B * D * E)
        beside = layers * (rows(N) * 8 + 8 * H * D)
        assert decoder.cache.device_bytes == equation_10 + beside
        slots = 0 if prefetch == "none" else layers * H * B * 8
        assert decoder.cache.host_bytes == layers * rows(N) * H * TAIL * E + slots


@pytest.mark.parametrize("prefetch", ["none", "last_step", "next_layer"])
def test_fasa_m_moves_what_it_lacks_and_the_new_token(
    prefetch: Prefetch, network: LlamaForCausalLM, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    method = FasaM("fasa_m", fc_granularity="kv_head", token_granularity="kv_head", prefetch=prefetch)
    chosen: list[list[set[tuple[int, int]]]] = []  # at each step, in each layer: head and slot
    read, moved = [0], [0]

    def spy(layer: KVLayer, slots: Tensor) -> Chosen:
        pairs = {(head, slot) for head, row in enumerate(slots[0].tolist()) for slot in row}
        chosen[-1].append(pairs)
        return choose(layer, slots)

    choose = KVLayer.choose
    monkeypatch.setattr(KVLayer, "choose", spy)
    with Session(network) as session:
        prefilled = session.prefill(prompt[: N - 2])
        with prefilled.fork(prepared(method, network), B) as decoder:
            for token in prompt[N - 2 : N]:
                chosen.append([])
                decoder.step(torch.tensor([[token]]))
                read.append(decoder.read_bytes)
                moved.append(decoder.moved_bytes)
            hit_rate = decoder.cache.hit_rate
    common = sum(len(first & second) for first, second in zip(*chosen, strict=True))
    assert 0 < common < 2 * H * B
    new = 2 * H  # rows of the step's token, to the host
    ahead = H * B if prefetch == "next_layer" else 0  # fetched for each layer while the one before computes
    found = 0 if prefetch == "none" else common
    assert moved[1] == (new + 2 * H * B + ahead) * TAIL * E
    assert moved[2] - moved[1] == (new + 2 * H * B - found + 2 * ahead) * TAIL * E
    assert hit_rate == found / (2 * 2 * H * B)
    assert read[2] - read[1] == 2 * READ["fasa_plus"]  # as FASA-C does


def test_a_tenth_of_the_context_is_held_in_a_fifth_of_the_memory() -> None:
    """Equation 10 at d 128, 25 % dominant dimensions and b = L / 10: 4.7 times less, not 8, which needs a small b."""
    length, dim, lead = 10 * LEAD_BLOCK, 128, 32
    full = KVLayer(0)
    keys = torch.randn(1, 8, length, dim)
    full.append(keys, keys, torch.arange(length)[None])
    times = []
    for budget in (length // 10, 16):
        layer = full.fork()
        layer.split(torch.arange(dim).expand(8, -1), lead, offload="last_step")
        layer.choose(torch.arange(budget)[None, None])
        times.append(full.device_bytes / layer.device_bytes)
    assert times[0] == pytest.approx(2 / (1 / 4 + 0.1 * 3 / 4 + 0.1), rel=0.02) == pytest.approx(4.7, rel=0.02)
    assert times[1] == pytest.approx(8, rel=0.03)


def test_full_kv_reads_everything(network: LlamaForCausalLM, prompt: list[int]) -> None:
    with Session(network) as session, session.prefill(prompt[: N - 1]).fork(FullKV("fkv"), None) as decoder:
        decoder.step(torch.tensor([[prompt[N - 1]]]))
        assert decoder.read_bytes == 2 * ALL
        assert decoder.cache.device_bytes == 2 * cache(H, N)


def test_a_packed_token_takes_what_the_formula_says(
    network_of: Callable[..., LlamaForCausalLM], prompt: list[int]
) -> None:
    """Per KV head ceil(d bits / 8) + 2 d e / group for a key, ceil(d bits / 8) + 2 ceil(d / group) e for a value."""
    network, bits, group = network_of(layers=1), 4, 8
    packing = Packing(bits=bits, group=group, residual=4)
    with Session(network) as session:
        prefilled = session.prefill(prompt[:36])
        with prefilled.fork(FullKV("fkv"), None, packing=packing) as decoder:
            packed = decoder.cache.layers[0].segments[0]
            assert packed.tokens == 32
            code = -(-D * bits // 8)
            assert packed.key_bytes == H * 32 * (code + 2 * ROW // group)
            assert packed.value_bytes == H * 32 * (code + 2 * -(-D // group) * E)


def test_every_method_of_the_list_is_held_against_its_formula() -> None:
    variants = {name.split("_")[0] for name in METHODS} - {"fasa"}
    assert variants <= {name.split("_")[0] for name in READ}
