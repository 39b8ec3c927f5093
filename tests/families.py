"""Tiny random networks of the architectures that the harness supports."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 8
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]}

# name: model_type, changes to the config
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_llama3": ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0} | LLAMA3}),
    "llama_linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama_dynamic": ("llama", {"rope_scaling": DYNAMIC, "max_position_embeddings": 32}),
    "qwen2": ("qwen2", {}),
    "qwen2_yarn": ("qwen2", {"rope_scaling": YARN}),
    "qwen2_sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_sliding": ("mistral", {"sliding_window": WINDOW}),
    "gemma2": ("gemma2", MIXED | {"query_pre_attn_scalar": 30, "attn_logit_softcapping": 5.0}),
    "gemma3": ("gemma3_text", MIXED | {"query_pre_attn_scalar": 30}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "phi": ("phi", {}),
    "phi3": ("phi3", {"sliding_window": None, "partial_rotary_factor": 0.75}),
    "phi3_longrope": (
        "phi3",
        {"sliding_window": 600, "original_max_position_embeddings": 32, "rope_scaling": LONGROPE},
    ),
    "stablelm": ("stablelm", {}),
    "granite": ("granite", {"attention_multiplier": 0.1}),
    "cohere2": ("cohere2", MIXED | {"logit_scale": 1.0}),
    "gpt_oss": ("gpt_oss", MIXED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
FULL = [name for name in FAMILIES if name != "mistral_sliding"]  # those with layers of full attention


@functools.cache
def network(name: str) -> Any:
    """In double precision: what is left of a difference is an error, and no rounding."""
    model_type, changes = FAMILIES[name]
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES | changes))
    for layer in made.model.layers:
        if hasattr(layer.self_attn, "sinks"):
            layer.self_attn.sinks.data.normal_()  # transformers leaves them as they come
    if not made._supports_attention_backend:
        pytest.skip(f"{model_type} of this transformers has attention code of its own (StableLM before 5)")
    if hasattr(made, "set_experts_implementation"):
        made.set_experts_implementation("eager")  # the fused one knows no double precision
    return made.double().eval().requires_grad_(False)
