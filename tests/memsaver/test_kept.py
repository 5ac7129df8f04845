"""LeaseCache: cached leases never block their owner and never show pages that the tag has left.

Random orders of operations are in test_stateful and test_processes.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memsaver
from memsaver import Lease, LeaseCache, LeaseError, MemorySaver, StateError, Ticket
from memsaver.memory.page_pool import imports
from memsaver.sharing.client import peer_backend
from tests.helpers.memory import counted, family_bytes
from tests.helpers.memsaver.remote import remote_saver
from tests.helpers.memsaver.savers import MIB, at_once, busy, inject_fault, until

pytestmark = pytest.mark.alone
SIZE = 4 * MIB


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extend the time a pause waits for leases, so that needless waits and lost recalls show."""
    monkeypatch.setattr("memsaver.tag.transaction.LEASE_GRACE_SECONDS", 60.0)


class World:
    """A saver whose tag "weights" has one tensor, and a cache of leases in the same process."""

    def __init__(self, device: str) -> None:
        self.saver, self.kept = MemorySaver(device), LeaseCache()
        self.tensor = self.saver.empty(SIZE, torch.uint8, tag="weights").fill_(1)
        self.ticket = self.saver.share("weights", writable=True)

    @property
    def leases(self) -> int:
        return self.saver.report().tags["weights"].leases

    def write(self, value: int) -> Lease:
        """Fill the tag through the cached lease, and check the owner's tensor."""
        with self.kept.use(self.ticket) as lease:
            lease.tensor((SIZE,), torch.uint8).fill_(value)
        assert int(self.tensor[0]) == int(self.tensor[-1]) == value
        return lease


@pytest.fixture
def world(device: str) -> Iterator[World]:
    instance = World(device)
    yield instance
    instance.kept.close()
    instance.saver.check_integrity()
    instance.saver.close()


def _first(kept: LeaseCache, ticket: Ticket) -> int:
    with kept.use(ticket) as lease:
        return int(lease.tensor((1,), torch.uint8))


def test_lease_is_mapped_once_until_a_pause_moves_the_pages(world: World, device: str) -> None:
    before = world.write(2)
    assert world.leases == 1 and world.write(2) is before
    world.saver.pause(release="retain")
    world.saver.resume()
    assert before.closed and world.leases == 0
    again = world.write(3)
    assert again is not before and world.write(5) is again
    assert len(again.owner.recalls) == 1, "the connection keeps ended leases"
    held, committed = family_bytes(device), world.saver.report().committed_bytes
    world.saver.pause()
    world.saver.trim()
    assert held - family_bytes(device) == counted(committed, device, 2), "a lease keeps pages"
    with pytest.raises(LeaseError, match="'weights' is paused"), world.kept.use(world.ticket):
        pass
    world.saver.resume()


def test_pause_waits_for_lease_in_use_which_then_ends(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world.kept.use(world.ticket):
        pausing = threading.Thread(target=world.saver.pause)
        pausing.start()
        time.sleep(0.1)
        assert not world.saver.is_paused("weights")
    pausing.join()
    assert world.saver.is_paused("weights")
    world.saver.resume()
    world.tensor.fill_(1)
    monkeypatch.setattr("memsaver.tag.transaction.LEASE_GRACE_SECONDS", 0.05)
    with world.kept.use(world.ticket) as lease:
        with pytest.raises(LeaseError, match="leased: 'weights' by process"):
            world.saver.pause("weights")
        assert not world.saver.is_paused("weights")
        lease.tensor((SIZE,), torch.uint8).fill_(7)
        # The owner has given up on the pause, and grants new leases.
        with world.kept.use(world.ticket) as again:
            assert again is not lease and int(again.tensor((1,), torch.uint8)) == 7
    assert lease.closed and not again.closed and world.leases == 1


def test_concurrent_uses_share_one_lease(world: World) -> None:
    with world.kept.use(world.ticket) as first, world.kept.use(world.ticket) as second:
        assert first is second and world.leases == 1
    assert not first.closed
    meet = threading.Barrier(4)

    def work() -> int:
        with fresh.use(world.ticket) as lease:
            meet.wait(60)  # by then, every thread has entered a lease
            return int(lease.tensor((1,), torch.uint8))

    with LeaseCache() as fresh:
        assert at_once(*[work] * 4) == [1] * 4 and world.leases == 2  # one per cache
    assert world.leases == 1


def test_grown_tag_is_mapped_again_only_if_at_least_requires_it(world: World) -> None:
    first = world.write(2)
    more = world.saver.empty(SIZE, torch.uint8, tag="weights").fill_(8)
    assert world.write(3) is first
    with world.kept.use(world.ticket, at_least=2 * SIZE) as lease:
        view = lease.tensor((SIZE,), torch.uint8, world.saver.offset_of(more))
        assert int(view[-1]) == 8
    assert first.closed and world.leases == 1 and world.write(4) is lease


def test_cache_has_one_lease_per_tag_and_right_until_close(world: World) -> None:
    world.saver.empty(10, tag="other")
    tickets = [world.saver.share("weights"), world.ticket, world.saver.share("other")]
    for _ in range(2):
        for ticket in tickets:
            with world.kept.use(ticket):
                pass
    assert world.leases == 2
    world.saver.pause("other")
    assert world.leases == 2
    with world.kept.use(world.ticket) as lease:
        world.kept.close()
        assert int(lease.tensor((1,), torch.uint8)) == 1, "a use keeps its pages"
    assert lease.closed and world.leases == 0
    with pytest.raises(StateError, match="closed; make a new one"), world.kept.use(world.ticket):
        pass


def test_recall_and_close_can_be_repeated_after_driver_error(world: World) -> None:
    lease = world.write(2)
    backend: Any = peer_backend(world.ticket.device_key)
    inject_fault(backend, 1, 2)
    world.saver.pause("weights")  # the recall is repeated
    assert lease.closed
    world.saver.resume("weights")
    again = world.write(3)
    inject_fault(backend, 1, 2)
    with pytest.raises(memsaver.BackendError):
        world.kept.close()
    world.kept.close()
    assert again.closed and world.leases == 0


def test_recall_that_overtakes_the_lease_is_repeated(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The owner grants a lease, and pauses before the peer has mapped it.
    original = memsaver.sharing.lease.import_all
    pausing = threading.Thread(target=world.saver.pause)

    def import_all(*arguments: Any) -> None:
        pausing.start()
        time.sleep(0.1)
        original(*arguments)

    monkeypatch.setattr(memsaver.sharing.lease, "import_all", import_all)
    with world.kept.use(world.ticket):
        pass
    pausing.join()
    assert world.saver.is_paused("weights") and world.leases == 0
    world.saver.resume()


def test_leases_end_when_owner_dies(device: str) -> None:
    # An idle lease ends immediately, which frees the memory; a lease in use ends with the use.
    before, here = family_bytes(device), len(imports)
    for used in (False, True):
        with remote_saver(device, nbytes=SIZE) as owner, contextlib.ExitStack() as uses:
            kept = LeaseCache()
            lease = uses.enter_context(kept.use(owner.ticket))
            if not used:
                uses.close()
            owner.kill()
            if used:
                until(lambda lease=lease: lease.owner.endpoint.closed)
                assert int(lease.tensor((1,), torch.uint8)) == 1
        until(lambda lease=lease: lease.closed)
        if device == "cpu":
            until(lambda: (family_bytes(device), len(imports)) == (before, here))
        with pytest.raises(LeaseError, match="does not answer"), kept.use(owner.ticket):
            pass
        kept.close()


@pytest.mark.parametrize("how", ["close", "drop"])
def test_lease_ends_when_owner_closes_or_is_dropped(how: str, device: str) -> None:
    world = World(device)
    lease, kept, ticket = world.write(1), world.kept, world.ticket
    if how == "close":
        world.saver.close()
    del world
    gc.collect()
    until(lambda: lease.closed)
    with pytest.raises(LeaseError, match="does not answer"), kept.use(ticket):
        pass
    kept.close()


def test_dropped_cache_ends_its_leases(world: World) -> None:
    kept: Any = LeaseCache()
    assert _first(kept, world.ticket) == world.leases == 1
    kept.cycle = kept
    with busy(world.saver):  # the finalizer must not need the saver's lock
        threads = threading.active_count()
        del kept
        gc.collect()
        assert threading.active_count() == threads
    until(lambda: not world.leases)


@pytest.mark.parametrize("device", ["cpu"])  # CUDA does not survive a fork
def test_forked_child_maps_leases_again(world: World, device: str) -> None:
    kept, ticket = world.kept, world.ticket
    assert _first(kept, ticket) == 1
    if not (child := os.fork()):
        code = 1
        with contextlib.suppress(BaseException):
            assert _first(kept, ticket) == 1 and world.saver.backend.forked
            kept.close()
            code = 0
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    until(lambda: world.leases == 1)
    assert _first(kept, ticket) == 1
    world.saver.pause()


def test_concurrent_uses_show_present_pages_while_owner_pauses_and_resumes(world: World) -> None:
    # Each use shows values that the owner wrote after its last resume.
    stop, values = threading.Event(), set()

    def use() -> None:
        while not stop.is_set():
            # A use fails while the tag is paused.
            with contextlib.suppress(LeaseError), world.kept.use(world.ticket) as lease:
                ends = lease.tensor((SIZE,), torch.uint8)[:: SIZE - 1].tolist()
                assert ends[0] == ends[1] or 0 in ends, ends
                values.add(ends[0])

    def own() -> None:
        try:
            for value in range(1, 80):
                world.saver.pause()
                world.saver.resume()
                for at, number in ((-1, 0), (0, value), (-1, value)):
                    world.tensor[at] = number
                time.sleep(0.002)
        finally:
            stop.set()

    at_once(own, use, use, use)
    assert len(values) > 1
    world.kept.close()
    assert world.leases == 0


def test_owners_with_leases_of_each_other_pause_concurrently(device: str) -> None:
    # Each owner holds its lock and asks a thread of the other owner, which must need no lock.
    sides, kept = [World(device) for _ in range(2)], LeaseCache()
    for _ in range(5):
        for side in sides:
            _first(kept, side.ticket)
        at_once(*(side.saver.pause for side in sides))
        for side in sides:
            assert side.saver.is_paused("weights")
            side.saver.resume()
    kept.close()
    for side in sides:
        side.saver.close()
