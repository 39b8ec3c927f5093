"""FASA by the Triton kernels, in the interpreter where there is no GPU, gives what the torch path gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from fasa_bench.errors import UserError
from fasa_bench.methods import fused
from fasa_bench.methods.fasa import FasaC
from fasa_bench.session import Session
from tests.test_kernels import needs_triton, quiet
from tests.test_methods import prepared

FORMS: dict[str, dict[str, Any]] = {
    "fasa_c": {},
    "fasa_plus": {"fc_granularity": "kv_head", "token_granularity": "kv_head", "share": "max", "sinks": 1, "recent": 4},
    "softmax": {"fc_granularity": "kv_head", "token_granularity": "kv_head", "share": "softmax"},
    "mixed": {"fc_granularity": "kv_head"},
}


def method(form: str, network: LlamaForCausalLM, backend: fused.Backend) -> FasaC:
    made = prepared(FasaC(form, backend=backend, **FORMS[form]), network)
    assert isinstance(made, FasaC)
    return made


@needs_triton
@quiet
@pytest.mark.parametrize("form", FORMS)
def test_equals_the_torch_path(form: str, network: LlamaForCausalLM, prompt: list[int]) -> None:
    with Session(network) as session:
        prefilled = session.prefill(prompt[:30], reserve=8)
        logits, bytes_read = [], []
        for backend in ("torch", "triton"):
            with prefilled.fork(method(form, network, backend), 8) as decoder:
                logits.append(torch.stack([decoder.step(torch.tensor([[token]])) for token in prompt[30:36]]))
                bytes_read.append(decoder.read_bytes)
                assert decoder.state.tally.attended == 8 * decoder.state.tally.layer_steps
                assert ("kernels" in decoder.state.clock.seconds) == (backend == "triton")
    torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=1e-4)
    assert bytes_read[0] <= bytes_read[1] <= 1.5 * bytes_read[0]  # the kernels read chosen keys whole


@needs_triton
@quiet
def test_what_the_kernels_do_not_take_goes_the_torch_way(network: LlamaForCausalLM, prompt: list[int]) -> None:
    """Samples that share a prompt, and left-padded prompts."""
    padding = torch.ones(2, 30, dtype=torch.bool)
    padding[1, :5] = False
    ids = torch.tensor([prompt[:30], [0] * 5 + prompt[:25]])
    tokens = torch.tensor([[3], [4]])
    with Session(network) as session:
        for prefilled, samples in ((session.prefill(ids, padding), 1), (session.prefill(prompt[:30]), 2)):
            logits = []
            for backend in ("torch", "triton"):
                with prefilled.fork(method("fasa_plus", network, backend), 8, samples) as decoder:
                    logits.append(decoder.step(tokens))
            torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=1e-4)


def test_auto_takes_kernels_on_a_gpu_only() -> None:
    assert not fused.use_kernels("auto", torch.empty(0))
    assert not fused.use_kernels("torch", torch.empty(0))


def test_asking_for_kernels_that_cannot_run_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "unavailable", lambda tensor: "triton is not installed")
    with pytest.raises(UserError, match=r"method\.backend='triton'.*triton is not installed"):
        fused.use_kernels("triton", torch.empty(0))
