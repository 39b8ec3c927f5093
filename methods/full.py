"""Full KV: every head reads every cached token at every step. The reference that all methods are measured against."""

from dataclasses import dataclass
from typing import ClassVar

from fasa_bench.method import Method


@dataclass
class FullKV(Method):
    takes_budget: ClassVar[bool] = False

    @property
    def parallel(self) -> bool:
        return True
