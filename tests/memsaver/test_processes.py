"""Processes that lease tags and hand over memory at random, and are killed at random.

No resource grows with the number of steps. Survivors keep working, and no memory of killed
processes stays.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import memsaver
from memsaver import LeaseCache, MemorySaver
from memsaver.memory.page_pool import imports
from memsaver.sharing.client import owners
from tests.helpers.case_selection import rounds
from tests.helpers.memory import (
    machine_bytes,
    memfd_bytes,
    memory_maps,
    open_fds,
    own_fds,
    process_bytes,
    status_bytes,
)
from tests.helpers.memsaver.savers import at_once, connections, may_raise, own_threads, until
from tests.helpers.peers import Address, Gone, Peer

TAGS = {"weights": "host", "optim": "host", "kv": "discard", "acts": "discard"}
# Bytes of each tag's tensors; the first one stays at the start of the tag.
SIZES = (1 << 20, 1 << 19, 150_000)
LIMIT = 28 << 20  # enough for the tags with their holes and for some handed-over memory
# glibc keeps the stack of an ended thread (8 MiB), and the CUDA driver sometimes takes and returns
# 32 MiB, after few cycles as after 1500. On a GPU, Python's heap grows by 1 MiB in 450 cycles,
# because torch leaks two tuples per view. A leak of one reservation per cycle, 4 MiB or more, would
# exceed the slack.
SLACK_VMSIZE = 48 << 20
M_ARENA_MAX = -8  # of malloc.h
SLACK_FDS = 2  # descriptors of the test runner; a leak by kills would be one per round
# Python maps its heaps one by one. A leak of one mapping per cycle would be 20 or more.
SLACK_MAPS = 16
SLACK_MAPS_KILLS = 40  # stacks and heaps of ended threads, which glibc keeps for new threads


class Actor:
    """A saver with tags of several contents, and random operations on its own and others' tags.

    All processes run the same actor.
    """

    def __init__(self, device: str, seed: int) -> None:
        self.device, self.random = device, random.Random(seed)
        self.saver, self.kept = MemorySaver(device, limit_bytes=LIMIT), LeaseCache()
        self.pattern = (torch.arange(SIZES[0], device=device) % 251).to(torch.uint8)
        self.others: list[Address] = []
        self.make_all()
        self.operations = [
            self.pause,
            self.pause,
            self.resume,
            self.resume,
            self.lease,
            self.lease,
            self.replace,
        ]

    def make_all(self) -> None:
        self.tensors: dict[tuple[str, int], torch.Tensor] = {}
        gc.collect()
        for key in itertools.product(TAGS, SIZES):
            self.make(*key)

    def make(self, tag: str, size: int) -> None:
        self.tensors[tag, size] = self.empty(tag, size).copy_(self.pattern[:size])

    def empty(self, tag: str, size: int) -> torch.Tensor:
        try:
            return self.saver.empty(size, torch.uint8, tag=tag, content=TAGS[tag])
        except memsaver.OutOfMemory:  # handed-over memory has reached the limit
            self.saver.trim()
            return self.saver.empty(size, torch.uint8, tag=tag, content=TAGS[tag])

    @property
    def address(self) -> Address:
        tickets = tuple(
            self.saver.share(tag, writable=content == "discard") for tag, content in TAGS.items()
        )
        return Address(self.saver.pool_ticket(), tickets)

    def meet(self, others: Iterable[Address]) -> None:
        """Connect to all processes and to itself, by a first lease."""
        self.others = list(others)
        for address in (*self.others, self.address):
            with may_raise(memsaver.LeaseError):
                memsaver.attach(address.tags[0]).close()

    def step(self) -> None:
        """Run one operation, which fails cleanly if other processes block it or die."""
        operation = self.random.choice(self.operations)
        with may_raise(memsaver.LeaseError, memsaver.OutOfMemory):
            operation()

    def cycle(self) -> None:
        for _ in range(4):
            self.step()
        self.resume()  # always succeeds: retained memory is reused
        self.saver.drain_events()

    def pause(self) -> None:
        tags = self.random.sample(list(TAGS), self.random.randrange(1, 5))
        release = self.random.choice(("driver", "retain", "hand_over"))
        to = self.random.choice(self.others).pool if release == "hand_over" else None
        self.saver.pause(*tags, release=release, to=to)
        if release == "retain" and self.random.randrange(2):
            most = self.random.choice((None, SIZES[0]))
            self.saver.release_retained(self.random.choice(self.others).pool, most)

    def resume(self) -> None:
        self.saver.resume()
        self.check()

    def lease(self) -> None:
        """Lease a tag of any process; some leases stay in the cache."""
        ticket = self.random.choice(self.random.choice([*self.others, self.address]).tags)
        use = self.random.choice((memsaver.attach, self.kept.use))
        with use(ticket) as lease:
            if ticket.writable:
                lease.tensor((lease.nbytes,), torch.uint8).fill_(self.random.randrange(256))
            else:
                assert torch.equal(lease.tensor(self.pattern.shape, torch.uint8), self.pattern)
            time.sleep(self.random.choice((0, 0.005)))

    def replace(self) -> None:
        self.saver.resume()
        keys = self.random.sample(list(itertools.product(TAGS, SIZES[1:])), 3)
        for key in keys:
            self.tensors.pop(key, None)
        extra = self.empty(self.random.choice(list(TAGS)), self.random.choice(SIZES))
        for key in reversed(keys):
            self.make(*key)
        del extra
        if not self.random.randrange(3):
            self.saver.trim()

    def check(self) -> None:
        self.saver.check_integrity()
        for (tag, size), tensor in self.tensors.items():
            assert TAGS[tag] == "discard" or torch.equal(tensor, self.pattern[:size])

    def wake(self) -> tuple[int, int]:
        """Restore all tensors at their first addresses, with no other memory committed."""
        self.saver.resume()
        self.make_all()
        self.rest()  # on a GPU, an extent in partial use can only be released as a whole
        self.saver.resume()
        # Back to the size that the next rest needs, from the size that the worst cycle needed.
        self.saver.pinned_arena.trim()
        return self.saver.report().committed_bytes, process_bytes(self.device)

    def end_leases(self) -> None:
        self.kept.close()
        self.kept = LeaseCache()

    def rest(self) -> None:
        """Check a whole resume and pause, and release all memory."""
        self.resume()
        self.end_leases()
        self.saver.pause()
        self.saver.trim()
        self.saver.check_integrity()
        assert self.saver.report().committed_bytes == 0
        if self.device != "cpu":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch._C._host_emptyCache()  # torch's pinned cache fills over hundreds of cycles

    def held(self) -> dict[str, int]:
        """Return the resources that the process holds at rest."""
        gc.collect()
        nbytes = memfd_bytes([os.getpid()]) if self.device == "cpu" else machine_bytes(self.device)
        pinned = (
            0
            if self.device == "cpu"
            else torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
        )
        held = {"bytes": nbytes, "imports": len(imports), "owners": len(owners), "fds": open_fds()}
        held |= {"maps": memory_maps(), "threads": own_threads()}
        held |= {"pinned": self.saver.pinned_arena.committed_bytes + pinned}
        return held | {key: status_bytes(key) for key in ("VmLck", "VmPin", "VmSize")}


def _peer(pipe: Connection, device: str, seed: int, die_at: int | None = None) -> None:
    # Otherwise glibc reserves another 64 MiB for a new thread at some point.
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    actor = Actor(device, seed)
    pipe.send(actor.address)
    if die_at is not None:
        _die_after(die_at, type(actor.saver.backend))
    while True:
        name, *arguments = pipe.recv()
        while name == "work" and not pipe.poll():
            actor.step()
        if name != "work":
            pipe.send(getattr(actor, name)(*arguments))


def _die_after(steps: int, backend: Any) -> None:
    """Kill this process after a number of steps.

    The beginning and the end of each message and each driver call count as a step.
    """
    count = itertools.count(1)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(count) == steps:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            if next(count) == steps:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for owner, names in (
        (socket, ("send_fds", "recv_fds")),
        (backend, ("create", "release", "map", "unmap", "export_fd", "import_fd")),
    ):
        for name in names:
            setattr(owner, name, counted(getattr(owner, name)))


@pytest.mark.soak
@pytest.mark.alone
def test_random_operations_leak_nothing(device: str) -> None:
    # In fresh processes, nothing else changes the counts.
    peers = [Peer(_peer, device, seed) for seed in (1, 2)]

    def both(name: str) -> list[Any]:
        """Ask one peer after the other."""
        return [peer.ask((name,)) for peer in peers]

    def cycle() -> None:
        """Run both peers at the same time, so that their operations collide."""
        for peer in peers:
            peer.tell(("cycle",))
        for peer in peers:
            peer.hear()

    def measure() -> tuple[list[Any], list[Any]]:
        """Return the bytes of both peers while active, and all of their resources at rest."""
        active = both("wake")
        both("rest")
        return active, both("held")

    try:
        for peer, other in zip(peers, reversed([peer.hear() for peer in peers]), strict=True):
            peer.ask(("meet", [other]))
        for _ in range(10):
            cycle()
        active, held = measure()
        for _ in range(rounds(20, 1000)):
            cycle()
        active_now, held_now = measure()
    finally:
        for peer in peers:
            peer.bury()
    for (then_committed, then_bytes), (committed, nbytes) in zip(active, active_now, strict=True):
        assert committed == then_committed and nbytes <= then_bytes
    for then, now in zip(held, held_now, strict=True):
        assert now.pop("VmSize") < then.pop("VmSize") + SLACK_VMSIZE
        assert now.pop("maps") <= then.pop("maps") + SLACK_MAPS
        assert now == then


class Survivor:
    """The saver of this process, which works in one thread while another thread kills peers."""

    def __init__(self, device: str) -> None:
        self.device, self.random = device, random.Random(0)
        self.floor = len(imports), memfd_bytes([os.getpid()])
        self.actor = Actor(device, 1)
        self.peers: dict[Peer, Address] = {}

    def round(self) -> None:
        while len(self.peers) < 2:
            die_at = self.random.choice((None, self.random.randrange(1, 1000)))
            peer = Peer(_peer, self.device, self.random.randrange(1 << 30), die_at)
            self.peers[peer] = peer.hear()
        everybody = [self.actor.address, *self.peers.values()]
        self.actor.meet(self.peers.values())
        self._ask("meet", lambda own: [[address for address in everybody if address != own]])
        for peer in self.peers:
            peer.tell(("work",))
        victims = self.random.sample(
            list(self.peers), min(len(self.peers), self.random.choice((1, 1, 2)))
        )
        stop = threading.Event()
        at_once(lambda: self._work(stop), lambda: self._kill(victims, stop))
        self._ask("rest")
        self.actor.end_leases()
        # Wait for the leases of killed peers to end.
        until(lambda: not any(tag.leases for tag in self.actor.saver.report().tags.values()))
        self.actor.rest()
        self._ask("rest")  # again, because the survivor and the peers had each other's memory
        pids = [os.getpid(), *(peer.pid for peer in self.peers)]
        until(lambda: (len(imports), memfd_bytes(pids)) == self.floor)

    def _work(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self.actor.step()

    def _kill(self, victims: list[Peer], stop: threading.Event) -> None:
        try:
            for victim in victims:
                time.sleep(self.random.uniform(0, 0.2))
                victim.kill()
            time.sleep(self.random.uniform(0, 0.02))
        finally:
            stop.set()

    def _ask(self, name: str, arguments: Callable[[Address], list[Any]] = lambda own: []) -> None:
        """Call a method in the living peers, and bury peers that are dead or die of it."""
        for peer, own in list(self.peers.items()):
            try:
                peer.ask((name, *arguments(own)))
            except Gone:
                del self.peers[peer]
                peer.bury()

    def bury_all(self) -> None:
        while self.peers:
            self.peers.popitem()[0].bury()

    def held(self) -> dict[str, int]:
        """Return what the saver holds; other tests' descriptors in this process come and go."""
        held = self.actor.held()
        fds = own_fds() if self.device == "cpu" else held["fds"]
        return {key: held[key] for key in ("bytes", "imports", "owners", "threads")} | {"fds": fds}

    def grown(self, before: dict[str, int]) -> dict[str, int]:
        """Return by how much more is held than before."""
        return {key: now - before[key] for key, now in self.held().items() if now > before[key]}


@pytest.mark.soak
@pytest.mark.alone
def test_killed_peers_leave_nothing_behind(device: str, fds: int) -> None:
    survivor = Survivor(device)
    try:
        for _ in range(2):
            survivor.round()
        survivor.bury_all()
        until(lambda: connections() <= 2)  # both ends of the survivor's own
        before, maps = survivor.held(), memory_maps()
        before["fds"] += SLACK_FDS if device != "cpu" else 0
        for _ in range(rounds(5, 200)):
            survivor.round()
    finally:
        survivor.bury_all()
    until(lambda: not survivor.grown(before), found=lambda: survivor.grown(before))
    assert memory_maps() <= maps + SLACK_MAPS_KILLS
    survivor.actor.saver.close()
