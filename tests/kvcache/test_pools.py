"""What every pool of token rows does: accounting, padding page, copies, moves, pauses, mistakes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from memsaver import MemorySaver
from tests.helpers.kvcache.blocks import DEVICE
from tests.helpers.kvcache.pools import POOLS, PS, SLOTS, at, blocks, make, new_saver, rows_for, stored, write


@pytest.fixture(params=list(POOLS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def saver() -> Iterator[MemorySaver]:
    saver = new_saver()
    yield saver
    saver.close()


def test_bytes_are_exact_on_the_tag(name: str, saver: MemorySaver) -> None:
    pool, per_token = make(name, saver), POOLS[name][1]
    assert pool.bytes_per_token == per_token
    expected = per_token * SLOTS if name != "swa" else per_token // 2 * (SLOTS + 16 + PS)
    assert pool.nbytes == expected == sum(b.numel() for b in blocks(pool))
    assert pool.nbytes == sum(t.numel() * t.element_size() for t in stored(pool))
    report = saver.report().tags["kv_cache"]
    page = saver._backend.granularity
    assert expected <= report.live_bytes <= expected + 4096
    assert report.committed_bytes == -(-report.live_bytes // page) * page or DEVICE == "cuda"  # in whole extents there


def test_parts_do_not_overlap(name: str) -> None:
    pool = make(name)
    for block in blocks(pool):
        block.zero_()
    for part in stored(pool):
        part.view(torch.uint8).add_(1)
    for block in blocks(pool):
        assert (block == 1).all()


def test_page_0_is_zero_first_and_after_every_resume(name: str, saver: MemorySaver) -> None:
    """Paused and resumed at any step: fresh, written, paused twice; rows written afterwards are right."""
    pool = make(name, saver)
    assert not any(part[:, :PS].any() for part in stored(pool))
    addresses = [part.data_ptr() for part in stored(pool)]
    for step in range(3):
        saver.pause("kv_cache")
        saver.resume("kv_cache")
        for block in blocks(pool):
            block.fill_(255)  # NaN in every dtype: what undefined may be
        pool.on_resume()
        assert addresses == [part.data_ptr() for part in stored(pool)]
        assert not any(part[:, :PS].view(torch.uint8).any() for part in stored(pool))
        assert all((part[:, PS:].view(torch.uint8) == 255).all() for part in stored(pool))
        loc = at(5, 19, 8)
        write(pool, loc, step)
        for layer in range(2):
            k, v = pool.get_rows(layer, loc)
            assert k.isfinite().all()
            assert v.isfinite().all()
            assert not any(rows.any() for rows in pool.get_rows(layer, at(0, 1, 3)))


def test_moves_read_all_before_they_write(name: str) -> None:
    pool = make(name)
    tgt, src = [5, 6, 7, 19], [4, 5, 6, 7]
    write(pool, torch.arange(PS, 20, device=DEVICE))
    before = [[rows.clone() for rows in pool.get_rows(layer, at(*range(20)))] for layer in range(2)]
    pool.move_kv_cache(at(*tgt), at(*src))
    for layer in range(2):
        for was, now in zip(before[layer], pool.get_rows(layer, at(*range(20))), strict=True):
            expected = was.clone()
            expected[tgt] = was[src]
            assert torch.equal(now, expected)


def test_host_copies_come_back_bit_for_bit(name: str, saver: MemorySaver) -> None:
    pool = make(name, saver)
    loc, other = at(7, 18, 9), at(12, 7, 15)
    write(pool, loc)
    before = [pool.get_rows(layer, loc) for layer in range(2)]
    copy = pool.get_cpu_copy(loc)
    assert all(t.device.type == "cpu" for t in copy.tensors)
    assert copy.nbytes == 3 * pool.bytes_per_token
    saver.pause("kv_cache")
    saver.resume("kv_cache")
    pool.on_resume()
    pool.load_cpu_copy(copy, other)
    for layer in range(2):
        for was, now in zip(before[layer], pool.get_rows(layer, other), strict=True):
            assert torch.equal(was, now)
    assert torch.equal(pool.get_cpu_copy(other).tensors[0], copy.tensors[0])
    assert pool.get_cpu_copy(loc[:0]).nbytes == 0


def test_mistakes_write_nothing(name: str) -> None:
    pool: Any = make(name)
    for block in blocks(pool):
        block.fill_(9)
    k, v = rows_for(pool, 2)
    loc = at(4, 5)
    for layer in (-1, 2):
        for call in (
            lambda layer=layer: pool.set_kv_buffer(layer, loc, k, v),
            lambda layer=layer: pool.get_kv_buffer(layer),
            lambda layer=layer: pool.get_rows(layer, loc),
            lambda layer=layer: pool.scales(layer),
        ):
            with pytest.raises(ValueError, match=f"layer {layer} "):
                call()
    for bad in (
        (k.double(), v.double()),
        (k, v.double()),
        (k[:1], v),
        (k[..., :-1], v),
        (k, v[:, :, None]),
        (k.to("meta"), v),
    ):
        with pytest.raises(ValueError, match="shape|float64|must be on the pool's"):
            pool.set_kv_buffer(0, loc, *bad)
    for wrong in (loc.int(), loc.view(1, 2), loc.to("meta")):
        for call in (
            lambda wrong=wrong: pool.set_kv_buffer(0, wrong, k, v),
            lambda wrong=wrong: pool.get_rows(0, wrong),
            lambda wrong=wrong: pool.move_kv_cache(wrong, wrong),
            lambda wrong=wrong: pool.get_cpu_copy(wrong),
        ):
            with pytest.raises(ValueError, match="int64|must be on the pool's"):
                call()
    with pytest.raises(ValueError, match="pair them"):
        pool.move_kv_cache(loc, loc[:1])
    with pytest.raises(ValueError, match="pair them"):
        pool.load_cpu_copy(pool.get_cpu_copy(loc), loc[:1])
    other = "mla" if name != "mla" else "mha"
    with pytest.raises(ValueError, match="the host copy is of"):
        pool.load_cpu_copy(make(other).get_cpu_copy(loc), loc)
    assert all((block == 9).all() for block in blocks(pool))
