"""The KV layer: growth, eviction, sharing between forks, true positions and byte counts."""

import pytest
import torch

from fasa_bench.cache import KVLayer
from fasa_bench.errors import UserError
from fasa_bench.model_cache import Cache
from fasa_bench.segments import BLOCK, Buffer, Packed, Packing


def filled(n: int, batch: int = 1, heads: int = 2, dim: int = 4, reserve: int = 0) -> KVLayer:
    """Keys and values that name their own batch row, head and slot: 100 b + 10 h + slot in every dimension."""
    layer = KVLayer(0)
    b = torch.arange(batch)[:, None, None, None] * 1000.0
    h = torch.arange(heads)[None, :, None, None] * 100.0
    names = (b + h + torch.arange(n)[None, None, :, None]).expand(batch, heads, n, dim).clone()
    layer.append(names, -names, torch.arange(n).expand(batch, n), reserve=reserve)
    return layer


def buffer(layer: KVLayer) -> Buffer:
    assert layer._own is not None
    return layer._own.buffer


def test_grows_in_blocks_and_keeps_what_was_there() -> None:
    layer = filled(3)
    storages = set()
    for i in range(3, 3 * BLOCK):
        token = torch.full((1, 2, 1, 4), float(i))
        layer.append(token, -token, torch.tensor([[i]]))
        storages.add(buffer(layer).keys.data_ptr())
    assert layer.length == layer.seen == 3 * BLOCK
    assert len(storages) <= 3  # not one allocation a token
    assert layer.keys[0, 0, :, 0].tolist() == list(range(3 * BLOCK))
    assert layer.positions[0, 0].tolist() == list(range(3 * BLOCK))


@pytest.mark.parametrize("heads", [1, 2, 6])
def test_gather_reads_the_slots_of_the_right_head(heads: int) -> None:
    layer = filled(20, batch=2)
    slots = torch.stack([torch.randperm(20)[:7].sort().values for _ in range(2 * heads)]).view(2, heads, 7)
    keys, values = layer.gather(slots)
    wanted = max(heads, 2)
    assert keys.shape == (2, wanted, 7, 4)
    for b in range(2):
        for h in range(wanted):
            chosen = slots[b, h if heads > 1 else 0]
            expected = 1000 * b + 100 * (h // (wanted // 2)) + chosen
            assert keys[b, h, :, 2].tolist() == expected.tolist()
    assert torch.equal(values, -keys)


def test_keep_frees_memory_and_positions_stay_true() -> None:
    layer = filled(200)
    before = layer.device_bytes
    layer.keep(torch.tensor([[[0, 5, 199], [1, 2, 3]]]))
    assert layer.positions[0].tolist() == [[0, 5, 199], [1, 2, 3]]
    assert layer.keys[0, :, :, 0].tolist() == [[0, 5, 199], [101, 102, 103]]
    assert (layer.length, layer.seen) == (3, 200)
    assert layer.device_bytes < before / 1.5
    layer.append(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), torch.tensor([[200]]))
    assert layer.positions[0].tolist() == [[0, 5, 199, 200], [1, 2, 3, 200]]
    layer.keep(torch.tensor([[[1, 3]]]))  # one row of slots for all heads
    assert layer.positions[0].tolist() == [[5, 200], [2, 200]]


def test_bytes_are_those_of_the_tensors_held() -> None:
    layer = filled(10, heads=3, dim=8)
    layer.state["index"] = torch.zeros(5, dtype=torch.float64)
    rows = BLOCK
    assert layer.device_bytes == 2 * 3 * rows * 8 * 4 + rows * 8 + 5 * 8
    assert layer.host_bytes == 0


def test_forks_share_the_prompt_and_never_see_each_other() -> None:
    prompt = filled(10, reserve=20)
    one = prompt.fork()
    one.append(torch.full((1, 2, 1, 4), 7.0), torch.full((1, 2, 1, 4), 7.0), torch.tensor([[10]]))
    assert buffer(one) is buffer(prompt)  # nothing copied
    two = prompt.fork()
    two.append(torch.full((1, 2, 1, 4), 8.0), torch.full((1, 2, 1, 4), 8.0), torch.tensor([[10]]))
    assert buffer(two) is not buffer(prompt)  # one lives: two has to copy
    assert (one.keys[0, 0, 10, 0], two.keys[0, 0, 10, 0]) == (7.0, 8.0)
    one.release(prompt)
    three = prompt.fork()
    three.append(torch.full((1, 2, 1, 4), 9.0), torch.full((1, 2, 1, 4), 9.0), torch.tensor([[10]]))
    assert buffer(three) is buffer(prompt)  # one is gone: its rows are free
    assert (three.keys[0, 0, 10, 0], two.keys[0, 0, 10, 0], prompt.length) == (9.0, 8.0, 10)
    assert prompt.keys[0, 0, :, 0].tolist() == list(range(10))


def test_evicting_in_a_fork_leaves_the_prompt_alone() -> None:
    prompt = filled(10)
    fork = prompt.fork()
    fork.keep(torch.tensor([[[2, 3]]]))
    assert prompt.length == 10
    assert prompt.keys[0, 1, :, 0].tolist() == list(range(100, 110))


def test_cache_tells_the_true_length_after_eviction() -> None:
    cache = Cache([filled(40)])
    cache.layers[0].keep(torch.arange(8)[None, None])
    assert cache.get_seq_length() == 40
    assert cache.get_mask_sizes(1, 0) == (41, 0)
    assert cache.get_mask_sizes(torch.arange(40, 42), 0) == (42, 0)  # transformers 4 passes cache_position
    assert cache.is_compileable is False


def test_samples_share_the_prompt_and_diverge() -> None:
    """Three continuations of one prompt against three separate layers: same products, rows, positions; one prompt."""
    torch.manual_seed(0)
    tokens = torch.randn(2, 3, 2, 5, 4)  # keys and values of 5 further tokens for 3 samples
    prompt = filled(70, reserve=10)
    together = prompt.fork()
    together.state["index"] = torch.arange(6.0).view(1, 6)
    together.expand(3)
    apart = [filled(70) for _ in range(3)]
    for step in range(5):
        key, value = tokens[:, :, :, step : step + 1]
        together.append(key, value, torch.full((3, 1), 70 + step))
        for row, layer in enumerate(apart):
            layer.append(key[row : row + 1], value[row : row + 1], torch.tensor([[70 + step]]))
    assert (together.batch, together.heads, together.length, together.seen) == (3, 2, 75, 75)
    query, weights = torch.randn(3, 4, 1, 4), torch.rand(3, 4, 1, 75)
    slots = torch.stack([torch.randperm(75)[:9].sort().values for _ in range(12)]).view(3, 4, 9)
    for row, layer in enumerate(apart):
        one = slice(row, row + 1)
        torch.testing.assert_close(together.dot(query)[one], layer.dot(query[one]))
        torch.testing.assert_close(together.mix(weights)[one], layer.mix(weights[one]))
        torch.testing.assert_close(together.gather(slots)[0][one], layer.gather(slots[one])[0])
        torch.testing.assert_close(together.gather(slots)[1][one], layer.gather(slots[one])[1])
        assert torch.equal(together.positions[one], layer.positions)
        assert torch.equal(together.keys[one], layer.keys)
    assert together.device_bytes < sum(layer.device_bytes for layer in apart)
    assert together.state["index"].shape == (3, 6)
    together.keep(slots[:, :2])
    for row, layer in enumerate(apart):
        layer.keep(slots[row : row + 1, :2])
        assert torch.equal(together.values[row : row + 1], layer.values)
        assert torch.equal(together.positions[row : row + 1], layer.positions)
    assert len(together.segments) == 1
    assert prompt.length == 70


def test_a_copy_per_query_head_takes_further_tokens() -> None:
    layer = filled(10)
    layer.keep(torch.arange(4)[None, None].expand(1, 6, 4))  # 6 query heads on 2 KV heads
    assert layer.heads == 6
    token = torch.tensor([1.0, 2.0]).view(1, 2, 1, 1).expand(1, 2, 1, 4)
    layer.append(token, token, torch.tensor([[10]]))
    assert layer.keys[0, :, -1, 0].tolist() == [1, 1, 1, 2, 2, 2]
    assert layer.positions[0].tolist() == [[0, 1, 2, 3, 10]] * 6


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_packed_layer_reads_as_its_unpacked_rows_would(bits: int) -> None:
    """Products, sums and rows against the dense dequantised tables; recent tokens are exact; packed as text comes."""
    torch.manual_seed(0)
    packing = Packing(bits=bits, group=8, residual=16)
    keys, values = torch.randn(1, 2, 100, 12), torch.randn(1, 2, 100, 12)
    layer = KVLayer(0)
    layer.append(keys[:, :, :60], values[:, :, :60], torch.arange(60)[None])
    plain = layer.fork()
    layer.packing = packing
    layer.pack()
    for i in range(60, 100):
        layer.append(keys[:, :, i : i + 1], values[:, :, i : i + 1], torch.tensor([[i]]))
        assert 16 <= layer.segments[-1].tokens < 24
    packed = layer.segments[0]
    assert isinstance(packed, Packed)
    assert packed.tokens == 80
    assert layer.length == layer.seen == 100
    assert layer.positions[0, 0].tolist() == list(range(100))
    assert torch.equal(layer.keys[:, :, 80:], keys[:, :, 80:])
    error = (layer.keys - keys).abs().max()
    assert 0 < error < 6 / (2**bits - 1)  # half a step of a range of at most about 8
    query, weights = torch.randn(1, 6, 1, 12), torch.rand(1, 6, 1, 100)
    expected = torch.matmul(query.view(1, 2, 3, 12), layer.keys.transpose(2, 3)).view(1, 6, 1, 100)
    torch.testing.assert_close(layer.dot(query), expected)
    expected = torch.matmul(weights.view(1, 2, 3, 100), layer.values).view(1, 6, 1, 12)
    torch.testing.assert_close(layer.mix(weights), expected)
    slots = torch.stack([torch.randperm(100)[:9].sort().values for _ in range(6)])[None]
    found, _ = layer.gather(slots)
    for head in range(6):
        torch.testing.assert_close(found[0, head], layer.keys[0, head // 3, slots[0, head]])
    assert torch.equal(plain.keys, keys[:, :, :60])  # another fork of the same prompt is untouched


def test_a_packed_prompt_can_be_shared_by_samples() -> None:
    layer = filled(80)
    layer.packing = Packing(bits=8, group=8, residual=16)
    layer.pack()
    layer.expand(2)
    for i in range(40):
        token = torch.full((2, 2, 1, 4), float(i)) + torch.tensor([0.0, 50.0]).view(2, 1, 1, 1)
        layer.append(token, token, torch.full((2, 1), 80 + i))
    assert layer.length == 120
    torch.testing.assert_close(layer.keys[0, 0, 80:, 0], torch.arange(40.0), atol=0.1, rtol=0.05)
    torch.testing.assert_close(layer.keys[1, 0, 80:, 0], torch.arange(40.0) + 50, atol=0.1, rtol=0.05)
    assert layer.dot(torch.ones(2, 4, 1, 4)).shape == (2, 4, 1, 120)


def test_bytes_shrink_with_the_bits() -> None:
    sizes = {}
    for bits in (16, 8, 4, 2):
        layer = filled(4096, dim=64)
        layer.packing = Packing(bits=bits, group=32, residual=128)
        layer.pack()
        sizes[bits] = layer.device_bytes
    assert sizes[8] < sizes[16] / 2.5
    assert sizes[4] < sizes[8] / 1.4
    assert sizes[2] < sizes[4]


def test_a_packed_layer_refuses_eviction() -> None:
    layer = filled(80)
    layer.packing = Packing(bits=4, group=8, residual=16)
    layer.pack()
    with pytest.raises(UserError, match=r"cache.bits=4 .* evicts while decoding"):
        layer.keep(torch.arange(5)[None, None])
