"""One tag out, another in: content of both right, addresses the same, nothing lost when it fails in the middle."""

from __future__ import annotations

import functools

import pytest
import torch

import memsaver
from memsaver import page_pool as page_pool_module
from memsaver import swap as swap_module
from tests.helpers.memory import process_bytes
from tests.helpers.memsaver.savers import MIB, every_call

pytestmark = pytest.mark.alone


@functools.cache
def _numbers(count: int, step: int, first: int) -> torch.Tensor:
    return ((torch.arange(count) * step + first) % 251).to(torch.uint8)


class World:
    """Tag a is active, tag b paused; both keep their content, in pieces of different sizes."""

    def __init__(self, device: str, a: tuple[int, ...], b: tuple[int, ...], limit: int | None = None) -> None:
        self.saver = memsaver.MemorySaver(device, limit_bytes=limit)
        self.expected: dict[str, list[torch.Tensor]] = {}
        self.tensors: dict[str, list[torch.Tensor]] = {}
        for tag, sizes in (("b", b), ("a", a)):
            made = [self.saver.empty(size * MIB, torch.uint8, tag=tag, content="host") for size in sizes]
            for number, tensor in enumerate(made):
                tensor.copy_(_numbers(len(tensor), number + 3 + len(tag), ord(tag)))
            self.tensors[tag], self.expected[tag] = made, [tensor.clone() for tensor in made]
            if tag == "b":
                self.saver.pause("b", release="keep")
                self.saver.trim()

    def check(self) -> None:
        self.saver.check_integrity()
        for tag, tensors in self.tensors.items():
            if not self.saver.is_paused(tag):
                assert all(torch.equal(x, y) for x, y in zip(tensors, self.expected[tag], strict=True))

    def swap(self, one: str = "a", other: str = "b") -> None:
        self.saver.swap(pause=one, resume=other)


SHAPES = {
    "alike": ((4, 4, 4), (4, 4, 4)),
    "the second is larger": ((2, 2), (4, 6, 2)),
    "the first is larger": ((8, 8, 8), (2,)),
    "one piece each": ((6,), (6,)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_to_and_fro(shape: str, device: str) -> None:
    world = World(device, *SHAPES[shape])
    addresses = [tensor.data_ptr() for tensors in world.tensors.values() for tensor in tensors]
    for _ in range(3):
        world.swap()
        assert world.saver.is_paused("a") and not world.saver.is_paused("b")
        world.check()
        world.swap("b", "a")
        assert world.saver.is_paused("b") and not world.saver.is_paused("a")
        world.check()
    assert [tensor.data_ptr() for tensors in world.tensors.values() for tensor in tensors] == addresses
    world.saver.resume()
    world.check()
    world.saver.pause()
    world.saver.trim()
    assert world.saver.report().committed_bytes == 0


def test_little_memory_beside_the_first_tag(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (swap_module, page_pool_module):
        monkeypatch.setattr(module, "LARGEST", 2 * MIB)
    world = World(device, (4, 4, 4, 4), (4, 4, 4, 4), limit=18 * MIB + 2 * (device != "cpu") * MIB)
    for one, other in (("a", "b"), ("b", "a")) * 2:
        world.swap(one, other)
        world.check()
        assert world.saver.report().committed_bytes <= 20 * MIB
    assert world.saver.report().tags["a"].extents > 4, "in pieces, since the first time"


@pytest.mark.parametrize(
    ("sizes", "needed", "piecewise"),
    [
        ([1] * 16, 16, True),
        ([16], 16, False),
        ([8, 8], 16, False),
        ([1] * 4, 16, True),
        ([16], 2, False),
        ([16], 1, True),
    ],
)
def test_what_goes_piecewise(sizes: list[int], needed: int, piecewise: bool) -> None:
    unit = swap_module.LARGEST
    assert swap_module.goes_piecewise([size * unit for size in sizes], needed * unit) == piecewise


def test_memory_in_one_large_extent_goes_in_turn_first(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_module, "LARGEST", 2 * MIB)
    world = World(device, (4, 4), (4, 4))
    world.swap()
    world.check()
    world.saver.resume()
    world.check()


def test_too_little_memory_is_told_and_nothing_changes(device: str) -> None:
    world = World(device, (4,), (16,), limit=16 * MIB + MIB)
    keep = world.saver.empty(6 * MIB, torch.uint8, tag="c")
    before = process_bytes(device)
    with pytest.raises(memsaver.OutOfMemory, match="swap.*needs 12.0 MiB: 5.0 MiB are missing.*nothing was changed"):
        world.swap()
    assert world.saver.is_paused("b") and not world.saver.is_paused("a")
    world.check()
    assert process_bytes(device) == before
    del keep


@pytest.mark.parametrize("in_turn", [False, True])
def test_every_driver_call_fails_once(in_turn: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if in_turn:
        monkeypatch.setattr(swap_module, "LARGEST", 2 * MIB)
    raised = 0
    for fault in every_call(device):
        world = World(device, (4, 4) if in_turn else (2, 4), (4, 4))
        try:
            with fault.at(world.saver.backend):
                world.swap()
        except (memsaver.MemSaverError, MemoryError):
            raised += 1
            assert world.saver.is_paused("b") and not world.saver.is_paused("a")
        world.check()
        if world.saver.is_paused("b"):
            world.swap()
        world.check()
        world.swap("b", "a")
        world.check()
        world.saver.close()
    assert raised >= 5


def test_a_clean_tag_is_swapped_out_without_a_copy(device: str) -> None:
    world = World(device, (4, 4), (4, 4))
    world.saver.mark_clean("a", 1)
    world.swap()
    world.swap("b", "a")
    world.saver.mark_clean("a", 1)
    before = world.saver.statistics()["copy"].nbytes
    world.swap()
    assert world.saver.statistics()["copy"].nbytes - before == 8 * MIB, "only the way in"
    world.swap("b", "a")
    world.check()


def test_content_that_is_discarded_is_not_copied(device: str) -> None:
    world = World(device, (4, 4), (4, 4))
    before = world.saver.statistics()["copy"].nbytes
    world.saver.swap(pause="a", resume="b", content="discard")
    assert world.saver.statistics()["copy"].nbytes - before == 8 * MIB
    assert all(torch.equal(x, y) for x, y in zip(world.tensors["b"], world.expected["b"], strict=True))


def test_misuse(device: str) -> None:
    world = World(device, (2,), (2,))
    with pytest.raises(memsaver.StateError, match="paused"):
        world.swap("b", "a")
    with pytest.raises(memsaver.StateError, match="'a' is not paused"):
        world.swap("a", "a")
    with pytest.raises(memsaver.TagError):
        world.swap("a", "c")
    with pytest.raises(ValueError, match="swap keeps content in host memory"):
        world.saver.swap(pause="a", resume="b", content="disk")
    with world.saver.region("a"), pytest.raises(memsaver.StateError, match="region"):
        world.swap()
    world.check()
