"""Draw the next tokens of several answers, each with a random stream of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from fasa_bench.task import Sampling


class Sampler:
    """Chooses tokens as transformers does: temperature, then top k, then top p (Holtzman et al. 2020, section 3.1).

    Row i draws one number a token from a generator seeded by `seeds[i]`: what it draws depends neither on the other
    rows nor on how many there are.
    """

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self._sampling, self._device = sampling, device
        self._streams = [torch.Generator(device).manual_seed(seed) for seed in sampling.seeds]

    def choose(self, logits: Tensor) -> Tensor:
        """logits [n, vocabulary] -> token ids [n]."""
        wanted = self._sampling
        if wanted.temperature == 0:
            return logits.argmax(-1)
        logits = logits.float() / wanted.temperature
        kept = min(wanted.top_k, logits.shape[1]) or logits.shape[1]
        ordered, ids = logits.topk(kept) if kept < logits.shape[1] else logits.sort(descending=True, stable=True)
        likely = torch.softmax(ordered, dim=-1)
        likely = likely.masked_fill(likely.cumsum(-1) - likely >= wanted.top_p, 0)  # the first always stays
        mass = likely.cumsum(-1)
        drawn = torch.cat([torch.rand(1, 1, generator=stream, device=self._device) for stream in self._streams])
        place = torch.searchsorted(mass, drawn * mass[:, -1:], right=True)
        last = (likely > 0).sum(-1, keepdim=True) - 1  # rounding may point behind it
        return ids.gather(1, place.minimum(last)).squeeze(1)
