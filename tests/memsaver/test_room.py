"""Cached memory is released for operations that need memory, and shortages are reported exactly."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import memsaver
from memsaver import MemorySaver
from memsaver.memory.torch_allocator import releasable
from memsaver.native import shim
from tests.helpers.memsaver.savers import MIB

pytestmark = pytest.mark.alone
CACHE = "torch's cache"


class World:
    """A device that a cache has filled; `large` bytes fit only after the cache is released.

    The cache is torch's own on a GPU, and on the CPU a tag that `reclaim` pauses.
    """

    def __init__(self, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cpu = device == "cpu"
        self.saver = MemorySaver(device, limit_bytes=64 * MIB if self.cpu else None)
        if self.cpu:
            self.saver.empty(40 * MIB, torch.uint8, tag=CACHE)
            monkeypatch.setattr(self.saver.backend, "reclaim", lambda: self.saver.pause(CACHE))
            self.saver.pause(CACHE)
            self.large = 48 * MIB
        else:
            torch.cuda.empty_cache()
            self.large = torch.cuda.mem_get_info()[0] // 2 >> 21 << 21

    def fill(self) -> None:
        if self.cpu:
            self.saver.resume(CACHE)
        else:
            torch.empty(int(torch.cuda.mem_get_info()[0] * 0.8), dtype=torch.uint8, device="cuda:0")
            assert self.saver.free_bytes >= self.large > self.saver.backend.device_free_bytes

    def tag(self, name: str, nbytes: int, elastic: bool = False) -> torch.Tensor:
        return self.saver.empty(nbytes, torch.uint8, tag=name, elastic=elastic)


def _paused(world: World) -> torch.Tensor:
    tensor = world.tag("t", world.large)
    world.saver.pause("t")
    return tensor


def _small(world: World) -> torch.Tensor:
    tensor = world.tag("t", world.large, elastic=True)
    world.saver.resize("t", 2 * MIB)
    return tensor


def _paused_and_small(world: World) -> list[torch.Tensor]:
    return [_paused(world), world.tag("small", 2 * MIB)]


def _region(world: World) -> torch.Tensor:
    with world.saver.region("t"):
        return torch.empty(world.large, dtype=torch.uint8, device=world.saver.device)


OPERATIONS: dict[str, tuple[Callable[[World], Any], Callable[[World], Any]]] = {
    "resume": (_paused, lambda world: world.saver.resume("t")),
    "begin_resume": (_paused, lambda world: world.saver.begin_resume("t").wait()),
    "at_least": (_paused, lambda world: world.saver.resume("t", at_least=world.large)),
    "empty": (lambda _: None, lambda world: world.tag("t", world.large)),
    "elastic": (lambda _: None, lambda world: world.tag("t", world.large, elastic=True)),
    "region": (lambda _: None, _region),
    "resize": (_small, lambda world: world.saver.resize("t", world.large)),
    "swap": (_paused_and_small, lambda world: world.saver.swap(pause="small", resume="t")),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation_releases_cache_when_memory_is_short(
    operation: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(device, monkeypatch)
    prepare, act = OPERATIONS[operation]
    kept = [prepare(world)]
    world.fill()
    kept.append(act(world))
    assert world.saver.report(others=False).tags["t"].committed_bytes >= world.large
    world.saver.check_integrity()
    del kept
    world.saver.close()


def test_missing_bytes_exclude_the_page_pool() -> None:
    # 20 MiB are needed, 8 MiB are retained, and 8 MiB are free under the limit.
    saver = MemorySaver(limit_bytes=32 * MIB)
    tensors = [saver.empty(20 * MIB, torch.uint8, tag="a")]
    saver.pause("a")
    tensors += [saver.empty(16 * MIB, torch.uint8, tag="b")]
    tensors += [saver.empty(8 * MIB, torch.uint8, tag="c")]
    saver.pause("c", release="retain")
    with pytest.raises(memsaver.OutOfMemory, match=r"4\.0 MiB are missing") as caught:
        saver.resume("a")
    assert caught.value.missing_bytes == 4 * MIB
    saver.limit_bytes = 36 * MIB
    saver.resume("a")


def test_check_integrity_tolerates_concurrent_growth_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Another thread may grow a tag between two readings; a lasting contradiction is an error.
    saver, grown = MemorySaver(), list[torch.Tensor]()
    read = shim.extents

    def read_and_grow(slot: int) -> list[shim.Extent]:
        extents = read(slot)
        if len(grown) < 3:
            grown.append(torch.empty(MIB, dtype=torch.uint8))
        return extents

    with saver.region("t"), monkeypatch.context() as patch:
        patch.setattr(shim, "extents", read_and_grow)
        saver.check_integrity()
        assert len(grown) == 3
        patch.setattr(shim, "extents", lambda slot: read(slot)[:-1])
        with pytest.raises(AssertionError, match="0 bytes of extents"):
            saver.check_integrity()


def test_releasable_counts_segments_that_torch_can_release() -> None:
    def segment(device: int = 0, **given: Any) -> dict[str, Any]:
        plain = {"device": device, "address": 64, "segment_pool_id": (0, 0), "active_size": 0}
        return plain | {"total_size": 40 * MIB, "is_expandable": False} | given

    pages = [("active_allocated", 30 * MIB), ("inactive", 40 * MIB), ("active_allocated", MIB)]
    blocks = [{"state": state, "size": size} for state, size in pages]
    expandable = {"is_expandable": True, "segment_type": "large", "blocks": blocks}
    counted = [
        (segment(), 40 * MIB),
        (segment(active_size=1), 0),
        (segment(device=1), 0),
        (segment(segment_pool_id=(0, 1)), 0),
        (segment(active_size=31 * MIB, **expandable), 20 * MIB),  # of 30 to 70 MiB: 40 to 60
    ]
    for item, expected in counted:
        assert releasable([item], 0) == expected
    assert releasable([item for item, _ in counted], 0) == sum(nbytes for _, nbytes in counted)


@pytest.mark.gpu
def test_full_region_releases_cache_and_asks_to_enter_again() -> None:
    # The cache is smaller than the free memory, so entering the region does not release it.
    if torch.__version__ >= "2.13":
        pytest.skip("torch empties its cache and retries")
    torch.cuda.empty_cache()
    saver, free = MemorySaver("cuda:0"), torch.cuda.mem_get_info()[0]
    torch.empty(int(free * 0.4), dtype=torch.uint8, device="cuda:0")
    with pytest.raises(memsaver.OutOfMemory, match="were released: enter the region again"):
        with saver.region("t"):
            torch.empty(int(free * 0.8), dtype=torch.uint8, device="cuda:0")
    with saver.region("t"):
        torch.empty(int(free * 0.8), dtype=torch.uint8, device="cuda:0")
    saver.close()


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["reported at each step", "a region of each step inside"])
def test_open_region_reuses_memory_of_tensors_used_on_two_streams(how: str) -> None:
    saver, side = MemorySaver("cuda:0"), torch.cuda.Stream()
    with saver.region("t"):
        for step in range(100):
            inner = saver.region("t") if "inside" in how else contextlib.nullcontext()
            with inner:
                x = torch.full((2 * MIB,), float(step), device="cuda:0")
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    x.mul_(2)
                x.record_stream(side)
                del x
            torch.cuda.synchronize()
            held = saver.report(others=False).tags["t"].committed_bytes
    assert held <= 64 * MIB  # 8 MiB each, 800 in all
    saver.close()


@pytest.mark.gpu
def test_open_region_warns_when_dead_tensors_make_it_grow(
    caplog: pytest.LogCaptureFixture,
) -> None:
    if torch.__version__ >= "2.13":
        pytest.skip("torch reuses the memory")
    saver, side = MemorySaver("cuda:0"), torch.cuda.Stream()
    with caplog.at_level(logging.WARNING, "memsaver"), saver.region("t"):
        for _ in range(40):
            torch.empty(16 * MIB, dtype=torch.uint8, device="cuda:0").record_stream(side)
    assert "region 't': 640.0 MiB of dead tensors" in caplog.text
    assert "leave the region at each step" in caplog.text
    saver.close()


@pytest.mark.gpu
@pytest.mark.gpus(2)
@pytest.mark.parametrize("operation", ["empty", "trim", "region"])
def test_cache_is_emptied_after_work_of_the_savers_gpu(operation: str) -> None:
    # The segments are expandable, and another GPU is current.
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        with torch.cuda.device(0):
            saver = MemorySaver("cuda:1")
            kept = torch.zeros(1024, device="cuda:1")
            for _ in range(5):
                with torch.cuda.device(1):
                    x = torch.ones(256 * MIB // 4, device="cuda:1")
                    torch.cuda._sleep(200_000_000)  # about 0.1 s
                    kept += x.sum()
                    del x
                if operation == "empty":
                    saver.backend.reclaim()
                elif operation == "trim":
                    saver.trim()
                else:
                    with saver.region("t"):
                        inside = torch.empty(MIB, dtype=torch.uint8, device="cuda:1")
                    assert saver.tag_of(inside) == "t"
                    del inside
            assert kept.tolist() == [5 * 64.0 * MIB] * 1024
            saver.close()
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
