"""Memory of a step is reused by the next one without page faults."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, resource, torch
from fasa_bench import allocator
def faults():
    def step():
        scores = [torch.ones(2_000_000) for _ in range(4)]  # 7,800 pages of 4 KiB
    for _ in range(5):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 20
mallopt = ctypes.CDLL(None).mallopt
for what in (allocator.M_TRIM_THRESHOLD, allocator.M_MMAP_THRESHOLD):
    mallopt(what, 1 << 17)  # what a process starts with; left to itself, glibc raises it at times
print(faults())
assert allocator.keep_freed_memory()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_a_step_costs_no_page_faults() -> None:
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=one_thread)
    left, kept = map(int, run.stdout.split())
    assert left > 1000
    assert kept < 100
