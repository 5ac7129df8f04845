"""Two tags of one saver swap their memory: content goes over, addresses stay, and nothing is half done."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

import memsaver
from memsaver import MemorySaver
from memsaver.imports import imports
from tests.helpers.memory import family_bytes, open_fds
from tests.helpers.memsaver.savers import MIB, every_call

pytestmark = pytest.mark.alone
SIZE, FIRST = 6 * MIB, 4 * MIB  # on every backend pieces of 4 and 2 MiB, where it is in pieces


class World:
    """Tags "old" and "new" of one size, in one piece and in two."""

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
        """Of "old", then of "new": the first and the last byte of either piece."""
        return [int(tensor[at]) for tensor in (self.old, self.new) for at in (0, FIRST - 1, FIRST, -1)]

    @property
    def addresses(self) -> list[int]:
        return [self.old.data_ptr(), self.new.data_ptr()]


APART = [1, 1, 1, 1, 2, 2, 3, 3]
EXCHANGED = [2, 2, 3, 3, 1, 1, 1, 1]


@pytest.fixture
def world(device: str) -> Iterator[World]:
    world = World(device)
    yield world
    world.saver.check_integrity()
    world.saver.close()


def test_content_goes_over_and_addresses_stay(world: World, device: str) -> None:
    addresses, held = world.addresses, family_bytes(device)
    for seen in (EXCHANGED, APART, EXCHANGED):
        world.saver.exchange("old", "new")
        assert world.seen() == seen and world.addresses == addresses
        world.saver.check_integrity()
        assert family_bytes(device) == held
    world.old.fill_(9)
    assert world.seen() == [9] * 4 + [1] * 4
    world.saver.pause("old")
    world.saver.resume("old")
    world.old.fill_(4)
    assert world.seen() == [4] * 4 + [1] * 4


def test_memory_is_given_back_from_where_it_is(world: World, device: str) -> None:
    world.saver.exchange("old", "new")
    before = family_bytes(device)
    world.saver.pause("new")
    assert before - family_bytes(device) == SIZE
    assert [int(world.old[0]), int(world.old[-1])] == [2, 3]


def test_the_timeline_has_both_tags(world: World) -> None:
    world.saver.drain_events()
    world.saver.exchange("old", "new")
    events = world.saver.drain_events()
    assert [(event.op, event.tag, event.committed_bytes) for event in events] == [
        ("exchange", "old", SIZE),
        ("exchange", "new", SIZE),
    ]


def test_a_tag_grows_after_it(world: World) -> None:
    world.saver.exchange("old", "new")
    more = [world.saver.empty(2 * MIB, torch.uint8, tag=tag).fill_(7) for tag in ("old", "new")]
    world.saver.check_integrity()
    assert world.seen() == EXCHANGED and [int(tensor[-1]) for tensor in more] == [7, 7]
    world.saver.exchange("new", "old")
    assert world.seen() == APART


@pytest.mark.parametrize("tag", ["old", "new"])
def test_what_refuses_changes_nothing(world: World, tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memsaver.switch.LEASE_GRACE_SECONDS", 0.05)
    saver = world.saver
    saver.empty(100, tag="small").zero_()
    with pytest.raises(ValueError, match=f"'{tag}' has {SIZE} bytes, 'small' "):
        saver.exchange(tag, "small")
    with pytest.raises(ValueError, match="twice"):
        saver.exchange(tag, tag)
    with pytest.raises(memsaver.TagError, match="unknown tag"):
        saver.exchange(tag, "nobody's")
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
    saver.exchange("old", "new")
    assert world.seen() == EXCHANGED


def test_it_waits_for_a_lease_that_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memsaver.switch.LEASE_GRACE_SECONDS", 60.0)
    lease = memsaver.attach(world.saver.share("old"))
    timer = threading.Timer(0.2, lease.close)
    timer.start()
    world.saver.exchange("old", "new")
    timer.join()
    assert world.seen() == EXCHANGED


def test_imports_stay_with_the_extents(fds: int, world: World) -> None:
    """A peer that imported the old pages finds them behind the other tag, and imports nothing again."""
    saver = world.saver
    tickets = {tag: saver.share(tag) for tag in ("old", "new")}
    for ticket in tickets.values():
        memsaver.attach(ticket).close()
    resting = open_fds(), len(imports), saver.statistics()["export"].calls
    for seen in ([2, 1], [1, 2]):
        saver.exchange("old", "new")
        for ticket, value in zip(tickets.values(), seen, strict=True):
            with memsaver.attach(ticket) as lease:
                assert int(lease.tensor((1,), torch.uint8)) == value
        assert (open_fds(), len(imports), saver.statistics()["export"].calls) == resting
    saver.exchange("old", "new")
    held = len(imports)
    saver.pause("old")  # the extents that it has now are revoked, and no others
    assert held - len(imports) == 2
    assert [int(world.new[0]), int(world.new[-1])] == [1, 1]


def test_what_is_known_of_the_content_goes_with_it(device: str) -> None:
    """A version goes over; a copy that was kept is not mistaken for the other tag's content."""
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
    world.saver.resume()
    assert world.seen() == APART
    saver.mark_clean("new", "v2")  # what "old" was called before it went over
    copies = saver.statistics()["copy"].calls
    saver.pause("new")
    assert saver.statistics()["copy"].calls == copies
    saver.resume()
    assert world.seen() == APART
    saver.close()


def test_every_driver_call_fails_once(device: str) -> None:
    for fault in every_call(device):
        world = World(device)
        raised = False
        with fault.at(world.saver.backend):
            try:
                world.saver.exchange("old", "new")
            except memsaver.BackendError:
                raised = True
                assert world.seen() == APART
        assert fault.fired == raised
        world.saver.check_integrity()
        if raised:
            world.saver.exchange("old", "new")
        assert world.seen() == EXCHANGED
        world.saver.empty(MIB, tag="old").fill_(1)  # not left frozen
        world.saver.close()
    assert fault.call >= 8


def test_nothing_is_copied_cleared_or_taken(world: World) -> None:
    before = world.saver.statistics()
    world.saver.exchange("old", "new")
    after = world.saver.statistics()
    assert {name for name, calls in after.items() if calls != before.get(name)} <= {
        "map", "unmap", "set_access", "synchronize"
    }  # fmt: skip
