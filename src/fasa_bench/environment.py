"""Where a run was computed: versions, source and hardware, without the name of the machine."""

from __future__ import annotations

import functools
import platform
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("fasa-bench", "torch", "transformers", "numpy", "triton", "flash-attn")


@functools.cache
def environment() -> dict[str, Any]:
    """Versions and hardware of this process, without the name of the machine."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpus else None
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "gpu": gpus,
        "driver": driver.split("\n")[0] if driver else None,
        "cuda": torch.version.cuda,
        "packages": {name: _version(name) for name in PACKAGES},
        "git": _git(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _git() -> dict[str, Any] | None:
    """Commit of this source, if it is a checkout of its own and not merely installed somewhere inside one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
    changes = _output("git", "--no-optional-locks", "-C", str(root), "status", "--porcelain")
    return {"commit": commit, "dirty": bool(changes)} if commit and changes is not None else None


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
