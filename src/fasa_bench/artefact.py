"""What a calibration leaves behind: one tensor a file, with what it was made of, refused where it does not belong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from safetensors import safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor

from fasa_bench.errors import UserError
from fasa_bench.store import write_whole

if TYPE_CHECKING:
    from fasa_bench.calibration import Calibration
    from fasa_bench.models import Model

Kind = Literal["agreement", "basis"]
SETTING: dict[Kind, str] = {"agreement": "pairing", "basis": "rotary"}  # the method's setting that it was made for


def save(
    path: Path, tensor: Tensor, model: Model, setting: str, calibration: Calibration, kind: Kind = "agreement"
) -> None:
    """Write an artefact: the tensor and, as text, what it was made of."""
    facts = {**asdict(calibration), "sample": calibration.sample_id}
    write_whole(path, content({kind: tensor}, facts, model, setting, kind))


def content(
    tensors: Mapping[str, Tensor], facts: Mapping[str, Any], model: Model, setting: str, kind: Kind = "agreement"
) -> bytes:
    """The bytes of an artefact. tensors: the one of its `kind`, and others that `load` leaves alone."""
    told = {key: str(value) for key, value in facts.items()}
    told |= {"model": model.name, "fingerprint": model.fingerprint, SETTING[kind]: setting}
    told["layers"] = " ".join(map(str, model.rope.layers))  # to which the tensor's rows belong
    return save_tensors({name: tensor.contiguous() for name, tensor in tensors.items()}, told)


def load(path: Path, model: Model, setting: str, kind: Kind = "agreement") -> Tensor:
    """Read an artefact; UserError when it is none, of another kind, or made for another model or setting."""
    try:
        with safe_open(path, framework="pt") as artefact:
            facts = artefact.metadata() or {}
            tensors = {name: artefact.get_tensor(name) for name in artefact.keys()}  # noqa: SIM118 (not a dict)
    except Exception as error:
        raise UserError(
            f"{path} is not a calibration artefact, or a damaged one ({error}): if calibration.file names it, take "
            "another or null; if it lies in the cache, delete it and it is made anew"
        ) from error
    if facts.get("fingerprint") != model.fingerprint:
        raise UserError(
            f"calibration artefact {path} belongs to another model ({facts.get('model')}, {facts.get('fingerprint')}), "
            f"not to {model.name} ({model.fingerprint}): set calibration.file=null to have one made"
        )
    if kind not in tensors:
        raise UserError(f"calibration artefact {path} holds {', '.join(tensors)}, but this method needs {kind}")
    made_for = facts.get(SETTING[kind])
    if made_for != setting:
        raise UserError(f"calibration artefact {path} is for {SETTING[kind]}={made_for}, not {setting}")
    return tensors[kind]


def existing(file: str) -> Path:
    """The path of `calibration.file`; UserError if there is none."""
    if not Path(file).is_file():
        raise UserError.of("calibration.file", file, "no such file")
    return Path(file)
