"""The process that compares two mathematical expressions with math-verify; `math_grading` starts and kills it.

Run as a script: one JSON object {"gold", "answer"} a line on stdin, true or false a line on stdout, after a first
line that says it is ready. It imports nothing of this package, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys

MEMORY = 4 * 2**30  # bytes: 9^(9^9) fills any machine long before it is computed


def equal(gold: str, answer: str) -> bool:
    """Whether math-verify takes the content of two boxes for the same; what it cannot read is wrong."""
    from math_verify import parse, verify
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    extraction = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    try:  # its own time limits work through signals that sympy swallows; ours kills the process
        read = [
            parse(rf"\boxed{{{text}}}", extraction_config=extraction, parsing_timeout=None) for text in (gold, answer)
        ]
        return bool(verify(*read, timeout_seconds=None))
    except Exception:  # whatever the parser or sympy meets in a model's text, recursion and memory included
        return False


def main(seconds: int) -> None:
    logging.disable(logging.CRITICAL)
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has none, some systems refuse
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    sys.stdout = sys.stderr  # a library that prints must not answer for us
    equal("1", "1")  # import everything before the first clock runs
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        if hasattr(signal, "alarm"):  # ends this process even if nobody is left to kill it
            signal.alarm(seconds)
        request = json.loads(line)
        print(json.dumps(equal(request["gold"], request["answer"])), file=replies, flush=True)
        if hasattr(signal, "alarm"):
            signal.alarm(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
