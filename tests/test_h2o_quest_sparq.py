"""H2O, Quest and SparQ on a network: batches, tokens read, bytes held; and the values that their fields may have."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor
from transformers import LlamaForCausalLM

from fasa_bench.config import build
from fasa_bench.errors import UserError
from fasa_bench.method import Method
from fasa_bench.methods.h2o import H2O
from fasa_bench.methods.h2o_mask_sim import H2OMaskSim
from fasa_bench.methods.quest import Quest
from fasa_bench.methods.sparq import SparQ
from fasa_bench.session import Session
from tests.conftest import ROOT

EVERYTHING: dict[str, Callable[[], Method]] = {
    "h2o": lambda: H2O("h2o"),
    "h2o_query_head": lambda: H2O("h2o", heads="query_head", interval=3),
    "h2o_prompt": lambda: H2O("h2o", group="max", interval=None),
    "h2o_mask_sim": lambda: H2OMaskSim("h2o_mask_sim"),
    "quest": lambda: Quest("quest", page=4, min_pages=1),
    "sparq": lambda: SparQ("sparq"),
}


def decode(network: LlamaForCausalLM, method: Method, prompts: list[list[int]], rest: list[int], **fork: Any) -> Tensor:
    """Logits [b, steps, vocabulary] of prompts that are left-padded to one width and go on with the same tokens."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    padding = torch.tensor([[False] * (width - len(prompt)) + [True] * len(prompt) for prompt in prompts])
    with Session(network) as session:
        dense = session.prefill(ids, None if padding.all() else padding, observe=method.observes())
        with dense.fork(method, 10, **fork) as decoder:
            batch = decoder.logits.shape[0]
            return torch.stack([decoder.step(torch.full((batch, 1), token)) for token in rest], dim=1)


@pytest.mark.parametrize("name", EVERYTHING)
def test_padded_prompts_equal_their_own_runs(name: str, network: LlamaForCausalLM, prompt: list[int]) -> None:
    method = EVERYTHING[name]()
    prompts = [prompt[:30], prompt[10:17], prompt[5:20]]
    if not method.padding or getattr(method, "interval", 1) == 3:  # evictions would come at other steps
        with pytest.raises(UserError, match="different lengths"):
            decode(network, method, prompts, [1])
        return
    together = decode(network, method, prompts, prompt[30:])
    for row, single in zip(together, prompts, strict=True):
        alone = decode(network, method, [single], prompt[30:])[0]
        torch.testing.assert_close(row, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", EVERYTHING)
def test_samples_of_one_prompt_equal_a_single_run(name: str, network: LlamaForCausalLM, prompt: list[int]) -> None:
    single = decode(network, EVERYTHING[name](), [prompt[:30]], prompt[30:])
    double = decode(network, EVERYTHING[name](), [prompt[:30]], prompt[30:], samples=2)
    torch.testing.assert_close(double, single.expand(2, -1, -1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (H2O("h2o", interval=3), [10, 11, 12, 10, 11, 12, 10]),
        (H2O("h2o", interval=None), [10, 11, 12, 13, 14, 15, 16]),
        (H2OMaskSim("h2o_mask_sim"), [9] * 7),
        (Quest("quest", page=4, min_pages=2, newest="forced"), [6, 7, 8, 5, 6, 7, 8]),  # 34 tokens: 2 on the last page
        (Quest("quest", page=4, min_pages=1, newest="forced", recent=3), [6, 7, 4, 5, 6, 7, 4]),  # 31 in pages, and 3
        (SparQ("sparq"), [10] * 7),
    ],
)
def test_tokens_read_at_each_step(
    method: Method, expected: list[int], network: LlamaForCausalLM, prompt: list[int]
) -> None:
    with Session(network) as session:
        dense = session.prefill(prompt[:33], observe=method.observes())
        budget = 7 if getattr(method, "recent", 0) == 3 else 10
        with dense.fork(method, budget) as decoder:
            read, total = [], 0.0
            for token in prompt[33:]:
                decoder.step(torch.tensor([[token]]))
                read.append((decoder.state.tally.attended - total) / 2)  # of two layers
                total = decoder.state.tally.attended
    assert read == expected


@pytest.mark.parametrize("name", EVERYTHING)
def test_bytes_held_are_those_of_the_formula(name: str, network: LlamaForCausalLM, prompt: list[int]) -> None:
    """docs/methods.md: tokens that a layer holds, and bytes besides their keys, values and positions."""
    method = EVERYTHING[name]()
    with Session(network) as session:
        dense = session.prefill(prompt[:33], observe=method.observes())
        with dense.fork(method, 10) as decoder:
            for token in prompt[33:39]:
                decoder.step(torch.tensor([[token]]))
            layer = decoder.cache.layers[1]
            query_heads, heads, dim, size = 4, 2, 16, 4
            tokens, state = {
                "h2o": (9, query_heads * 9 * 4),
                "h2o_query_head": (9, query_heads * 9 * 4),
                "h2o_prompt": (15, query_heads * 15 * 4),
                "h2o_mask_sim": (39, query_heads * 39 * 4 + heads * 9 * 8),
                "quest": (39, 2 * heads * 9 * dim * size),
                "sparq": (39, heads * dim * 4 + query_heads * 4),
            }[name]
            assert layer.length == tokens
            assert sum(tensor.nbytes for tensor in layer.state.values()) == state
            assert layer.keys.shape == (1, query_heads if name == "h2o_query_head" else heads, tokens, dim)


# settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h2o", H2O("h2o")),
        ("h2o_mask_sim", H2OMaskSim("h2o_mask_sim")),
        ("quest", Quest("quest", dense_layers=[0, 1])),
        ("sparq", SparQ("sparq")),
    ],
)
def test_yaml_states_the_defaults(name: str, expected: Method) -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        values = OmegaConf.to_container(compose("config", [f"method={name}"]).method)
    assert set(values) - {"_target_"} == set(vars(expected))  # type: ignore[arg-type]
    assert build("method", values, Method) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: H2O("h2o", recent=0), "method.recent=0"),
        (lambda: H2O("h2o", recent=1.5), "method.recent=1.5"),
        (lambda: H2O("h2o", interval=0), "method.interval=0"),
        (lambda: H2OMaskSim("h2o", interval=None), "method.interval=None"),
        (lambda: Quest("quest", page=0), "method.page=0"),
        (lambda: Quest("quest", min_pages=0), "method.min_pages=0"),
        (lambda: Quest("quest", recent=-1), "method.recent=-1"),
        (lambda: Quest("quest", unit="tokens", newest="forced"), "method.newest='forced'"),
        (lambda: SparQ("sparq", local=-1), "method.local=-1"),
        (lambda: SparQ("sparq", local=1.5), "method.local=1.5"),
    ],
)
def test_values_that_mean_nothing_are_refused(make: Callable[[], Method], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


def test_sparq_refuses_more_components_than_there_are() -> None:
    model: Any = SimpleNamespace(rope=SimpleNamespace(head_dim=16))
    SparQ("sparq", rank=16).prepare(model, None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"method.rank=17 .* from 1 to 16"):
        SparQ("sparq", rank=17).prepare(model, None)  # type: ignore[arg-type]


def test_smallest_budgets() -> None:
    assert H2O("h2o").smallest_budget() == 2
    assert H2O("h2o", recent=7).smallest_budget() == 7
    assert SparQ("sparq").smallest_budget() == 1
    assert SparQ("sparq", local=4).smallest_budget() == 5
    assert Quest("quest", recent=5).smallest_budget() == 53
    assert Quest("quest", recent=5, unit="tokens").smallest_budget() == 6
