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
    """Makes the pass when the first job asks for it, for all jobs that want the same tokens.

    What their methods observe of it is recorded once, for all of them. One pass is held at a time: jobs that want the
    same should come one after the other.
    """

    def __init__(self, session: Session, wanting: Sequence[tuple[Job, Example]]) -> None:
        self._session = session
        self._wanting = wanting
        self._ids: tuple[int, ...] = ()
        self._found: Prefilled | Exception | None = None

    def prefilled(self, job: Job, example: Example) -> Prefilled:
        """The prompt after its pass; raises for every job what was raised for the first."""
        ids = dense_ids(job, example)
        if self._found is None or self._ids != ids:
            self._found = None  # freed before the next
            self._ids, self._found = ids, self._make(ids)
        if isinstance(self._found, Exception):
            raise self._found
        return self._found

    def _make(self, ids: tuple[int, ...]) -> Prefilled | Exception:
        same = [(job, example) for job, example in self._wanting if dense_ids(job, example) == ids]
        wanted = [job.method.observes() for job, _ in same]
        wanted += [example.study.observes() for _, example in same if example.study is not None]
        observe = functools.reduce(Observation.union, wanted)
        reserve = max(len(example.prompt_ids) - len(ids) + example.room for _, example in same)
        try:
            return self._session.prefill(ids, observe=observe, reserve=reserve)
        except Exception as error:
            return error.with_traceback(None)  # which would keep tensors alive


def dense_ids(job: Job, example: Example) -> tuple[int, ...]:
    """The tokens that the job's protocol wants in the dense pass."""
    return tuple(job.protocol.split(example)[0])
