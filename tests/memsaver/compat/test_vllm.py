"""vLLM's own tests of its CuMemAllocator that need no engine
(tests/basic_correctness/test_cumem.py), stated anew.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from memsaver.compat.savers import Savers
from memsaver.compat.vllm import CuMemAllocator
from memsaver.errors import OutOfMemory, StateError
from tests.helpers.memory import process_bytes

pytestmark = pytest.mark.alone
Scribble = Callable[[int], None]
SHAPE = (1024, 1024)


def used(device: str) -> int:
    """Bytes in use, without torch's cache: a sleep empties it."""
    if device != "cpu":
        torch.cuda.empty_cache()
    return process_bytes(device)


@pytest.mark.parametrize("device", ["cpu"])
def test_python_error(device: str) -> None:
    """Too little memory at wake-up raises, and all is as before it."""
    allocator = CuMemAllocator(Savers(lambda: torch.device(device), limit_bytes=64 << 20))
    with allocator.use_memory_pool():
        kept = torch.full((40 << 20,), 1, dtype=torch.uint8)
    allocator.sleep()
    with allocator.use_memory_pool("kv_cache"):
        other = torch.full((40 << 20,), 2, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="are missing") as caught:
        allocator.wake_up()
    assert isinstance(caught.value, OutOfMemory)
    del other
    allocator.sleep(())
    allocator.wake_up([CuMemAllocator.default_tag])
    assert bool((kept == 1).all())


def test_levels_and_stages(allocator: CuMemAllocator, device: str, scribble: Scribble) -> None:
    """As vLLM's worker does it: level 1 keeps the weights, level 2 nothing; weights are woken
    before the cache.
    """
    plain = torch.ones(SHAPE, device=device)
    with allocator.use_memory_pool(tag="weights"):
        assert allocator.current_tag == "weights"
        weights = torch.arange(1 << 20, device=device)
    with allocator.use_memory_pool(tag="kv_cache"):
        # more than a segment of torch's with the weights
        cache = torch.ones(1 << 23, device=device)
    assert allocator.current_tag == "default"
    expected, full = weights.cpu().clone(), used(device)
    allocator.sleep(offload_tags="weights")
    scribble(64 << 20)
    empty = process_bytes(device)
    assert full - empty >= weights.nbytes + cache.nbytes
    assert bool((plain == 1).all())
    allocator.wake_up(["weights"])
    assert torch.equal(weights.cpu(), expected)
    assert process_bytes(device) - empty < cache.nbytes
    allocator.wake_up(["kv_cache"])
    cache.fill_(1)
    assert used(device) == full
    allocator.sleep((), tags=("kv_cache",))
    allocator.wake_up()
    assert bool((cache.fill_(2) == 2).all())
    assert used(device) == full
    allocator.discard("kv_cache")
    assert full - process_bytes(device) >= cache.nbytes
    assert torch.equal(weights.cpu(), expected), "it was not among the tags"
    allocator.sleep((), tags=())
    allocator.sleep(offload_tags=())
    scribble(64 << 20)
    allocator.wake_up(tags=["weights"])
    assert not torch.equal(weights.cpu(), expected)
    weights.copy_(expected)
    allocator.wake_up(tags=["kv_cache", "no such tag"])
    assert torch.equal(weights.cpu(), expected)


def test_a_failed_sleep_brings_the_saved_tags_back(allocator: CuMemAllocator, device: str) -> None:
    with allocator.use_memory_pool("weights"):
        weights = torch.ones(1 << 20, device=device)
    with allocator.use_memory_pool("kv_cache"):
        torch.ones(1 << 20, device=device)
        with pytest.raises(StateError, match="'kv_cache': a region of it is open"):
            allocator.sleep("weights")
    assert bool((weights == 1).all())


def test_current_usage(allocator: CuMemAllocator, device: str) -> None:
    assert allocator.get_current_usage() == 0
    with allocator.use_memory_pool("weights"):
        weights = torch.ones(1 << 20, device=device)
        scratch = torch.ones(1 << 22, device=device)
        del scratch
    with allocator.use_memory_pool():
        other = torch.ones(1 << 20, device=device)
    assert allocator.get_current_usage() == weights.nbytes + other.nbytes
    allocator.sleep()
    assert allocator.get_current_usage() == weights.nbytes + other.nbytes
    allocator.wake_up()
    del weights, other
    assert allocator.get_current_usage() == 0
