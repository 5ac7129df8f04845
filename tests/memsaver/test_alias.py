"""Aliases: a tag shows another saver's pages, and returns them however peer or owner ends.

Failing driver calls are in test_fault_injection.
"""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memsaver
from memsaver import MemorySaver
from memsaver.memory.page_pool import imports
from tests.helpers.memory import family_bytes, memory_maps, open_fds
from tests.helpers.memsaver.remote import RemoteSaver, remote_saver
from tests.helpers.memsaver.savers import MIB, until

pytestmark = pytest.mark.alone
SIZE = 6 * MIB  # of the owner's tag, in pieces of 4 and 2 MiB
ALIASED = [0, 1, 1, 2, 2, 3, 3]  # values that the peer's tensors show of the owner's


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a pause give up on a leased tag immediately."""
    monkeypatch.setattr("memsaver.tag.transaction.LEASE_GRACE_SECONDS", 0.05)


class World:
    """An owner whose tag "params" holds 0, 1, 2 ... by MiB, and a peer with a smaller tag."""

    def __init__(self, device: str, content: str = "discard", **options: Any) -> None:
        self.owner, self.saver = MemorySaver(device), MemorySaver(device, **options)
        self.params = self.owner.empty(SIZE, torch.uint8, tag="params", elastic=True)
        self.params.view(6, -1).copy_(torch.arange(6, dtype=torch.uint8)[:, None])
        self.first = self.saver.empty(MIB, torch.uint8, tag="weights", content=content).fill_(77)
        self.rest = self.saver.empty(3 * MIB, torch.uint8, tag="weights", content=content).fill_(78)
        self.saver.pause("weights")

    def alias(self, writable: bool = True) -> None:
        self.saver.alias("weights", self.owner.share("params", writable))

    @property
    def leases(self) -> int:
        return self.owner.report().tags["params"].leases

    def seen(self) -> list[int]:
        return [
            int(self.first[-1]),
            *(int(row[at]) for row in self.rest.view(3, -1) for at in (0, -1)),
        ]

    def check(self) -> None:
        self.owner.check_integrity()
        self.saver.check_integrity()

    def close(self) -> None:
        self.check()
        self.saver.close()
        self.owner.close()


@pytest.fixture
def world(device: str) -> Iterator[World]:
    world = World(device)
    yield world
    world.close()


def test_alias_is_refused_when_tag_or_ticket_does_not_fit(world: World, device: str) -> None:
    # A refusal changes nothing: the same tag can be aliased afterwards.
    saver, ticket = world.saver, world.owner.share("params")
    little = world.owner.empty(2 * MIB, torch.uint8, tag="small").fill_(1)
    active = saver.empty(MIB, torch.uint8, tag="active").fill_(1)

    def changed(**fields: str) -> memsaver.Ticket:
        return dataclasses.replace(ticket, **fields)

    small, lease = world.owner.share("small"), memsaver.LeaseError
    refusals: list[tuple[str, memsaver.Ticket, type[Exception], str]] = [
        ("unknown", ticket, memsaver.TagError, "unknown tag"),
        ("active", ticket, memsaver.StateError, "the tag is active; pause it first"),
        ("weights", changed(device_key="GPU-1"), ValueError, "the pages are on GPU-1, not on "),
        ("weights", saver.share("active"), ValueError, "is a tag of the same saver; use exchange"),
        ("weights", changed(token=""), lease, "unknown ticket"),
        ("weights", changed(socket_name="x"), lease, "not answer"),
        ("weights", small, ValueError, "needs 4.0 MiB.*tag 'small' has 2.0 MiB"),
    ]
    for tag, bad, kind, text in refusals:
        with pytest.raises(kind, match=text):
            saver.alias(tag, bad)
        world.check()
    narrow = World(device, reserve_bytes=4 * MIB)
    with pytest.raises(ValueError, match="has addresses for 4.0 MiB; tag 'params' has 6.0 MiB"):
        narrow.alias()
    narrow.close()
    world.owner.pause("params")
    with pytest.raises(memsaver.LeaseError, match="'params' is paused"):
        world.alias()
    world.owner.resume("params")
    assert world.leases == world.owner.report().tags["small"].leases == 0
    world.params.fill_(9)
    world.alias()
    assert world.seen() == [9] * 7 and int(active[-1]) == int(little[-1]) == 1


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
    "alias": lambda saver: saver.alias("weights", saver.share("spare")),
}


def test_aliased_tag_refuses_operations_that_need_its_own_memory(world: World) -> None:
    for tag in ("spare", "asleep"):
        world.saver.empty(SIZE, torch.uint8, tag=tag).fill_(1)
    world.saver.pause("asleep")
    ticket = world.saver.share("weights")
    world.alias()
    for name, operation in REFUSED.items():
        with pytest.raises(
            memsaver.LeaseError, match=rf"{name}.*aliases the pages of another saver's tag 'params'"
        ):
            operation(world.saver)
        world.check()
        assert world.seen() == ALIASED
    with pytest.raises(memsaver.LeaseError, match="aliases another saver's pages; share them at"):
        memsaver.attach(ticket)  # an earlier ticket does not help
    world.saver.trim()
    world.saver.resume()
    assert world.seen() == ALIASED
    for end in (world.owner.pause, lambda: world.owner.resize("params", MIB), world.owner.close):
        with pytest.raises(
            memsaver.LeaseError,
            match=f"'params' by process {os.getpid()}; .*the tag that aliases the pages",
        ):
            end()
    world.check()
    assert world.seen() == ALIASED
    world.saver.pause("weights")
    world.owner.pause()


def test_mapping_is_writable_only_if_ticket_is() -> None:
    world = World("cpu")
    for writable, rights in ((False, "r--s"), (True, "rw-s")):
        world.alias(writable)
        start = f"{world.first.data_ptr():x}-"
        lines = Path("/proc/self/maps").read_text().splitlines()
        assert [line.split()[1] for line in lines if line.startswith(start)] == [rights]
        assert world.seen() == ALIASED
        world.saver.pause()
    world.close()


def _bytes(device: str) -> int:
    """Return the held bytes, where torch and other processes cannot disturb the count."""
    return family_bytes(device) if device == "cpu" else 0


@pytest.mark.parametrize("how", ["close", "drop"])
def test_alias_ends_when_its_saver_ends(device: str, how: str) -> None:
    World(device).close()  # the first use loads kernels
    gc.collect()
    floor = len(imports), _bytes(device)
    world = World(device)
    world.alias()
    if how == "close":
        world.saver.close()
    cycle: list[Any] = [world.first, world.rest, world.saver]
    cycle.append(cycle)
    del cycle, world.saver, world.first, world.rest
    assert how == "close" or world.leases == 1
    gc.collect()
    until(lambda: not world.leases)  # a thread tells the owner
    world.owner.pause()
    world.owner.check_integrity()
    assert (len(imports), _bytes(device)) == floor
    world.owner.close()


@pytest.fixture
def owner(device: str) -> Iterator[RemoteSaver]:
    """Return the owner, which is in another process."""
    with remote_saver(device, nbytes=SIZE, elastic=True) as owner:
        yield owner


@pytest.fixture
def peer(device: str) -> Iterator[tuple[MemorySaver, torch.Tensor]]:
    saver = MemorySaver(device)
    weights = saver.empty(4 * MIB, torch.uint8, tag="weights").fill_(77)
    saver.pause()
    yield saver, weights
    saver.close()


AliasPeer = tuple[MemorySaver, torch.Tensor]


def test_alias_of_another_process_shows_and_writes_its_pages(
    fds: int, owner: RemoteSaver, peer: AliasPeer
) -> None:
    floor, (saver, weights), resting, maps = len(imports), peer, set(), []
    for value in range(10, 15):
        owner.fill(value)
        saver.alias("weights", owner.ticket)
        saver.check_integrity()
        assert int(weights[-1]) == value
        weights.fill_(value + 100)
        saver.backend.synchronize()
        assert owner.look()[0] == value + 100 and owner.report().tags["t"].leases == 1
        saver.pause("weights")
        resting.add(
            (
                owner.report().tags["t"].leases,
                owner.exports(),
                owner.held(),
                open_fds(),
                len(imports),
            )
        )
        maps.append(memory_maps())
    assert len(resting) == 1 and resting.pop()[:2] == (0, 2), "exported or imported more than once"
    assert maps[-1] <= maps[0] + 8
    saver.alias("weights", owner.ticket)
    with pytest.raises(memsaver.LeaseError, match=f"leased: 't' by process {os.getpid()}"):
        owner.pause()
    saver.pause("weights")
    owner.pause()
    assert len(imports) == floor, "revoked when the memory left"
    with pytest.raises(memsaver.LeaseError, match="'t' is paused"):
        saver.alias("weights", owner.ticket)
    owner.resume()
    owner.fill(3)
    saver.alias("weights", owner.ticket)
    assert int(weights[-1]) == 3


def test_aliased_pages_outlive_their_owner(device: str, fds: int, peer: AliasPeer) -> None:
    floor, held, (saver, weights) = len(imports), _bytes(device), peer
    with remote_saver(device, nbytes=SIZE, elastic=True) as owner:
        owner.fill(21)
        saver.alias("weights", owner.ticket)
        owner.kill()
        assert bool((weights == 21).all())
        weights.fill_(22)
        saver.check_integrity()
        assert bool((weights == 22).all())
        if device == "cpu":
            assert _bytes(device) - held == SIZE, "the kernel keeps them for the peer"
        saver.pause("weights")
        saver.check_integrity()
        until(lambda: len(imports) == floor and _bytes(device) == held)
        with pytest.raises(memsaver.LeaseError, match="does not answer"):
            saver.alias("weights", owner.ticket)
        saver.resume()
        weights.fill_(5)
        saver.close()
    until(lambda: open_fds() <= fds)


def test_alias_ends_when_peer_is_killed_but_not_with_its_forked_child(
    device: str, world: World
) -> None:
    with remote_saver(device, nbytes=4 * MIB) as peer:
        assert peer.alias(world.owner.share("params")) == (0, 3)
        if device == "cpu":
            assert peer.pause_in_child() == 0
        assert world.leases == 1
        with pytest.raises(memsaver.LeaseError, match=f"'params' by process {peer.pid}"):
            world.owner.pause()
        peer.kill()
    until(lambda: not world.leases)
    world.owner.pause()
