"""Memory that changes its owner, and imports that are revoked: two processes, and two savers of one."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import memsaver
from memsaver import MemorySaver
from memsaver.imports import imports
from tests.helpers.memory import machine_bytes, memfd_bytes, open_fds
from tests.helpers.peers import Peer

SIZE = 32 << 20


def _serve(pipe: Connection, device: str, limit: int | None) -> None:
    """The other process: a saver with a tag "kv" of SIZE bytes, and whatever the test asks."""
    saver = MemorySaver(device, limit_bytes=limit)
    kv = saver.empty(SIZE, torch.uint8, tag="kv").fill_(1)
    saver.pause()
    pipe.send(saver.pool_ticket())
    leases: list[Any] = []

    def answer(op: str, *arguments: Any) -> Any:
        if op == "resume":
            saver.resume()
            saver.check_integrity()
            return int(kv[0]), int(kv[-1])
        if op == "fill":
            kv.fill_(arguments[0])
        if op == "give":
            saver.pause(release="hand_over", to=arguments[0])
            saver.check_integrity()
        if op == "attach":
            leases.append(memsaver.attach(arguments[0]))
            return leases[0].tensor((1,), torch.uint8).tolist()
        if op == "detach":
            leases.pop().close()
        if op == "report":
            return saver.report(), len(imports), open_fds()
        return None

    while (request := pipe.recv()) is not None:
        try:
            pipe.send(answer(*request))
        except memsaver.MemSaverError as error:
            pipe.send(error)


class Other:
    def __init__(self, device: str, limit: int | None = None) -> None:
        machine_bytes(device)  # makes this process's own context
        before = machine_bytes(device)
        self.peer = Peer(_serve, device, limit)
        self.process = self.peer.process
        self.ticket = self.peer.hear()
        self.context_bytes = machine_bytes(device) - before  # its saver is paused

    def ask(self, *request: Any) -> Any:
        answer = self.peer.ask(request)
        if isinstance(answer, Exception):
            raise answer
        return answer


@contextlib.contextmanager
def other_process(device: str, limit: int | None = None) -> Iterator[Other]:
    other = Other(device, limit)
    try:
        yield other
    finally:
        other.peer.bury()


def held(device: str, other: Other) -> int:
    """Physical bytes of this process's savers and the other's: what both know of once, or the device's used memory."""
    if device != "cpu":
        gone = not other.process.is_alive()
        return machine_bytes(device) + gone * other.context_bytes
    assert other.process.pid is not None
    return memfd_bytes([os.getpid(), other.process.pid])


def giver(device: str) -> tuple[MemorySaver, torch.Tensor]:
    saver = MemorySaver(device)
    return saver, saver.empty(SIZE, torch.uint8, tag="kv").fill_(7)


def test_the_same_pages_go_to_and_fro(device: str) -> None:
    with other_process(device) as other:
        saver, mine = giver(device)
        resting, used = [], held(device, other)
        for value in range(8, 14):
            mine.fill_(value)
            saver.pause(release="hand_over", to=other.ticket)
            saver.check_integrity()
            assert saver.report().committed_bytes == 0
            theirs, _, fds = other.ask("report")
            assert theirs.pool_bytes == theirs.committed_bytes == SIZE
            assert other.ask("resume") == (value, value)  # not cleared, so no others than mine
            other.ask("fill", value + 100)
            other.ask("give", saver.pool_ticket())
            saver.resume()
            saver.check_integrity()
            assert int(mine[0]) == int(mine[-1]) == value + 100
            assert held(device, other) == used
            resting.append((fds, open_fds(), len(imports)))
        assert len(set(resting[1:])) == 1, "exported or imported more than once"


def test_what_another_process_made_can_be_leased_and_handed_to_a_third(device: str) -> None:
    """The CUDA driver does not export what was imported."""
    with other_process(device) as maker, other_process(device) as third:
        saver, mine = giver(device)
        saver.pause()
        maker.ask("resume")
        maker.ask("fill", 42)
        maker.ask("give", saver.pool_ticket())
        saver.resume()
        assert third.ask("attach", saver.share("kv")) == [42]
        third.ask("detach")
        assert int(mine[-1]) == 42
        saver.pause(release="hand_over", to=third.ticket)
        assert third.ask("resume") == (42, 42)


def test_two_savers_of_one_process(device: str) -> None:
    (one, mine), two = giver(device), MemorySaver(device)
    theirs = two.empty(SIZE, torch.uint8, tag="kv").fill_(1)
    two.pause()
    for value in (2, 3):
        mine.fill_(value)
        one.pause(release="hand_over", to=two.pool_ticket())
        two.resume()
        assert int(theirs[-1]) == value and two.report().committed_bytes == SIZE
        two.pause(release="hand_over", to=one.pool_ticket())
        one.resume()
        one.check_integrity()
        two.check_integrity()
    one.close()
    two.close()


def test_a_receiver_without_room_refuses_and_nothing_changes(device: str) -> None:
    with other_process(device, limit=SIZE + (4 << 20)) as other:
        saver, mine = giver(device)
        other.ask("resume")
        with pytest.raises(memsaver.LeaseError, match=r"not handed over.*limit of 36.0 MiB.*32.0 MiB are held"):
            saver.pause(release="hand_over", to=other.ticket)
        assert not saver.is_paused("kv") and bool((mine == 7).all())
        saver.check_integrity()
        saver.pause(release="keep")
        saver.resume()


def test_bad_tickets(device: str) -> None:
    saver, mine = giver(device)
    receiver = MemorySaver(device)
    ticket = receiver.pool_ticket()
    with pytest.raises(ValueError, match="go together"):
        saver.pause(release="hand_over")
    with pytest.raises(ValueError, match="go together"):
        saver.pause(to=ticket)
    with pytest.raises(ValueError, match="cannot go to"):
        saver.pause(release="hand_over", to=memsaver.PoolTicket(**{**vars(ticket), "device_key": "GPU-1"}))
    with pytest.raises(memsaver.LeaseError, match="unknown pool ticket"):
        saver.pause(release="hand_over", to=memsaver.PoolTicket(**{**vars(ticket), "token": "0" * 32}))
    with pytest.raises(memsaver.LeaseError, match="does not answer"):
        saver.pause(release="hand_over", to=memsaver.PoolTicket(**{**vars(ticket), "socket_name": "nobody"}))
    assert not saver.is_paused("kv") and bool((mine == 7).all())


def test_an_import_that_a_peer_kept_is_revoked_before_the_release(device: str) -> None:
    with other_process(device) as other:
        saver, _ = giver(device)
        assert other.ask("attach", saver.share("kv")) == [7]
        with pytest.raises(memsaver.LeaseError, match=f"'kv' by process {other.process.pid}"):
            saver.pause()
        other.ask("detach")
        assert other.ask("report")[1] == 1
        before = held(device, other)
        saver.pause(release="keep")
        saver.resume()
        assert other.ask("report")[1] == 1 and held(device, other) == before
        saver.pause()
        assert other.ask("report")[1] == 0
        assert before - held(device, other) == SIZE
        saver.resume()
        saver.check_integrity()
        assert other.ask("attach", saver.share("kv")) is not None


def _stop(pid: int) -> None:
    """Wait until each thread has stopped, for one that has not may still answer."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while any(
        file.read_text().rpartition(")")[2].split()[0] != "T" for file in Path(f"/proc/{pid}/task").glob("*/stat")
    ):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_silent_peer_is_named_and_nothing_changes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memsaver.share.REVOKE_SECONDS", 0.3)
    with other_process(device) as other:
        saver, mine = giver(device)
        other.ask("attach", saver.share("kv"))
        other.ask("detach")
        assert other.process.pid is not None
        _stop(other.process.pid)
        with pytest.raises(memsaver.LeaseError, match=f"process {other.process.pid} does not let go of 1 extents"):
            saver.pause()
        assert not saver.is_paused("kv") and bool((mine == 7).all())
        os.kill(other.process.pid, signal.SIGCONT)
        time.sleep(0.2)
        saver.pause()
        assert saver.report().committed_bytes == 0


@pytest.mark.parametrize("when", ["with an import", "as owner"])
def test_a_killed_peer_leaves_nothing(device: str, when: str) -> None:
    with other_process(device) as other:
        saver, mine = giver(device)
        used = held(device, other)
        if when == "as owner":
            saver.pause(release="hand_over", to=other.ticket)
            other.ask("resume")
        else:
            other.ask("attach", saver.share("kv"))
            other.ask("detach")
        other.process.kill()
        other.process.join(10)
        deadline = time.monotonic() + 5
        while len(imports) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(imports) == 0
        if when == "as owner":
            assert used - held(device, other) == SIZE
            with pytest.raises(memsaver.LeaseError, match="does not answer"):
                saver.resume()
                saver.pause(release="hand_over", to=other.ticket)
            assert not saver.is_paused("kv")
        else:
            saver.pause()
            assert used - held(device, other) == SIZE
        saver.resume()
        mine.fill_(1)
        saver.check_integrity()


def test_kept_pages_serve_any_tag_and_go_when_room_is_needed(device: str) -> None:
    saver = MemorySaver(device, limit_bytes=2 * SIZE)
    one = saver.empty(SIZE, torch.uint8, tag="one").fill_(5)
    two = saver.empty(SIZE, torch.uint8, tag="two").fill_(6)
    saver.pause(release="keep")
    assert saver.report().pool_bytes == saver.report().committed_bytes == 2 * SIZE
    saver.resume("two")
    assert int(two[0]) in (5, 6)  # one of the two extents as it was: no driver, no clearing
    big = saver.empty(SIZE, torch.uint8, tag="big").fill_(1)  # takes the other's room
    assert saver.report().pool_bytes == 0 and saver.report().committed_bytes == 2 * SIZE
    with pytest.raises(memsaver.OutOfMemory, match="32.0 MiB are missing"):
        saver.resume("one")
    del big
    gc.collect()
    saver.trim()
    saver.resume("one")
    one.fill_(1)
    saver.pause("one", release="keep")
    assert saver.trim() == SIZE and saver.report().committed_bytes == SIZE
    saver.check_integrity()


def test_a_tag_of_many_extents_is_kept_in_few(device: str) -> None:
    """Extents that the tag got from the pool, one by one, as on a GPU from growing tensor by tensor."""
    saver = MemorySaver(device)
    parts = [saver.empty(2 << 20, torch.uint8, tag=f"part{i}").fill_(i) for i in range(40)]
    whole = saver.empty(80 << 20, torch.uint8, tag="whole").fill_(1)
    saver.pause("whole")
    saver.pause(release="keep")
    assert len(saver._pool.extents) == 40
    saver.resume("whole")
    assert saver.report().tags["whole"].extents == 40 and saver.report().pool_bytes == 0
    saver.pause("whole", release="keep")
    assert saver.report().pool_bytes == whole.nbytes and len(saver._pool.extents) == 2
    saver.check_integrity()
    saver.resume("whole")
    assert saver.report().tags["whole"].extents == 2 and saver.report().pool_bytes == 0
    whole.fill_(2)
    saver.pause("whole")
    saver.resume()
    for part in parts:
        part.fill_(1)
    saver.check_integrity()


def test_an_allocation_takes_what_peers_have_imported(device: str) -> None:
    giver = memsaver.MemorySaver(device)
    given = giver.empty(4 << 20, torch.uint8, tag="given")
    taker = memsaver.MemorySaver(device, limit_bytes=4 << 20)
    giver.pause(release="hand_over", to=taker.pool_ticket())
    assert taker.report().pool_bytes == 4 << 20
    with pytest.raises(memsaver.OutOfMemory, match="page pool 4.0 MiB.*trim"), taker.region("a region"):
        torch.empty(6 << 20, dtype=torch.uint8, device=device)
    assert taker.report().pool_bytes == 4 << 20
    with pytest.raises(memsaver.OutOfMemory, match="missing under the limit of 4.0 MiB"):
        taker.empty(6 << 20, torch.uint8, tag="too much")
    giver.resume()
    giver.pause(release="hand_over", to=taker.pool_ticket())
    halves = [taker.empty(2 << 20, torch.uint8, tag=f"half {i}").fill_(i) for i in range(2)]
    assert [int(half[0]) for half in halves] == [0, 1]
    assert taker.report().pool_bytes == 0
    giver.resume()
    given.fill_(1)
