"""`make test-slurm`: a sweep through a Slurm cluster of one node, set up for it on this machine and ended after it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.sweep import check

NODE = Path(__file__).with_name("slurm_node.sh")
SMALL = ["gpus_per_node=0", "cpus_per_task=1", "mem_gb=2", "timeout_min=5"]


@pytest.fixture
def slurm() -> Iterator[dict[str, str]]:
    """The environment in which clients find the cluster."""
    if importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is None:
        pytest.exit("submitit's launcher is not installed: pip install 'fasa-bench[slurm]'", returncode=1)
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:  # pytest's own is too long a path for a socket
        done = subprocess.run([NODE, "start", folder], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        try:
            if done.returncode:
                pytest.exit(f"no Slurm here: {done.stderr}", returncode=1)
            yield {"SLURM_CONF": f"{folder}/slurm.conf"}
        finally:
            subprocess.run([NODE, "stop", folder], check=True)


def test_a_sweep_through_slurm_gives_what_it_gives_here(slurm: dict[str, str], tmp_path: Path) -> None:
    settings = [f"hydra.launcher.through.{line}" for line in SMALL]
    check(["hydra/launcher=slurm", *settings], tmp_path, slurm)
    jobs = subprocess.run(
        ["scontrol", "show", "jobs"], env=os.environ | slurm, capture_output=True, text=True, check=True
    ).stdout
    assert jobs.count("JobName=fasa-bench") == 2  # it was Slurm that ran them, one job a group
