"""Swap: one tag is paused and another resumed, both with their content and addresses.

Failing driver calls are in test_fault_injection.
"""

from __future__ import annotations

import functools

import pytest
import torch

import memsaver
from memsaver.memory import page_pool as page_pool_module
from memsaver.tag import refill as swap_module
from tests.helpers.memory import counted, process_bytes
from tests.helpers.memsaver.savers import MIB, driver_calls

pytestmark = pytest.mark.alone


@functools.cache
def _numbers(count: int, step: int, first: int) -> torch.Tensor:
    return ((torch.arange(count) * step + first) % 251).to(torch.uint8)


class World:
    """An active tag "a" and a paused tag "b" with content, in tensors of the given MiB."""

    def __init__(
        self,
        device: str,
        a: tuple[int, ...],
        b: tuple[int, ...],
        limit: int | None = None,
        elastic: bool = False,
    ) -> None:
        self.saver = memsaver.MemorySaver(device, limit_bytes=limit)
        self.expected: dict[str, list[torch.Tensor]] = {}
        self.tensors: dict[str, list[torch.Tensor]] = {}
        for tag, sizes in (("b", b), ("a", a)):
            created = [
                self.saver.empty(size * MIB, torch.uint8, tag, content="host", elastic=elastic)
                for size in sizes
            ]
            for number, tensor in enumerate(created):
                tensor.copy_(_numbers(len(tensor), number + 3 + len(tag), ord(tag)))
            self.tensors[tag], self.expected[tag] = created, [tensor.clone() for tensor in created]
            if tag == "b":
                self.saver.pause("b", release="retain")
                self.saver.trim()

    @property
    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensors in self.tensors.values() for tensor in tensors]

    @property
    def copied(self) -> int:
        return driver_calls(self.saver)["copy"].nbytes

    def check(self, *paused: str) -> None:
        self.saver.check_integrity()
        assert [tag for tag in ("a", "b") if self.saver.is_paused(tag)] == list(paused)
        for tag in {"a", "b"} - set(paused):
            assert all(
                torch.equal(x, y)
                for x, y in zip(self.tensors[tag], self.expected[tag], strict=True)
            )

    def swap_twice(self) -> None:
        for out, into in (("a", "b"), ("b", "a")):
            self.saver.swap(pause=out, resume=into)
            self.check(out)


def test_swap_needs_little_extra_memory(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (swap_module, page_pool_module):
        monkeypatch.setattr(module, "LARGEST", 2 * MIB)
    limit = 18 * MIB + 2 * (device != "cpu") * MIB
    world = World(device, (4, 4, 4, 4), (4, 4, 4, 4), limit, elastic=True)
    for _ in range(2):
        world.swap_twice()
        assert world.saver.report().committed_bytes <= 20 * MIB
    assert world.saver.report().tags["a"].extents > 4, "one large extent instead of pieces"


def test_refused_swap_changes_nothing(device: str) -> None:
    world = World(device, (4,), (16,), limit=16 * MIB + MIB)
    world.saver.empty(100, tag="c")
    swap = world.saver.swap
    with pytest.raises(memsaver.StateError, match="paused"):
        swap(pause="b", resume="a")
    with pytest.raises(memsaver.StateError, match="'a' is not paused"):
        swap(pause="a", resume="a")
    with pytest.raises(memsaver.TagError):
        swap(pause="a", resume="d")
    with pytest.raises(ValueError, match="swap keeps content in host memory"):
        swap(pause="a", resume="b", content="disk")
    with world.saver.region("a"), pytest.raises(memsaver.StateError, match="region"):
        swap(pause="a", resume="b")
    world.check("b")
    keep = world.saver.empty(6 * MIB, torch.uint8, tag="d")
    before = process_bytes(device)
    with pytest.raises(
        memsaver.OutOfMemory, match="swap.*needs 12.0 MiB: .* are missing.*nothing was changed"
    ):
        swap(pause="a", resume="b")
    world.check("b")
    assert process_bytes(device) == counted(before, device, 2)
    del keep


def test_swap_copies_no_clean_or_discarded_content(device: str) -> None:
    world = World(device, (4, 4), (4, 4))
    world.saver.mark_clean("a", 1)
    world.swap_twice()
    world.saver.mark_clean("a", 1)
    before = world.copied
    world.saver.swap(pause="a", resume="b")
    assert world.copied - before == 8 * MIB, "more than the entering tag was copied"
    world.saver.swap(pause="b", resume="a")
    world.check("b")
    before = world.copied
    world.saver.swap(pause="a", resume="b", content="discard")
    assert world.copied - before == 8 * MIB
    world.check("a")
