"""Keep memory that was freed, instead of handing it back to the system and asking for it again at the next step."""

from __future__ import annotations

import ctypes
import functools
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
KEEP = 1 << 30  # bytes that may lie free at the end of the heap
LARGEST_MMAP_THRESHOLD = 32 << 20  # the most glibc takes: half the size of one of its heaps


@functools.cache
def keep_freed_memory() -> bool:
    """Once per process; False where the C library has no such setting.

    A decode step allocates and frees the scores of a long context in every layer. Fresh pages come from the system one
    page fault at a time, which can take longer than the arithmetic.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # a C library other than glibc
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, KEEP)) and bool(mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD))
