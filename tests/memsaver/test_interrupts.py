"""Ctrl-C at any moment: every operation has happened or has not, nothing is lost, and the saver
goes on.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import memsaver
from memsaver import MemorySaver
from memsaver.sharing.lease import LeaseCache
from tests.helpers.alarms import interrupted
from tests.helpers.effort import rounds
from tests.helpers.memory import family_bytes, settled_fds
from tests.helpers.memsaver.savers import until

pytestmark = pytest.mark.alone
FILLS = {"kept": 7, "file": 5, "loose": 9, "other": 3}


class World:
    """Tags whose content a pause keeps on the host and in a file, and two of one size whose content
    it drops.
    """

    def __init__(self, device: str, folder: Path) -> None:
        self.saver = MemorySaver(device, disk_dir=folder)
        make, unit = self.saver.empty, max(self.saver.backend.granularity, 1 << 16)
        self.unit = unit  # bytes; small, so that most of the time goes into driver calls
        self.tensors = {
            "kept": make(unit, torch.uint8, tag="kept", content="host"),
            "file": make(unit, torch.uint8, tag="file", content="disk"),
            "loose": make(3 * unit, torch.uint8, tag="loose", elastic=True),
            "other": make(3 * unit, torch.uint8, tag="other"),
        }
        self.fill()
        self.guests: list[Any] = []

    def fill(self) -> None:
        for tag, tensor in self.tensors.items():
            tensor.fill_(FILLS[tag])

    def wrong(self, exchanged: bool) -> list[str]:
        """Tags that are active and show something else than was written there."""
        shown = {**FILLS, "loose": FILLS["other"], "other": FILLS["loose"]} if exchanged else FILLS
        active = [tag for tag in FILLS if not self.saver.is_paused(tag)]
        views = {tag: self.saver.backed_view(self.tensors[tag]) for tag in active}
        return [tag for tag, view in views.items() if not bool((view == shown[tag]).all())]


def paused(*tags: str, **how: Any) -> Callable[[World], None]:
    return lambda world: world.saver.pause(*tags, **how)


def shared(world: World) -> None:
    world.guests = [world.saver.share("loose"), LeaseCache()]


def another(world: World) -> None:
    """A second saver, one of whose tags is paused and may alias."""
    guest = MemorySaver(world.saver.device)
    guest.empty(3 * world.unit, torch.uint8, tag="guest")
    guest.pause("guest")
    world.guests = [guest, world.saver.share("loose"), guest.pool_ticket()]


def alias_tag(world: World) -> None:
    guest, ticket, _ = world.guests
    guest.alias("guest", ticket)
    guest.pause("guest")


def use(world: World) -> None:
    with world.guests[1].use(world.guests[0]) as lease:
        lease.tensor((4,), torch.uint8)


def more(world: World) -> None:
    world.guests = [world.saver.empty(world.unit, tag="new", elastic=True)]


def region(world: World) -> None:
    with world.saver.region("loose"):
        torch.empty(world.unit, dtype=torch.uint8, device=world.saver.device)


def nested(world: World) -> None:
    with world.saver.region("loose"), world.saver.region("kept"):
        torch.empty(100, device=world.saver.device)


def nothing(world: World) -> None:
    pass


OPERATIONS: dict[str, tuple[Callable[[World], Any], Callable[[World], Any]]] = {
    "pause host": (nothing, paused("kept")),
    "pause disk": (nothing, paused("file")),
    "pause discard": (nothing, paused("loose")),
    "pause all": (nothing, paused()),
    "pause keep": (nothing, paused("loose", "other", release="retain")),
    "hand over": (
        another,
        lambda world: world.saver.pause("other", release="hand_over", to=world.guests[2]),
    ),
    "resume host": (paused("kept"), lambda world: world.saver.resume("kept")),
    "resume disk": (paused("file"), lambda world: world.saver.resume("file")),
    "resume kept pages": (
        paused("loose", release="retain"),
        lambda world: world.saver.resume("loose"),
    ),
    "resume all": (paused(), lambda world: world.saver.resume()),
    "resize down": (nothing, lambda world: world.saver.resize("loose", world.unit)),
    "resize up": (nothing, lambda world: world.saver.resize("loose", 5 * world.unit)),
    "exchange": (nothing, lambda world: world.saver.exchange("loose", "other")),
    "swap": (paused("other"), lambda world: world.saver.swap(pause="kept", resume="other")),
    "swap in turn": (
        paused("kept"),
        lambda world: world.saver.swap(pause="other", resume="kept", content="host"),
    ),
    "alias": (another, alias_tag),
    "attach": (shared, lambda world: memsaver.attach(world.guests[0]).close()),
    "kept lease": (shared, use),
    "save": (nothing, lambda world: world.saver.save("kept", 1)),
    "empty": (nothing, more),
    "trim": (paused("loose", release="retain"), lambda world: world.saver.trim()),
    "region": (nothing, region),
    "nested regions": (nothing, nested),
    "make and close": (nothing, lambda world: MemorySaver(world.saver.device).close()),
}


def goes_on(world: World, operation: str) -> None:
    """Everything that the saver can do, it still can."""
    saver = world.saver
    saver.check_integrity()
    for guest in world.guests:
        if isinstance(guest, MemorySaver):
            guest.pause()  # gives back what it has aliased
    if operation != "kept lease":
        until(lambda: not saver.leases("loose"))
    swapped = [tag for tag in ("loose", "other") if not saver.is_paused(tag)]
    exchanged = operation == "exchange" and bool((world.tensors["loose"] == FILLS["other"]).all())
    if operation in ("resume kept pages", "resume all", "swap"):  # what a pause drops is undefined
        for tag in swapped:
            world.tensors[tag].fill_(FILLS[tag])
    assert world.wrong(exchanged) == []
    plain = torch.ones(1 << 14, device=saver.device)
    with pytest.raises(memsaver.TagError):
        saver.tag_of(plain)
    saver.resume()
    saver.resize("loose", 3 * world.unit)
    for tag in ("loose", "other"):
        world.tensors[tag].fill_(FILLS[tag])
    saver.pause()
    report = saver.report()
    assert [tag for tag, item in report.tags.items() if item.committed_bytes] == []
    saver.trim()
    assert saver.report().committed_bytes == 0
    saver.resume()
    for tag in ("kept", "file"):
        assert bool((world.tensors[tag] == FILLS[tag]).all()), tag
    assert float(plain.sum()) == len(plain)


def end(world: World) -> None:
    world.tensors.clear()
    for guest in world.guests:
        if isinstance(guest, MemorySaver | LeaseCache):
            guest.close()
    world.saver.close()


@pytest.mark.soak
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_interrupt_at_any_moment(operation: str, device: str, tmp_path: Path) -> None:
    before, work = OPERATIONS[operation]
    draw = random.Random(operation)
    durations = []
    for _ in range(8):
        world = World(device, tmp_path)
        before(world)
        started = time.perf_counter()
        work(world)
        durations.append(time.perf_counter() - started)
        goes_on(world, operation)  # loads its kernels, too
        end(world)
    longest = 1.3 * statistics.median(durations)
    # with what a process opens once, for CUDA above all
    held = family_bytes(device)
    fds = settled_fds()
    hits = 0
    for _ in range(rounds(60, 4000)):
        if hits == rounds(25, 1000):
            break
        world = World(device, tmp_path)
        before(world)
        if interrupted(partial(work, world), max(1e-6, draw.random() * longest)):
            hits += 1
            goes_on(world, operation)
        end(world)
    assert hits >= rounds(5, 1000)
    del world
    until(lambda: settled_fds() <= fds + 2)
    assert family_bytes(device) <= held
