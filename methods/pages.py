"""Pages of the cache for Quest: bounds of their keys, and the choice of many queries at once."""

from __future__ import annotations

import torch
from torch import Tensor

from fasa_bench.cache import KVLayer
from fasa_bench.softmax import biased, position_bias


def page_keys(layer: KVLayer, start: int, end: int) -> Tensor:
    """Keys of the slots start..end - 1: [b, H, end - start, d]."""
    return layer.gather(torch.arange(start, end, device=layer.device).expand(layer.batch, 1, -1))[0]


def page_bounds(keys: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each dimension in every page: [b, H, pages * page, d] -> two [b, H, pages, d]."""
    paged = keys.unflatten(2, (keys.shape[2] // page, page))
    return paged.amin(3), paged.amax(3)


def bounded(layer: KVLayer, scores: Tensor, page: int, recent: int) -> Tensor:
    """Bounds of products [b, H, G, pages] as [b, Hq, pages], and of logits where ALiBi adds to them.

    The bias adds most to the newest token of a page; pages are made of all but the `recent` newest tokens.
    """
    scores = scores.flatten(1, 2)
    if layer.slopes is None:
        return scores
    newest = torch.arange(1, scores.shape[-1] + 1, device=scores.device) * page - 1
    slots = newest.clamp(max=layer.length - recent - 1).expand(len(scores), 1, -1)
    return biased(layer, scores, layer.scale, layer.positions_of(slots))


def choose(
    layer: KVLayer,
    query: Tensor,
    bounds: tuple[Tensor, Tensor],
    budget: int,
    pages: int | None,
    page: int,
    recent: int,
    forced: bool,
) -> Tensor:
    """What many queries, those of the newest tokens, read: [b, Hq, q, d] -> bool [b, Hq, q, n].

    bounds: of all full pages before the `recent` newest tokens. Each query takes its best `pages` whole pages, or
    (None) the first `budget` tokens of just enough pages; and the `recent` newest tokens. forced: its newest page is
    one of them. A query that has no more than all this reads everything.
    """
    seen = torch.arange(layer.length - query.shape[2] + 1, layer.length + 1, device=query.device)
    paged = (seen - recent).clamp(min=1)
    scores, newest = scores_so_far(layer, query, bounds, paged, page)
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


def scores_so_far(
    layer: KVLayer, query: Tensor, bounds: tuple[Tensor, Tensor], paged: Tensor, page: int
) -> tuple[Tensor, Tensor]:
    """Upper bound of q.k over every page, for many queries, each over the first `paged` tokens of the cache.

    query [b, Hq, q, d], bounds of full pages two of [b, H, F, d], paged [q] ascending -> scores [b, Hq, q, pages],
    -inf for pages that a query does not have yet, and the number of its newest page [q].
    """
    newest = (paged - 1) // page
    grouped = query.unflatten(1, (layer.heads, -1))  # [b, H, G, q, d]
    positive, negative = grouped.clamp(min=0), grouped.clamp(max=0)
    least, most = (bound[:, :, None] for bound in bounds)
    scores = positive @ most.mT + negative @ least.mT
    if scores.shape[-1] <= newest[-1]:  # the last page is not full
        scores = torch.nn.functional.pad(scores, (0, 1))
    # of its newest page only the tokens up to a query count: the running bounds at the last of them
    start = int(newest[0]) * page
    keys = page_keys(layer, start, int(paged[-1]))
    filled = torch.nn.functional.pad(keys, (0, 0, 0, -keys.shape[2] % page)).unflatten(2, (-1, page))
    at = paged - 1 - start
    least, most = (bound.flatten(2, 3)[:, :, None, at] for bound in (filled.cummin(3).values, filled.cummax(3).values))
    so_far = (positive * most + negative * least).sum(-1, keepdim=True)
    scores = scores.scatter(-1, newest[:, None].expand_as(so_far), so_far)
    if layer.slopes is not None:
        pages = torch.arange(1, scores.shape[-1] + 1, device=query.device)
        last = (
            torch.minimum(pages * page, paged[:, None]) - 1
        )  # newest token that a query sees of each page, [q, pages]
        positions = layer.positions_of(last.view(1, 1, -1))
        bias = position_bias(layer, positions)
        assert bias is not None
        scores = scores + (bias.view(*bias.shape[:2], *last.shape) / layer.scale).unflatten(1, scores.shape[1:3])
    later = torch.arange(scores.shape[-1], device=query.device) > newest[:, None]
    return scores.masked_fill(later, -torch.inf).flatten(1, 2), newest
