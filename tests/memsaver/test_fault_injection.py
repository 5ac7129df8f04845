"""Every operation with each of its driver calls failing in turn, and with a Ctrl-C at any moment.

An operation either completes or changes nothing, no memory is lost, memory is mapped, unmapped and
created only under the device lock, and the saver stays usable.
"""

from __future__ import annotations

import gc
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
from memsaver import LeaseCache, MemorySaver
from memsaver.sharing.client import peer_backend
from tests.helpers.case_selection import rounds
from tests.helpers.memory import (
    counted,
    family_bytes,
    open_fds,
    own_fds,
    process_bytes,
    settled_fds,
)
from tests.helpers.memsaver.savers import connections, driver_calls, every_call, until
from tests.helpers.timed_interrupts import interrupted

pytestmark = pytest.mark.alone
FILLS = {"kept": 7, "file": 5, "loose": 9, "other": 3}


class World:
    """A saver with four tags, and a receiver whose tag is paused.

    A pause keeps the content of "kept" on the host and of "file" in a file, and discards the rest.
    "loose" and "other" have the same size, in two extents and in one.
    """

    def __init__(self, device: str, folder: Path) -> None:
        self.saver, self.receiver = MemorySaver(device, disk_dir=folder), MemorySaver(device)
        make, unit = self.saver.empty, max(self.saver.backend.granularity, 1 << 16)
        self.unit = unit  # bytes; small, so that driver calls dominate the time
        self.tensors = {
            "kept": make(unit, torch.uint8, tag="kept", content="host"),
            "file": make(unit, torch.uint8, tag="file", content="disk"),
            "loose": make(3 * unit, torch.uint8, tag="loose", elastic=True),
            "other": make(3 * unit, torch.uint8, tag="other"),
        }
        for tag, tensor in self.tensors.items():
            tensor.fill_(FILLS[tag])
        self.receiver_tensor = self.receiver.empty(4 * unit, torch.uint8, tag="theirs").fill_(1)
        self.receiver.pause()
        self.watch = memsaver.ContentWatch(self.saver, *FILLS)
        self.cache, self.more = LeaseCache(), list[torch.Tensor]()

    def backend_of(self, whose: str) -> Any:
        """Return the backend whose driver calls are to fail."""
        if whose == "peer":
            return peer_backend(self.saver.backend.device_key)
        return (self.receiver if whose == "receiver" else self.saver).backend

    def state(self) -> list[Any]:
        tags = self.saver.report(others=False).tags.items()
        return [(name, tag.state, tag.committed_bytes, tag.backup_bytes) for name, tag in tags]

    def check(self) -> None:
        """Check the tables, and the content that was not discarded."""
        self.saver.share("kept")  # waits for a prefetch
        self.saver.check_integrity()
        self.receiver.check_integrity()
        active = [tag for tag in FILLS if not self.saver.is_paused(tag)]
        lost = self.watch.lost(*active)
        assert not {"kept", "file"} & {*lost}
        for tag in active:
            view = self.saver.backed_view(self.tensors[tag])
            if tag in lost:
                view.fill_(FILLS[tag])
            assert bool((view == FILLS[tag]).all()), tag
        self.watch.note(*active)

    def settle(self) -> None:
        """Check that the saver can still pause and resume everything, and leave it active."""
        saver, plain = self.saver, torch.ones(1 << 14, device=self.saver.device)
        self.check()
        with pytest.raises(memsaver.TagError):
            saver.tag_of(plain)
        if saver.report(others=False).tags["loose"].aliased_bytes:
            saver.pause("loose", content="discard")
        until(lambda: saver.leases("loose") <= 1)  # the cached one
        self.receiver.pause()
        saver.resume()
        saver.resize("loose", 3 * self.unit)
        self.tensors["loose"].fill_(FILLS["loose"])
        self.check()
        saver.pause()
        assert not any(tag.committed_bytes for tag in saver.report(others=False).tags.values())
        saver.trim()
        assert saver.report(others=False).committed_bytes == 0
        saver.resume()
        self.check()
        assert float(plain.sum()) == len(plain)

    def end(self) -> None:
        self.tensors.clear()
        self.cache.close()
        self.saver.close()
        self.receiver.close()


Step = Callable[[World], Any]


def pause(*tags: str, **how: Any) -> Step:
    return lambda world: world.saver.pause(*tags, **how)


def resume(*tags: str) -> Step:
    return lambda world: world.saver.resume(*tags)


def resize(units: int) -> Step:
    return lambda world: world.saver.resize("loose", units * world.unit)


def swap(out: str, into: str) -> Step:
    return lambda world: world.saver.swap(pause=out, resume=into, content="host")


def prefetch(world: World) -> None:
    tensors = [world.tensors["kept"], world.tensors["file"]]
    prefetched = world.saver.begin_resume(order=tensors)
    prefetched.wait(tensors[:1])
    prefetched.wait()


def new(world: World) -> None:
    world.more.append(world.saver.empty(world.unit, torch.uint8, tag="new", elastic=True))


def grow(world: World) -> None:
    world.more.append(world.saver.empty(2 * world.unit, torch.uint8, tag="loose"))


def exchange(world: World) -> None:
    """Exchange two tags, and check that both contents have moved or neither has."""
    loose, other = world.tensors["loose"], world.tensors["other"]
    try:
        world.saver.exchange("loose", "other")
    finally:
        moved = bool(world.watch.lost("loose"))
        assert bool((loose == FILLS["other" if moved else "loose"]).all())
        assert bool((other == FILLS["loose" if moved else "other"]).all())


def region(world: World) -> None:
    with world.saver.region("loose"):
        device = world.saver.device
        world.more.append(torch.ones(2 * world.unit, dtype=torch.uint8, device=device))


def nested(world: World) -> None:
    with world.saver.region("loose"), world.saver.region("kept"):
        torch.empty(100, device=world.saver.device)


def attach_and_close(world: World) -> None:
    lease = memsaver.attach(world.saver.share("loose", writable=True))
    lease.tensor((10,), torch.uint8).fill_(FILLS["loose"])
    try:
        lease.close()
    except memsaver.BackendError:
        lease.close()
        raise


def use(world: World) -> None:
    with world.cache.use(world.saver.share("loose")) as lease:
        lease.tensor((4,), torch.uint8)


def can_alias(world: World) -> None:
    world.saver.pause("loose")
    world.receiver.resume()


def alias(world: World) -> None:
    world.saver.alias("loose", world.receiver.share("theirs", writable=True))


def aliased(world: World) -> None:
    can_alias(world)
    alias(world)


def give(world: World) -> None:
    world.saver.pause("loose", release="hand_over", to=world.receiver.pool_ticket())


def give_and_take_back(world: World) -> None:
    """Hand memory over to the receiver, and have the receiver hand its memory back."""
    give(world)
    world.receiver.resume()
    world.receiver.pause(release="hand_over", to=world.saver.pool_ticket())
    world.saver.resume("loose")


def give_retained(world: World) -> None:
    world.saver.release_retained(world.receiver.pool_ticket())


retain = pause("loose", release="retain")
OPERATIONS: dict[str, tuple[Step, Step]] = {
    "pause host": (bool, pause("kept")),
    "pause disk": (bool, pause("file")),
    "pause discard": (bool, pause("loose")),
    "pause all": (bool, pause()),
    "pause all, retained": (bool, pause(release="retain")),
    "pause, aliased": (aliased, pause("loose", content="discard")),
    "resume host": (pause("kept"), resume("kept")),
    "resume disk": (pause("file"), resume("file")),
    "resume all": (pause(), resume()),
    "resume all, retained": (pause(release="retain"), resume()),
    "resume at least": (
        pause("loose"),
        lambda world: world.saver.resume("loose", at_least=world.unit),
    ),
    "begin_resume": (pause(), prefetch),
    "resize down": (bool, resize(1)),
    "resize up": (bool, resize(5)),
    "exchange": (bool, exchange),
    "swap": (pause("kept"), swap("loose", "kept")),
    "swap for more": (pause("loose"), swap("kept", "loose")),
    "alias": (can_alias, alias),
    "hand over": (bool, give),
    "hand over and back": (bool, give_and_take_back),
    "hand over retained": (retain, give_retained),
    "attach": (bool, attach_and_close),
    "cached lease": (bool, use),
    "save": (bool, lambda world: world.saver.save("kept", 1)),
    "trim": (retain, lambda world: world.saver.trim()),
    "new tag": (bool, new),
    "new tag with retained pages": (retain, new),
    "grow": (bool, grow),
    "region": (bool, region),
    "nested regions": (bool, nested),
    "make and close": (bool, lambda world: MemorySaver(world.saver.device).close()),
}
NO_CALLS = {"make and close", "nested regions", "cached lease"}  # a round may make no driver call
OTHERS_CALLS = [
    *[("alias", "receiver"), ("alias", "peer"), ("attach", "peer"), ("hand over", "receiver")],
    ("hand over and back", "receiver"),
]
GROWING = {"new tag", "new tag with retained pages", "grow", "region"}  # the shim makes calls
IN_PARTS = {"attach", "trim", "hand over and back"}
RETRIED = {"trim", "grow", "region", "new tag"}  # a shortage of memory is retried


class WatchedLock:
    """Stand-in for the device lock that counts calls outside of it that change mappings."""

    def __init__(self) -> None:
        self.saver: MemorySaver | None = None
        self.depth = self.counted = self.outside = 0

    def calls(self) -> int:
        calls = driver_calls(self.saver) if self.saver is not None else {}
        return sum(calls[name].calls for name in ("map", "unmap", "create") if name in calls)

    def watch(self, saver: MemorySaver) -> None:
        self.saver, self.outside = saver, 0
        self.counted = self.calls()

    def count(self) -> None:
        if not self.depth:
            self.outside += self.calls() - self.counted
        self.counted = self.calls()

    def __enter__(self) -> None:
        self.count()
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
        self.counted = self.calls()


@pytest.mark.parametrize(
    ("name", "whose"),
    [*((name, "saver") for name in OPERATIONS if name not in NO_CALLS), *OTHERS_CALLS],
)
def test_operation_is_atomic_when_any_driver_call_fails(
    name: str, whose: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, operation = OPERATIONS[name]
    open_before, fds, lock = connections(), own_fds(), WatchedLock()
    attach_and_close(World(device, tmp_path))  # the first use loads kernels
    gc.collect()
    until(lambda: connections() <= open_before)
    if device == "cpu":  # a GPU has a real lock
        monkeypatch.setattr("memsaver.tag.transaction.device_lock", lambda key: lock)
    floor = process_bytes(device)
    raised = 0
    for fault in every_call(device):
        world = World(device, tmp_path)
        before(world)
        state = world.state()
        lock.watch(world.saver)
        try:
            with fault.at(world.backend_of(whose)):
                operation(world)
        except (memsaver.MemSaverError, MemoryError) as error:
            raised += 1
            assert str(error)
            if name not in IN_PARTS:
                assert world.state()[: len(state)] == state or "new" in world.saver.tags
        lock.count()
        assert device != "cpu" or not lock.outside or name in GROWING
        world.settle()
        before(world)
        operation(world)
        world.settle()
        world.end()
        del world
        lock.saver = None
        # The next fault must not hit the threads that close the connections.
        until(lambda: connections() <= open_before)
    if name != "save" or device == "cpu":  # on a GPU, another thread copies
        assert (raised > 0 or name in RETRIED) and fault.call >= 2
    gc.collect()
    if device == "cpu":
        until(lambda: process_bytes(device) <= floor)
        until(lambda: own_fds() <= fds)


@pytest.mark.soak
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_is_atomic_when_interrupted(name: str, device: str, tmp_path: Path) -> None:
    before, work = OPERATIONS[name]
    draw = random.Random(name)
    durations = []
    for _ in range(5):
        world = World(device, tmp_path)
        before(world)
        started = time.perf_counter()
        work(world)
        durations.append(time.perf_counter() - started)
        world.settle()  # also loads its kernels
        world.end()
    longest = 1.3 * statistics.median(durations)
    # Includes memory and descriptors that a process opens once, mostly for CUDA.
    held = family_bytes(device)
    fds = settled_fds()
    hits = 0
    for _ in range(rounds(24, 4000)):
        if hits == rounds(4, 1000):
            break
        world = World(device, tmp_path)
        before(world)
        if interrupted(partial(work, world), max(1e-6, draw.random() * longest)):
            hits += 1
            world.settle()
        else:  # the work takes less time than it did
            longest *= 0.9
        world.end()
    assert hits >= rounds(2, 1000)
    del world
    gc.collect()
    until(lambda: open_fds() <= fds + 2)
    assert max(0, family_bytes(device) - held) == counted(0, device)
