"""Pools whose layers differ: full and window side, full and linear layers."""

import pytest
import torch

from kvcache import HostCopy, HybridLinearKVPool, KVCacheConfig, MHATokenToKVPoolFP4, SWAKVPool
from kvcache.config import FP4_DTYPE
from tests.helpers.kvcache.blocks import DEVICE
from tests.helpers.kvcache.pools import PS, at, mha, stored


def config(layers: int, size: int, dtype: torch.dtype = torch.float32) -> KVCacheConfig:
    return mha(dtype, layers, size, num_kv_heads=1, head_dim=16)


def rows(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=DEVICE).view(-1, 1, 1).expand(-1, 1, 16)


def swa() -> SWAKVPool:
    pool = SWAKVPool(config(2, 32), config(3, 8), [1, 3], [0, 2, 4])
    for part in stored(pool):
        part.fill_(255)  # NaN
    pool.on_resume()
    return pool


def test_layers_lead_to_their_pool() -> None:
    pool = swa()
    assert [pool.route(layer) for layer in range(5)] == [
        (pool.window_pool, 0),
        (pool.full_pool, 0),
        (pool.window_pool, 1),
        (pool.full_pool, 1),
        (pool.window_pool, 2),
    ]
    assert [len(pool.get_kv_buffer(layer)[0]) for layer in range(5)] == [12, 36, 12, 36, 12]
    assert (pool.size, pool.bytes_per_token) == (32, 5 * 128)
    assert pool.nbytes == (36 * 2 + 12 * 3) * 128


def test_writes_to_the_window_go_through_the_mapping() -> None:
    pool = swa()
    with pytest.raises(ValueError, match="register_mapping"):
        pool.set_kv_buffer(0, at(4), rows(1), rows(1))
    pool.set_kv_buffer(1, at(4), rows(1), rows(1))  # the full side needs none
    mapping = torch.zeros(36, dtype=torch.int64, device=DEVICE)
    pool.register_mapping(mapping)
    mapping[20:23] = at(9, 4, 11)  # changed in place, as the allocator does
    pool.set_kv_buffer(2, at(22, 21, 30), rows(1, 2, 3), rows(-1, -2, -3))
    k, v = pool.get_kv_buffer(2)
    assert k[at(11, 4), 0, 0].tolist() == [1, 2]
    assert v[at(11, 4), 0, 0].tolist() == [-1, -2]
    assert k[0, 0, 0] == 3  # unmapped: the padding page
    assert k[9].isnan().all()
    assert pool.get_rows(2, at(21))[0][0, 0, 0] == 2
    assert pool.get_kv_buffer(0)[0][4].isnan().all()  # other layers untouched
    assert pool.get_kv_buffer(3)[0][PS:].isnan().all()
    pool.set_kv_buffer(3, at(22), rows(7), rows(8))
    assert pool.get_kv_buffer(3)[0][22, 0, 0] == 7
    pool.on_resume()
    assert k[0, 0, 0] == 0


def test_moves_and_copies_take_both_sides_along() -> None:
    pool = swa()
    mapping = torch.zeros(36, dtype=torch.int64, device=DEVICE)
    mapping[20:24] = at(9, 4, 11, 5)
    pool.register_mapping(mapping)
    for layer in range(5):
        pool.set_kv_buffer(layer, at(20, 21), rows(layer, 10 + layer), rows(0, 0))
    pool.move_kv_cache(at(21, 22), at(20, 21))
    copy = pool.get_cpu_copy(at(21, 22))
    mapping[30:32] = at(6, 7)
    pool.load_cpu_copy(copy, at(31, 30))
    for layer in range(5):
        for slots in (at(21, 22), at(31, 30)):
            assert pool.get_rows(layer, slots)[0][:, 0, 0].tolist() == [layer, 10 + layer]
    with pytest.raises(ValueError, match="the host copy is of"):
        pool.load_cpu_copy(pool.full_pool.get_cpu_copy(at(4)), at(4))
    before = [part.clone() for part in stored(pool)]
    half = HostCopy((copy.format[0], ("of another pool",)), copy.tensors)  # the full side would fit
    with pytest.raises(ValueError, match="the host copy is of"):
        pool.load_cpu_copy(half, at(25, 26))
    assert all(torch.equal(a, b) for a, b in zip(stored(pool), before, strict=True))


def test_wrong_sides_and_mappings() -> None:
    full, window = config(1, 32), config(1, 8)
    with pytest.raises(ValueError, match="the full pool is for 1 layers, got the layer ids"):
        SWAKVPool(full, window, [0, 1], [2])
    with pytest.raises(ValueError, match="layers \\[0\\] are named as full and as window"):
        SWAKVPool(full, window, [0], [0])
    with pytest.raises(ValueError, match="larger than the full pool"):
        SWAKVPool(window, full, [0], [1])
    pool = swa()
    for wrong in (torch.zeros(36), torch.zeros(35, dtype=torch.int64), torch.zeros(6, 6, dtype=torch.int64)):
        with pytest.raises(ValueError, match="full_to_swa_index_mapping"):
            pool.register_mapping(wrong.to(DEVICE))
    with pytest.raises(ValueError, match="layer 5 is not in this pool; it holds layers 0, 1, 2, 3, 4"):
        pool.get_kv_buffer(5)


def test_only_full_layers_of_a_hybrid_keep_keys() -> None:
    pool = HybridLinearKVPool(config(2, 8, FP4_DTYPE), [3, 7], pool_class=MHATokenToKVPoolFP4)
    pool.set_kv_buffer(7, at(5), rows(6), rows(-3))
    k, v = pool.get_rows(7, at(5))
    assert (k == 6).all()
    assert (v == -3).all()
    assert pool.route(7) == (pool.full_pool, 1)
    assert pool.nbytes == 12 * pool.bytes_per_token == 12 * 2 * 2 * 9
    for layer in (0, 4, -1):
        with pytest.raises(ValueError, match=rf"layer {layer} keeps no keys and values .* layers 3, 7 do"):
            pool.set_kv_buffer(layer, at(5), rows(6), rows(-3))
    with pytest.raises(ValueError, match="the full pool is for 2 layers"):
        HybridLinearKVPool(config(2, 8), [3, 3])
