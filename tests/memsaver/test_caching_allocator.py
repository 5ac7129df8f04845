"""Model of the caching allocator: known sequences, invariants, and torch itself on a GPU."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memsaver.memory.caching_allocator import MIB, CachingAllocator


@pytest.mark.parametrize(
    ("nbytes", "taken"),
    [
        (1, 2),
        (MIB, 2),
        (MIB + 1, 20),
        (10 * MIB - 512, 20),
        (10 * MIB, 10),
        (10 * MIB + 1, 12),
        (33 * MIB, 34),
    ],
)
def test_first_request_takes_a_segment_of_torchs_size(nbytes: int, taken: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate("a", nbytes)
    assert allocator.reserved == allocator.peak == taken * MIB


@pytest.mark.parametrize(
    ("requests", "reserved"),
    [
        # A freed block serves the next request, and the rest of it another.
        ("a=40 -a b=30 c=10", 40),
        ("a=40 -a b=30 c=10 d=10", 50),
        # A rest of less than a mebibyte is not split off a large block, so c cannot use it.
        ("a=40 -a b=39 c=1.1", 60),
        ("a=60 b=40 -a -b c=40 d=60", 100),  # takes the smallest block that suffices
        ("w=60 -w a=20 b=20 c=20 -a -c -b w=60", 60),  # joins free neighbors
        ("a=20 -a b=0.1", 22),  # small and large requests share no segment
        ("a=6 b=6 c=6", 20),
        ("a=6 b=6 c=6 d=6", 40),
        ("a=30@0 -a b=30@1 -b c=30@2 -c d=10 empty", 30),
        ("a=40@0 -a b=40@1", 80),  # Streams do not share caches.
        # One small block keeps a whole segment, so torch's cache is emptied together with cuBLAS's
        # workspaces.
        ("logits=2374 -logits workspace=32 empty", 2374),
        ("logits=2374 -logits workspace=32 empty -workspace empty", 0),
    ],
)
def test_sequence_of_requests_reserves_the_bytes_of_torchs_rules(
    requests: str, reserved: int
) -> None:
    """Run requests of the forms `name=MiB@stream`, `-name` (free) and `empty`."""
    allocator = CachingAllocator()
    for word in requests.split():
        name, _, size = word.partition("=")
        if word == "empty":
            allocator.empty_cache()
        elif size:
            nbytes, _, stream = size.partition("@")
            allocator.allocate(name, int(float(nbytes) * MIB), stream=int(stream or 0))
        else:
            allocator.free(name.removeprefix("-"))
    assert allocator.reserved == reserved * MIB


steps = st.lists(
    st.tuples(
        st.integers(0, 7), st.sampled_from([300, MIB, 3 * MIB, 11 * MIB + 5]), st.integers(0, 1)
    ),
    max_size=60,
)


@settings(max_examples=80)
@given(steps, st.booleans())
def test_reserved_bytes_cover_live_blocks_and_return_when_all_are_free(
    requests: list[tuple[int, int, int]], empty: bool
) -> None:
    allocator, most, before = CachingAllocator(), 0, 0
    live: dict[int, int] = {}
    for key, size, stream in requests:
        if key in live:
            allocator.free(key)
            del live[key]
        else:
            allocator.allocate(key, size, stream)
            live[key] = size
        if empty:
            allocator.empty_cache()
        assert empty or allocator.reserved >= before
        before = allocator.reserved
        most = max(most, before)
        assert allocator.reserved >= sum(live.values())
        assert allocator.peak >= most
    for key in live:
        allocator.free(key)
    allocator.empty_cache()
    assert allocator.reserved == 0


def test_small_requests_share_segments_of_two_mebibytes() -> None:
    allocator = CachingAllocator()
    for number in range(4096):
        allocator.allocate(number, 512)
        assert allocator.reserved == 2 * MIB
    allocator.allocate("one more", 1)
    assert allocator.reserved == 4 * MIB


@pytest.mark.gpu
def test_model_reserves_the_bytes_that_torch_reserves() -> None:
    """Compare with torch's counter after each request of random size, in a separate pool."""
    chosen, allocator = random.Random(0), CachingAllocator()
    torch.cuda.empty_cache()
    begin, live = torch.cuda.memory_reserved(), dict[int, torch.Tensor]()
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        for number in range(300):
            if live and chosen.random() < 0.45:
                key = chosen.choice([*live])
                del live[key]
                allocator.free(key)
            else:
                size = int(2 ** chosen.uniform(8, 27))
                live[number] = torch.empty(size, dtype=torch.uint8, device="cuda")
                allocator.allocate(number, size)
            assert torch.cuda.memory_reserved() - begin == allocator.reserved, number
