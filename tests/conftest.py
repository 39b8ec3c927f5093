"""Shared by all tests: small random networks, and where the shared data lies if it is there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("FASA_BENCH_SHARED", ROOT.parent / "shared"))
os.environ.setdefault("WANDB_MODE", "offline")
if (SHARED / "golden").is_dir():  # conformance cases that are not part of the project
    os.environ.setdefault("FASA_BENCH_CASES", str(SHARED / "golden"))


@pytest.fixture
def shared_data() -> Path:
    """The real data slices that lie beside a checkout; they are not part of the project."""
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip(f"no shared data at {folder}")
    return folder


@pytest.fixture(scope="session")
def network_of() -> Callable[..., LlamaForCausalLM]:
    """Make a random Llama; queries and keys of about unit variance, so that attention is far from flat."""

    def make(
        layers: int = 2, heads: int = 4, kv_heads: int = 2, head_dim: int = 16, dtype: torch.dtype = torch.float32
    ) -> LlamaForCausalLM:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=101,
            hidden_size=16 * heads,
            intermediate_size=96,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=4096,
            initializer_range=0.125,
        )
        return LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)

    return make


@pytest.fixture(scope="session")
def network(network_of: Callable[..., LlamaForCausalLM]) -> LlamaForCausalLM:
    return network_of()


@pytest.fixture
def prompt() -> list[int]:
    """40 of the 101 ids, each once: a token that comes twice has keys of equal norm, and methods see ties."""
    return torch.randperm(101, generator=torch.Generator().manual_seed(1))[:40].tolist()
