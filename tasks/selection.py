"""Which of the tokens that exact attention would take a method takes, and which it misses: by place, kind and layer.

The paper (FASA, arXiv 2602.03152) does not ask this. Full KV decodes; at each step, layer and query head the method's
choice at its budget B is held against the Oracle's, the B tokens with the largest logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor

from fasa_bench.cache import KVLayer
from fasa_bench.errors import UserError
from fasa_bench.method import Method, Observation, best_mask
from fasa_bench.statistics import Sample
from fasa_bench.study import Recorder, Shadow, Study
from fasa_bench.task import Example, Prediction
from fasa_bench.tasks.sample_texts import SampledTask
from fasa_bench.tasks.token_kinds import KINDS, kinds_of

if TYPE_CHECKING:
    from fasa_bench.runner import Job
    from fasa_bench.session import Prefilled

COUNTS = ("wanted", "found", "lost")


@dataclass
class SelectionTask(SampledTask):
    """Parameters, besides those of the texts
    distances: where bands of distance to the current token end; the current token has distance 0.
    first: so many first tokens of the text, attention's sinks, are a band of their own.
    """

    name: ClassVar[str] = "selection"

    distances: list[int] = field(default_factory=lambda: [16, 64, 256, 1024])
    first: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.distances, default=1) < 1 or self.distances != sorted(set(self.distances)):
            raise UserError.of("task.distances", self.distances, "must be rising integers of at least 1")
        if self.first < 0:
            raise UserError.of("task.first", self.first, "must be at least 0")

    @property
    def bands(self) -> list[str]:
        starts = [0, *self.distances]
        ends = [f"-{end - 1}" if end - 1 > start else "" for start, end in zip(starts, self.distances, strict=False)]
        return [*(f"{start}{end}" for start, end in zip(starts, [*ends, "+"], strict=True)), "first"]

    def check(self, method: Method) -> None:
        if not method.takes_budget:
            raise UserError.of("method", method.name, "must have a budget: task=selection asks what it leaves out")

    def study(self) -> Study:
        return SelectionStudy(self)

    def score(self, example: Example, prediction: Prediction) -> dict[str, Any]:
        """mass, oracle_mass, tokens: means. all, and places by name: tokens that the Oracle takes, how many of them the
        method took, the attention on the others, and the steps of a head, all summed over steps, heads and layers.
        """
        assert prediction.measured is not None
        return prediction.measured

    def samples(self, rows: list[dict[str, Any]]) -> dict[str, Sample]:
        """In %. recall: share of the Oracle's tokens that the method takes. mass: share of the exact attention that
        its tokens hold, oracle_mass: that the Oracle's hold; lost: attention on Oracle's tokens that it misses. By
        distance=, kind= and layer= also recall and lost, and share: how the Oracle's tokens spread. tokens: read by a
        head, a number.
        """
        scores = {row["id"]: row["scores"] for row in rows}
        result = {
            name: Sample([{key: one[name] for key, one in scores.items()}])
            for name in ("mass", "oracle_mass", "tokens")
        }
        for place in dict.fromkeys(("all", *(name for one in scores.values() for name in one["places"]))):
            counts = {key: one["places"][place] for key, one in scores.items() if place in one["places"]}
            where = "" if place == "all" else f"/{place}"
            result[f"recall{where}"] = Sample(
                [{key: (found, all_) for key, (all_, found, _, _) in counts.items()}], _percent
            )
            result[f"lost{where}"] = Sample(
                [{key: (lost, steps) for key, (_, _, lost, steps) in counts.items()}], _percent
            )
            if place != "all" and not place.startswith("layer="):
                of_all = {key: (count[0], scores[key]["places"]["all"][0]) for key, count in counts.items()}
                result[f"share{where}"] = Sample([of_all], _percent)
        return result


def _percent(rows: NDArray[Any]) -> float:
    """rows [n, 2]: parts and wholes."""
    return float(100 * rows[:, 0].sum() / rows[:, 1].sum())


class SelectionStudy(Study):
    folder = "selection"

    def __init__(self, task: SelectionTask) -> None:
        self.task = task

    def recorder(self, job: Job, example: Example, prefilled: Prefilled) -> Recorder:
        ids = [*example.prompt_ids, *(example.target_ids or [])]
        kinds = [KINDS.index(kind) for kind in kinds_of(job.model.tokenizer, ids)]
        return Selection(self.task, Shadow(job.method, prefilled.budgets(job.method, job.budget)), kinds)


class Selection(Recorder):
    """Measures one text. kinds: of the tokens that are known before decoding, places in KINDS."""

    def __init__(self, task: SelectionTask, shadow: Shadow, kinds: Sequence[int]) -> None:
        super().__init__(task.name)
        self.task, self.shadow, self.kinds = task, shadow, torch.tensor(kinds)
        self._sums: dict[int, dict[str, Tensor]] = {}
        self._steps: dict[int, int] = {}

    def observes(self) -> Observation:
        return self.shadow.method.observes()

    def prefill(self, layer: KVLayer, query: Tensor | None) -> None:
        self.shadow.prefill(layer, query)

    def decoded(self, layer: KVLayer, query: Tensor, weights: Tensor | None) -> None:
        """Sums by query head: of the step's tokens by band and kind, and of attention."""
        read, budget = self.shadow.step(layer, query), self.shadow.budgets[layer.index]
        if budget is None or layer.length <= budget:
            return  # nothing can be missed
        logits = layer.dot(query)[0, :, 0].float() * layer.scale
        exact = torch.softmax(logits, dim=-1)
        wanted = best_mask(logits, budget)
        missed = wanted & ~read
        groups = torch.cat([self._bands(layer), self._kinds(layer)])  # [C, n]
        step = {
            "wanted": wanted.float() @ groups.T,
            "found": (wanted & read).float() @ groups.T,
            "lost": (exact * missed) @ groups.T,
            "mass": (exact * read).sum(-1),
            "oracle_mass": (exact * wanted).sum(-1),
            "tokens": read.float().sum(-1),
        }
        sums = self._sums.setdefault(layer.index, {})
        for name, value in step.items():
            sums[name] = sums.get(name, 0) + value.double().cpu()
        self._steps[layer.index] = self._steps.get(layer.index, 0) + 1

    def _bands(self, layer: KVLayer) -> Tensor:
        """[bands, n], 1 where a token belongs."""
        positions = layer.positions[0, 0]
        band = torch.bucketize(positions[-1] - positions, torch.tensor(self.task.distances).to(positions), right=True)
        band = band.masked_fill(positions < self.task.first, len(self.task.bands) - 1)
        return torch.nn.functional.one_hot(band, len(self.task.bands)).T.float()

    def _kinds(self, layer: KVLayer) -> Tensor:
        """[kinds, n]."""
        positions = layer.positions[0, 0]
        known = self.kinds.to(positions.device)[positions.clamp(max=len(self.kinds) - 1)]
        kind = known.masked_fill(positions >= len(self.kinds), KINDS.index("generated"))
        return torch.nn.functional.one_hot(kind, len(KINDS)).T.float()

    def found(self) -> tuple[dict[str, Any], bytes]:
        if not self._sums:
            raise UserError.of("budget", self.shadow.budgets[0], "must be less than the tokens of a text")
        layers = sorted(self._sums)
        sums = {name: torch.stack([self._sums[i][name] for i in layers]) for name in self._sums[layers[0]]}
        steps = torch.tensor([self._steps[i] for i in layers], dtype=torch.float64)[:, None].expand_as(sums["mass"])
        bands = [f"distance={band}" for band in self.task.bands]  # each token is of one of them, and of one kind
        names = [*bands, *(f"kind={kind}" for kind in KINDS)]
        counts = torch.stack([sums[name] for name in COUNTS], dim=-1)  # [layers, Hq, places, 3]
        by_layer = counts[:, :, : len(bands)].sum((1, 2))
        places = {"all": [*by_layer.sum(0).tolist(), float(steps.sum())]}
        for name, found in zip(names, counts.sum((0, 1)).tolist(), strict=True):
            places[name] = [*found, float(steps.sum())]
        for layer, found, passed in zip(layers, by_layer.tolist(), steps.sum(1).tolist(), strict=True):
            places[f"layer={layer}"] = [*found, passed]
        numbers: dict[str, Any] = {
            "mass": 100 * float((sums["mass"] / steps).mean()),
            "oracle_mass": 100 * float((sums["oracle_mass"] / steps).mean()),
            "tokens": float((sums["tokens"] / steps).mean()),
            "places": {name: found for name, found in places.items() if found[0]},
        }
        tensors = {"steps": steps, **sums}
        facts = {"places": ",".join(names), "layers": ",".join(map(str, layers))}
        return numbers, save({name: value.float().contiguous() for name, value in tensors.items()}, facts)
