"""Models from every source: right weights, right tokens, right refusals."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from fasa_bench import embedded, hub, models
from fasa_bench.config import build
from fasa_bench.errors import UserError
from fasa_bench.models import Model, ModelSpec
from fasa_bench.paths import cache_folder

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf" / "model"


def tiny(**changes: Any) -> Model:
    return Model(ModelSpec(**{"name": "tiny", "max_input": 64, "source": "random"} | changes))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model folder, as a user might have one."""
    folder = tmp_path_factory.mktemp("model")
    model = tiny(hidden=32, head_dim=8)
    model.network.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return folder


def local(folder: Path, **changes: Any) -> Model:
    return Model(ModelSpec(**{"name": "mine", "max_input": 64, "source": "local", "path": str(folder)} | changes))


def config_folder(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# --- conf/model


def specs() -> dict[str, ModelSpec]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        names = sorted(path.stem for path in CONF.glob("[!_]*.yaml"))
        return {name: build("model", OmegaConf.to_container(compose(name)), ModelSpec) for name in names}  # type: ignore[arg-type]


def test_every_model_of_the_paper_is_described() -> None:
    limits = {
        "llama32_3b": 127_500,
        "llama31_8b": 127_500,
        "mistral_7b": 31_500,
        "qwen25_7b": 127_500,
        "qwen25_14b": 127_500,
        "qwen25_14b_1m": 500_000,
        "qwen25_32b": 127_500,
        "r1_llama_8b": 32_768,
        "r1_qwen_14b": 32_768,
        "r1_qwen_32b": 32_768,
        "deepseek_v2_lite": 31_500,
        "baichuan_13b": 3_000,
        "bloomz_7b1": 2_048,
        "mpt_7b_chat": 2_048,
        "qwen3_8b": 32_768,
        "gemma3_4b": 130_560,
        "phi35_mini": 130_560,
        "phi4_mini": 130_560,
        "glm4_9b": 32_256,
        "gpt_oss_20b": 130_560,
        "smollm2_135m": 7_680,
        "tiny": 2_048,
    }
    found = specs()
    assert {name: spec.max_input for name, spec in found.items()} == limits
    assert all(spec.name == name for name, spec in found.items())
    assert [name for name, spec in found.items() if spec.trust_remote_code] == ["baichuan_13b"]
    assert [name for name, spec in found.items() if spec.gated] == ["gemma3_4b", "llama31_8b", "llama32_3b"]
    chat = re.compile(r"-[Ii]nstruct|-[Cc]hat|R1-Distill-|bloomz|-it$|/Qwen3-8B$|-0414$|gpt-oss")  # no base checkpoint
    assert all(chat.search(spec.hub_id) for spec in found.values() if spec.hub_id)
    assert all(len(path.read_text().splitlines()) <= 15 for path in CONF.glob("*.yaml"))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"max_input": 0}, "model.max_input=0"),
        ({"layers": 0}, "model.layers=0"),
        ({"heads": 4, "kv_heads": 3}, "model.kv_heads=3"),
        ({"source": "local"}, "model.path=None"),
        ({"source": "hub"}, "model.hub_id=None"),
    ],
)
def test_impossible_descriptions(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=key):
        tiny(**changes)


@pytest.mark.parametrize("device", ["abacus", "cuda:99"])  # one that torch does not know, one that is not there
def test_device_that_cannot_be_used(device: str) -> None:
    with pytest.raises(UserError, match=rf"model\.device='{device}' is not allowed: must be auto or a device of this"):
        _ = tiny(device=device).network


def test_cache_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FASA_BENCH_CACHE", f"{tmp_path}/file")
    with pytest.raises(UserError, match=r"FASA_BENCH_CACHE='.*/file' is not allowed: Not a directory"):
        cache_folder("models")


# --- the embedded model


def test_embedded_model_is_what_the_wheel_holds() -> None:
    from gguf import GGUFReader, dequantize

    model = Model(ModelSpec("smollm2_135m", 7680, source="embedded"))
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.max_position_embeddings, model.network.dtype, model.rope.head_dim) == (8192, torch.float32, 64)
    assert (model.rope.layout, model.rope.n_chunks) == ("half", 32)
    assert model.rope.inv_freq[1].item() == pytest.approx(100_000 ** (-2 / 64), rel=1e-6)
    tensors = {tensor.name: tensor for tensor in GGUFReader(embedded._gguf()).tensors}
    state = model.network.state_dict()
    for ours, theirs in (("embed_tokens", "token_embd"), ("layers.7.mlp.down_proj", "blk.7.ffn_down")):
        tensor = tensors[f"{theirs}.weight"]
        expected = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(state[f"model.{ours}.weight"], expected)


def test_embedded_tokenizer() -> None:
    model = Model(ModelSpec("smollm2_135m", 7680, source="embedded"))
    tokenizer = model.tokenizer
    assert tokenizer("Hello 123")["input_ids"] == [19556, 216, 33, 34, 35]  # no begin token, digits one by one
    assert tokenizer.tokenize("a\n\n1.\n    20") == ["a", "ĊĊ", "1", ".", "ĊĠĠĠĠ", "2", "0"]
    special = tokenizer("<|endoftext|><|im_start|><|im_end|>")["input_ids"]
    assert special == [0, 1, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert model.end_token_ids == (2,)
    text = "def f(x):\n\treturn  x  # naïve ☃ 12345\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert model.chat("Why?").endswith("<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n")


@pytest.fixture
def fake_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FASA_BENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "_gguf", lambda: tmp_path / "a.gguf")
    return tmp_path / "models" / embedded.NAME


def test_a_killed_conversion_is_never_used(fake_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(source: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("half")
        raise KeyboardInterrupt

    def whole(source: Path, target: Path) -> None:
        target.mkdir()  # fails if something is left of the first
        (target / "config.json").write_text("whole")

    monkeypatch.setattr(embedded, "_convert", killed)
    with pytest.raises(KeyboardInterrupt):
        embedded.folder()
    assert not fake_wheel.exists()
    monkeypatch.setattr(embedded, "_convert", whole)
    assert (embedded.folder() / "config.json").read_text() == "whole"
    assert [path.name for path in fake_wheel.parent.iterdir() if path.is_dir()] == [fake_wheel.name]


def test_only_one_of_several_converts(fake_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def slow(source: Path, target: Path) -> None:
        target.mkdir()
        time.sleep(0.2)
        made.append(target)

    monkeypatch.setattr(embedded, "_convert", slow)
    threads = [threading.Thread(target=embedded.folder) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert fake_wheel.is_dir()


def test_missing_or_changed_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=re.escape(embedded.INSTALL)):
        embedded._gguf()
    (tmp_path / embedded.FILE).write_bytes(b"GGUF of another model")

    class Spec:
        origin = str(tmp_path / "__init__.py")

    monkeypatch.setattr(embedded, "find_spec", lambda name: Spec)
    with pytest.raises(UserError, match=f"not {embedded.SHA256}"):
        embedded._gguf()


# --- random weights


def test_random_weights_are_drawn_from_the_seed() -> None:
    before = torch.random.get_rng_state()
    a, b, c = tiny(seed=3), tiny(seed=3), tiny(seed=4)
    weights = [model.network.model.layers[1].self_attn.k_proj.weight for model in (a, b, c)]
    assert weights[0].shape == (2 * 16, 64)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert torch.equal(torch.random.get_rng_state(), before)  # nobody else's draws change
    assert a.fingerprint == b.fingerprint != c.fingerprint
    assert not any(parameter.requires_grad for parameter in a.network.parameters())
    assert not a.network.training


def test_random_model_of_another_size_and_architecture() -> None:
    model = tiny(model_type="glm", layers=1, heads=6, kv_heads=3, head_dim=8, hidden=48, dtype="bfloat16")
    assert model.network.config.num_hidden_layers == 1
    assert model.network.dtype == torch.bfloat16
    assert model.network.model.rotary_emb.inv_freq.dtype == torch.float32
    assert model.rope.layout == "interleaved"
    assert model.config.vocab_size == len(model.tokenizer) == 49_152
    with pytest.raises(UserError, match=r"model\.model_type='abacus'"):
        _ = tiny(model_type="abacus").config


# --- a local folder


BY_MODULE = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}


@pytest.mark.parametrize("device_map", [None, "auto", "cpu", {"": "cpu"}, {**BY_MODULE, "lm_head": "cpu"}])
def test_local_folder_gives_the_same_network(saved: Path, device_map: Any) -> None:
    ids = torch.tensor([[5, 6, 7]])
    model = local(saved, device_map=device_map, device="cpu" if device_map is None else "auto")
    expected = tiny(hidden=32, head_dim=8, device=model.device.type).network(ids.to(model.device)).logits
    torch.testing.assert_close(model.network(ids.to(model.device)).logits, expected)


def test_random_weights_take_no_device_map() -> None:
    with pytest.raises(UserError, match=r"model\.device_map='auto' is not allowed: a model of random weights"):
        tiny(device_map="auto")


def test_path_wins_over_the_hub(saved: Path) -> None:
    model = local(saved, source="hub", hub_id="meta-llama/Llama-3.1-8B-Instruct", gated=True)
    assert model.folder == saved
    assert model.config.hidden_size == 32


def test_fingerprint_follows_the_content_and_not_the_place(saved: Path, tmp_path: Path) -> None:
    weights, config = (saved / "model.safetensors").read_bytes(), json.loads((saved / "config.json").read_text())

    def fingerprint(name: str, weights: bytes, config: dict[str, Any]) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(weights)
        (folder / "config.json").write_text(json.dumps(config))
        return local(folder).fingerprint

    original = local(saved).fingerprint
    middle = len(weights) // 2
    changed = weights[:middle] + bytes([weights[middle] ^ 1]) + weights[middle + 1 :]
    assert fingerprint("copy", weights, config | {"transformers_version": "4.0", "use_cache": False}) == original
    assert fingerprint("weights", changed, config) != original
    assert fingerprint("config", weights, config | {"rms_norm_eps": 0.5}) != original


def test_folder_that_is_no_model(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.path='/no/such/folder'.*config.json"):
        _ = local(Path("/no/such/folder")).tokenizer
    shards = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (tmp_path / "config.json").write_text((saved / "config.json").read_text())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(shards))
    (tmp_path / "model-1-of-2.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"missing: model-2-of-2\.safetensors"):
        _ = local(tmp_path).network


def test_all_end_tokens_count(saved: Path, tmp_path: Path) -> None:
    for file in saved.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    ends = {"eos_token_id": [128, 9, 77]}  # Llama-3 has three; using one lets answers run on
    (tmp_path / "generation_config.json").write_text(json.dumps(ends))
    assert local(tmp_path).end_token_ids == (2, 9, 77, 128)


def test_chat_template_is_the_same_on_every_day(saved: Path) -> None:
    model = local(saved)
    model.tokenizer.chat_template = (
        "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
        "{{ date_string }}: {{ messages[0]['content'] }}"
    )
    assert model.chat("Hi") == "26 Jul 2024: Hi"
    model.tokenizer.chat_template = None
    assert not model.has_chat_template
    with pytest.raises(UserError, match="no chat template"):
        model.chat("Hi")


# --- the hub


@pytest.fixture
def empty_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No cached model, no token, no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "get_token", lambda: None)

    def offline(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    return tmp_path


def from_hub(**changes: Any) -> Model:
    return Model(ModelSpec(**{"name": "m", "max_input": 64, "hub_id": "org/model"} | changes))


def test_gated_model_without_token_says_what_to_do(empty_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*args: Any, **kwargs: Any) -> str:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(hub, "snapshot_download", asked)
    for part in ("tokenizer", "config", "network", "fingerprint"):
        with pytest.raises(UserError) as error:
            getattr(from_hub(gated=True), part)
        for advice in ("https://huggingface.co/org/model", "hf auth login", "HF_TOKEN", "model.path=FOLDER"):
            assert advice in str(error.value)


def test_hub_out_of_reach(empty_hub: Path) -> None:
    with pytest.raises(UserError, match=r"org/model.*cannot be fetched.*Name or service.*model\.path=FOLDER"):
        _ = from_hub().tokenizer


def test_hub_refuses(empty_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    for kind, message in ((GatedRepoError, "org/model is gated"), (RepositoryNotFoundError, "hub_id='org/model'")):

        def refuse(*args: Any, kind: type[Exception] = kind, **kwargs: Any) -> str:
            raise kind.__new__(kind)  # their constructors want an HTTP response, whose type changed between versions

        monkeypatch.setattr(hub, "snapshot_download", refuse)
        with pytest.raises(UserError, match=message):
            _ = from_hub().tokenizer


def test_complete_copy_in_the_cache_needs_no_hub(empty_hub: Path, saved: Path) -> None:
    repository = empty_hub / "models--org--model"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abcd")
    for file in saved.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    assert from_hub(gated=True).network.config.hidden_size == 32
    (snapshot / "model.safetensors").unlink()
    assert from_hub(gated=True).config.hidden_size == 32
    with pytest.raises(UserError, match="cannot be fetched"):  # now the hub is asked for the weights
        _ = from_hub().network


# --- what the harness cannot do right


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "qwen3_next"}, "linear_attention"),
        ({"model_type": "llama4_text"}, "chunked_attention"),
        ({"model_type": "falcon", "alibi": True}, "ALiBi"),
    ],
)
def test_unsupported_attention_is_refused_before_weights_are_loaded(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UserError, match=f"is not supported.*{reason}"):
        _ = local(config_folder(tmp_path, **config)).network


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mistral", "sliding_window": None},  # Mistral-7B v0.3
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 131_072},  # Qwen2.5
        {"model_type": "deepseek_v2"},
        {"model_type": "bloom"},
        {"model_type": "mpt"},
    ],
)
def test_full_attention_is_accepted(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="weight files are missing"):  # the next step after the check
        _ = local(config_folder(tmp_path, **config)).network


def test_baichuan_is_refused_before_its_own_code_fails(saved: Path) -> None:
    model = local(saved, trust_remote_code=True)
    model.config = SimpleNamespace(model_type="baichuan", num_hidden_layers=2, get_text_config=lambda: model.config)
    with pytest.raises(UserError, match=r"model=mine cannot be run: Baichuan's own code.*bloom, mpt"):
        _ = model.tokenizer


def test_flash_attention_is_not_for_biases_and_latents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda: True)
    for number, family in enumerate(({"model_type": "bloom"}, {"model_type": "deepseek_v2", "kv_lora_rank": 8})):
        (folder := tmp_path / str(number)).mkdir()
        model = local(config_folder(folder, **family), dtype="bfloat16")
        model._home = torch.device("meta")
        assert model.prefill_backend == "sdpa"
        model = local(folder, attention="flash_attention_2")
        with pytest.raises(UserError, match=r"model\.attention='flash_attention_2'"):
            _ = model.prefill_backend


def test_architecture_that_transformers_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="transformers cannot read"):
        _ = local(config_folder(tmp_path, model_type="abacus")).config


@pytest.mark.parametrize("version", ["4.56.1", "4.43.0", "6.0.0"])
def test_transformers_out_of_range(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    models._check_transformers.cache_clear()
    monkeypatch.setattr(models.importlib.metadata, "version", lambda name: version)
    try:
        with pytest.raises(UserError, match=rf"transformers {version} is not supported: .*>=4\.56\.2,<6"):
            tiny()
    finally:
        models._check_transformers.cache_clear()


# --- devices and attention backends


def test_dense_attention_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tiny(device="cpu").prefill_backend == "sdpa"
    assert tiny(device="cpu", model_type="gpt_oss").rope.layers == (1,)  # a class that knows eager attention only
    monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda: False)
    with pytest.raises(UserError, match=r"model\.attention='flash_attention_2'"):
        _ = tiny(attention="flash_attention_2").prefill_backend
    monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda: True)
    # "meta" stands for an accelerator here: FlashAttention needs one, and half precision
    assert tiny(device="meta", dtype="bfloat16").prefill_backend == "flash_attention_2"
    assert tiny(device="meta", dtype="float32").prefill_backend == "sdpa"
    assert tiny(device="cpu", dtype="bfloat16").prefill_backend == "sdpa"


def test_identity_tells_what_changes_an_output() -> None:
    base = tiny(device="cpu").identity()
    assert base == tiny(device="cpu", name="other", revision="dev").identity()
    for changes in ({"dtype": "bfloat16"}, {"attention": "eager"}, {"seed": 1}, {"max_input": 63}):
        assert tiny(**{"device": "cpu"} | changes).identity() != base


def test_no_fixed_device_name_in_the_source() -> None:
    files = [
        *(ROOT / "src" / "fasa_bench").glob("*.py"),
        *(ROOT / "methods").glob("*.py"),
        *(ROOT / "tasks").glob("*.py"),
    ]
    assert len(files) > 10
    fixed = re.compile(r"""["'](cuda|mps|xpu|npu)(:\d+)?["']\s*[,)\]]|\.cuda\(""")  # as a device, e.g. .to("cuda")
    assert [file.name for file in files if fixed.search(file.read_text())] == []
