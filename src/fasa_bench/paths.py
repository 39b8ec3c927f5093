"""Where things that are made once are kept: the user's cache folder, or FASA_BENCH_CACHE."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_folder(part: str) -> Path:
    """`<cache>/<part>`, made if missing."""
    base = os.environ.get("FASA_BENCH_CACHE") or platformdirs.user_cache_dir("fasa-bench")
    folder = Path(base) / part
    folder.mkdir(parents=True, exist_ok=True)
    return folder
