"""FASA by kernels gives what the torch path gives: Triton's, in the interpreter where there is no GPU, and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from fasa_bench.errors import UserError
from fasa_bench.methods import fused
from fasa_bench.methods.fasa import FasaC
from fasa_bench.methods.fused import Backend
from fasa_bench.session import Session
from tests.test_cpu_kernels import needs_compiler
from tests.test_kernels import needs_triton, quiet
from tests.test_methods import prepared

FORMS: dict[str, dict[str, Any]] = {
    "fasa_c": {},
    "fasa_plus": {"fc_granularity": "kv_head", "token_granularity": "kv_head", "share": "max", "sinks": 1, "recent": 4},
    "softmax": {"fc_granularity": "kv_head", "token_granularity": "kv_head", "share": "softmax"},
    "mixed": {"fc_granularity": "kv_head"},
}


BACKENDS = [pytest.param("triton", marks=[needs_triton, quiet]), pytest.param("cpp", marks=needs_compiler)]


def method(form: str, network: LlamaForCausalLM, backend: Backend) -> FasaC:
    made = prepared(FasaC(form, backend=backend, **FORMS[form]), network)
    assert isinstance(made, FasaC)
    return made


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_equals_the_torch_path(form: str, backend: Backend, network: LlamaForCausalLM, prompt: list[int]) -> None:
    with Session(network) as session:
        prefilled = session.prefill(prompt[:30], reserve=8)
        logits, bytes_read = [], []
        for which in ("torch", backend):
            with prefilled.fork(method(form, network, which), 8) as decoder:
                logits.append(torch.stack([decoder.step(torch.tensor([[token]])) for token in prompt[30:36]]))
                bytes_read.append(decoder.read_bytes)
                assert decoder.state.tally.attended == 8 * decoder.state.tally.layer_steps
                assert ("kernels" in decoder.state.clock.seconds) == (which != "torch")
    torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=1e-4)
    if backend == "triton":  # which reads chosen keys whole
        assert bytes_read[0] <= bytes_read[1] <= 1.5 * bytes_read[0]
    elif form == "fasa_c":  # of chosen tokens, the products with all leading dimensions are there already
        assert bytes_read[1] < bytes_read[0]
    else:
        assert bytes_read[1] == bytes_read[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_the_kernels_do_not_take_goes_the_torch_way(
    backend: Backend, network: LlamaForCausalLM, prompt: list[int]
) -> None:
    """Samples that share a prompt, and left-padded prompts."""
    padding = torch.ones(2, 30, dtype=torch.bool)
    padding[1, :5] = False
    ids = torch.tensor([prompt[:30], [0] * 5 + prompt[:25]])
    tokens = torch.tensor([[3], [4]])
    with Session(network) as session:
        for prefilled, samples in ((session.prefill(ids, padding), 1), (session.prefill(prompt[:30]), 2)):
            logits = []
            for which in ("torch", backend):
                with prefilled.fork(method("fasa_plus", network, which), 8, samples) as decoder:
                    logits.append(decoder.step(tokens))
            torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=1e-4)


@needs_compiler
def test_auto_takes_what_the_device_and_the_type_allow() -> None:
    assert fused.resolve("auto", torch.empty(0)) == "cpp"
    assert fused.resolve("torch", torch.empty(0)) == "torch"
    for tensor in (torch.empty(0, dtype=torch.bfloat16), torch.empty(0, device="meta")):
        assert fused.resolve("auto", tensor) == "torch"


def test_asking_for_kernels_that_cannot_run_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "unavailable", lambda tensor: "triton is not installed")
    with pytest.raises(UserError, match=r"method\.backend='triton'.*triton is not installed"):
        fused.resolve("triton", torch.empty(0))
    with pytest.raises(UserError, match=r"method\.backend='cpp'.*need float32, not torch.float16"):
        fused.resolve("cpp", torch.empty(0, dtype=torch.float16))
    monkeypatch.setattr(fused, "missing", lambda tensor: "no C++ compiler")
    assert fused.resolve("auto", torch.empty(0)) == "torch"
