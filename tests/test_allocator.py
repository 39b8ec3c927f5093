"""Memory of a step is reused by the next one without page faults."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from fasa_bench.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def step():
    scores = torch.ones(2_000_000)
    return torch.exp(scores).sum() + torch.log(scores).sum()
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_a_step_costs_no_page_faults() -> None:
    def faults(how: str) -> int:
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", SCRIPT, how]
        run = subprocess.run(command, capture_output=True, text=True, check=True, env=one_thread)
        return int(run.stdout)

    kept, left = faults("keep"), faults("leave")
    assert left > 1000
    assert kept < left / 20
