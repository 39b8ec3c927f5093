"""The one error for input that a user can mend."""

from __future__ import annotations

from typing import Any


class UserError(Exception):
    """Bad input: shown as one line, without a traceback, and the process ends with a non-zero status."""

    @classmethod
    def of(cls, key: str, value: Any, allowed: str) -> UserError:
        """The house form: which key, what it was given, and what is allowed."""
        return cls(f"{key}={value!r} is not allowed: {allowed}")


class FailedExamplesError(Exception):
    """A run went through all examples, and some of them could not be computed."""
