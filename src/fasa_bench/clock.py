"""Time by stage, with the device brought to rest at both ends of what is timed."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch


def synchronise(device: torch.device) -> None:
    """Wait for the device's queue; nothing to wait for on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Clock:
    """Sums seconds by name.

    wait: called before every reading of the time. Stages inside a step are timed only when `fine` is set: each one
    then waits for the device, which adds to the step itself; on a CPU that costs nothing.
    """

    def __init__(self, wait: Callable[[], None] = lambda: None, fine: bool = True) -> None:
        self.wait, self.fine = wait, fine
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = 0.0  # seconds of the stages inside the one that is running

    @classmethod
    def on(cls, device: torch.device) -> Clock:
        return cls(wait=lambda: synchronise(device), fine=device.type == "cpu")

    @contextlib.contextmanager
    def whole(self, name: str) -> Iterator[None]:
        """Time a whole pass or step, whatever `fine` says; every `stage` inside the block counts here as well."""
        token = _running.set(self)
        try:
            start = self._now()
            yield
            self.seconds[name] += self._now() - start
        finally:
            _running.reset(token)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a part of a step, without the stages inside it: the stages of a step add up."""
        if not self.fine:
            yield
            return
        outside, self._inside = self._inside, 0.0
        start = self._now()
        yield
        spent = self._now() - start
        self.seconds[name] += spent - self._inside
        self._inside = outside + spent

    def spent(self, name: str, seconds: float) -> None:
        """Count a part of the running stage that somebody else timed as a stage of its own."""
        if self.fine:
            self.seconds[name] += seconds
            self._inside += seconds

    def _now(self) -> float:
        self.wait()
        return time.perf_counter()


_running: ContextVar[Clock | None] = ContextVar("running", default=None)


def stage(name: str) -> contextlib.AbstractContextManager[None]:
    """`Clock.stage` on the clock of the pass or step in progress, if there is one."""
    clock = _running.get()
    return contextlib.nullcontext() if clock is None else clock.stage(name)


def spent(name: str, seconds: float) -> None:
    """`Clock.spent` on the clock of the step in progress, if there is one."""
    clock = _running.get()
    if clock is not None:
        clock.spent(name, seconds)
