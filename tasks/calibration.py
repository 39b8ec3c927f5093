"""How well single frequency chunks, and a few of them together, know what a head attends to (FASA, Sec. 3).

Contextual agreement (CA) of every chunk, kept as an artefact beside the rows (Figures 1 and 8 to 13, Tables 6 and 10);
shares of dominant and other chunks (Table 9); how they do on a head's best and next best tokens (Table 11); and the
agreement of the best chunks together, of StreamingLLM, SnapKV and of chance (Table 1). More in docs/analyses.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fasa_bench.artefact import content
from fasa_bench.cache import KVLayer
from fasa_bench.calibration import AgreementRecorder
from fasa_bench.config import build
from fasa_bench.errors import UserError
from fasa_bench.identity import code_fingerprint
from fasa_bench.method import Method, Observation, resolve_count
from fasa_bench.rope import Pairing
from fasa_bench.statistics import Sample
from fasa_bench.study import Recorder, Shadow, Study
from fasa_bench.task import Example, Prediction
from fasa_bench.tasks.sample_texts import SampledTask

if TYPE_CHECKING:
    from fasa_bench.models import Model
    from fasa_bench.runner import Job
    from fasa_bench.session import Prefilled

COMPOUND = "compound_ca"


@dataclass
class CalibrationTask(SampledTask):
    """Parameters, besides those of the texts
    k: size of CA's top-K sets. pairing: which dimensions make a chunk.
    methods: {name: a method's config} whose choice is compared with the head's own best tokens, at each of `budgets`
        tokens (but those too small for it); one that has `n_tip` is taken with each of `n_tips`, numbers of chunks or
        shares of all, which it chooses by the calibration of the run and not by the texts at hand.
    dominant_above, non_dominant_below: the CA of dominant and of non-dominant chunks.
    band_ends: where bands of the head's K best tokens end: shares of K, or ranks.
    band_dominant_above: the CA that is dominant for the bands; band_skip_layers: layers that they leave out;
        band_most: at most so many dominant chunks of a layer, the best.
    """

    name: ClassVar[str] = "calibration"
    notes: ClassVar[dict[str, str]] = SampledTask.notes | {
        "k": "paper 256 in its figures; not stated for Tables 9 to 11",
        "pairing": "paper and ours: dimensions that rotate together; authors' code: adjacent ones on every model",
        "band_ends": "paper: fifths; authors' code ranks 50, 100, 150, 200, 256",
        "band_dominant_above": "paper does not say; authors' code 0.54; ours 0.4, as for Table 9",
        "band_skip_layers": "authors' code skips layers 0 to 2; ours none",
        "band_most": "authors' code at most 100 a layer; ours all",
        "n_tips": "paper 8 to 16 of 64; ours the same shares",
        "methods": "paper does not say how the sets of SnapKV and StreamingLLM come about; ours: by the methods, on "
        "the full-KV model's queries; SnapKV evicts at each step, so that it holds no more than the budget",
    }

    k: int = 256
    pairing: Pairing = "rope"
    methods: dict[str, dict[str, Any]] = field(default_factory=dict)
    budgets: list[int] = field(default_factory=lambda: [64, 256, 512, 768, 1024, 2048])
    n_tips: list[int | float] = field(default_factory=lambda: [0.125, 0.15625, 0.1875, 0.21875, 0.25])
    dominant_above: float = 0.4
    non_dominant_below: float = 0.15
    band_ends: list[int | float] = field(default_factory=lambda: [0.2, 0.4, 0.6, 0.8, 1.0])
    band_dominant_above: float = 0.4
    band_skip_layers: list[int] = field(default_factory=list)
    band_most: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, values in (("k", [self.k]), ("budgets", self.budgets), ("band_most", [self.band_most or 1])):
            if min(values, default=1) < 1 or len(set(values)) < len(values):
                raise UserError.of(f"task.{key}", getattr(self, key), "must be different integers of at least 1")
        self.ends = tuple(resolve_count("task.band_ends", end, self.k) for end in self.band_ends)
        if not self.ends or list(self.ends) != sorted(set(self.ends)) or self.ends[-1] != self.k:
            raise UserError.of("task.band_ends", self.band_ends, f"must rise, to all of task.k={self.k}")
        if self.k >= self.prefill + self.decode:
            allowed = f"must be less than task.prefill + task.decode ({self.prefill + self.decode})"
            raise UserError.of("task.k", self.k, allowed)
        built = {name: build(f"task.methods.{name}", given, Method) for name, given in self.methods.items()}
        self.built = built if self.budgets else {}

    @property
    def uses_calibration(self) -> bool:
        return any(method.uses_calibration for method in self.built.values())

    def check(self, method: Method) -> None:
        if method.takes_budget:
            raise UserError.of("method", method.name, "must be fkv: task=calibration observes the full-KV model")

    def identity(self) -> dict[str, Any]:
        modules = {type(method).__module__ for method in self.built.values()}
        return {**super().identity(), "code": code_fingerprint(*sorted(modules))}

    def least(self) -> int:
        return self.k + 1

    def study(self) -> Study:
        return AgreementStudy(self)

    def score(self, example: Example, prediction: Prediction) -> dict[str, Any]:
        """In %, under the names of `samples`: what this text gives."""
        assert prediction.measured is not None
        return prediction.measured

    def samples(self, rows: list[dict[str, Any]]) -> dict[str, Sample]:
        """Means over texts, in %: dominant, non_dominant (chunks), predictive_accuracy/chunks=.../band=...,
        compound_ca/method=.../(n_tip=.../)budget=...; of several sources the mean of their means, then each by itself
        with /dataset=...
        """
        by_source: dict[str, list[dict[str, Any]]] = {label: [] for label in self.labels}
        for row in rows:
            by_source[row["fields"]["dataset"]].append(row)
        groups: dict[str, dict[str, dict[str, float]]] = {}
        for label, own in by_source.items():
            for row in own:
                for name, value in row["scores"].items():
                    if value is not None:
                        groups.setdefault(name, {}).setdefault(label, {})[row["id"]] = value
        result = {name: Sample(list(found.values())) for name, found in groups.items()}
        if len(self.labels) > 1:
            result |= {
                f"{name}/dataset={label}": Sample([values])
                for name, found in groups.items()
                for label, values in found.items()
            }
        return result


class AgreementStudy(Study):
    """The task's recorders; methods are made ready once for all texts."""

    folder = "agreement"

    def __init__(self, task: CalibrationTask) -> None:
        self.task = task
        self._compared: dict[str, Method] = {}

    def observes(self) -> Observation:
        wanted = Observation()
        for method in self.task.built.values():
            wanted = wanted.union(method.observes())
        return wanted

    def recorder(self, job: Job, example: Example, prefilled: Prefilled) -> Recorder:
        if not self._compared:
            self._compared = dict(self._made(job.model))
            for method in self._compared.values():
                method.prepare(job.model, job.calibration)
        shadows = {
            (f"{COMPOUND}/{name}/budget={budget}", budget): Shadow(method, prefilled.budgets(method, budget))
            for name, method in self._compared.items()
            for budget in self.task.budgets
            if budget >= method.smallest_budget()
        }
        return AgreementOf(self.task, job.model, shadows, self.observes())

    def _made(self, model: Model) -> Mapping[str, Method]:
        made: dict[str, Method] = {}
        for name, method in self.task.built.items():
            if not any(one.name == "n_tip" for one in fields(method)):
                made[f"method={name}"] = method
                continue
            total = len(model.rope.units(self.task.pairing))
            for n_tip in self.task.n_tips:
                count = resolve_count("task.n_tips", n_tip, total)
                made[f"method={name}/n_tip={count}"] = replace(method, n_tip=count)  # type: ignore[call-arg]
        return made


class AgreementOf(Recorder):
    """Measures one text. shadows: by the metric's name and the budget."""

    def __init__(
        self, task: CalibrationTask, model: Model, shadows: dict[tuple[str, int], Shadow], observed: Observation
    ) -> None:
        super().__init__(task.name)
        self.task, self.model, self.shadows, self.observed = task, model, shadows, observed
        self.agreement = AgreementRecorder(task.name, units=model.rope.units(task.pairing), k=task.k, ends=task.ends)
        self._shared: dict[str, list[float]] = {name: [] for name, _ in shadows}

    def observes(self) -> Observation:
        return self.observed

    def prefill(self, layer: KVLayer, query: Tensor | None) -> None:
        for shadow in self.shadows.values():
            shadow.prefill(layer, query)

    def decoded(self, layer: KVLayer, query: Tensor, weights: Tensor | None) -> None:
        self.agreement.decoded(layer, query, weights)
        best = self._best(layer, query)
        for (name, budget), shadow in self.shadows.items():
            read = shadow.step(layer, query)
            if layer.length > budget:  # else it reads everything
                self._shared[name].append(100 * float(read.gather(1, best[:, :budget]).float().mean()))

    @cached_property
    def _most(self) -> int:
        return max((budget for _, budget in self.shadows), default=1)

    def _best(self, layer: KVLayer, query: Tensor) -> Tensor:
        """The head's own best tokens, best first: [Hq, most], fewer in a short text."""
        scores = layer.dot(query)[0, :, 0].float()
        return scores.topk(min(self._most, layer.length), dim=-1).indices

    def found(self) -> tuple[dict[str, Any], bytes]:
        agreement, by_band = self.agreement.mean(), self.agreement.by_band()
        task = self.task
        numbers: dict[str, Any] = {
            "dominant": 100 * float((agreement > task.dominant_above).float().mean()),
            "non_dominant": 100 * float((agreement < task.non_dominant_below).float().mean()),
        }
        starts = (0, *task.band_ends)
        for chunks, chosen in self._chunks(agreement).items():
            accuracy = 100 * by_band[chosen].mean(0)  # of no chunk at all: NaN
            for start, end, value in zip(starts, task.band_ends, accuracy.tolist(), strict=False):
                name = f"{_edge(start)}-{_edge(end)}"
                numbers[f"predictive_accuracy/chunks={chunks}/band={name}"] = value if value == value else None
        numbers |= {name: sum(values) / len(values) for name, values in self._shared.items() if values}
        facts = {key: getattr(task, key) for key in ("k", "prefill", "decode", "queries")}
        facts |= {"steps": self.agreement.steps[0], "band_ends": list(task.ends)}
        tensors = {"agreement": agreement, "by_band": by_band}
        return numbers, content(tensors, facts, self.model, task.pairing)

    def _chunks(self, agreement: Tensor) -> dict[str, Tensor]:
        """The chunks that are looked at by bands, [layers, Hq, U] bool."""
        task = self.task
        dominant = agreement > task.band_dominant_above
        if task.band_most is not None:
            ranks = agreement.flatten(1).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
            dominant &= (ranks < task.band_most).view_as(agreement)
        allowed = torch.ones(len(agreement), 1, 1, dtype=torch.bool)
        allowed[[layer for layer in task.band_skip_layers if layer < len(agreement)]] = False
        return {"dominant": dominant & allowed, "non_dominant": (agreement < task.non_dominant_below) & allowed}


def _edge(end: int | float) -> str:
    """As the paper writes it: a share in per cent, a rank as it is."""
    return f"{100 * end:g}" if isinstance(end, float) else str(end)
