"""What methods learn of a model offline, from one sample of text: contextual agreement, and principal axes of keys.

Contextual agreement (CA) tells how well one frequency chunk predicts which tokens its whole head attends to. FASA
paper, Sec. 3 and Alg. 1: for a query of a head, CA of chunk i = |topK(full scores) & topK(scores of chunk i)| / K,
scores being post-RoPE dot products without scale or softmax; averaged over decode queries of the full-KV model.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import filelock
import torch
from torch import Tensor

from fasa_bench.artefact import Kind, existing, load, save
from fasa_bench.cache import KVLayer
from fasa_bench.errors import UserError
from fasa_bench.method import Method, best_mask
from fasa_bench.paths import cache_folder
from fasa_bench.principal import Rotary, principal_axes
from fasa_bench.rope import Pairing
from fasa_bench.session import Session
from fasa_bench.softmax import position_bias
from fasa_bench.texts import calibration_text, sample_of

if TYPE_CHECKING:
    from fasa_bench.models import Model

log = logging.getLogger("fasa_bench")


@dataclass
class Calibration:
    """The sample that is measured, and the artefacts made from it.

    k: size of CA's top-K sets. prefill, decode: tokens of the sample's dense pass, then of its decode queries, which
    are teacher-forced; principal axes are those of the keys of all these tokens. text: a text file, or
    .jsonl of a data set; None for the part of Python's documentation that no task evaluates. file: an artefact to use
    as it is, instead of one made (and kept in the user's cache folder) for these settings.
    """

    k: int = 256
    prefill: int = 1024
    decode: int = 128
    text: str | None = None
    file: str | None = None

    notes: ClassVar[dict[str, str]] = {
        "k": "paper 256 (Table 5 varies it); authors' code takes the budget, or 1024 where it made no such artefact",
        "text": "paper: one Qasper sample or one MATH500 question; ours: Python's documentation unless a text is given",
        "prefill": "paper: one sample, length not stated; authors' code up to 8 samples; ours 1,024 tokens of one",
        "decode": "paper: tokens the full-KV model generates; ours: the sample's own next tokens (teacher forcing)",
    }

    def __post_init__(self) -> None:
        for key in ("k", "prefill", "decode"):
            if getattr(self, key) < 1:
                raise UserError.of(f"calibration.{key}", getattr(self, key), "must be at least 1")
        if self.k >= self.prefill:
            raise UserError.of("calibration.k", self.k, f"must be less than calibration.prefill ({self.prefill})")

    def identity(self) -> dict[str, object]:
        """What of this can change a method's choice, for the run id."""
        if self.file is not None:
            return {"artefact": hashlib.sha256(existing(self.file).read_bytes()).hexdigest()}
        return {"k": self.k, "prefill": self.prefill, "decode": self.decode, "sample": self.sample_id}

    @property
    def sample(self) -> str:
        if self.text is None:
            return calibration_text()
        path = Path(self.text)
        if not path.is_file():
            raise UserError.of("calibration.text", self.text, "no such file")
        return sample_of(path)

    @property
    def sample_id(self) -> str:
        return hashlib.sha256(self.sample.encode()).hexdigest()[:16]

    def agreement(self, model: Model, pairing: Pairing) -> Tensor:
        """Mean CA [layers, Hq, chunks] of full-attention layers: from `file`, from an earlier run, or measured now."""
        return self._artefact("agreement", f"{pairing}-k{self.k}", model, pairing, self.measure)

    def basis(self, model: Model, rotary: Rotary) -> Tensor:
        """Principal axes of their keys [layers, H, d, d], columns by falling variance; found like `agreement`."""
        return self._artefact("basis", f"keys-{rotary}", model, rotary, self.measure_basis)

    def _artefact(
        self, kind: Kind, what: str, model: Model, setting: Any, measure: Callable[[Model, Any], Tensor]
    ) -> Tensor:
        if self.file is not None:
            return load(existing(self.file), model, setting, kind)
        facts = [model.fingerprint, str(model.network.dtype), what, self.prefill, self.decode, self.sample_id]
        name = f"{model.name}-{what}-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]}.safetensors"
        path = cache_folder("calibration") / name
        with filelock.FileLock(path.with_suffix(".lock")):
            if not path.exists():
                log.warning("calibrating %s (%s), once: %s", model.name, what, path)
                save(path, measure(model, setting), model, setting, self, kind)
        return load(path, model, setting, kind)

    def measure(self, model: Model, pairing: Pairing) -> Tensor:
        """Mean CA [layers, Hq, chunks] over `decode` queries that follow a dense pass of `prefill` tokens."""
        ids = self._ids(model, self.prefill + self.decode + 1)
        recorder = AgreementRecorder("calibration", units=model.rope.units(pairing), k=self.k)
        with Session(model.network, model.prefill_backend) as session:
            prefilled = session.prefill(ids[: self.prefill], reserve=self.decode)
            with prefilled.fork(recorder, None) as decoder:
                decoder.force(ids[self.prefill :])
        return recorder.mean()

    def measure_basis(self, model: Model, rotary: Rotary) -> Tensor:
        """Principal axes [layers, H, d, d] of the keys of a dense pass of `prefill` + `decode` tokens."""
        with Session(model.network, model.prefill_backend) as session:
            layers = session.prefill(self._ids(model, self.prefill + self.decode)).cache.full
            if rotary == "post":
                keys = [layer.keys for layer in layers]
            else:  # turned back to where they were
                keys = [model.rope.rotate(layer.keys, -layer.positions) for layer in layers]
            return torch.stack([principal_axes(one[0].cpu()) for one in keys])

    def _ids(self, model: Model, needed: int) -> list[int]:
        """The first tokens of the sample."""
        # a token has at least one character, and rarely more than 16: no need to tokenise a whole book
        ids = model.tokenizer(self.sample[: 16 * needed], add_special_tokens=False)["input_ids"]
        if len(ids) < needed:
            raise UserError.of("calibration.text", self.text, f"{len(ids)} tokens, {needed} are needed")
        return ids[:needed]


@dataclass
class AgreementRecorder(Method):
    """A method that reads everything and measures CA on the way. units [chunks, dimensions of a chunk].

    ends: where bands of a head's K best tokens end, the last at K: CA is measured in each of them.
    """

    units: Tensor = None  # type: ignore[assignment]
    k: int = 256
    ends: tuple[int, ...] = ()

    takes_budget: ClassVar[bool] = False

    def __post_init__(self) -> None:
        ends = self.ends or (self.k,)
        self._sizes = [end - start for start, end in itertools.pairwise((0, *ends))]
        self._found: dict[int, Tensor] = {}
        self.steps: dict[int, int] = {}  # by layer

    def decoded(self, layer: KVLayer, query: Tensor, weights: Tensor | None) -> None:
        if layer.length <= self.k:  # any chunk would agree
            return
        bias = position_bias(layer)
        bias = None if bias is None else bias / layer.scale
        hits = chunk_hits(query, layer.keys, self.units.to(query.device), self.k, bias)[0]
        found = torch.stack([band.sum(-1) for band in hits.split(self._sizes, dim=-1)], dim=-1).double().cpu()
        self._found[layer.index] = self._found.get(layer.index, 0) + found
        self.steps[layer.index] = self.steps.get(layer.index, 0) + 1

    def mean(self) -> Tensor:
        """CA [layers, Hq, U]."""
        return (self._means().sum(-1) / self.k).float()

    def by_band(self) -> Tensor:
        """Share of each band's tokens that a chunk has among its own K best: [layers, Hq, U, bands]."""
        return (self._means() / torch.tensor(self._sizes)).float()

    def _means(self) -> Tensor:
        """Tokens of each band that a chunk has at a step, [layers, Hq, U, bands] float64."""
        return torch.stack([self._found[i] / self.steps[i] for i in sorted(self._found)])


def contextual_agreement(query: Tensor, keys: Tensor, units: Tensor, k: int, bias: Tensor | None = None) -> Tensor:
    """CA of each chunk for one query: query [b, Hq, 1, d], keys [b, H, n, d], units [U, s] -> [b, Hq, U]."""
    return chunk_hits(query, keys, units, k, bias).sum(-1) / k


def chunk_hits(query: Tensor, keys: Tensor, units: Tensor, k: int, bias: Tensor | None = None) -> Tensor:
    """Which of a head's K best tokens, best first, each chunk has among its own K best: [b, Hq, U, K] bool.

    bias [b, Hq, n]: a position bias, which is part of the full scores and of no chunk's.

    Works through one KV head at a time, so that a long context needs memory for G * U * n scores, not for all heads.
    """
    batch, heads, _, dim = keys.shape
    grouped = query.reshape(batch, heads, -1, dim).float()
    found = []
    for head in range(heads):
        one, cached = grouped[:, head], keys[:, head].float()  # [b, G, d], [b, n, d]
        whole = torch.matmul(one, cached.transpose(1, 2))
        if bias is not None:
            whole += bias.unflatten(1, (heads, -1))[:, head]
        best = whole.topk(k, dim=-1).indices[:, :, None].expand(-1, -1, len(units), -1)
        parts = (unit_products(one, cached, dims) for dims in units.unbind(1))
        chunk = functools.reduce(torch.Tensor.add_, parts)  # [b, G, U, n]
        found.append(best_mask(chunk, k).gather(3, best))
    return torch.cat(found, dim=1)


def unit_products(query: Tensor, keys: Tensor, dims: Tensor) -> Tensor:
    """Products in one dimension of each unit, 0 where it has none (-1): [b, G, d], [b, n, d], [U] -> [b, G, U, n]."""
    one = query[:, :, dims] * (dims >= 0)
    return one[..., None] * keys[:, None, :, dims].transpose(2, 3)
