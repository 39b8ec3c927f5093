"""Contextual agreement (CA): how well one frequency chunk predicts which tokens its whole head attends to.

FASA paper, Sec. 3 and Alg. 1: for a query of a head, CA of chunk i = |topK(full scores) & topK(scores of chunk i)| / K,
scores being post-RoPE dot products without scale or softmax; averaged over decode queries of the full-KV model.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import filelock
import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fasa_bench.cache import KVLayer
from fasa_bench.errors import UserError
from fasa_bench.method import Method
from fasa_bench.paths import cache_folder
from fasa_bench.rope import Pairing
from fasa_bench.session import Session
from fasa_bench.texts import calibration_text

if TYPE_CHECKING:
    from fasa_bench.models import Model

log = logging.getLogger("fasa_bench")


@dataclass
class Calibration:
    """The sample that CA is measured on, and the artefacts made from it.

    k: size of the top-K sets. prefill, decode: tokens of the sample's dense pass, then of its decode queries, which
    are teacher-forced. text: a text file, or None for the part of Python's documentation that no task evaluates.
    file: an artefact to use as it is, instead of one made (and kept in the user's cache folder) for these settings.
    """

    k: int = 256
    prefill: int = 1024
    decode: int = 128
    text: str | None = None
    file: str | None = None

    notes: ClassVar[dict[str, str]] = {
        "k": "paper 256 (Table 5 varies it); authors' code takes the budget, or 1024 where it made no such artefact",
        "text": "paper: one Qasper sample or one MATH500 question; ours: Python's documentation unless a text is given",
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
            return {"artefact": hashlib.sha256(_existing(self.file).read_bytes()).hexdigest()}
        return {"k": self.k, "prefill": self.prefill, "decode": self.decode, "sample": self.sample_id}

    @property
    def sample(self) -> str:
        if self.text is None:
            return calibration_text()
        path = Path(self.text)
        if not path.is_file():
            raise UserError.of("calibration.text", self.text, "no such file")
        return path.read_text(encoding="utf-8")

    @property
    def sample_id(self) -> str:
        return hashlib.sha256(self.sample.encode()).hexdigest()[:16]

    def agreement(self, model: Model, pairing: Pairing) -> Tensor:
        """Mean CA [layers, Hq, chunks] of this model: from `file`, from an earlier run, or measured now."""
        if self.file is not None:
            return load(_existing(self.file), model, pairing)
        wanted = json.dumps([model.fingerprint, str(model.network.dtype), pairing, self.identity()], sort_keys=True)
        name = f"{model.name}-{pairing}-k{self.k}-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}.safetensors"
        path = cache_folder("calibration") / name
        with filelock.FileLock(path.with_suffix(".lock")):
            if not path.exists():
                log.warning("calibrating %s (%s pairs, K=%d), once: %s", model.name, pairing, self.k, path)
                save(path, self.measure(model, pairing), model, pairing, self)
        return load(path, model, pairing)

    def measure(self, model: Model, pairing: Pairing) -> Tensor:
        """Mean CA [layers, Hq, chunks] over `decode` queries that follow a dense pass of `prefill` tokens."""
        needed = self.prefill + self.decode + 1
        # a token has at least one character, and rarely more than 16: no need to tokenise a whole book
        ids = model.tokenizer(self.sample[: 16 * needed], add_special_tokens=False)["input_ids"]
        if len(ids) < needed:
            raise UserError.of("calibration.text", self.text, f"{len(ids)} tokens, {needed} are needed")
        recorder = AgreementRecorder("calibration", units=model.rope.units(pairing), k=self.k)
        with Session(model.network, model.prefill_backend) as session:
            prefilled = session.prefill(ids[: self.prefill], reserve=self.decode)
            with prefilled.fork(recorder, None) as decoder:
                decoder.force(ids[self.prefill : needed])
        return recorder.mean()


@dataclass
class AgreementRecorder(Method):
    """A method that reads everything and measures CA on the way. units [chunks, dimensions of a chunk]."""

    units: Tensor = None  # type: ignore[assignment]
    k: int = 256

    takes_budget: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._sums: dict[int, Tensor] = {}
        self._steps: dict[int, int] = {}

    def decoded(self, layer: KVLayer, query: Tensor, weights: Tensor) -> None:
        found = contextual_agreement(query, layer.keys, self.units.to(query.device), self.k)[0].double().cpu()
        self._sums[layer.index] = self._sums.get(layer.index, 0) + found
        self._steps[layer.index] = self._steps.get(layer.index, 0) + 1

    def mean(self) -> Tensor:
        return torch.stack([self._sums[i] / self._steps[i] for i in sorted(self._sums)]).float()


def contextual_agreement(query: Tensor, keys: Tensor, units: Tensor, k: int) -> Tensor:
    """CA of each chunk for one query: query [b, Hq, 1, d], keys [b, H, n, d], units [U, s] -> [b, Hq, U].

    Works through one KV head at a time, so that a long context needs memory for G * U * n scores, not for all heads.
    """
    batch, heads, _, dim = keys.shape
    grouped = query.reshape(batch, heads, -1, dim).float()
    found = []
    for head in range(heads):
        one, cached = grouped[:, head], keys[:, head].float()  # [b, G, d], [b, n, d]
        whole = torch.matmul(one, cached.transpose(1, 2))
        member = whole >= kth_largest(whole, k)
        parts = (one[:, :, dims, None] * cached[:, None, :, dims].transpose(2, 3) for dims in units.unbind(1))
        chunk = functools.reduce(torch.Tensor.add_, parts)  # [b, G, U, n]
        shared = member[:, :, None] & (chunk >= kth_largest(chunk, k))
        found.append(shared.sum(-1) / k)
    return torch.cat(found, dim=1)


def kth_largest(scores: Tensor, k: int) -> Tensor:
    """The k-th largest entry of each row: [..., n] -> [..., 1]."""
    n = scores.shape[-1]
    if scores.device.type == "cpu":  # numpy selects without sorting, five times as fast as topk on a CPU
        return torch.from_numpy(np.partition(scores.numpy(), n - k, axis=-1)[..., n - k, None])
    return scores.topk(k, dim=-1).values[..., -1:]


def save(path: Path, agreement: Tensor, model: Model, pairing: Pairing, calibration: Calibration) -> None:
    """Write an artefact: the tensor and, as text, what it was made of."""
    settings = {key: str(value) for key, value in asdict(calibration).items()}
    facts = {"model": model.name, "fingerprint": model.fingerprint, "pairing": pairing, "sample": calibration.sample_id}
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    save_file({"agreement": agreement.contiguous()}, draft, metadata={**settings, **facts})
    draft.replace(path)


def load(path: Path, model: Model, pairing: Pairing) -> Tensor:
    """Read an artefact; UserError when it was made for another model or pairing, or is none."""
    try:
        with safe_open(path, framework="pt") as artefact:
            facts = artefact.metadata() or {}
            agreement = artefact.get_tensor("agreement")
    except Exception as error:
        raise UserError(f"{path} is not a calibration artefact ({error}); delete it to have it made anew") from error
    if facts.get("fingerprint") != model.fingerprint:
        raise UserError(
            f"calibration artefact {path} belongs to another model ({facts.get('model')}, {facts.get('fingerprint')}), "
            f"not to {model.name} ({model.fingerprint}): set calibration.file=null to have one made"
        )
    if facts.get("pairing") != pairing:
        raise UserError(f"calibration artefact {path} is for pairing={facts.get('pairing')}, not {pairing}")
    return agreement


def _existing(file: str) -> Path:
    if not Path(file).is_file():
        raise UserError.of("calibration.file", file, "no such file")
    return Path(file)
