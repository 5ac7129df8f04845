"""A tag shows another saver's pages: two tags, one memory, in one process or in two, and it goes back whole."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import memsaver
from memsaver import MemorySaver
from memsaver.imports import imports
from memsaver.lease import peer_backend
from tests.helpers.memory import family_bytes, memory_maps, open_fds
from tests.helpers.peers import Peer

MIB = 1 << 20
SIZE = 6 * MIB  # the owner's: in pieces of 4 and 2 MiB
ERROR = {"cpu": errno.ENOMEM, "cuda:0": 2}  # CUDA_ERROR_OUT_OF_MEMORY


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause under a lease gives up at once."""
    monkeypatch.setattr("memsaver.switch._LEASE_GRACE_SECONDS", 0.05)


class World:
    """An owner whose tag "params" shows 0, 1, 2 ... at every MiB, a borrower whose paused tag "weights" is smaller."""

    def __init__(self, device: str, content: str = "discard", **options: Any) -> None:
        self.owner, self.saver = MemorySaver(device), MemorySaver(device, **options)
        self.params = self.owner.empty(SIZE, torch.uint8, tag="params", elastic=True)
        self.params.view(6, -1).copy_(torch.arange(6, dtype=torch.uint8)[:, None])
        self.first = self.saver.empty(MIB, torch.uint8, tag="weights", content=content).fill_(77)
        self.rest = self.saver.empty(3 * MIB, torch.uint8, tag="weights", content=content).fill_(78)
        self.saver.pause("weights")

    def borrow(self, writable: bool = True) -> None:
        self.saver.borrow("weights", self.owner.share("params", writable))

    def seen(self) -> list[int]:
        return [int(self.first[-1]), *(int(row[at]) for row in self.rest.view(3, -1) for at in (0, -1))]

    def check(self) -> None:
        self.owner.check_integrity()
        self.saver.check_integrity()

    def close(self) -> None:
        self.check()
        self.saver.close()
        self.owner.close()


THEIRS = [0, 1, 1, 2, 2, 3, 3]
OWN = [77, *[78] * 6]


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


def test_the_second_time_nothing_is_imported_or_exported(world: World) -> None:
    gc.collect()
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
    small = world.owner.share("small") if world.owner.empty(MIB, tag="small").zero_().numel() else ticket
    other_device = memsaver.Ticket(**{**vars(ticket), "device_key": "GPU-1"})
    active = saver.empty(MIB, torch.uint8, tag="active").fill_(1)
    refusals: list[tuple[str, memsaver.Ticket, type[Exception], str]] = [
        ("nobody's", ticket, memsaver.TagError, "unknown tag"),
        ("active", ticket, memsaver.StateError, "the tag is active; pause it first"),
        ("weights", other_device, ValueError, "pages of GPU-1 cannot serve"),
        ("weights", saver.share("active"), ValueError, "'active' is a tag of the same saver; use exchange"),
        ("weights", memsaver.Ticket(**{**vars(ticket), "token": ""}), memsaver.LeaseError, "unknown ticket"),
        ("weights", memsaver.Ticket(**{**vars(ticket), "socket_name": "x"}), memsaver.LeaseError, "not answer"),
    ]
    if saver._backend.granularity < MIB:
        world.owner.resize("small", MIB)
    refusals.append(("weights", small, ValueError, "needs 4.0 MiB.*tag 'small' has"))
    world.owner.resize("small", 2 * MIB)
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
    assert world.seen() == [9] * 7 and int(active[-1]) == 1


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
    assert receiver.report().pool_bytes == max(MIB, world.saver._backend.granularity)
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


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_saver_that_ends_gives_it_back(device: str, how: str) -> None:
    gc.collect()
    floor = len(imports), family_bytes(device)
    world = World(device)
    world.borrow()
    if how == "close":
        world.saver.close()
    cycle: list[Any] = [world.first, world.rest, world.saver]
    cycle.append(cycle)
    del cycle, world.saver, world.first, world.rest
    assert how == "close" or world.owner.report().tags["params"].leases == 1
    gc.collect()
    deadline = time.monotonic() + 5
    while world.owner.report().tags["params"].leases:  # a thread tells the owner
        assert time.monotonic() < deadline
        time.sleep(0.005)
    world.owner.pause()
    world.owner.check_integrity()
    assert (len(imports), family_bytes(device)) == floor
    world.owner.close()


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


SIDES: dict[str, Callable[[World], Any]] = {
    "borrower": lambda world: world.saver._backend,
    "owner": lambda world: world.owner._backend,
    "importer": lambda world: peer_backend(world.saver._backend.device_key),
}


@pytest.mark.parametrize("side", SIDES)
def test_every_driver_call_fails_once(side: str, device: str) -> None:
    gc.collect()
    floor = len(imports), family_bytes(device), open_fds()
    raised = 0
    for call in itertools.count(1):
        world = World(device)
        backend = SIDES[side](world)
        backend.inject_fault(call, ERROR[device])
        try:
            world.borrow()
            assert world.seen() == THEIRS
            world.saver.pause("weights")
        except memsaver.MemSaverError:
            raised += 1
            world.check()
            assert world.saver.is_paused("weights") or world.seen() == THEIRS
        fired = backend.inject_fault(0, 0) >= call
        if world.saver.is_paused("weights"):
            assert world.owner.report().tags["params"].leases == 0
            world.borrow()
        assert world.seen() == THEIRS
        world.saver.pause()
        world.owner.pause()
        world.owner.resume()
        world.saver.resume()
        world.rest.fill_(1)
        world.close()
        del world
        if not fired:
            break
    assert raised >= 1 + (side == "borrower")
    deadline = time.monotonic() + 5  # connections are closed by their own threads
    while (len(imports), device == "cpu" and family_bytes(device), open_fds()) > (floor[0], floor[1], floor[2]):
        gc.collect()
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---------------------------------------------------------------- two processes


def _own(pipe: Connection, device: str) -> None:
    """The owner, in another process: does what it is asked."""
    saver = MemorySaver(device)
    params = saver.empty(SIZE, torch.uint8, tag="params", elastic=True).fill_(1)
    pipe.send(saver.share("params", writable=True))
    while True:
        op, *arguments = pipe.recv()
        try:
            if op == "fill":
                params.fill_(arguments[0])
                torch.cuda.synchronize() if device != "cpu" else None
            if op in ("pause", "resume"):
                getattr(saver, op)()
            saver.check_integrity()
            value = None if saver.is_paused("params") else int(params[0])
            exports = saver.statistics()["export"].calls if "export" in saver.statistics() else 0
            pipe.send((value, saver.report().tags["params"].leases, exports, open_fds()))
        except memsaver.LeaseError as error:
            pipe.send(str(error))


@contextlib.contextmanager
def _owner(device: str) -> Iterator[tuple[Peer, memsaver.Ticket]]:
    peer = Peer(_own, device)
    try:
        yield peer, peer.hear()
    finally:
        peer.bury()


def _borrower(device: str) -> tuple[MemorySaver, torch.Tensor]:
    saver = MemorySaver(device)
    weights = saver.empty(4 * MIB, torch.uint8, tag="weights").fill_(77)
    saver.pause()
    return saver, weights


def test_another_process_lends(device: str) -> None:
    gc.collect()
    floor = len(imports)
    with _owner(device) as (peer, ticket):
        saver, weights = _borrower(device)
        resting = []
        for value in range(10, 15):
            assert peer.ask(("fill", value))[0] == value
            saver.borrow("weights", ticket)
            saver.check_integrity()
            assert int(weights[-1]) == value
            weights.fill_(value + 100)
            torch.cuda.synchronize() if device != "cpu" else None
            assert peer.ask(("look",))[:2] == (value + 100, 1)
            saver.pause("weights")
            resting.append((*peer.ask(("look",))[1:], open_fds(), len(imports)))
        assert len(set(resting)) == 1 and resting[0][:2] == (0, 2), "exported or imported more than once"
        saver.borrow("weights", ticket)
        message = peer.ask(("pause",))
        assert f"leased: 'params' by process {os.getpid()}" in message
        saver.pause("weights")
        assert peer.ask(("pause",))[0] is None
        assert len(imports) == floor, "revoked when the memory left"
        with pytest.raises(memsaver.LeaseError, match="'params' is paused"):
            saver.borrow("weights", ticket)
        peer.ask(("resume",))
        assert peer.ask(("fill", 3))[0] == 3
        saver.borrow("weights", ticket)
        assert int(weights[-1]) == 3
        saver.close()


def test_the_pages_outlive_their_owner(device: str) -> None:
    gc.collect()
    floor, fds, held = len(imports), open_fds(), family_bytes(device)
    with _owner(device) as (peer, ticket):
        saver, weights = _borrower(device)
        peer.ask(("fill", 21))
        saver.borrow("weights", ticket)
        peer.kill()
        assert peer.dies_within(10)
        assert bool((weights == 21).all())
        weights.fill_(22)
        saver.check_integrity()
        assert bool((weights == 22).all())
        if device == "cpu":
            assert family_bytes(device) - held == SIZE, "the kernel keeps them for the borrower"
        saver.pause("weights")
        saver.check_integrity()
        _until(lambda: len(imports) == floor)
        assert device != "cpu" or family_bytes(device) == held
        with pytest.raises(memsaver.LeaseError, match="does not answer"):
            saver.borrow("weights", ticket)
        saver.resume()
        weights.fill_(5)
        saver.close()
    _until(lambda: open_fds() <= fds)


def _until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _borrow_and_wait(pipe: Connection, device: str, ticket: memsaver.Ticket) -> None:
    saver, weights = _borrower(device)
    saver.borrow("weights", ticket)
    pipe.send(int(weights[-1]))
    if device == "cpu":
        pipe.send(_forked(saver, weights))
    pipe.recv()


def _forked(saver: MemorySaver, weights: torch.Tensor) -> int:
    """The exit status of a child that lets go of a borrowed tag."""
    if child := os.fork():
        return os.waitpid(child, 0)[1]
    with contextlib.suppress(BaseException):
        try:
            saver.pause()
        except memsaver.StateError:
            del saver, weights
            gc.collect()
            os._exit(0)
    os._exit(1)


def test_a_borrower_that_is_killed_has_given_it_back(world: World, device: str) -> None:
    """And its forked child has nothing to give back."""
    peer = Peer(_borrow_and_wait, device, world.owner.share("params"))
    assert peer.hear() == 3
    if device == "cpu":
        assert peer.hear() == 0
    assert world.owner.report().tags["params"].leases == 1
    with pytest.raises(memsaver.LeaseError, match=f"'params' by process {peer.pid}"):
        world.owner.pause()
    peer.bury()
    _until(lambda: not world.owner.report().tags["params"].leases)
    world.owner.pause()
