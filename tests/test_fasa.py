"""FASA's choice of chunks and tokens by hand; what holds for every method is in test_methods.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForCausalLM

from fasa_bench.errors import UserError
from fasa_bench.methods.dominant import chunk_mask
from fasa_bench.methods.fasa import FasaC
from fasa_bench.methods.oracle import Oracle
from fasa_bench.rope import Rope
from tests.test_methods import FakeCalibration, decode, layer_of


def test_fasa_reads_only_the_dominant_chunks() -> None:
    """Head 0 looks at dims (1, 5) and head 1 at (0, 4) of an 8-dim half-layout head: scores by hand."""
    agreement = torch.tensor([[[0.1, 0.9, 0.2, 0.3], [0.8, 0.1, 0.2, 0.3]]])
    units = torch.tensor([[0, 4], [1, 5], [2, 6], [3, 7]])
    mask = chunk_mask(agreement, units, 1, 8)
    assert mask[0].tolist() == [[0, 1, 0, 0, 0, 1, 0, 0], [1, 0, 0, 0, 1, 0, 0, 0]]
    query = torch.arange(1.0, 17.0).view(1, 2, 1, 8)
    # head 0: q = 1..8 -> 2 + 6; head 1: q = 9..16 -> 9 + 13
    assert layer_of(torch.ones(1, 1, 1, 8)).dot(query * mask[0][:, None]).flatten().tolist() == [8.0, 22.0]


def test_fasa_with_all_chunks_is_the_oracle(network: LlamaForCausalLM, prompt: list[int]) -> None:
    fasa = FasaC("fasa_c", n_tip=1.0)
    fasa.prepare(SimpleNamespace(config=network.config, rope=Rope.of(network)), FakeCalibration())  # type: ignore[arg-type]
    chosen, _ = decode(network, fasa, 8, prompt, 33)
    oracle, _ = decode(network, Oracle("oracle"), 8, prompt, 33)
    torch.testing.assert_close(chosen, oracle)


def test_fasa_shares_chunks_in_a_kv_head(network: LlamaForCausalLM) -> None:
    model = SimpleNamespace(config=network.config, rope=Rope.of(network))
    shared = FasaC("fasa_plus", n_tip=3, fc_granularity="kv_head")
    shared.prepare(model, FakeCalibration())  # type: ignore[arg-type]
    masks = torch.stack([dominant.mask[:, 0] for dominant in shared._layers.values()])  # [layers, Hq, d]
    assert torch.equal(masks[:, 0], masks[:, 1])
    assert not torch.equal(masks[:, 1], masks[:, 2])
    mean = FakeCalibration().agreement(model, "rope")[:, :2].mean(1)
    best = mean.topk(3, dim=-1).indices
    chosen = sorted([*best[0].tolist(), *(best[0] + 8).tolist()])
    assert masks[0, 0].nonzero().flatten().tolist() == chosen
    assert shared._layers[0].lead == 6
    assert sorted(shared._layers[0].order[0, :6].tolist()) == chosen  # which lie in front


def test_n_tip_over_the_number_of_chunks_is_refused(network: LlamaForCausalLM) -> None:
    model = SimpleNamespace(config=network.config, rope=Rope.of(network))
    with pytest.raises(UserError, match=r"method.n_tip=9 .* from 1 to 8"):
        FasaC("fasa_c", n_tip=9).prepare(model, FakeCalibration())  # type: ignore[arg-type]
