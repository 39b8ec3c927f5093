"""A cache of any length without a prompt pass: random keys and values behind one real token.

How long a decode step takes depends on how much is cached, not on what the numbers are; so a step at 64K needs no
pass over 64K tokens, nor a model with so many positions.
"""

from __future__ import annotations

import math

import torch

from fasa_bench.cache import KVLayer
from fasa_bench.method import Observation
from fasa_bench.session import Prefilled, Session


def filled(
    session: Session,
    context: int,
    batch: int = 1,
    *,
    seed: int = 0,
    observe: Observation | None = None,
    reserve: int = 0,
) -> Prefilled:
    """As if `context` tokens had been prefilled in each of `batch` rows: standard normal keys and values.

    One real token makes the layers (shapes, types, devices); the rest is written where it stays, so that nothing is
    held twice. What methods observe of a prompt pass is random too: normal queries, uniform attention mass. reserve:
    tokens to be decoded later. `seconds` of the result is NaN, since no pass was timed. ValueError for an empty cache.
    """
    if context < 1 or batch < 1:
        raise ValueError(f"a cache needs tokens and rows, not {context} and {batch}")
    observe = observe or Observation()
    token = torch.zeros(batch, 1, dtype=torch.long)
    prefilled = session.prefill(token, observe=observe, reserve=context - 1 + reserve)
    for layer in prefilled.cache.layers:
        _fill(layer, context, seed + layer.index, observe)
        layer.trim()
    prefilled.next_position = prefilled.next_position + context - 1
    prefilled.seconds = math.nan
    return prefilled


def _fill(layer: KVLayer, context: int, seed: int, observe: Observation) -> None:
    generator = torch.Generator(layer.device).manual_seed(seed)
    positions = torch.arange(1, context, device=layer.device).expand(layer.batch, -1)
    # expanded zeros take no memory: rows are made by the layer itself, then drawn in place
    keys, values = (rows.new_zeros(1).expand(*rows.shape[:2], context - 1, rows.shape[3]) for rows in layer.tables)
    layer.append(keys, values, positions)
    for rows in layer.tables:
        rows[:, :, 1:].normal_(generator=generator)
    if layer.prompt_queries is not None:
        query = layer.prompt_queries
        shape = (*query.shape[:2], min(observe.window, context), query.shape[3])
        layer.prompt_queries = query.new_empty(shape).normal_(generator=generator)
    if layer.prompt_mass is not None:
        mass = layer.prompt_mass
        layer.prompt_mass = mass.new_empty(*mass.shape[:2], context).uniform_(generator=generator)
