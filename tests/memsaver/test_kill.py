"""Processes that share and hand over memory are killed at random: the survivor goes on, nothing of the dead stays."""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import memsaver
from memsaver import MemorySaver
from memsaver.imports import imports
from memsaver.owner import owners
from tests.helpers.effort import rounds
from tests.helpers.memory import machine_bytes, memfd_bytes, memory_maps, open_fds, settled_fds
from tests.helpers.memsaver.savers import not_in_vain, until
from tests.helpers.peers import Address, Gone, Peer

SIZE = 2 << 20
SLACK_FDS = 2  # for the test runner's own; what a kill leaves would be one a round
SLACK_MAPS = 40  # stacks and heaps of ended threads, which glibc keeps for the next ones


class Actor:
    """A saver with a tag whose content is kept and one whose content is not, and random things to do with them and with
    those of others. The survivor and the peers do the same."""

    def __init__(self, device: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.others: list[Address] = []
        self.pattern = (torch.arange(SIZE, device=device) % 251).to(torch.uint8)
        self.saver = MemorySaver(device, limit_bytes=4 * SIZE)
        self.kept = self.saver.empty(SIZE, torch.uint8, tag="kept", content="host").copy_(self.pattern)
        self.loose = self.saver.empty(SIZE, torch.uint8, tag="loose")
        self.operations = [self.pause, self.pause, self.resume, self.resume, self.attach, self.attach, self.trim]

    @property
    def address(self) -> Address:
        tickets = self.saver.share("kept"), self.saver.share("loose", writable=True)
        return Address(self.saver.pool_ticket(), tickets)

    def step(self) -> None:
        """One operation. Others may be in its way, or die meanwhile: it fails cleanly then, and waits for nobody."""
        operation = self.random.choice(self.operations)
        with not_in_vain(memsaver.LeaseError, memsaver.OutOfMemory):
            operation()

    def pause(self) -> None:
        tags = self.random.choice((("kept",), ("loose",), ()))
        release, to = self.random.choice(("driver", "keep", "hand_over")), None
        if release == "hand_over":
            to = self.random.choice(self.others).pool
        self.saver.pause(*tags, release=release, to=to)

    def resume(self) -> None:
        self.saver.resume()
        self.check()
        self.loose.fill_(self.random.randrange(256))

    def attach(self) -> None:
        ticket = self.random.choice(self.random.choice(self.others).tags)
        with memsaver.attach(ticket) as mapped:
            seen = mapped.tensor((SIZE,), torch.uint8)
            if ticket.writable:
                seen.fill_(self.random.randrange(256))
            else:
                assert torch.equal(seen, self.pattern)
            time.sleep(self.random.choice((0, 0.005)))

    def trim(self) -> None:
        self.saver.trim()

    def check(self) -> None:
        self.saver.check_integrity()
        assert torch.equal(self.kept, self.pattern)

    def rest(self) -> None:
        """A whole pause and resume works, and so does giving everything back."""
        self.saver.resume()
        self.check()
        self.loose.fill_(1)
        self.saver.pause()
        self.saver.trim()
        self.saver.check_integrity()
        assert self.saver.report().committed_bytes == 0


def _peer(pipe: Connection, device: str, seed: int, steps: int | None) -> None:
    actor = Actor(device, seed)
    pipe.send(actor.address)
    if steps is not None:
        _die_after(steps, type(actor.saver.backend))
    while True:
        message = pipe.recv()
        if isinstance(message, list):
            actor.others = message
            while not pipe.poll():
                actor.step()
            continue
        if message == "rest":
            actor.rest()
        pipe.send("done")


def _die_after(steps: int, backend: Any) -> None:
    """Kill this process before or after one of its coming messages and driver calls: number ``steps`` of them."""
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


class Survivor:
    """The saver of this process, in a thread of its own while the main thread kills."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.floor = len(imports), memfd_bytes([os.getpid()])
        self.random = random.Random(0)
        self.actor = Actor(device, 1)
        self.peers: dict[Peer, Address] = {}

    def round(self) -> None:
        while len(self.peers) < 2:
            self._start_peer()
        victims = self.random.sample(list(self.peers), self.random.choice((1, 1, 2)))
        everybody = [self.actor.address, *self.peers.values()]
        for peer, own in self.peers.items():
            peer.tell([address for address in everybody if address != own])
        self.actor.others = list(self.peers.values())
        self._while_it_works(lambda: self._kill(victims))
        self._tell_peers("stop")
        self._tell_peers("rest")
        self._check()

    def _start_peer(self) -> None:
        steps = self.random.choice((None, self.random.randrange(1, 1000)))
        peer = Peer(_peer, self.device, self.random.randrange(1 << 30), steps)
        self.peers[peer] = peer.hear()

    def _kill(self, victims: list[Peer]) -> None:
        for victim in victims:
            time.sleep(self.random.uniform(0, 0.2))
            victim.kill()
        time.sleep(self.random.uniform(0, 0.02))

    def _while_it_works(self, do: Callable[[], None]) -> None:
        errors: list[BaseException] = []
        stop = threading.Event()

        def work() -> None:
            try:
                while not stop.is_set():
                    self.actor.step()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work, name="survivor", daemon=True)
        thread.start()
        try:
            do()
        finally:
            stop.set()
            thread.join(60)
        assert not thread.is_alive(), "the survivor hangs"
        if errors:
            raise errors[0]

    def _tell_peers(self, message: str) -> None:
        """Those that are alive obey; the others, also those that die of it, are buried."""
        for peer in list(self.peers):
            try:
                peer.ask(message)
            except Gone:
                del self.peers[peer]
                peer.bury()

    def _check(self) -> None:
        """Leases and imports of the dead have ended; everything works, and nothing is held when all rest."""
        until(lambda: not any(tag.leases for tag in self.actor.saver.report().tags.values()))  # of the dead
        self.actor.rest()
        self._tell_peers("rest")  # again, for the survivor had memory of theirs, and they had its
        pids = [os.getpid(), *(peer.pid for peer in self.peers)]
        until(lambda: (len(imports), memfd_bytes(pids)) == self.floor)

    def bury_all(self) -> None:
        while self.peers:
            self.peers.popitem()[0].bury()

    def held(self) -> dict[str, int]:
        """What this process has now, at rest."""
        gc.collect()
        if self.device != "cpu":
            torch.cuda.empty_cache()
        return {
            "bytes": memfd_bytes([os.getpid()]) if self.device == "cpu" else machine_bytes(self.device),
            "imports": len(imports),
            "owners": len(owners),
            "fds": open_fds(),
            "threads": threading.active_count(),
        }


@pytest.mark.soak
@pytest.mark.alone
def test_processes_killed_at_random(device: str, fds: int) -> None:
    survivor = Survivor(device)
    try:
        for _ in range(2):
            survivor.round()
        survivor.bury_all()
        settled_fds()  # their connections end in threads
        before, maps = survivor.held(), memory_maps()
        before["fds"] += SLACK_FDS
        for _ in range(rounds(5, 200)):
            survivor.round()
    finally:
        survivor.bury_all()
    until(lambda: all(now <= before[key] for key, now in survivor.held().items()))
    assert memory_maps() <= maps + SLACK_MAPS
    survivor.actor.saver.close()
