"""Is a model's answer to a mathematical problem right? The last \\boxed{...} of a text against the reference.

Expressions are compared by math-verify in processes of their own under a hard limit of time and memory: a text is
written by a model, and computing 9^(9^9) must cost seconds, not the run.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import math
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from fasa_bench.errors import UserError
from fasa_bench.tasks import math_worker

log = logging.getLogger("fasa_bench")

SECONDS = 10.0  # for one answer; usual ones take milliseconds
START_SECONDS = 120.0  # sympy from a slow disk
_TOKEN = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


def last_box(text: str) -> str | None:
    r"""Content of the last \boxed{...} whose braces balance, None if there is none. Linear in the text.

    The last one is the one that opens last, so of nested boxes the inner. \{ and \} are no braces.
    """
    found: tuple[int, int] | None = None
    opened: list[int | None] = []  # where the content of a box starts; None for any other brace
    for token in _TOKEN.finditer(text):
        if token[0] == "}":
            start = opened.pop() if opened else None
            if start is not None and (found is None or start > found[0]):
                found = (start, token.start())
        elif token[0] == "{":
            opened.append(None)
        elif token[0][-1] == "{" and token[0] != r"\{":
            opened.append(token.end())
    return text[slice(*found)].strip() if found else None


def pass_at_k(correct: Sequence[bool | int], k: int) -> float:
    """Chance that one of k samples, drawn without repeats from those that are there, is right.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) of Chen et al. 2021 (arXiv 2107.03374, section 2.1), with n the
    real number of samples, whatever was asked for; k above n counts as n. ValueError without samples.
    """
    n = len(correct)
    if n == 0 or k < 1:
        raise ValueError(f"pass@{k} of {n} samples")
    k = min(k, n)
    return 1 - math.comb(n - sum(map(bool, correct)), k) / math.comb(n, k)


class Grader:
    """Compares answers in `workers` processes, started when first needed and replaced when they had to be killed.

    seconds: limit for one answer; an answer that takes longer, or kills its process, is wrong.
    """

    def __init__(self, seconds: float = SECONDS, workers: int | None = None) -> None:
        self.seconds = seconds
        size = workers or min(4, os.cpu_count() or 1)
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(size):
            self._idle.put(None)
        self._threads = ThreadPoolExecutor(size)

    def grade(self, texts: Sequence[str], gold: str) -> list[bool]:
        r"""Whether the last balanced \boxed{} of each text equals `gold` (an expression, in a box or not).

        A text without a box is wrong. Percent signs count as not there, as in MATH's own grader: 200 is not 2.
        """
        reference = last_box(gold)
        reference = _clean(gold if reference is None else reference)
        return list(self._threads.map(lambda text: self._is_right(last_box(text), reference), texts))

    def close(self) -> None:
        self._threads.shutdown()
        while not self._idle.empty():
            worker = self._idle.get()
            if worker:
                worker.kill()

    def _is_right(self, box: str | None, gold: str) -> bool:
        answer = _clean(box or "")
        if not answer:
            return False
        if answer == gold:
            return True
        if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(gold):  # no process needed; 073 is 73
            return int(answer) == int(gold)
        worker = self._idle.get()
        try:
            if worker is None or worker.ended:
                worker = _Worker(self.seconds)
            verdict = worker.ask(gold, answer)
            if verdict is None:
                log.warning("an answer of %d characters could not be graded in time: wrong", len(answer))
                worker.kill()
                worker = None
            return bool(verdict)
        finally:
            self._idle.put(worker)


def grader() -> Grader:
    """The grader of this process; its own processes end with it."""
    return _grader(os.getpid())  # a forked process must not talk over its parent's pipes


@functools.cache
def _grader(pid: int) -> Grader:
    shared = Grader()
    atexit.register(shared.close)
    return shared


class _Worker:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        # -P: the folder of the script holds a math.py, which must not hide Python's own
        command = [sys.executable, "-P", str(math_worker.__file__), str(math.ceil(seconds) + 5)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env={**os.environ, "PYTHONHASHSEED": "0"},  # sympy's paths depend on the order of sets
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        self._replies: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        if self._reply(START_SECONDS) is None:
            self.kill()
            raise UserError("the grader of mathematical answers does not start: pip install 'math-verify>=0.8'")

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, gold: str, answer: str) -> bool | None:
        """The verdict, None if there is none in time or the process died of it."""
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps({"gold": gold, "answer": answer}) + "\n")
            self._process.stdin.flush()
        except OSError:
            return None
        reply = self._reply(self.seconds)
        return None if reply is None else bool(json.loads(reply))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._replies.put(line)
        self._replies.put(None)

    def _reply(self, seconds: float) -> str | None:
        try:
            return self._replies.get(timeout=seconds)
        except queue.Empty:
            return None


def _clean(text: str) -> str:
    return text.replace(r"\%", "").replace("%", "").strip()
