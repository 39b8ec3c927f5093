"""`make test-ray`: a sweep through a Ray cluster of one node, set up for it on this machine and ended after it."""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.sweep import check

NEEDED = {
    "ray": "pip install 'fasa-bench[ray]'",
    "hydra_plugins.hydra_ray_launcher": "pip install --no-deps hydra-ray-launcher",
}
HEAD = ["start", "--head", "--block", "--port=0", "--num-cpus=2", "--num-gpus=0", "--include-dashboard=false"]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of the cluster's files; `ray_current_cluster` in it is its address."""
    for module, install in NEEDED.items():
        if importlib.util.find_spec(module) is None:
            pytest.exit(f"{module} is not installed: {install}", returncode=1)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # its ports take commands from whoever reaches them
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as name:  # short: for sockets
        folder = Path(name)
        line = [sys.executable, "-m", "ray.scripts.scripts", *HEAD, "--disable-usage-stats", f"--temp-dir={folder}"]
        with (folder / "log").open("w") as log:
            node = subprocess.Popen(line, stdout=log, stderr=log, start_new_session=True)
        try:
            deadline = time.monotonic() + 120
            while "Ray runtime started" not in (folder / "log").read_text():
                if node.poll() is not None or time.monotonic() > deadline:
                    pytest.exit(f"Ray does not start here: {(folder / 'log').read_text()}", returncode=1)
                time.sleep(0.2)
            yield folder
        finally:
            os.killpg(node.pid, signal.SIGTERM)
            node.wait(timeout=60)


def test_a_sweep_through_ray_gives_what_it_gives_here(ray: Path, tmp_path: Path) -> None:
    settings = ["remote.num_gpus=0", f"init.address={(ray / 'ray_current_cluster').read_text()}"]
    check(["hydra/launcher=ray_tasks", *(f"hydra.launcher.through.ray.{line}" for line in settings)], tmp_path)
    logs = [path.read_text() for path in (ray / "session_latest" / "logs").glob("worker-*.err")]
    assert sum(text.count("stdlib 3 runs: 100%") for text in logs) == 2  # it was Ray that ran them, one task a group
