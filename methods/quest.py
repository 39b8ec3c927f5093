"""Quest: read the pages of the cache whose keys could match the query best.

Source: mit-han-lab/Quest. The cache is divided into pages of consecutive tokens; of each page the smallest and the
largest value of every key dimension are kept. For a query q they bound q.k over the page from above by
sum_i max(q_i min_i, q_i max_i), and each query head reads the pages with the highest bounds. The default is the
official evaluation (evaluation/quest_attention.py), from which the published accuracy comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fasa_bench.cache import KVLayer
from fasa_bench.errors import UserError
from fasa_bench.method import Method
from fasa_bench.methods.pages import bounded, choose, page_bounds, page_keys


@dataclass
class Quest(Method):
    """page: tokens of a page; pages start at token 0. min_pages: pages read at least, as the budget is whole pages.

    newest: free lets the newest page, and with it the current token, compete; forced always reads it, as one of the
    pages (official CUDA path). unit: pages reads whole pages; tokens reads exactly the budget, the first so many
    tokens of just enough pages (KVCache-Factory). recent: newest tokens that are read besides the pages, inside the
    budget; pages are then made of the tokens before them (KVCache-Factory).
    """

    page: int = 16
    min_pages: int = 3
    newest: Literal["free", "forced"] = "free"
    unit: Literal["pages", "tokens"] = "pages"
    recent: int = 0

    ragged: ClassVar[bool] = True  # the last page is rarely full
    padding: ClassVar[bool] = False  # pages are cut at the same slots in all rows
    notes: ClassVar[dict[str, str]] = {
        "dense_layers": "official evaluation: layers 0 and 1 by a counter that is right for 32 layers only (none of "
        "shallower models, the first n - 30 of deeper ones); official CUDA path and ours: layers 0 and 1",
        "min_pages": "official evaluation 3 whatever the budget; CUDA path none; ours 3, and a budget that holds them",
        "newest": "official evaluation free, CUDA path forced; ours free",
        "unit": "official code whole pages; KVCache-Factory exact tokens; ours whole pages",
        "recent": "official code none; KVCache-Factory a window inside the budget; ours none",
    }

    def __post_init__(self) -> None:
        for key, least in (("page", 1), ("min_pages", 1), ("recent", 0)):
            if getattr(self, key) < least:
                raise UserError.of(f"method.{key}", getattr(self, key), f"must be at least {least}")
        if self.unit == "tokens" and self.newest == "forced":
            raise UserError.of("method.newest", self.newest, "exact tokens cut the newest page; use method.recent")

    def smallest_budget(self) -> int:
        return self.recent + (self.min_pages * self.page if self.unit == "pages" else 1)

    @property
    def parallel(self) -> bool:
        return True

    def prefill(self, layer: KVLayer, query: Tensor | None) -> None:
        if layer.budget is not None and layer.index not in self.dense_layers:
            self._full_pages(layer)

    def select(self, layer: KVLayer, query: Tensor) -> Tensor:
        pages = self.best_pages(layer, self.page_scores(layer, query))
        paged = layer.length - self.recent
        slots = (pages[..., None] * self.page + torch.arange(self.page, device=pages.device)).flatten(2)
        if self.unit == "pages":  # what is missing in the newest page comes first, as -1
            slots = slots.masked_fill(slots >= paged, -1).sort(dim=-1).values
        else:
            slots = slots.masked_fill(slots >= paged, paged).sort(dim=-1).values[..., : self._budget(layer)]
        recent = torch.arange(paged, layer.length, device=slots.device)
        return torch.cat([slots, recent.expand(*slots.shape[:2], -1)], dim=-1)[:, :, None]

    def reads(self, layer: KVLayer, query: Tensor, visible: Tensor) -> Tensor:
        budget, forced, bounds = self._budget(layer), self.newest == "forced", self._full_pages(layer)
        pages = max(self.min_pages, budget // self.page) if self.unit == "pages" else None
        return choose(layer, query, bounds, budget, pages, self.page, self.recent, forced) & visible

    def best_pages(self, layer: KVLayer, scores: Tensor) -> Tensor:
        """The pages to read, in no order: scores [b, Hq, pages] -> [b, Hq, p]."""
        if self.newest == "forced":
            scores = torch.cat([scores[..., :-1], torch.full_like(scores[..., -1:], torch.inf)], dim=-1)
        if self.unit == "pages":
            wanted = max(self.min_pages, self._budget(layer) // self.page)
        else:  # one page more where the newest one, which may be among them, is not full
            wanted = -(-self._budget(layer) // self.page) + ((layer.length - self.recent) % self.page > 0)
        return scores.topk(min(wanted, scores.shape[-1]), dim=-1, sorted=False).indices

    def _budget(self, layer: KVLayer) -> int:
        """Tokens for the pages. More than there are: still whole pages of those there are (official evaluation)."""
        assert layer.budget is not None
        return min(layer.length, layer.budget) - self.recent

    def page_scores(self, layer: KVLayer, query: Tensor) -> Tensor:
        """Upper bound of q.k, unscaled, over the real tokens of every page: [b, Hq, 1, d] -> [b, Hq, pages]."""
        least, most = self._full_pages(layer)
        first = least.shape[2] * self.page
        if first < layer.length - self.recent:
            keys = page_keys(layer, first, layer.length - self.recent)
            least, most = (
                torch.cat(pair, 2) for pair in zip((least, most), page_bounds(keys, keys.shape[2]), strict=True)
            )
        layer.read_bytes += least.nbytes + most.nbytes
        grouped = query[:, :, 0].unflatten(1, (layer.heads, -1))  # [b, H, G, d]
        return bounded(layer, grouped.clamp(min=0) @ most.mT + grouped.clamp(max=0) @ least.mT, self.page, self.recent)

    def _full_pages(self, layer: KVLayer) -> tuple[Tensor, Tensor]:
        """Bounds of all full pages, two of [b, H, pages, d]; those that filled up since the last call are added."""
        known = layer.state["least"].shape[2] if "least" in layer.state else 0
        full = max(0, layer.length - self.recent) // self.page
        if full > known or "least" not in layer.state:
            new = page_bounds(page_keys(layer, known * self.page, full * self.page), self.page)
            for name, bound in zip(("least", "most"), new, strict=True):
                layer.state[name] = torch.cat([layer.state[name], bound], dim=2) if known else bound
        return layer.state["least"], layer.state["most"]
