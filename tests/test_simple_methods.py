"""TOVA, L2 norm, random and Loki against loops written from their formulas, and what each switch changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import Tensor
from transformers import LlamaForCausalLM

from fasa_bench.artefact import load, save
from fasa_bench.cache import KVLayer
from fasa_bench.calibration import Calibration
from fasa_bench.errors import UserError
from fasa_bench.method import Method
from fasa_bench.methods.fasa import FasaC
from fasa_bench.methods.knorm import KNorm
from fasa_bench.methods.loki import Loki
from fasa_bench.methods.oracle import Oracle
from fasa_bench.methods.random import Random
from fasa_bench.methods.tova import Tova
from fasa_bench.models import Model, ModelSpec
from fasa_bench.principal import principal_axes
from fasa_bench.runner import Job
from fasa_bench.session import Session
from tests.conftest import ROOT

Q, H, D = 4, 2, 8  # query heads, KV heads, head dimension


def filled(tokens: int, budget: int, batch: int = 1, seed: int = 0, index: int = 0) -> KVLayer:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(batch, H, tokens, D, generator=generator) for _ in range(2))
    layer = KVLayer(index)
    layer.append(keys, values, torch.arange(tokens).expand(batch, tokens))
    layer.budget, layer.scale = budget, D**-0.5
    return layer


def queries(count: int, batch: int = 1) -> list[Tensor]:
    return list(torch.randn(count, batch, Q, 1, D, generator=torch.Generator().manual_seed(9)))


def positions(layer: KVLayer) -> list[list[int]]:
    return layer.positions[0].tolist()


def weights_by_hand(query: Tensor, keys: Tensor) -> Tensor:
    """Softmax weights of each query head: [Q, D] and [H, n, D] -> [Q, n]."""
    rows = [torch.softmax(keys[head // (Q // H)] @ query[head] * D**-0.5, dim=0) for head in range(Q)]
    return torch.stack(rows)


# TOVA ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recent", [0, 3])
def test_tova_drops_the_least_attended_token_each_step(recent: int) -> None:
    """Prompt of 10 tokens, budget 7: 6 stay, then each step adds one and drops one."""
    layer, method = filled(10, budget=7), Tova("tova", recent=recent)
    everything = filled(15, budget=7, seed=4)
    first, *steps = queries(6)
    held = list(range(10))
    keys = layer.keys[0].clone()

    def keep(query: Tensor) -> None:
        """The 6 most attended of `held`, among them the newest `recent`."""
        mean = weights_by_hand(query[0, :, 0], keys[:, held]).mean(0).tolist()
        older, newest = held[: len(held) - recent], held[len(held) - recent :]
        best = sorted(older, key=lambda position: -mean[held.index(position)])[: 6 - recent]
        held[:] = sorted(best) + newest

    method.prefill(layer, first)
    keep(first)
    assert positions(layer) == [held]
    for position, query in enumerate(steps, start=10):
        new = everything.keys[:, :, position : position + 1]
        layer.append(new, new, torch.tensor([[position]]))
        keys = torch.cat([keys, new[0]], dim=1)
        held.append(position)
        method.decoded(layer, query, weights_by_hand(query[0, :, 0], layer.keys[0])[None])
        keep(query)
        assert positions(layer) == [held]


def test_tova_may_drop_the_newest_token_unless_it_is_protected() -> None:
    weights = torch.tensor(
        [[[0.3, 0.2, 0.4, 0.1], [0.3, 0.3, 0.4, 0.0], [0.1] * 4, [0.1] * 4]]
    )  # the newest gets least
    for recent, kept in ((0, [0, 1, 2]), (1, [0, 2, 3])):
        layer = filled(4, budget=4)
        Tova("tova", recent=recent).decoded(layer, queries(1)[0], weights)
        assert positions(layer) == [kept]


def test_tova_averages_over_all_heads_of_the_layer() -> None:
    """Each head alone would drop token 0, 1, 2 or 3; together token 3 has the smallest mean."""
    weights = torch.tensor([[[0.0, 0.4, 0.4, 0.2], [0.4, 0.0, 0.4, 0.2], [0.5, 0.3, 0.0, 0.2], [0.3, 0.4, 0.3, 0.0]]])
    layer = filled(4, budget=4)
    Tova("tova").decoded(layer, queries(1)[0], weights)
    assert positions(layer) == [[0, 1, 2]]


# L2 norm ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recent", [0, 2])
def test_knorm_keeps_the_shortest_keys_of_each_head(recent: int) -> None:
    layer, method = filled(12, budget=6), KNorm("knorm", recent=recent)
    expected = []
    for head in range(H):
        norms = [sum(x * x for x in key.tolist()) ** 0.5 for key in layer.keys[0, head]]
        older = sorted(range(12 - recent), key=lambda slot: norms[slot])[: 5 - recent]
        expected.append(sorted(older) + list(range(12 - recent, 12)))
    assert expected[0] != expected[1]
    method.prefill(layer, None)
    assert positions(layer) == expected


def test_knorm_is_not_fooled_by_half_precision() -> None:
    """Squares of 300 overflow float16: all norms would be infinite, and any token as good as another."""
    keys = torch.tensor([500.0, 300, 400, 600])[:, None].expand(4, 2).half()[None, None]
    layer = KVLayer(0)
    layer.append(keys, keys, torch.arange(4)[None])
    layer.budget = 3
    KNorm("knorm").prefill(layer, None)
    assert positions(layer) == [[1, 2]]


def test_knorm_evicts_every_interval_steps() -> None:
    """Budget 6, interval 4: 5 tokens stay, the cache grows to 9 and falls back; no step reads more than 6 + 3."""
    layer, method = filled(12, budget=6), KNorm("knorm", interval=4)
    method.prefill(layer, None)
    lengths = []
    for position in range(12, 21):
        layer.append(torch.randn(1, H, 1, D), torch.randn(1, H, 1, D), torch.tensor([[position]]))
        lengths.append(layer.length)
        method.decoded(layer, queries(1)[0], torch.empty(0))
    assert lengths == [6, 7, 8, 9, 6, 7, 8, 9, 6]


@pytest.mark.parametrize("method", [KNorm("knorm", dense_layers=[1]), Tova("tova", dense_layers=[1])])
def test_dense_layers_and_short_prompts_are_left_alone(method: Method) -> None:
    for layer in (filled(20, budget=7, index=1), filled(6, budget=7), filled(20, budget=7)):
        before = layer.length
        layer.budget = None if layer.length == 20 and layer.index == 0 else layer.budget
        method.prefill(layer, queries(1)[0])
        method.decoded(layer, queries(1)[0], torch.rand(1, Q, before))
        assert layer.length == before


# Random -------------------------------------------------------------------------------------------------------------


def test_random_reads_the_budget_and_the_current_token() -> None:
    layer = filled(30, budget=5)
    slots = Random("random").select(layer, queries(1)[0])
    assert slots.shape == (1, H, 1, 5)
    assert (slots[..., -1] == 29).all()
    assert (slots.diff(dim=-1) > 0).all()
    assert not torch.equal(slots[:, 0], slots[:, 1])  # every KV head draws its own


def test_random_depends_on_seed_layer_and_step_only() -> None:
    query = queries(1)[0]
    chosen = Random("random").select(filled(30, budget=5), query)
    torch.manual_seed(123)  # neither on the global generator nor on what is cached
    assert torch.equal(Random("random").select(filled(30, budget=5, seed=7), query), chosen)
    assert not torch.equal(Random("random", seed=1).select(filled(30, budget=5), query), chosen)
    assert not torch.equal(Random("random").select(filled(30, budget=5, index=1), query), chosen)
    later = filled(30, budget=5)
    later.append(*(torch.zeros(1, H, 1, D) for _ in range(2)), torch.tensor([[30]]))
    assert not torch.equal(Random("random").select(later, query)[..., :-1], chosen[..., :-1])
    batch = Random("random").select(filled(30, budget=5, batch=3), queries(1, batch=3)[0])
    assert all(torch.equal(row, chosen[0]) for row in batch)


def test_random_draws_every_token_equally_often() -> None:
    """20 tokens, budget 5, 400 layers of 2 heads: each token is expected 200 times (standard deviation 12)."""
    for current, last in ((True, 800), (False, 200)):
        layer, method = filled(20, budget=5), Random("random", current=current)
        counts = torch.zeros(20)
        for index in range(400):
            layer.index = index
            counts += torch.bincount(method.select(layer, queries(1)[0]).flatten(), minlength=20)
        others = 200 if not current else 4 * 800 / 19
        assert counts[-1] == last or (not current and abs(counts[-1] - 200) < 60)
        assert (counts[:-1] - others).abs().max() < 60


def test_random_in_a_padded_batch_equals_the_single_run() -> None:
    layer = filled(30, budget=5, batch=2)
    padded = KVLayer(0)
    rows = torch.stack([torch.arange(30), torch.tensor([-1] * 8 + list(range(22)))])
    padded.append(layer.keys, layer.values, rows)
    padded.padded, padded.budget = True, 5
    together = Random("random").select(padded, queries(1, batch=2)[0])
    assert torch.equal(together[0], Random("random").select(filled(30, budget=5), queries(1)[0])[0])
    assert torch.equal(together[1] - 8, Random("random").select(filled(22, budget=5), queries(1)[0])[0])


# Loki ---------------------------------------------------------------------------------------------------------------


class Basis:
    """An orthonormal basis per layer and KV head, in place of a calibration."""

    def __init__(self, layers: int, heads: int, dim: int) -> None:
        draws = torch.randn(layers, heads, dim, dim, generator=torch.Generator().manual_seed(5))
        self.tensor = torch.linalg.qr(draws).Q

    def basis(self, model: Any, rotary: str) -> Tensor:
        return self.tensor


def prepared(method: Loki, calibration: Any) -> Loki:
    layers = range(len(calibration.basis(None, method.rotary)))
    method.prepare(SimpleNamespace(rope=SimpleNamespace(layers=layers)), calibration)  # type: ignore[arg-type]
    return method


@pytest.mark.parametrize("r", [1, 3, 8])
def test_loki_ranks_by_products_of_projected_query_and_keys(r: int) -> None:
    calibration = Basis(2, H, D)
    layer, query = filled(30, budget=6, index=1), queries(1)[0]
    chosen = prepared(Loki("loki", r=r), calibration).select(layer, query)
    for head in range(Q):
        axes = calibration.tensor[1, head // (Q // H), :, :r]
        scores = [(query[0, head, 0] @ axes) @ (key @ axes) for key in layer.keys[0, head // (Q // H)]]
        best = torch.stack(scores).topk(6).indices.sort().values
        assert torch.equal(chosen[0, head, 0], best)


def test_loki_with_all_components_is_the_oracle_and_with_few_is_not() -> None:
    layer, query = filled(40, budget=6), queries(1)[0]
    exact = Oracle("oracle").select(layer, query)
    assert torch.equal(prepared(Loki("loki", r=1.0), Basis(1, H, D)).select(layer, query), exact)
    assert not torch.equal(prepared(Loki("loki"), Basis(1, H, D)).select(layer, query), exact)


def test_a_share_of_components_is_a_share_of_the_head() -> None:
    assert prepared(Loki("loki", r=0.25), Basis(1, H, 16))._first[0].shape == (H, 16, 4)
    with pytest.raises(UserError, match=r"method.r=17 .* from 1 to 16"):
        prepared(Loki("loki", r=17), Basis(1, H, 16))


def test_principal_axes_by_hand() -> None:
    """Variance 9 along (0.6, 0.8), 1 along (-0.8, 0.6); the mean, far away, does not count."""
    along, across = torch.tensor([0.6, 0.8]), torch.tensor([-0.8, 0.6])
    points = torch.stack([100 + a * 3 * along + b * across for a in (-1, 1) for b in (-1, 1)])
    axes = principal_axes(points[None])[0]
    torch.testing.assert_close(axes.T @ axes, torch.eye(2))
    assert abs(axes[:, 0] @ along) == pytest.approx(1, abs=1e-6)
    assert abs(axes[:, 1] @ across) == pytest.approx(1, abs=1e-6)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        model = Job.of(compose("config", ["model=tiny", "logger=none", "method=fkv"])).model
    assert model.tokenizer  # from the user's cache folder
    monkeypatch.setenv("FASA_BENCH_CACHE", str(tmp_path))
    return model


def test_the_basis_is_that_of_the_models_own_keys(tiny: Model) -> None:
    """Against the cache of plain transformers; before RoPE, the key projection of each token."""
    calibration = Calibration(k=16, prefill=60, decode=4)
    found = calibration.measure_basis(tiny, "post")
    ids = torch.tensor([tiny.tokenizer(calibration.sample[:2000], add_special_tokens=False)["input_ids"][:64]])
    seen: list[Tensor] = []
    hook = tiny.network.model.layers[1].self_attn.k_proj.register_forward_hook(lambda *call: seen.append(call[2]))
    with torch.no_grad():
        output = tiny.network(ids, use_cache=True)
    hook.remove()
    cache = getattr(output, "cache", None) or output.past_key_values
    unrotated = seen[0].view(64, 2, 16).transpose(0, 1)
    for rotary, keys in (("post", cache.layers[1].keys[0]), ("pre", unrotated)):
        found = calibration.measure_basis(tiny, rotary)  # type: ignore[arg-type]
        assert found.shape == (2, 2, 16, 16)
        spread = torch.stack([(head - head.mean(0)).T @ (head - head.mean(0)) for head in keys])
        turned = found[1].transpose(1, 2) @ spread @ found[1]  # diagonal in its own axes, falling
        diagonal = turned.diagonal(dim1=1, dim2=2)
        assert (turned - torch.diag_embed(diagonal)).abs().max() < 1e-3 * diagonal.max()
        assert (diagonal.diff(dim=1) <= 1e-3).all()


def test_the_basis_is_made_once_and_refused_elsewhere(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    calibration = Calibration(k=16, prefill=60, decode=4)
    first = calibration.basis(tiny, "post")
    before = calibration.basis(tiny, "pre")
    assert not torch.equal(first, before)
    monkeypatch.setattr(Calibration, "measure_basis", lambda *args: pytest.fail("measured again"))
    assert torch.equal(calibration.basis(tiny, "post"), first)
    assert torch.equal(Calibration(k=32, prefill=60, decode=4).basis(tiny, "post"), first)  # K is CA's


def test_an_artefact_of_another_kind_is_refused(tmp_path: Path) -> None:
    spec: dict[str, Any] = {"max_input": 64, "source": "random"}
    one, other = Model(ModelSpec("one", **spec)), Model(ModelSpec("other", seed=1, **spec))
    path = tmp_path / "basis.safetensors"
    save(path, torch.eye(4), one, "pre", Calibration(), "basis")
    assert torch.equal(load(path, one, "pre", "basis"), torch.eye(4))
    with pytest.raises(UserError, match="holds basis, but this method needs agreement"):
        Calibration(file=str(path)).agreement(one, "rope")
    with pytest.raises(UserError, match="for rotary=pre, not post"):
        Calibration(file=str(path)).basis(one, "post")
    with pytest.raises(UserError, match="belongs to another model"):
        load(path, other, "pre", "basis")


# All together -------------------------------------------------------------------------------------------------------


def test_loki_on_a_whole_model(network_of: Callable[..., LlamaForCausalLM], prompt: list[int]) -> None:
    """Every layer projects with its own basis: with all components the run equals the Oracle's."""
    network = network_of()
    results = []
    for method in (
        prepared(Loki("loki", r=1.0), Basis(2, 2, 16)),
        Oracle("oracle"),
        prepared(Loki("loki"), Basis(2, 2, 16)),
    ):
        with Session(network) as session, session.prefill(prompt[:33]).fork(method, 8) as decoder:
            results.append(torch.stack([decoder.step(torch.tensor([[token]]))[0] for token in prompt[33:]]))
    torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(results[2], results[1], atol=1e-3)


@pytest.mark.parametrize("name", ["tova", "knorm", "random", "loki", "fasa_pyramidkv"])
def test_configs_build_their_methods(name: str) -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        method = Job.of(compose("config", ["model=tiny", "logger=none", f"method={name}", "seed=5"])).method
    assert method.name == name
    expected: dict[str, tuple[type[Method], dict[str, Any]]] = {
        "tova": (Tova, {"recent": 0, "dense_layers": []}),
        "knorm": (KNorm, {"recent": 0, "interval": 1, "dense_layers": [0, 1]}),
        "random": (Random, {"seed": 5, "current": True}),
        "loki": (Loki, {"r": 0.25, "rotary": "post"}),
        "fasa_pyramidkv": (FasaC, {"layer_budget": "pyramid", "n_tip": 0.25, "pyramid_rounding": "exact"}),
    }
    kind, fields = expected[name]
    assert type(method) is kind
    assert {key: getattr(method, key) for key in fields} == fields
    assert set(method.notes) <= set(vars(method))  # every note is of a field, so that its value is logged


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tova("tova", recent=-1), "method.recent=-1"),
        (lambda: KNorm("knorm", recent=-1), "method.recent=-1"),
        (lambda: KNorm("knorm", interval=0), "method.interval=0 .*at least 1"),
        (lambda: Random("random", seed=-1), "method.seed=-1"),
    ],
)
def test_values_that_make_no_sense(make: Callable[[], Method], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


def test_the_smallest_budget_keeps_a_token() -> None:
    assert [Tova("t").smallest_budget(), Tova("t", recent=4).smallest_budget()] == [2, 5]
    for method in (KNorm("k"), KNorm("k", recent=4), Tova("t", recent=4)):
        layer = filled(20, budget=method.smallest_budget())
        method.prefill(layer, queries(1)[0])
        assert layer.length == layer.budget - 1 >= 1
