"""FASA-M gives what FASA-C gives for the same choice, whatever is prefetched and however the tokens came."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from fasa_bench.cache import KVLayer
from fasa_bench.errors import UserError
from fasa_bench.methods.fasa import FasaC
from fasa_bench.methods.fasa_m import FasaM
from fasa_bench.near import Prefetch
from fasa_bench.segments import Chosen
from fasa_bench.session import Session
from tests.test_methods import prepared

PREFETCH: tuple[Prefetch, ...] = ("none", "last_step", "next_layer")
PAPER: dict[str, Any] = {}
SHARED: dict[str, Any] = {"fc_granularity": "kv_head", "token_granularity": "kv_head", "recent": 3}
MIXED: dict[str, Any] = {"fc_granularity": "kv_head", "sinks": 1}


def decode(
    network: LlamaForCausalLM,
    method: FasaC,
    prompt: Tensor,
    following: Tensor,
    budget: int,
    monkeypatch: pytest.MonkeyPatch,
    padding: Tensor | None = None,
    samples: int = 1,
) -> tuple[Tensor, list[Tensor], float | None]:
    """Logits of all steps, the slots of all choices, the hit rate."""
    chosen: list[Tensor] = []
    choose = KVLayer.choose

    def spy(layer: KVLayer, slots: Tensor) -> Chosen:
        chosen.append(slots.clone())
        return choose(layer, slots)

    device = network.device
    with monkeypatch.context() as patch, Session(network) as session:
        patch.setattr(KVLayer, "choose", spy)
        with session.prefill(prompt.to(device), padding).fork(prepared(method, network), budget, samples) as decoder:
            logits = [decoder.step(tokens.view(-1, 1)) for tokens in following.T]
            return torch.stack(logits), chosen, decoder.cache.hit_rate


def compare(network: LlamaForCausalLM, options: dict[str, Any], *args: Any, **kwargs: Any) -> list[float | None]:
    """Checks FASA-M in all its forms against FASA-C; their hit rates in the order of PREFETCH."""
    wanted, slots, rate = decode(network, FasaC("fasa_c", backend="torch", **options), *args, **kwargs)
    assert rate is None
    rates = []
    for prefetch in PREFETCH:
        logits, found, rate = decode(network, FasaM("fasa_m", prefetch=prefetch, **options), *args, **kwargs)
        assert len(found) == len(slots)
        assert all(torch.equal(a, b) for a, b in zip(found, slots, strict=True))
        torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)
        rates.append(rate)
    return rates


@pytest.mark.parametrize("options", [PAPER, SHARED, MIXED, {"dense_layers": [0]}], ids=str)
@pytest.mark.parametrize("rows", [1, 2])
def test_equals_fasa_c_over_many_steps(
    options: dict[str, Any], rows: int, network: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Across the growth of the buffers, which hold 64 rows at first."""
    torch.manual_seed(0)
    prompt, following = torch.randint(101, (rows, 50)), torch.randint(101, (rows, 30))
    none, kept, ahead = compare(network, options, prompt, following, 12, monkeypatch)
    assert none == 0
    assert kept is not None
    assert 0.2 < kept < 1
    assert ahead == kept  # both know the last choice


def test_equals_fasa_c_at_every_budget(
    network: LlamaForCausalLM, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the least to more than there is: with a large one rows go to the host as soon as there are too many."""
    for budget in (1, 2, 20, 29, 30, 31, 35, 41, 42):
        rates = compare(network, PAPER, torch.tensor(prompt[:30]), torch.tensor([prompt[30:]]), budget, monkeypatch)
        assert (rates[1] is None) == (budget >= 40)


@pytest.mark.parametrize("budget", [9, 33])
def test_equals_fasa_c_with_samples_that_share_a_prompt(
    budget: int, network: LlamaForCausalLM, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is longer, or shorter, than the budget when it is shared; both go to the host."""
    following = torch.randint(101, (3, 12), generator=torch.Generator().manual_seed(2))
    none, kept, ahead = compare(network, PAPER, torch.tensor(prompt[:28]), following, budget, monkeypatch, samples=3)
    assert none == 0
    assert kept == ahead
    assert kept is not None
    assert kept > 0.2


def test_equals_fasa_c_with_padding(
    network: LlamaForCausalLM, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.tensor([prompt[:30], [5] * 9 + prompt[10:31]])
    padding = torch.tensor([[True] * 30, [False] * 9 + [True] * 21])
    following = torch.tensor([prompt[31:40], prompt[:9]])
    compare(network, PAPER, ids, following, 9, monkeypatch, padding=padding)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_equals_fasa_c_on_a_gpu(network_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    network = network_of(layers=4).cuda()
    torch.manual_seed(0)
    for options, samples in itertools.product((PAPER, SHARED), (1, 3)):
        following = torch.randint(101, (samples, 40))
        compare(network, options, torch.randint(101, (1, 300)), following, 32, monkeypatch, samples=samples)


def test_one_layer_by_hand() -> None:
    """Two heads, three tokens chosen twice: one of one head and two of the other come again."""
    layer = KVLayer(0)
    layer.append(torch.randn(1, 2, 10, 4), torch.randn(1, 2, 10, 4), torch.arange(10)[None])
    keys, values = layer.keys.clone(), layer.values.clone()
    layer.split(torch.tensor([[2, 0, 1, 3], [0, 1, 2, 3]]), 1, offload="last_step")
    first, second = torch.tensor([[[0, 4, 7], [1, 2, 3]]]), torch.tensor([[[3, 7, 9], [1, 3, 8]]])
    row = 7 * 4  # bytes of three key dimensions and four of the value
    for slots, asked, found, moved in ((first, 6, 0, 6 * row), (second, 12, 3, 9 * row)):
        found_keys, found_values = layer.gather(slots)
        assert torch.equal(found_keys, keys.gather(2, slots[..., None].expand(-1, -1, -1, 4)))
        assert torch.equal(found_values, values.gather(2, slots[..., None].expand(-1, -1, -1, 4)))
        assert (layer.asked_rows, layer.found_rows, layer.moved_bytes) == (asked, found, moved)
    layer.prefetch()  # nothing to do: what was chosen last is there
    assert layer.moved_bytes == 9 * row


def test_what_a_fed_question_moves_is_no_step_s(network: LlamaForCausalLM, prompt: list[int]) -> None:
    with (
        Session(network) as session,
        session.prefill(prompt[:25]).fork(prepared(FasaM("fasa_m"), network), 9) as decoder,
    ):
        decoder.feed(prompt[25:31])
        assert (decoder.read_bytes, decoder.moved_bytes) == (0, 0)
        decoder.step(torch.tensor([[prompt[31]]]))
        assert decoder.moved_bytes > 0


def test_a_fork_knows_nothing_of_its_sibling() -> None:
    layer = KVLayer(0)
    layer.append(torch.randn(1, 2, 10, 4), torch.randn(1, 2, 10, 4), torch.arange(10)[None])
    layer.split(torch.arange(4).expand(2, 4), 1, offload="last_step")
    slots = torch.arange(5).expand(1, 2, 5)
    layer.choose(slots)
    twin = layer.fork()
    twin.choose(slots)
    assert (twin.asked_rows - layer.asked_rows, twin.found_rows) == (10, 0)
    assert layer.device_bytes == twin.device_bytes


def test_kernels_are_refused() -> None:
    with pytest.raises(UserError, match=r"method.backend='triton' .* auto, torch or cpp"):
        FasaM("fasa_m", backend="triton")
