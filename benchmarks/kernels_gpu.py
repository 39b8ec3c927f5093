"""Check and time FASA's Triton kernels on a CUDA GPU, against the best dense decode attention to be had there.

    python benchmarks/kernels_gpu.py --out kernels_gpu.json

Needs torch and triton, no installed package. First every kernel with every block size is compared with its torch
reference; then one layer of Llama-3.1-8B (32 query heads, 8 KV heads, d 128, bfloat16, r 32, k 256) is timed over
context lengths and batches. Times are medians of CUDA graph replays, divided by the number of layers in the graph: each
layer has its own cache, and together they exceed the L2 cache, as in a model. About two minutes; what does not fit into
--seconds is left out and named. Exit status 1 if any check failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# The kernels need nothing of the fasa_bench package, which may not be installed here: load their folder by itself.
_package = types.ModuleType("fasa_kernels")
_package.__path__ = [str(Path(__file__).resolve().parents[1] / "kernels")]
sys.modules["fasa_kernels"] = _package
from fasa_kernels import append, attend, backend, decode, select, tip  # type: ignore[import-not-found]  # noqa: E402

KERNELS = {
    "tip": tip._tip_kernel,
    "tally": select._tally_kernel,
    "choose": select._choose_kernel,
    "attend": attend._attend_kernel,
}
CONFIGS = {name: getattr(kernel, "configs", []) for name, kernel in KERNELS.items()}
HEADS, GROUP, DIM, LEAD, K, SINKS, RECENT = 8, 4, 128, 32, 256, 4, 16
SCALE = DIM**-0.5
LENGTHS = [(1, 65536), (1, 131072), (8, 65536), (1, 8192), (1, 32768), (1, 16384), (8, 8192), (8, 32768), (8, 131072)]
DEVICE = torch.device("cuda")


# checks ----------------------------------------------------------------------------------------------------------


def counts(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative error of the whole tensor; not a number if any value is none."""
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def check_shape(shape: tuple[int, ...], dtype: torch.dtype, config: int) -> dict[str, Any]:
    """Run every kernel on one shape, with the config-th of its block sizes, and compare with the references."""
    for name, kernel in KERNELS.items():
        kernel.configs = [CONFIGS[name][config % len(CONFIGS[name])]]
    b, heads, group, dim, r, cap, k = shape
    torch.manual_seed(config)
    lead, rest, values = (torch.randn(b, heads, cap, n, device=DEVICE).to(dtype) for n in (r, dim - r, dim))
    query = torch.randn(b, heads * group, dim, device=DEVICE).to(dtype)
    tip_query = query[..., :r]
    keys = torch.cat((lead, rest), -1)
    first = counts(*(13 * i for i in range(b)))
    end = counts(*(cap - 29 * i for i in range(b)))
    scale = dim**-0.5
    at = torch.arange(cap, device=DEVICE)
    held = ((at >= first[:, None]) & (at < end[:, None]))[:, None]
    limit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    wanted_scores = tip.tip_reference(tip_query, lead, first, end)
    found: dict[str, Any] = {}

    def check_tip() -> float:
        scores, peaks, sums = tip.tip(tip_query, lead, first, end, scale)
        total = (sums * (scale * (peaks - wanted_scores.amax(-1, keepdim=True))).exp()).sum(-1).log()
        wanted = (scale * (wanted_scores - wanted_scores.amax(-1, keepdim=True))).logsumexp(-1)
        assert error(total, wanted) < 1e-5, "sums of exponentials"
        inside = held.expand_as(scores)
        assert error(scores[inside], wanted_scores[inside]) < 1e-5, "scores"
        return error(scores[inside], wanted_scores[inside])

    def choice(values: Tensor, kv_heads: int | None, stats: tuple[Tensor, Tensor | None]) -> Tensor:
        rows = heads * group if kv_heads is None else kv_heads
        scratch = select.SelectScratch(b, rows, cap, k, DEVICE)
        scratch.slots.fill_(-7)
        slots = select.select(values, *stats, first, end, k, scale, SINKS, RECENT, kv_heads, scratch)
        ranked = values if kv_heads is None or group == 1 else scratch.values
        wanted = select.select_reference(ranked.where(held, float("-inf")), k, first, end, SINKS, RECENT)
        assert torch.equal(slots.sort(-1).values, wanted.sort(-1).values), "not the set that the reference chooses"
        assert not scratch.done.any(), "a counter is left"
        return slots

    def check_select() -> float:
        normal = torch.randn(b, heads * group, cap, device=DEVICE)
        for values in (normal, normal / 1e3 + 700, torch.full_like(normal, -3.0), normal.mul(3).round()):
            choice(values, None, (values.where(held, float("-inf")).amax(-1, keepdim=True), None))
        scores, peaks, sums = tip.tip(tip_query, lead, first, end, scale)
        choice(scores, heads, (peaks, sums))
        return 0.0

    def check_attend() -> float:
        worst = 0.0
        for rows in (heads, heads * group):
            slots = torch.rand(b, rows, cap, device=DEVICE).argsort(-1)[..., :k].int().contiguous()
            slots[0, 0, k // 2 :] = -1
            out = torch.full_like(query, float("nan"))
            attend.attend(query, lead, rest, values, slots, scale, out=out)
            worst = max(worst, error(out, attend.attend_reference(query, lead, rest, values, slots, scale)))
        assert worst < limit, f"error {worst}"
        return worst

    def check_dense() -> float:
        out = torch.full_like(query, float("nan"))
        attend.dense(query, keys, values, first, end, scale, out=out)
        worst = error(out, attend.dense_reference(query, keys, values, first, end, scale))
        assert worst < limit, f"error {worst}"
        return worst

    def check_append() -> float:
        key, value = torch.randn(2, b, heads, dim, device=DEVICE).to(dtype)
        order = torch.stack([torch.randperm(dim, device=DEVICE) for _ in range(heads)])
        wanted = [x.clone() for x in (lead, rest, values)]
        slot = end - 1
        append.append_reference(key, value, order, *wanted, slot)
        ours = [x.clone() for x in (lead, rest, values)]
        append.append(key, value, order, *ours, slot)
        assert all(torch.equal(x, y) for x, y in zip(ours, wanted, strict=True))
        return 0.0

    def check_step() -> float:
        worst = 0.0
        for share in ("none", "max", "softmax"):
            work = decode.Workspace(b, heads * group, heads, dim, cap, k, DEVICE, share)
            tensors = (tip_query, query, lead, rest, values, first, end, scale)
            out = decode.fasa_step(*tensors, work, SINKS, RECENT)
            wanted = decode.fasa_step_reference(*tensors, k, SINKS, RECENT, share)
            worst = max(worst, error(out, wanted))
            slots = work.slots.clone()
            for _ in range(30):  # what differs from run to run is a race
                again = decode.fasa_step(*tensors, work, SINKS, RECENT)
                assert torch.equal(again, out), "another output at another run"
                assert torch.equal(work.slots, slots), "another choice at another run"
        assert worst < limit, f"error {worst}"
        return worst

    for name, check in {
        "tip": check_tip,
        "select": check_select,
        "attend": check_attend,
        "dense": check_dense,
        "append": check_append,
        "step": check_step,
    }.items():
        try:
            found[name] = check()
            torch.cuda.synchronize()
        except Exception:
            found[name] = traceback.format_exc(limit=-6)
    return {"shape": shape, "dtype": str(dtype), "config": config, "error": found}


def all_checks(workers: int, deadline: float) -> list[dict[str, Any]]:
    """In several processes: most of the time goes into compiling, and the timings find it done."""
    small = [
        (1, 1, 1, 64, 16, 700, 64),
        (3, 2, 4, 128, 32, 5000, 300),
        (2, 1, 8, 256, 96, 3000, 64),
        (2, 2, 7, 64, 24, 1500, 2000 // 2),
        (1, 2, 4, 128, 33, 20000, 4096),
        (2, 2, 3, 80, 20, 2100, 100),
    ]
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    jobs = [((1, HEADS, GROUP, DIM, LEAD, 8192, K), bf16, config) for config in range(6)]
    jobs += [(shape, dtype, i) for i, shape in enumerate(small) for dtype in (bf16, fp32 if i % 2 else fp16)]
    done: list[dict[str, Any]] = []
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    waiting = {pool.submit(check_shape, *job): job for job in jobs}

    def failed(job: tuple[Any, Any, int], reason: str) -> None:
        done.append({"shape": job[0], "dtype": str(job[1]), "config": job[2], "error": {"process": reason}})

    try:
        for future in as_completed(list(waiting), timeout=max(1.0, deadline - time.monotonic())):
            job = waiting.pop(future)
            try:
                done.append(future.result())
            except Exception as problem:  # the process died
                failed(job, repr(problem))
    except TimeoutError:
        for job in waiting.values():
            failed(job, "out of time")
        for process in list(pool._processes.values()):  # or leaving would wait for them
            process.kill()
    pool.shutdown(wait=False, cancel_futures=True)
    return done


# times -----------------------------------------------------------------------------------------------------------


def replay_time(step: Callable[[int], Any], layers: int) -> dict[str, float]:
    """Microseconds per layer of a CUDA graph with one call for each layer: median and quartiles of its replays."""
    for layer in range(2):  # compile and tune
        step(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            step(layer)
    times: list[float] = []
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    spent = 0.0
    while len(times) < 3 or (spent < 0.1 and len(times) < 40):
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / layers)
        spent += start.elapsed_time(stop) / 1e3
    low, middle, high = statistics.quantiles(times[1:], n=4) if len(times) > 2 else (times[-1],) * 3
    return {"us": middle, "low": low, "high": high}


def attempt(found: dict[str, Any], name: str, step: Callable[[int], Any], layers: int) -> None:
    try:
        found[name] = replay_time(step, layers)
    except Exception as problem:
        torch.cuda.synchronize()
        found[name] = {"failed": str(problem).strip().splitlines()[:1], "trace": traceback.format_exc(limit=-4)}


def copy_bandwidth() -> float:
    """Bytes per second that a large copy reads and writes."""
    source = torch.randn(1 << 29, device=DEVICE)
    target = torch.empty_like(source)
    step = replay_time(lambda layer: target.copy_(source), 2)
    return 2 * source.nbytes / (step["us"] * 1e-6)


def dense_steps(query: Tensor, keys: Tensor, values: Tensor, end: Tensor) -> dict[str, Callable[[int], Any]]:
    """Every dense decode attention to be had: over whole caches [layers, b, H, n, d]."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    b = query.shape[1]
    scratch = attend.AttendScratch.for_all(b, HEADS, keys.shape[3], HEADS * GROUP, DIM, DEVICE)
    first = torch.zeros_like(end)
    steps: dict[str, Callable[[int], Any]] = {
        "split-K (ours)": lambda i: attend.dense(query[i], keys[i], values[i], first, end, SCALE, scratch),
    }

    def sdpa(kind: Any, folded: bool) -> Callable[[int], Any]:
        def step(i: int) -> Tensor:
            with sdpa_kernel([kind]):
                if folded:  # the query heads of a KV head as queries of one head: exact, since nothing is masked
                    q = query[i].unflatten(1, (HEADS, GROUP))
                    return scaled_dot_product_attention(q, keys[i], values[i], scale=SCALE)
                return scaled_dot_product_attention(
                    query[i][:, :, None], keys[i], values[i], scale=SCALE, enable_gqa=True
                )

        return step

    for name, kind in {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }.items():
        steps[f"sdpa {name}, folded"] = sdpa(kind, True)
        if name != "math":  # it would copy the keys for every query head
            steps[f"sdpa {name}, gqa"] = sdpa(kind, False)
    try:
        from flash_attn import flash_attn_with_kvcache

        steps["flash-attn"] = lambda i: flash_attn_with_kvcache(
            query[i][:, None], keys[i].transpose(1, 2), values[i].transpose(1, 2), softmax_scale=SCALE
        )
    except ImportError:
        pass
    return steps


def time_case(b: int, n: int, bandwidth: float) -> dict[str, Any]:
    """One batch and context length: dense attention, FASA's stages and whole steps."""
    lead_bytes = 2 * b * HEADS * n * LEAD
    layers = min(64, max(2, -(-(256 << 20) // lead_bytes)))  # together well beyond the L2 cache
    keys, values = (torch.randn(layers, b, HEADS, n, DIM, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    lead, rest = keys[..., :LEAD].contiguous(), keys[..., LEAD:].contiguous()
    query = torch.randn(layers, b, HEADS * GROUP, DIM, device=DEVICE, dtype=torch.bfloat16)
    first, end, last = (torch.full((b,), x, dtype=torch.int32, device=DEVICE) for x in (0, n, n - 1))
    order = torch.arange(DIM, device=DEVICE).expand(HEADS, DIM).contiguous()

    dense: dict[str, Any] = {}
    outputs = {}
    for name, step in dense_steps(query, keys, values, end).items():
        attempt(dense, name, step, layers)
        if "us" in dense[name]:
            outputs[name] = step(0).reshape(b, HEADS * GROUP, DIM)
    wanted = attend.dense_reference(query[0][:1], keys[0][:1], values[0][:1], first[:1], end[:1], SCALE)
    for name, out in outputs.items():
        dense[name]["error"] = error(out[:1], wanted)
        if not dense[name]["error"] < 1e-2:
            dense[name]["failed"] = "wrong result"
    right = {name: x["us"] for name, x in dense.items() if "us" in x and "failed" not in x}
    best = min(right, key=lambda name: right[name])

    fasa: dict[str, Any] = {}
    dense_bytes = 2 * 2 * b * HEADS * n * DIM
    shares = {"kv_head": "max", "kv_softmax": "softmax", "query_head": "none"}
    for form, share in shares.items():
        work = decode.Workspace(b, HEADS * GROUP, HEADS, DIM, n, K, DEVICE, share)
        rows, stats = work.rows, (work.scores, work.peaks, work.sums)
        per_kv = HEADS if share == "softmax" else None
        found: dict[str, Any] = {}

        def step(i: int, work: Any = work) -> Tensor:
            tensors = (query[i][..., :LEAD], query[i], lead[i], rest[i], values[i], first, end, SCALE)
            return decode.fasa_step(*tensors, work, SINKS, RECENT)

        attempt(found, "step", step, layers)
        attempt(
            found,
            "tip",
            lambda i, stats=stats, best=share == "max": tip.tip(
                query[i][..., :LEAD], lead[i], first, end, SCALE, stats, best
            ),
            layers,
        )
        attempt(
            found,
            "select",
            lambda i, stats=stats, work=work, per_kv=per_kv: select.select(
                *stats, first, end, K, SCALE, SINKS, RECENT, per_kv, work.select
            ),
            layers,
        )
        attempt(
            found,
            "attend",
            lambda i, work=work: attend.attend(query[i], lead[i], rest[i], values[i], work.slots, SCALE, work.attend),
            layers,
        )
        if form == "kv_head":
            key, value = keys[0, :, :, 0], values[0, :, :, 0]
            attempt(
                found,
                "append",
                lambda i, k=key, v=value: append.append(k, v, order, lead[i], rest[i], values[i], last),
                layers,
            )
        elif (
            form == "query_head"
        ):  # the slowest case of the selection: all values equal, which is settled by one program for each row
            work.scores.fill_(1.0)
            work.peaks.fill_(1.0)
            attempt(
                found,
                "select, all equal",
                lambda i, stats=stats, work=work: select.select(
                    *stats, first, end, K, SCALE, SINKS, RECENT, None, work.select
                ),
                layers,
            )
        needed = lead_bytes + 2 * b * rows * K * (2 * DIM)
        found["bytes"] = needed
        found["limit"] = dense_bytes / needed
        if "us" in found["step"]:
            found["ratio"] = right[best] / found["step"]["us"]
            found["share"] = needed / bandwidth / (found["step"]["us"] * 1e-6)
        fasa[form] = found
    return {
        "batch": b,
        "tokens": n,
        "layers": layers,
        "dense": dense,
        "best_dense": best,
        "dense_bytes": dense_bytes,
        "dense_share": dense_bytes / bandwidth / (right[best] * 1e-6),
        "fasa": fasa,
    }


def tuned() -> dict[str, dict[str, str]]:
    return {
        name: {str(key): str(config) for key, config in getattr(kernel, "cache", {}).items()}
        for name, kernel in KERNELS.items()
    }


# the report ------------------------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    import triton

    properties = torch.cuda.get_device_properties(DEVICE)
    command = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
    try:
        driver = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        driver = "unknown"
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "memory_bytes": properties.total_memory,
        "driver_and_clocks": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def micro(found: dict[str, Any], name: str) -> str:
    return f"{found[name]['us']:.1f}" if "us" in found.get(name, {}) else "-"


def print_cases(cases: list[dict[str, Any]]) -> None:
    print("\nmicroseconds per layer; share: of the time that the bytes take at the copy bandwidth")
    print("| b | tokens | best dense | us | share | ours | form | step | ratio | limit | share | TIP | sel. | att. |")
    print("|--:|--:|---|--:|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|")
    for case in sorted(cases, key=lambda case: (case["batch"], case["tokens"])):
        best = case["best_dense"]
        left = f"| {case['batch']} | {case['tokens']} | {best} | {micro(case['dense'], best)} | "
        left += f"{case['dense_share']:.2f} | {micro(case['dense'], 'split-K (ours)')} | "
        for form, found in case["fasa"].items():
            print(
                f"{left}{form} | {micro(found, 'step')} | {found.get('ratio', 0):.2f} | {found['limit']:.2f} | "
                f"{found.get('share', 0):.2f} | {micro(found, 'tip')} | {micro(found, 'select')} | "
                f"{micro(found, 'attend')} |"
            )
    for case in cases:
        slow = {k: micro(case["dense"], k) if "failed" not in v else "failed" for k, v in case["dense"].items()}
        extra = f"append {micro(case['fasa']['kv_head'], 'append')}"
        extra += f", select all equal {micro(case['fasa']['query_head'], 'select, all equal')}"
        print(f"b {case['batch']} n {case['tokens']}: {slow}; {extra}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("kernels_gpu.json"), help="where the results go (JSON)")
    parser.add_argument("--seconds", type=float, default=170.0, help="do not start what would begin later than this")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile and check")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("kernels_gpu.py needs a CUDA GPU; torch sees none", file=sys.stderr)
        return 2
    if backend.triton is None:
        print("kernels_gpu.py needs triton, which is not installed", file=sys.stderr)
        return 2
    begin = time.monotonic()
    report: dict[str, Any] = {"environment": environment(), "cases": [], "problems": []}
    print(json.dumps(report["environment"]), flush=True)

    def save() -> None:
        report["seconds"] = time.monotonic() - begin
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1))

    report["checks"] = all_checks(arguments.workers, begin + 0.6 * arguments.seconds)
    results = [(check, name, value) for check in report["checks"] for name, value in check["error"].items()]
    wrong = [(check, name, value) for check, name, value in results if not isinstance(value, float) or value != value]
    for check, name, value in wrong[:12]:
        print("WRONG", check["shape"], check["dtype"], check["config"], name, str(value).strip()[-300:], sep=" | ")
    print(f"checks: {len(results)}, of them {len(wrong)} wrong, {time.monotonic() - begin:.0f} s", flush=True)
    save()

    report["copy_bytes_per_second"] = copy_bandwidth()
    print(f"copy bandwidth: {report['copy_bytes_per_second'] / 1e12:.2f} TB/s", flush=True)
    for b, n in LENGTHS:
        if time.monotonic() - begin > arguments.seconds:
            report["problems"].append(f"out of time before b {b} n {n}")
            continue
        try:
            report["cases"].append(time_case(b, n, report["copy_bytes_per_second"]))
        except Exception:
            report["problems"].append(f"b {b} n {n}: {traceback.format_exc(limit=-6)}")
        torch.cuda.empty_cache()
        report["tuned"] = tuned()
        save()
        print(f"b {b} n {n}: {time.monotonic() - begin:.0f} s", flush=True)
    print_cases(report["cases"])
    print(*report["problems"], sep="\n")
    save()
    return 1 if wrong or report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
