"""What this device could do at best: the rate at which it reads memory, and how much of it is free."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fasa_bench.clock import synchronise

READ_BYTES = {"cpu": 2**29}  # far above what caches hold; twice that elsewhere
MEMORY = Path("/proc/meminfo")
LIMITS = [  # of a container: most bytes, bytes in use
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
]


@functools.cache
def bandwidth(device: torch.device, repeats: int = 7) -> dict[str, float]:
    """Bytes per second, the best of `repeats`: of the sum of one large tensor, its product with a vector, its copy.

    `limit` is the largest: what has to move bytes through this memory can hope for no more.
    """
    size = READ_BYTES.get(device.type, 2**30)
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    vector = torch.ones(4096, device=device)
    found = {
        "sum": size / _best(lambda: source.sum(), device, repeats),
        "product": size / _best(lambda: source.view(-1, 4096) @ vector, device, repeats),
        "copy": 2 * size / _best(lambda: target.copy_(source), device, repeats),
    }
    return {**found, "limit": max(found.values())}


def free_bytes(device: torch.device) -> int | None:
    """Memory that can still be taken on the device; None where the system does not tell."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        if hasattr(module, "empty_cache"):  # what PyTorch keeps for later is free too
            module.empty_cache()
        return int(module.mem_get_info(device)[0]) if hasattr(module, "mem_get_info") else None
    known = []
    try:
        line = next(line for line in MEMORY.read_text().splitlines() if line.startswith("MemAvailable"))
        known.append(int(line.split()[1]) * 1024)
    except (OSError, StopIteration):
        return None
    for most, used in LIMITS:
        try:
            known.append(int(most.read_text()) - int(used.read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(known)


def _best(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        synchronise(device)
        start = time.perf_counter()
        work()
        synchronise(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])
