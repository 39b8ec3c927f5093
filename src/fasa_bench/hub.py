"""Model folders: from the Hugging Face Hub's cache, the hub itself, or a local path."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import get_token, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

from fasa_bench.errors import UserError

SMALL = ["*.json", "*.jinja", "*.txt", "tokenizer*", "*.model"]  # config, tokenizer and shard indexes
IGNORED = ["original/*", "onnx/*", "consolidated*"]  # the same weights again, in formats that are not read
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def weight_files(folder: Path) -> list[Path]:
    """The weight files that transformers would read from `folder`, present or not; empty if there is no sign of any."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{name}.index.json"
        if index.is_file():
            return [folder / shard for shard in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        if (folder / name).is_file():
            return [folder / name]
    return []


def has_weights(folder: Path) -> bool:
    """Whether every weight file is there."""
    files = weight_files(folder)
    return bool(files) and all(file.is_file() for file in files)


def local(path: str, *, weights: bool) -> Path:
    """A model folder given by its path. Raises UserError if it holds no model."""
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise UserError.of("model.path", path, "must be a folder with config.json, tokenizer and safetensors files")
    if weights and not has_weights(folder):
        missing = [file.name for file in weight_files(folder) if not file.is_file()] or ["model.safetensors"]
        raise UserError.of("model.path", path, f"weight files are missing: {', '.join(missing)}")
    return folder


def download(hub_id: str, revision: str, *, gated: bool, remote_code: bool, weights: bool) -> Path:
    """The snapshot folder of a hub model: small files, and with `weights` its safetensors (else .bin) files too.

    A complete copy in the hub's cache is used as it is, without asking the hub.
    Raises UserError if the model is gated and no token is set, not found, or the hub cannot be reached.
    """
    config = try_to_load_from_cache(hub_id, "config.json", revision=revision)
    if isinstance(config, str):
        folder = Path(config).parent
        if any((folder / name).is_file() for name in TOKENIZERS) and (not weights or has_weights(folder)):
            return folder
    elif gated and get_token() is None:
        raise UserError(_gated(hub_id))
    wanted = [*SMALL, *(["*.py"] if remote_code else []), *(["model*.safetensors"] if weights else [])]
    try:
        folder = Path(snapshot_download(hub_id, revision=revision, allow_patterns=wanted, ignore_patterns=IGNORED))
        if weights and not has_weights(folder):
            snapshot_download(hub_id, revision=revision, allow_patterns=["pytorch_model*.bin"])
    except GatedRepoError as error:
        raise UserError(_gated(hub_id)) from error
    except RevisionNotFoundError as error:
        raise UserError.of("model.revision", revision, f"no such revision of {hub_id}") from error
    except RepositoryNotFoundError as error:  # the hub answers the same for a private model
        raise UserError(f"model.hub_id={hub_id!r} is not on the hub, or needs access. {_gated(hub_id)}") from error
    except (OSError, HfHubHTTPError) as error:  # no network, a proxy's refusal, offline mode
        reason = str(error).split("\n")[0]
        raise UserError(
            f"{hub_id} is not in the hub's cache and cannot be fetched ({reason}): "
            "download it on a machine with a network and set model.path=FOLDER, or use model=smollm2_135m"
        ) from error
    if weights and not has_weights(folder):
        raise UserError(f"{hub_id} has no safetensors or .bin weights that can be read; set model.path=FOLDER")
    return folder


def _gated(hub_id: str) -> str:
    return (
        f"{hub_id} is gated: request access at https://huggingface.co/{hub_id}, then `hf auth login` or set HF_TOKEN; "
        "or set model.path=FOLDER to a local copy"
    )
