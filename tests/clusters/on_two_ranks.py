"""`make test-tensor-parallel`: the engine on a model that transformers splits over two processes (gloo, on the CPU).

Each process holds half of the heads and their caches; the methods work on what is there. See docs/sweeps.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.conftest import ROOT

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node=2")
SCRIPT = """
import json, os, sys
import torch
from transformers import AutoModelForCausalLM
from fasa_bench.methods.full import FullKV
from fasa_bench.methods.quest import Quest
from fasa_bench.methods.snapkv import SnapKV
from fasa_bench.methods.streamingllm import StreamingLLM
from fasa_bench.session import Session

split = {"tp_plan": "auto"} if len(sys.argv) > 2 else {}
network = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, **split).eval().requires_grad_(False)
ids, later, found = list(range(1, 61)), list(range(61, 77)), {}
with Session(network) as session:
    for method in (FullKV("fkv"), SnapKV("snapkv"), StreamingLLM("streamingllm"), Quest("quest")):
        prompt = session.prefill(ids, observe=method.observes(), reserve=len(later))
        with prompt.fork(method, 40 if method.takes_budget else None) as decoder:
            found[method.name] = decoder.force(later)
            heads = decoder.cache.layers[0].keys.shape[1]
if os.environ.get("RANK", "0") == "0":
    print(json.dumps([heads, found]))
"""


def test_tensor_parallel_gives_the_same_losses(network: LlamaForCausalLM, tmp_path: Path) -> None:
    network.save_pretrained(tmp_path / "model")
    (tmp_path / "script.py").write_text(SCRIPT)
    line = [str(tmp_path / "script.py"), str(tmp_path / "model")]
    found = []
    for command in ([sys.executable, *line], [sys.executable, "-m", *TORCHRUN, *line, "split"]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    (heads, expected), (half, losses) = found
    assert (heads, half) == (2, 1)
    for name, values in expected.items():
        torch.testing.assert_close(torch.tensor(losses[name]), torch.tensor(values), atol=1e-4, rtol=0)
        assert name == "fkv" or values != pytest.approx(expected["fkv"], abs=0.01)  # something was left out
