"""The scripts of benchmarks/ that are no runs: one layer against dense attention, and what a GPU's machine needs."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))


def test_one_layer_is_compared_with_the_best_dense_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    from attention_layer import FORMS, OURS, Shape, compare, table

    shape = Shape(query_heads=4, kv_heads=2, head_dim=16, n_tip=2, budget=32)
    monkeypatch.setattr("attention_layer.bandwidth", lambda device: {"limit": 1e9})
    rows = compare(shape, 512, 2, torch.device("cpu"), torch.float32, turns=4)
    whole = 2 * 2 * 2 * 512 * 16 * 4
    dense = [row for row in rows if row["form"].startswith("dense")]
    assert len(dense) == (4 if OURS in {row["form"].removesuffix(" (best)") for row in dense} else 3)
    assert all((row["read_bytes"], row["limit"]) == (whole, 1) for row in dense)
    (best,) = [row for row in dense if row["form"].endswith("(best)")]
    assert (best["times_as_fast"], best["ms"]) == (1, min(row["ms"] for row in dense))
    per_kv, by_max, shared, per_query = (row for row in rows if row["form"] in FORMS)
    assert by_max["read_bytes"] == per_kv["read_bytes"]
    # leading dimensions of all tokens, then keys and values of 32 tokens per head; batch 2, 4 bytes
    chosen = 2 * 2 * 32 * (2 * 16 - 4) * 4  # whose leading dimensions are known already
    tokens = round((per_kv["read_bytes"] - chosen) / (2 * 2 * 4 * 4))
    assert 512 < tokens < 530  # each call appends one
    assert shared["read_bytes"] - per_kv["read_bytes"] == chosen  # twice as many heads choose
    assert per_query["read_bytes"] > shared["read_bytes"]
    assert all(row["difference"] < 1e-5 for row in (per_kv, by_max, shared, per_query))
    assert table(rows).count("\n") == len(dense) + len(FORMS) + 1
    assert 1 in [row["as_pytorch"] for row in dense]


def test_dense_forms_agree() -> None:
    from attention_layer import Shape, dense_forms, filled_layer

    shape = Shape(query_heads=4, kv_heads=2, head_dim=16)
    layer = filled_layer(shape, 100, 2, torch.device("cpu"), torch.float32)
    query = shape.query(2, layer.keys)
    first, *others = (form(query) for form in dense_forms(layer, 0.25).values())
    for other in others:
        torch.testing.assert_close(other, first, atol=1e-6, rtol=1e-5)


def test_the_gpu_script_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path / "gpu.json")])
    gpu.main()
    assert "no CUDA GPU" in said.getvalue()
    assert not (tmp_path / "gpu.json").exists()


def test_the_gpu_script_needs_only_what_transformers_needs() -> None:
    code = "import sys; sys.path[:0] = ['benchmarks', 'src']; import gpu; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "fasa_bench.timing" in loaded.split()
    assert not {"hydra", "omegaconf", "pandas", "matplotlib", "platformdirs", "wandb", "rich"} & set(loaded.split())
