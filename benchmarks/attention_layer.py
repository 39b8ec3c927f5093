"""One attention layer at decode time: FASA against the best dense attention, in turns, on this machine.

Drives the harness's own cache, selection and attention (`attention.forward`, no copy of it) on random keys and values,
with random dominant chunks: which ones are chosen does not change how long it takes. Default shape: Llama-3.1-8B's.

PYTHONPATH=src python benchmarks/attention_layer.py [--tokens 8192,65536] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from operator import truediv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from configured import method_named, prepare_at_random
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from fasa_bench.attention import Reading, faster_dense, forward, reading
from fasa_bench.cache import KVLayer
from fasa_bench.clock import synchronise
from fasa_bench.environment import environment
from fasa_bench.method import Method
from fasa_bench.model_cache import Cache
from fasa_bench.roofline import bandwidth
from fasa_bench.segments import product

OURS = "dense, compiled"
FORMS: dict[str, dict[str, Any]] = {  # settings of conf/method, and what is changed
    "FASA, all per KV head": {"name": "fasa_plus"},
    "FASA, all per KV head, share=max": {"name": "fasa_plus", "share": "max"},
    "FASA, chunks per KV head, tokens per query head": {"name": "fasa_c", "fc_granularity": "kv_head"},
    "FASA, all per query head (paper)": {"name": "fasa_c"},
}
HEAD = [
    "tokens",
    "batch",
    "form",
    "ms",
    "quartiles",
    "times as fast",
    "as PyTorch",
    "limit",
    "of the limit",
    "MiB read",
    "of bandwidth",
]


@dataclass(frozen=True)
class Shape:
    """One layer, and how FASA reads it."""

    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    n_tip: int = 16
    budget: int = 256

    def query(self, batch: int, like: Tensor) -> Tensor:
        return torch.randn(batch, self.query_heads, 1, self.head_dim, dtype=like.dtype, device=like.device)


def filled_layer(shape: Shape, tokens: int, batch: int, device: torch.device, dtype: torch.dtype) -> KVLayer:
    """A layer with random keys and values, and room for some more."""
    layer = KVLayer(0)
    nothing = torch.zeros(1, dtype=dtype, device=device).expand(batch, shape.kv_heads, tokens, shape.head_dim)
    layer.append(nothing, nothing, torch.arange(tokens, device=device).expand(batch, -1), reserve=256)
    for rows in (layer.keys, layer.values):
        rows.normal_()
    return layer


def method_of(shape: Shape, form: str) -> Method:
    """FASA in one of its forms, for one layer."""
    made = method_named(**FORMS[form], n_tip=shape.n_tip)
    return prepare_at_random(made, 1, shape.query_heads, shape.kv_heads, shape.head_dim)


class Step:
    """A decode step of one layer with one form of FASA: append, select, attend."""

    def __init__(self, shape: Shape, form: str, prompt: KVLayer, split: bool = True) -> None:
        self.layer, self.method = prompt.fork(), method_of(shape, form)
        self.layer.budget = shape.budget
        if split:
            self.method.prefill(self.layer, None)
        else:
            self.method.step = lambda layer, query: None  # type: ignore[method-assign]  # which would split it
        self.state = Reading(Cache([self.layer]), self.method)
        self.module = SimpleNamespace(layer_idx=0)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with reading(self.state):
            return forward(self.module, query, key, value, None)[0]  # type: ignore[arg-type]

    def read_bytes(self, *tensors: Tensor) -> int:
        """Of a step."""
        before = self.layer.read_bytes
        self(*tensors)
        return self.layer.read_bytes - before


def dense_forms(layer: KVLayer, scale: float) -> dict[str, Callable[[Tensor], Tensor]]:
    """Ways to attend to everything, [b, Hq, 1, d] -> the same; the fastest is what FASA is compared with."""
    keys, values = layer.keys, layer.values
    kv_heads = keys.shape[1]

    def matmul(query: Tensor) -> Tensor:
        weights = torch.softmax(product(query, keys.transpose(2, 3)) * scale, dim=-1, dtype=torch.float32)
        return product(weights.to(query.dtype), values)

    def folded(query: Tensor) -> Tensor:
        grouped = query.reshape(len(query), kv_heads, -1, query.shape[-1])
        return sdpa(grouped, keys, values, scale=scale).reshape(query.shape)

    def grouped(query: Tensor) -> Tensor:
        return sdpa(query, keys, values, scale=scale, enable_gqa=True)

    forms: dict[str, Callable[[Tensor], Tensor]] = {
        "dense, grouped matmul": matmul,
        "dense, SDPA folded": folded,
        "dense, SDPA enable_gqa": grouped,
    }
    faster = faster_dense(keys)
    if faster is not None:
        forms[OURS] = lambda query: faster(query, keys, values, scale).transpose(1, 2)
    if layer.device.type != "cpu" and keys.dtype in (torch.float16, torch.bfloat16):
        flash = _flash(keys, values, scale)
        forms |= {"dense, flash-attn": flash} if flash else {}
    return forms


def _flash(keys: Tensor, values: Tensor, scale: float) -> Callable[[Tensor], Tensor] | None:
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError:
        return None
    heads_last = [tensor.transpose(1, 2).contiguous() for tensor in (keys, values)]

    def flash(query: Tensor) -> Tensor:
        return flash_attn_with_kvcache(query.transpose(1, 2), *heads_last, softmax_scale=scale).transpose(1, 2)

    return flash


def take_turns(
    forms: dict[str, Callable[[], Any]], device: torch.device, turns: int, warmup: int = 3
) -> dict[str, list[float]]:
    """Milliseconds of each call, one call of each to a turn; who comes first changes."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(-warmup, turns):
        for name in list(forms) if turn % 2 else reversed(list(forms)):
            synchronise(device)
            start = time.perf_counter()
            forms[name]()
            synchronise(device)
            if turn >= 0:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


@torch.inference_mode()
def compare(
    shape: Shape, tokens: int, batch: int, device: torch.device, dtype: torch.dtype, turns: int
) -> list[dict[str, Any]]:
    """All dense ways and all forms of FASA: a row for each, with the bytes that it reads and what they would allow."""
    torch.manual_seed(0)
    layer = filled_layer(shape, tokens, batch, device, dtype)
    scale = shape.head_dim**-0.5
    query = shape.query(batch, layer.keys)
    new = torch.randn(2, batch, shape.kv_heads, 1, shape.head_dim, dtype=dtype, device=device)
    steps = {form: Step(shape, form, layer) for form in FORMS}
    calls: dict[str, Callable[[], Any]] = {
        name: partial(form, query) for name, form in dense_forms(layer, scale).items()
    }
    dense = list(calls)
    calls |= {form: partial(step, query, *new) for form, step in steps.items()}
    times = take_turns(calls, device, turns)
    best, best_of_pytorch = (
        min(names, key=lambda name: statistics.median(times[name]))
        for names in (dense, [name for name in dense if name != OURS])
    )
    whole = layer.keys.nbytes + layer.values.nbytes
    rate = bandwidth(device)["limit"]
    rows = []
    for name, taken in times.items():
        read = whole if name in dense else steps[name].read_bytes(query, *new)
        ratios = [other / own for other, own in zip(times[best], taken, strict=True)]
        quartiles = statistics.quantiles(taken, n=4)
        row = {
            "tokens": tokens,
            "batch": batch,
            "form": name + (" (best)" if name == best else ""),
            "ms": statistics.median(taken),
            "p25": quartiles[0],
            "p75": quartiles[2],
            "times_as_fast": statistics.median(ratios),
            "as_pytorch": statistics.median(map(truediv, times[best_of_pytorch], taken)),
            "limit": whole / read,
            "read_bytes": read,
            "of_bandwidth": read / (statistics.median(taken) / 1e3) / rate,
        }
        if name in steps and dtype == torch.float32:
            row["difference"] = _difference(shape, name, layer, query, new)
        rows.append(row)
    return rows


def _difference(shape: Shape, form: str, layer: KVLayer, query: Tensor, new: Tensor) -> float:
    """Largest difference of the output from that of the layer as it was, whole keys under a mask of dimensions."""
    outputs = []
    for split in (True, False):
        torch.manual_seed(1)  # the same chunks
        outputs.append(Step(shape, form, layer, split)(query, *new))
    return float((outputs[0] - outputs[1]).abs().max())


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [HEAD, [":--" if name == "form" else "--:" for name in HEAD]]
    for row in rows:
        times = f"{row['times_as_fast']:.2f}"
        lines.append(
            [
                f"{row['tokens']:,}",
                str(row["batch"]),
                row["form"],
                f"{row['ms']:.3f}",
                f"{row['p25']:.3f} to {row['p75']:.3f}",
                times,
                f"{row['as_pytorch']:.2f}",
                f"{row['limit']:.2f}",
                f"{row['times_as_fast'] / row['limit']:.0%}",
                f"{row['read_bytes'] / 2**20:.1f}",
                f"{row['of_bandwidth']:.0%}",
            ]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="One attention layer: FASA against the best dense attention.")
    parser.add_argument("--tokens", default="65536", help="cached tokens, several with commas")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    for key, value in asdict(Shape()).items():
        parser.add_argument(f"--{key.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--out", type=Path, help="JSON file; a table of the same name with .md goes beside it")
    options = parser.parse_args()
    shape = Shape(**{key: getattr(options, key) for key in asdict(Shape())})
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    rows = []
    for tokens in map(int, options.tokens.split(",")):
        rows += compare(shape, tokens, options.batch, device, dtype, options.turns)
    found = {"shape": asdict(shape), "dtype": options.dtype, "turns": options.turns, "bandwidth": bandwidth(device)}
    print(table(rows))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({**found, "rows": rows, "env": environment()}, indent=2) + "\n")
        options.out.with_suffix(".md").write_text(f"# One attention layer, {options.dtype}\n\n{table(rows)}\n")


if __name__ == "__main__":
    main()
