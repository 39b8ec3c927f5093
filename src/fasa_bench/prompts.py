"""The dense pass over an example's prompt, shared by all jobs that decode it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fasa_bench.method import Observation
from fasa_bench.session import Prefilled, Session
from fasa_bench.task import Example

if TYPE_CHECKING:
    from fasa_bench.runner import Job


class Prompts:
    """Makes the pass when the first job asks for it, for all jobs that want the same tokens; held by this object only.

    What their methods observe of it is recorded once, for all of them.
    """

    def __init__(self, session: Session, wanting: Sequence[tuple[Job, Example]]) -> None:
        self._session = session
        self._wanting = wanting
        self._found: dict[tuple[int, ...], Prefilled | Exception] = {}

    def prefilled(self, job: Job, example: Example) -> Prefilled:
        """The prompt after its pass, as far as the job's protocol wants it dense.

        Raises for every job what was raised for the first.
        """
        ids = _dense(job, example)
        if ids not in self._found:
            same = [(job, example) for job, example in self._wanting if _dense(job, example) == ids]
            observe = functools.reduce(Observation.union, (job.method.observes() for job, _ in same))
            reserve = max(len(example.prompt_ids) - len(ids) + example.room for _, example in same)
            try:
                self._found[ids] = self._session.prefill(ids, observe=observe, reserve=reserve)
            except Exception as error:
                self._found[ids] = error.with_traceback(None)  # it would keep tensors alive
        found = self._found[ids]
        if isinstance(found, Exception):
            raise found
        return found


def _dense(job: Job, example: Example) -> tuple[int, ...]:
    return tuple(job.protocol.split(example)[0])
