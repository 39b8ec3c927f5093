"""Time by stage, with the device brought to rest at both ends of what is timed."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch


def synchronise(device: torch.device) -> None:
    """Wait for the device's queue; nothing to wait for on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Clock:
    """Sums seconds by stage name.

    wait: called before every reading of the time. Stages inside a step are timed only when `fine` is set: each one
    then waits for the device, which adds to the step itself; on a CPU that costs nothing.
    """

    def __init__(self, wait: Callable[[], None] = lambda: None, fine: bool = True) -> None:
        self.wait, self.fine = wait, fine
        self.seconds: dict[str, float] = defaultdict(float)

    @classmethod
    def on(cls, device: torch.device) -> Clock:
        return cls(wait=lambda: synchronise(device), fine=device.type == "cpu")

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a part of a step."""
        if not self.fine:
            yield
            return
        with self.whole(name):
            yield

    @contextlib.contextmanager
    def whole(self, name: str) -> Iterator[None]:
        """Time a whole pass or step, whatever `fine` says."""
        self.wait()
        start = time.perf_counter()
        yield
        self.wait()
        self.seconds[name] += time.perf_counter() - start
