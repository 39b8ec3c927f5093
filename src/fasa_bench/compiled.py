"""Shared libraries from C++ sources: built at their first use, in seconds, once for each compiler and processor.

Plain libraries without PyTorch's headers compile fast and fit every version of PyTorch. They may use OpenMP, whose
threads are to be PyTorch's own: nothing but PyTorch is linked, which has the runtime loaded.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from filelock import FileLock

from fasa_bench.errors import UserError

COMPILERS = ("c++", "g++", "clang++")  # the first that is there, unless CXX names one
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-w")
WIDE = "-mprefer-vector-width=512"
SECONDS = 120  # after which a compiler is given up
SWITCH = "FASA_BENCH_CPP"  # environment variable; 0 does without

log = logging.getLogger(__name__)


class NoLibraryError(Exception):
    """Why there is none. What needs it does the same by PyTorch's operations, more slowly."""


@functools.cache
def shared_library(source: Path) -> Path:
    """The library of this source in the user's cache folder, made if it is not there; raises NoLibraryError."""
    if os.environ.get(SWITCH) == "0":
        raise NoLibraryError(f"{SWITCH}=0")
    if not source.exists():
        raise NoLibraryError(f"{source.name} is not installed")
    compiler = _compiler()
    try:
        from fasa_bench.paths import cache_folder  # of what not every machine with a GPU has

        folder = cache_folder("compiled")
    except (ImportError, UserError) as error:
        raise NoLibraryError(str(error)) from error
    target = folder / f"{source.stem}-{_key(source, compiler)}.so"
    with FileLock(f"{target}.lock", timeout=2 * SECONDS):  # a second process waits for the first one's
        if not target.exists():
            log.info("building %s with %s", source.name, compiler)
            with tempfile.TemporaryDirectory(dir=folder) as part:
                made = Path(part) / target.name
                _compile(compiler, source, made)
                made.replace(target)
    return target


def _compiler() -> str:
    named = os.environ.get("CXX")
    for name in (named,) if named else COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise NoLibraryError(f"no C++ compiler ({named or ', '.join(COMPILERS)})")


def _key(source: Path, compiler: str) -> str:
    """Of all that the library depends on; a cache folder may be shared by different machines."""
    files = [source, *sorted(source.parent.glob("*.h"))]
    parts = [*(file.read_text("utf-8") for file in files), " ".join((*FLAGS, WIDE)), _run(compiler, "--version")]
    parts += [_run(compiler, "-march=native", "-E", "-dM", "-x", "c++", os.devnull), torch.__version__]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compile(compiler: str, source: Path, target: Path) -> None:
    object_file = target.with_suffix(".o")
    _run(compiler, *FLAGS, *_wide(compiler), "-c", str(source), "-o", str(object_file))
    linked = f"-L{Path(torch.__file__).parent / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu"
    _run(compiler, "-shared", str(object_file), "-o", str(target), *linked)


def _wide(compiler: str) -> list[str]:
    """Whole AVX-512 registers, where the compiler knows them."""
    try:
        _run(compiler, WIDE, "-E", "-x", "c++", os.devnull)
    except NoLibraryError:
        return []
    return [WIDE]


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS)
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "").strip().splitlines()
        raise NoLibraryError(f"{Path(command[0]).name} failed: {said[0] if said else error.returncode}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise NoLibraryError(f"{Path(command[0]).name}: {error}") from error
    return done.stdout
