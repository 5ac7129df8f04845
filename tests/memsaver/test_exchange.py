"""Exchange: two tags swap their memory and content, and keep their addresses.

Failing driver calls are in test_fault_injection.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

import memsaver
from memsaver import MemorySaver
from memsaver.memory.page_pool import imports
from tests.helpers.memory import settled_fds
from tests.helpers.memsaver.savers import MIB, driver_calls

pytestmark = pytest.mark.alone
SIZE, FIRST = 6 * MIB, 4 * MIB  # an elastic tag has pieces of 4 and 2 MiB on every backend
APART = [1, 1, 1, 1, 2, 2, 3, 3]
EXCHANGED = [2, 2, 3, 3, 1, 1, 1, 1]


class World:
    """Tags "old" and "new" of the same size, in one piece and in two."""

    def __init__(self, device: str, content: str = "discard") -> None:
        self.saver = MemorySaver(device)
        self.old = self.saver.empty(SIZE, torch.uint8, tag="old", content=content)
        self.new = self.saver.empty(SIZE, torch.uint8, tag="new", content=content, elastic=True)
        assert [self.saver.report().tags[tag].extents for tag in ("old", "new")] == [1, 2]
        self.fill()

    def fill(self) -> None:
        self.old.fill_(1)
        self.new[:FIRST] = 2
        self.new[FIRST:] = 3

    def seen(self) -> list[int]:
        """Return the first and last bytes of both pieces, of "old" and then of "new"."""
        return [
            int(tensor[at]) for tensor in (self.old, self.new) for at in (0, FIRST - 1, FIRST, -1)
        ]


@pytest.fixture
def world(device: str) -> Iterator[World]:
    world = World(device)
    yield world
    world.saver.check_integrity()
    world.saver.close()


@pytest.mark.parametrize("tag", ["old", "new"])
def test_refused_exchange_changes_nothing(
    world: World, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memsaver.tag.transaction.LEASE_GRACE_SECONDS", 0.05)
    saver = world.saver
    saver.empty(100, tag="small").zero_()
    for other, kind, message in (
        ("small", ValueError, f"'{tag}' has {SIZE} bytes, 'small' "),
        (tag, ValueError, "twice"),
        ("unknown", memsaver.TagError, "unknown tag"),
    ):
        with pytest.raises(kind, match=message):
            saver.exchange(tag, other)
    with (
        memsaver.attach(saver.share(tag)) as lease,
        pytest.raises(memsaver.LeaseError, match=f"leased: '{tag}' by process"),
    ):
        saver.exchange("old", "new")
    assert lease.nbytes == SIZE and world.seen() == APART
    with saver.region(tag), pytest.raises(memsaver.StateError, match="a region of it is open"):
        saver.exchange("old", "new")
    saver.pause(tag)
    with pytest.raises(memsaver.StateError, match=rf"exchange\('{tag}'\): the tag is paused"):
        saver.exchange("old", "new")
    saver.resume(tag)
    world.fill()
    monkeypatch.setattr("memsaver.tag.transaction.LEASE_GRACE_SECONDS", 60.0)
    timer = threading.Timer(0.2, memsaver.attach(saver.share(tag)).close)
    timer.start()
    saver.exchange("old", "new")  # waits until the lease ends
    timer.join()
    assert world.seen() == EXCHANGED


def test_imports_follow_exchanged_extents(fds: int, world: World) -> None:
    # A peer finds the pages that it imported behind the other tag, and imports nothing again.
    saver = world.saver
    tickets = {tag: saver.share(tag) for tag in ("old", "new")}
    for ticket in tickets.values():
        memsaver.attach(ticket).close()
    resting = settled_fds(), len(imports), driver_calls(saver)["export"].calls
    for values in ([2, 1], [1, 2]):
        saver.exchange("old", "new")
        for ticket, value in zip(tickets.values(), values, strict=True):
            with memsaver.attach(ticket) as lease:
                assert int(lease.tensor((1,), torch.uint8)) == value
        assert (settled_fds(), len(imports), driver_calls(saver)["export"].calls) == resting
    saver.exchange("old", "new")
    held = len(imports)
    saver.pause("old")  # only the extents that the tag has now are revoked
    assert held - len(imports) == 2
    assert [int(world.new[0]), int(world.new[-1])] == [1, 1]


def test_version_moves_with_content_and_clean_copy_is_dropped(device: str) -> None:
    # A clean copy must not be mistaken for the other tag's content.
    world = World(device, content="host")
    saver = world.saver
    saver.save("old", "v1")
    saver.save("new", "v1")
    saver.exchange("old", "new")
    saver.pause("old", "new")
    saver.resume()
    assert world.seen() == EXCHANGED
    saver.mark_clean("old", "v2")
    saver.exchange("old", "new")
    saver.pause()
    saver.resume()
    assert world.seen() == APART
    saver.mark_clean("new", "v2")  # the version of the content that "old" had before
    copies = driver_calls(saver)["copy"].calls
    saver.pause("new")
    assert driver_calls(saver)["copy"].calls == copies
    saver.resume()
    assert world.seen() == APART
    saver.close()
