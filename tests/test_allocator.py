"""Memory of a step is reused by the next one without page faults."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, torch
from fasa_bench.allocator import keep_freed_memory
assert keep_freed_memory()
def step():
    scores = torch.ones(2_000_000)
    return torch.exp(scores).sum() + torch.log(scores).sum()
for _ in range(10):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(40):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 40)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_a_step_costs_few_page_faults() -> None:
    """A step touches 4 to 6 thousand pages of 4 KiB; without the setting it may ask for all of them anew."""
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=one_thread)
    assert int(run.stdout) < 400
