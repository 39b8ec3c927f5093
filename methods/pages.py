"""Pages of the cache for Quest: bounds of their keys, and the choice of many queries at once."""

from __future__ import annotations

import torch
from torch import Tensor

from fasa_bench.cache import KVLayer


def page_keys(layer: KVLayer, start: int, end: int) -> Tensor:
    """Keys of the slots start..end - 1: [b, H, end - start, d]."""
    return layer.gather(torch.arange(start, end, device=layer.device).expand(layer.batch, 1, -1))[0]


def page_bounds(keys: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each dimension in every page: [b, H, pages * page, d] -> two [b, H, pages, d]."""
    paged = keys.unflatten(2, (keys.shape[2] // page, page))
    return paged.amin(3), paged.amax(3)


def choose(
    layer: KVLayer, query: Tensor, budget: int, pages: int | None, page: int, recent: int, forced: bool
) -> Tensor:
    """What many queries, those of the newest tokens, read: [b, Hq, q, d] -> bool [b, Hq, q, n].

    Each takes its best `pages` whole pages, or (None) the first `budget` tokens of just enough pages; and the `recent`
    newest tokens. forced: its newest page is one of them. A query that has no more than all this reads everything.
    """
    seen = torch.arange(layer.length - query.shape[2] + 1, layer.length + 1, device=query.device)
    paged = (seen - recent).clamp(min=1)
    scores, newest = scores_so_far(layer, query, paged, page)
    if forced:
        scores = scores.scatter(-1, newest[:, None].expand_as(scores[..., :1]), torch.inf)
    # one page more where the newest one, which may be among them, is not full
    wanted = torch.full_like(paged, pages) if pages else -(-budget // page) + (paged % page > 0).long()
    best = scores.topk(min(int(wanted.max()), scores.shape[-1]), dim=-1).indices
    counted = (torch.arange(best.shape[-1], device=best.device) < wanted[:, None]).expand_as(best)
    read = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, counted).repeat_interleave(page, dim=-1)
    read = torch.nn.functional.pad(read, (0, max(0, layer.length - read.shape[-1])))[..., : layer.length]
    slots = torch.arange(layer.length, device=read.device)
    read = read & (slots < paged[:, None])
    if pages is None:
        read = read & (read.cumsum(-1) <= budget)
    return read | (slots >= paged[:, None]) | (seen <= budget + recent)[:, None]


def scores_so_far(layer: KVLayer, query: Tensor, paged: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Upper bound of q.k over every page, for many queries, each over the first `paged` tokens of the cache.

    query [b, Hq, q, d], paged [q] ascending -> scores [b, Hq, q, pages], -inf for pages that a query does not have
    yet, and the number of its newest page [q].
    """
    keys = page_keys(layer, 0, int(paged[-1]))
    missing = keys[:, :, -1:].expand(-1, -1, -keys.shape[2] % page, -1)  # the last key again: the same bounds
    rows = torch.cat([keys, missing], dim=2).unflatten(2, (-1, page))
    least, most = rows.cummin(3).values, rows.cummax(3).values
    grouped = query.unflatten(1, (layer.heads, -1))  # [b, H, G, q, d]
    positive, negative = grouped.clamp(min=0), grouped.clamp(max=0)
    whole = positive @ most[:, :, None, :, -1].mT + negative @ least[:, :, None, :, -1].mT
    # of the newest page only the tokens so far count: the running bounds at the last of them
    so_far = [bound.flatten(2, 3)[:, :, None, paged - 1] for bound in (most, least)]
    score = (positive * so_far[0] + negative * so_far[1]).sum(-1, keepdim=True)
    newest = (paged - 1) // page
    scores = whole.scatter(-1, newest[:, None].expand_as(score), score)
    later = torch.arange(scores.shape[-1], device=query.device) > newest[:, None]
    return scores.masked_fill(later, -torch.inf).flatten(1, 2), newest
