"""One task's examples spread over several workers: `shard=i/n` takes every n-th of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fasa_bench.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """Part `index` (from 1) of `count`."""

    index: int
    count: int

    @classmethod
    def of(cls, value: Any) -> Shard | None:
        """From the config: "i/n", or None for all examples."""
        if value is None:
            return None
        match = re.fullmatch(r"(\d+)/(\d+)", value) if isinstance(value, str) else None
        shard = cls(*map(int, match.groups())) if match else None
        if shard is None or not 1 <= shard.index <= shard.count:
            raise UserError.of("shard", value, "must be i/n with 1 <= i <= n, as in shard=2/4, or null for all")
        return shard

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def all(self) -> list[Shard]:
        """This one and its siblings."""
        return [Shard(index, self.count) for index in range(1, self.count + 1)]

    def of_examples(self, examples: Sequence[T]) -> list[T]:
        """This shard's part, in order; neighbours go to different shards, so that long ones spread."""
        return list(examples[self.index - 1 :: self.count])
