"""Ctrl-C while work is in hand that is about to be done: the work first, then the interruption."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from types import FrameType

log = logging.getLogger("fasa_bench")


@contextlib.contextmanager
def finishing(what: str) -> Iterator[None]:
    """A first Ctrl-C inside the block is raised at its end, as KeyboardInterrupt; a second one at once.

    Nothing changes in a thread other than the main one, nor where the signal is ignored (a job in the background).
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    asked = False

    def later(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        log.warning("interrupted: %s is finished first; Ctrl-C again stops at once", what)

    signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt
