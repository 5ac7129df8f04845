"""A tag shows another saver's pages: two tags, one memory; what it must not do with them, and that they go back."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memsaver
from memsaver import MemorySaver
from memsaver.imports import imports
from tests.helpers.memory import family_bytes, memory_maps, open_fds
from tests.helpers.memsaver.lending import OWN, SIZE, THEIRS, World
from tests.helpers.memsaver.savers import MIB

pytestmark = pytest.mark.alone


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause under a lease gives up at once."""
    monkeypatch.setattr("memsaver.switch.LEASE_GRACE_SECONDS", 0.05)


@pytest.fixture
def world(device: str) -> Iterator[World]:
    world = World(device)
    yield world
    world.close()


def test_both_tags_show_the_same_memory(world: World, device: str) -> None:
    addresses, held = (world.first.data_ptr(), world.rest.data_ptr()), family_bytes(device)
    for value in (100, 101):
        world.borrow()
        world.check()
        assert world.seen()[1:] == THEIRS[1:] and family_bytes(device) == held
        world.first.fill_(value)
        assert world.params[: MIB + 1].tolist()[-2:] == [value, 1]
        world.params[0] = 50
        assert int(world.first[0]) == 50
        assert (world.first.data_ptr(), world.rest.data_ptr()) == addresses
        world.saver.pause("weights")
        world.check()
        assert world.saver.is_paused("weights") and family_bytes(device) == held
    world.owner.pause()
    assert held - family_bytes(device) == SIZE
    world.saver.resume("weights")
    world.rest.fill_(3)
    report = world.saver.report().tags["weights"]
    assert (report.committed_bytes, report.borrowed_bytes, report.extents) == (4 * MIB, 0, 1)


def test_the_report_and_the_timeline(world: World) -> None:
    world.saver.drain_events()
    world.borrow()
    report = world.saver.report()
    tag = report.tags["weights"]
    assert (tag.state, tag.borrowed_bytes, tag.committed_bytes, tag.live_bytes) == ("active", SIZE, 0, 4 * MIB)
    assert report.committed_bytes == 0 and tag.last_resume_seconds > 0
    assert world.owner.report().tags["params"].leases == 1 and world.owner.report().committed_bytes == SIZE
    assert torch.equal(world.saver.backed_view(world.rest), world.rest)
    world.saver.pause()
    assert world.owner.report().tags["params"].leases == world.saver.report().tags["weights"].borrowed_bytes == 0
    assert [(event.op, event.tag) for event in world.saver.drain_events()] == [
        ("borrow", "weights"),
        ("pause", "weights"),
    ]


def test_the_second_time_nothing_is_imported_or_exported(fds: int, world: World) -> None:
    world.borrow()
    world.saver.pause()
    resting, maps = (len(imports), open_fds()), memory_maps()
    for _ in range(20):
        world.borrow()
        world.saver.pause()
        assert (len(imports), open_fds()) == resting and memory_maps() <= maps + 8
    assert world.owner.statistics()["export"].calls == 2


def test_what_does_not_fit_the_owners_pages_is_refused(world: World) -> None:
    """Each with nothing changed, so that the same tag borrows after it."""
    saver, ticket = world.saver, world.owner.share("params")
    little = world.owner.empty(2 * MIB, torch.uint8, tag="small").fill_(1)
    other_device = memsaver.Ticket(**{**vars(ticket), "device_key": "GPU-1"})
    active = saver.empty(MIB, torch.uint8, tag="active").fill_(1)
    refusals: list[tuple[str, memsaver.Ticket, type[Exception], str]] = [
        ("nobody's", ticket, memsaver.TagError, "unknown tag"),
        ("active", ticket, memsaver.StateError, "the tag is active; pause it first"),
        ("weights", other_device, ValueError, "pages of GPU-1 cannot serve"),
        ("weights", saver.share("active"), ValueError, "'active' is a tag of the same saver; use exchange"),
        ("weights", memsaver.Ticket(**{**vars(ticket), "token": ""}), memsaver.LeaseError, "unknown ticket"),
        ("weights", memsaver.Ticket(**{**vars(ticket), "socket_name": "x"}), memsaver.LeaseError, "not answer"),
        ("weights", world.owner.share("small"), ValueError, "needs 4.0 MiB.*tag 'small' has 2.0 MiB"),
    ]
    for tag, bad, kind, text in refusals:
        with pytest.raises(kind, match=text):
            saver.borrow(tag, bad)
        world.check()
    world.owner.pause("params")
    with pytest.raises(memsaver.LeaseError, match="'params' is paused"):
        world.borrow()
    world.owner.resume("params")
    assert world.owner.report().tags["params"].leases == world.owner.report().tags["small"].leases == 0
    world.params.fill_(9)
    world.borrow()
    assert world.seen() == [9] * 7 and int(active[-1]) == int(little[-1]) == 1


def test_tensors_that_died_need_no_pages(world: World) -> None:
    world.rest = world.first[:1]
    gc.collect()
    small = world.owner.empty(2 * MIB, torch.uint8, tag="small").fill_(9)
    world.saver.borrow("weights", world.owner.share("small"))
    assert int(world.first[-1]) == int(small[0]) == 9
    world.saver.pause()


def test_a_tag_with_too_few_addresses_is_refused(device: str) -> None:
    world = World(device, reserve_bytes=4 * MIB)
    with pytest.raises(ValueError, match="has addresses for 4.0 MiB; tag 'params' has 6.0 MiB"):
        world.borrow()
    world.close()


REFUSED: dict[str, Callable[[MemorySaver], Any]] = {
    "resize": lambda saver: saver.resize("weights", MIB),
    "exchange": lambda saver: saver.exchange("weights", "spare"),
    "swap": lambda saver: saver.swap(pause="weights", resume="asleep"),
    "save": lambda saver: saver.save("weights", 1),
    "mark_clean": lambda saver: saver.mark_clean("weights", 1),
    "share it at its owner": lambda saver: saver.share("weights"),
    "allocate": lambda saver: saver.empty(10, tag="weights"),
    "allocate on": lambda saver: saver.empty(10, tag="weights", elastic=True),
    "cannot allocate": lambda saver: saver.region("weights").__enter__(),
    "borrow": lambda saver: saver.borrow("weights", saver.share("spare")),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_borrowed_tag_refuses(world: World, what: str) -> None:
    for tag in ("spare", "asleep"):
        world.saver.empty(SIZE, torch.uint8, tag=tag).fill_(1)
    world.saver.pause("asleep")
    world.borrow()
    with pytest.raises(memsaver.LeaseError, match=rf"{what}.*are borrowed.*another saver's tag 'params'"):
        REFUSED[what](world.saver)
    world.check()
    assert world.seen() == THEIRS
    world.saver.trim()
    world.saver.resume()
    assert world.seen() == THEIRS
    world.saver.pause("weights")


def test_a_ticket_from_before_is_no_way_round(world: World) -> None:
    ticket = world.saver.share("weights")
    world.borrow()
    with pytest.raises(memsaver.LeaseError, match="borrowed its pages; share them at their owner"):
        memsaver.attach(ticket)


def test_its_own_saved_content_waits(device: str) -> None:
    world = World(device, content="host")
    for _ in range(2):
        world.borrow()
        assert world.seen() == THEIRS
        for content in (None, "host", "disk"):
            with pytest.raises(ValueError, match=r"\['weights'\] are borrowed.*content='discard'"):
                world.saver.pause(content=content)
        assert world.seen() == THEIRS
        world.saver.pause("weights", content="discard", release="keep")
    world.saver.resume("weights")
    assert world.seen() == OWN
    world.close()


def test_a_pause_of_several_tags_is_all_or_nothing(world: World) -> None:
    other = world.saver.empty(MIB, torch.uint8, tag="other").fill_(5)
    world.borrow()
    with memsaver.attach(world.saver.share("other")), pytest.raises(memsaver.LeaseError, match="leased: 'other'"):
        world.saver.pause()
    world.check()
    assert world.seen() == THEIRS and int(other[-1]) == 5 and not world.saver.is_paused("weights")
    receiver = MemorySaver(world.saver.device)
    world.saver.pause(release="hand_over", to=receiver.pool_ticket())
    assert receiver.report().pool_bytes == max(MIB, world.saver.backend.granularity)
    assert world.owner.report().tags["params"].leases == 0
    receiver.close()


def test_the_owner_cannot_pause_until_it_is_given_back(world: World) -> None:
    world.borrow()
    for what in (world.owner.pause, lambda: world.owner.resize("params", MIB), world.owner.close):
        with pytest.raises(memsaver.LeaseError, match=f"'params' by process {os.getpid()}; .*what borrowed the pages"):
            what()
    world.check()
    assert world.seen() == THEIRS
    world.saver.pause()
    world.owner.pause()
    world.owner.resume()


def test_tensors_die_while_it_is_borrowed(world: World) -> None:
    world.borrow()
    world.first = world.rest[:1]
    gc.collect()
    world.check()
    assert world.saver.report().tags["weights"].live_bytes == 3 * MIB and int(world.rest[-1]) == 3
    world.saver.pause()
    world.saver.resume()
    world.saver.empty(MIB, torch.uint8, tag="weights").fill_(1)


def test_mappings_are_writable_as_the_ticket_says() -> None:
    for writable, rights in ((False, "r--s"), (True, "rw-s")):
        world = World("cpu")
        world.borrow(writable)
        start = f"{world.first.data_ptr():x}-"
        lines = Path("/proc/self/maps").read_text().splitlines()
        assert [line.split()[1] for line in lines if line.startswith(start)] == [rights]
        assert world.seen() == THEIRS
        world.saver.pause()
        world.close()


def test_debug_mode_knows_that_there_is_memory(device: str) -> None:
    world = World(device, debug=True)
    with pytest.raises(memsaver.StateError, match="paused"):
        world.rest.sum()
    world.borrow()
    assert int(world.rest[-1]) == 3
    world.saver.pause()
    with pytest.raises(memsaver.StateError, match="paused"):
        world.rest.sum()
    world.close()
