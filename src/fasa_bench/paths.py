"""Where things that are made once are kept: the user's cache folder, or FASA_BENCH_CACHE."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from fasa_bench.errors import UserError


def cache_folder(part: str) -> Path:
    """`<cache>/<part>`, made if missing."""
    base = os.environ.get("FASA_BENCH_CACHE") or platformdirs.user_cache_dir("fasa-bench")
    folder = Path(base) / part
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError.of(
            "FASA_BENCH_CACHE", str(base), f"{error.strerror}; give a folder that can be written"
        ) from error
    return folder
