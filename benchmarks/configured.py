"""Methods as conf/method/*.yaml describes them, without Hydra, which not every machine with a GPU has."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml

from fasa_bench.method import Method
from fasa_bench.rope import Rope

CONF = Path(__file__).resolve().parents[1] / "conf" / "method"


def exists(name: str) -> bool:
    return (CONF / f"{name}.yaml").is_file()


def settings(name: str) -> dict[str, Any]:
    """The file's entries, after those of the files that it builds on."""
    given = yaml.safe_load((CONF / f"{name}.yaml").read_text("utf-8"))
    bases = [base for base in given.pop("defaults", []) if base != "_self_"]
    return {key: value for part in [*map(settings, bases), given] for key, value in part.items()}


def method_named(name: str, **changes: Any) -> Method:
    values = settings(name) | changes
    module, _, kind = values.pop("_target_").rpartition(".")
    return getattr(importlib.import_module(module), kind)(**values)


def prepare_at_random(method: Method, layers: int, query_heads: int, kv_heads: int, head_dim: int) -> Method:
    """In place of a calibration, random contextual agreement: which chunks are dominant does not change the time."""
    half = head_dim // 2
    pairs = [(i, i + half) for i in range(half)]
    rope = Rope("half", pairs, [], torch.ones(half), head_dim, layers=tuple(range(layers)))
    config = SimpleNamespace(num_key_value_heads=kv_heads, num_attention_heads=query_heads, num_hidden_layers=layers)
    agreement = torch.rand(layers, query_heads, half)
    model, calibration = SimpleNamespace(rope=rope, config=config), SimpleNamespace(agreement=lambda *_: agreement)
    method.prepare(model, calibration)  # type: ignore[arg-type]
    return method
