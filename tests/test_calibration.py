"""Contextual agreement by hand, on a model with planted chunks, and the artefact's safety."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import Tensor

from fasa_bench.cache import KVLayer
from fasa_bench.calibration import AgreementRecorder, Calibration, contextual_agreement, load, save
from fasa_bench.errors import UserError
from fasa_bench.models import Model, ModelSpec
from fasa_bench.runner import Job
from tests.conftest import ROOT

HALF = torch.tensor([[0, 2], [1, 3]])


def by_hand(query: Tensor, keys: Tensor, units: Tensor, k: int) -> Tensor:
    """The definition, with Python sets: |topK(full) & topK(chunk)| / K for each query head and chunk."""
    heads, group = keys.shape[0], query.shape[0] // keys.shape[0]
    result = torch.zeros(query.shape[0], len(units))
    for h in range(heads * group):
        cached = keys[h // group]
        whole = set((cached @ query[h]).argsort(descending=True)[:k].tolist())
        for u, dims in enumerate(units):
            chunk = set((cached[:, dims] @ query[h][dims]).argsort(descending=True)[:k].tolist())
            result[h, u] = len(whole & chunk) / k
    return result


@pytest.mark.parametrize(("heads", "group"), [(1, 1), (2, 3)])
def test_equals_the_definition(heads: int, group: int) -> None:
    torch.manual_seed(0)
    query, keys = torch.randn(heads * group, 8), torch.randn(heads, 50, 8)
    units = torch.tensor([[0, 4], [1, 5], [2, 6], [3, 7]])
    for k in (1, 7, 49):
        found = contextual_agreement(query[None, :, None], keys[None], units, k)[0]
        torch.testing.assert_close(found, by_hand(query, keys, units, k))
    single = torch.arange(8)[:, None]
    found = contextual_agreement(query[None, :, None], keys[None], single, 7)[0]
    torch.testing.assert_close(found, by_hand(query, keys, single, 7))


def test_a_case_small_enough_to_see() -> None:
    """Four tokens, K = 2. Full scores 4, 3, 2, 1; chunk 0 ranks them alike, chunk 1 the other way round."""
    keys = torch.tensor([[10.0, -6, 0, 0], [6, -3, 0, 0], [2, 0, 0, 0], [-2, 3, 0, 0]])
    found = contextual_agreement(torch.tensor([1.0, 1, 0, 0])[None, None, None], keys[None, None], HALF, 2)
    assert found.flatten().tolist() == [1.0, 0.0]


def test_of_ties_no_more_than_k_count() -> None:
    """Half precision makes many: each chunk has K best tokens, however many score alike."""
    keys = torch.ones(1, 1, 9, 4)
    keys[0, 0, 0] = 2.0
    found = contextual_agreement(torch.ones(1, 1, 1, 4), keys, HALF, 3)
    assert (found <= 1).all()
    assert (found >= 1 / 3).all()


def test_agreement_by_bands_of_the_best_tokens() -> None:
    """Five tokens, K = 4, ranked 0 1 2 3 4 by the head; chunk 0 has 0 1 2 4 as its best, chunk 1 all but token 0."""
    keys = torch.tensor([[9.0, 0], [7, 1], [5, 2], [1, 5], [3, -8]]) @ torch.eye(2)
    keys = torch.stack([keys[:, 0], keys[:, 1], torch.zeros(5), torch.zeros(5)], dim=1)
    keys[0, 1] = -9  # the last of chunk 1
    query = torch.tensor([1.0, 1, 0, 0])[None, None, None]
    keys[0, 0] = 18  # yet the first of all
    layer = KVLayer(0)
    layer.append(keys[None, None], keys[None, None], torch.arange(5)[None])
    recorder = AgreementRecorder("calibration", units=HALF, k=4, ends=(1, 3, 4))
    recorder.decoded(layer, query, None)
    assert (keys @ query.flatten()).argsort(descending=True).tolist() == [0, 1, 2, 3, 4]
    assert recorder.by_band()[0, 0].tolist() == [[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]]
    assert recorder.mean()[0, 0].tolist() == [0.75, 0.75]


def test_the_recorder_averages_over_queries() -> None:
    torch.manual_seed(0)
    recorder = AgreementRecorder("calibration", units=HALF, k=3)
    layer = KVLayer(0)
    layer.append(torch.randn(1, 1, 9, 4), torch.randn(1, 1, 9, 4), torch.arange(9)[None])
    queries = torch.randn(5, 1, 1, 1, 4)
    for query in queries:
        recorder.decoded(layer, query, torch.empty(0))
    each = [contextual_agreement(query, layer.keys, HALF, 3)[0] for query in queries]
    torch.testing.assert_close(recorder.mean()[0], torch.stack(each).mean(0))


@pytest.fixture
def tiny() -> Model:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return Job.of(compose("config", ["model=tiny", "logger=none", "method=fkv"])).model


def planted(model: Model, layer: int, head: int, chunk: int) -> None:
    """Let one chunk of one KV head's queries and keys carry nearly all of the score."""
    attention = model.network.model.layers[layer].self_attn
    a, b = model.rope.pairs[chunk]
    dim = model.rope.head_dim
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    for dims in (a, b):
        attention.k_proj.weight.data[head * dim + dims] *= 6
        for query_head in range(head * group, (head + 1) * group):
            attention.q_proj.weight.data[query_head * dim + dims] *= 6


def test_finds_the_planted_chunk(tiny: Model) -> None:
    planted(tiny, layer=1, head=0, chunk=5)
    agreement = Calibration(k=16, prefill=128, decode=12).measure(tiny, "rope")
    assert agreement.shape == (2, 4, 8)
    assert agreement[1, :2].argmax(-1).tolist() == [5, 5]
    assert agreement[1, :2, 5].min() > 0.6
    assert agreement[1, 2:].argmax(-1).tolist() != [5, 5]
    assert (agreement >= 0).all()
    assert (agreement <= 1).all()


def test_made_once_then_reused(tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tiny.tokenizer  # loaded from the user's cache folder before that changes
    monkeypatch.setenv("FASA_BENCH_CACHE", str(tmp_path))
    calibration = Calibration(k=16, prefill=64, decode=4)
    first = calibration.agreement(tiny, "rope")
    monkeypatch.setattr(Calibration, "measure", lambda *args: pytest.fail("measured again"))
    assert torch.equal(calibration.agreement(tiny, "rope"), first)


def test_an_artefact_of_another_model_is_refused(tmp_path: Path) -> None:
    spec: dict[str, Any] = {"max_input": 64, "source": "random"}
    one, other = Model(ModelSpec("one", **spec)), Model(ModelSpec("other", seed=1, **spec))
    path = tmp_path / "artefact.safetensors"
    save(path, torch.rand(2, 4, 8), one, "rope", Calibration())
    assert load(path, one, "rope").shape == (2, 4, 8)
    with pytest.raises(UserError, match=r"belongs to another model \(one"):
        load(path, other, "rope")
    with pytest.raises(UserError, match="for pairing=rope, not adjacent"):
        load(path, one, "adjacent")
    path.write_bytes(b"nonsense")
    with pytest.raises(UserError, match="not a calibration artefact"):
        load(path, one, "rope")


def test_settings_that_make_no_sense() -> None:
    for bad in ({"k": 0}, {"k": 1024}, {"prefill": 0}, {"decode": -1}):
        with pytest.raises(UserError, match="calibration"):
            Calibration(**bad)
    with pytest.raises(UserError, match="no such file"):
        Calibration(text="nowhere.txt").identity()


def test_a_sample_that_is_too_short(tiny: Model, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("only a few words")
    with pytest.raises(UserError, match=r"calibration.text=.* tokens, 77 are needed"):
        Calibration(text=str(tmp_path / "short.txt"), k=16, prefill=64, decode=12).measure(tiny, "rope")


def test_memory_does_not_grow_with_the_number_of_heads() -> None:
    """The largest tensor has G * chunks * n elements: one KV head at a time."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.untyped_storage().nbytes() != keys.untyped_storage().nbytes():
                largest = max(largest, out.numel())
            return out

    units = torch.arange(16).reshape(8, 2)
    keys, query = torch.randn(1, 8, 300, 16), torch.randn(1, 16, 1, 16)
    with Watch():
        contextual_agreement(query, keys, units, 10)
    assert largest <= 2 * 8 * 300
