"""Hand-over of memory and revocation of imports, between processes and between savers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import memsaver
from memsaver import MemorySaver
from memsaver.memory.page_pool import imports
from tests.helpers.memory import counted, machine_bytes, memfd_bytes, settled_fds
from tests.helpers.memsaver.remote import RemoteSaver, remote_saver
from tests.helpers.memsaver.savers import MIB, until

pytestmark = pytest.mark.alone
SIZE = 32 * MIB


@pytest.fixture
def other(device: str) -> Iterator[RemoteSaver]:
    """Return a saver in another process whose tag is paused."""
    with remote_saver(device, nbytes=SIZE) as other:
        other.pause()
        yield other


def held_by_both(device: str, other: RemoteSaver) -> int:
    """Return the physical bytes of both processes, counted once; on a GPU, of the device."""
    return memfd_bytes([os.getpid(), other.pid]) if device == "cpu" else machine_bytes(device)


def giver(device: str) -> tuple[MemorySaver, torch.Tensor]:
    saver = MemorySaver(device)
    return saver, saver.empty(SIZE, torch.uint8, tag="kv").fill_(7)


def test_hand_over_moves_the_same_pages_both_ways(
    device: str, fds: int, other: RemoteSaver
) -> None:
    saver, tensor = giver(device)
    resting, used = [], held_by_both(device, other)
    for value in range(8, 14):
        tensor.fill_(value)
        saver.pause(release="hand_over", to=other.pool)
        saver.check_integrity()
        assert saver.report().committed_bytes == 0
        report = other.report()
        assert report.pool_bytes == report.committed_bytes == SIZE
        remote = other.held()
        assert other.resume() == (value, value)  # not cleared, so they are the same pages
        other.fill(value + 100)
        other.give(saver.pool_ticket())
        saver.resume()
        saver.check_integrity()
        assert int(tensor[0]) == int(tensor[-1]) == value + 100
        assert held_by_both(device, other) == counted(used, device, 2)
        resting.append((remote, settled_fds(), len(imports)))
    assert len(set(resting[1:])) == 1, "exported or imported more than once"


def test_release_retained_hands_over_at_most_the_limit_and_frees_the_rest(
    device: str, other: RemoteSaver
) -> None:
    saver, tensors = MemorySaver(device), []
    for part in range(4):
        tensors.append(saver.empty(SIZE // 4, torch.uint8, tag=f"part{part}").fill_(9))
    before = held_by_both(device, other)
    saver.pause(release="retain")
    saver.release_retained(other.pool, most=SIZE // 2 + 1)
    saver.check_integrity()
    assert saver.report().committed_bytes == 0
    assert other.report().pool_bytes == other.report().committed_bytes == SIZE // 2
    assert before - held_by_both(device, other) == counted(SIZE // 2, device, 4)
    saver.resume()
    saver.pause(release="retain")
    saver.release_retained()
    assert saver.report().committed_bytes == 0 and other.report().pool_bytes == SIZE // 2
    with pytest.raises(ValueError, match="cannot go to"):
        saver.resume()
        saver.pause(release="retain")
        saver.release_retained(memsaver.PoolTicket(**{**vars(other.pool), "device_key": "GPU-1"}))
    assert saver.report().pool_bytes == SIZE


@pytest.mark.parametrize("fate", ["refuses", "is gone"])
def test_release_retained_frees_memory_when_receiver_fails(fate: str, device: str) -> None:
    saver, _ = giver(device)
    with remote_saver(device, nbytes=SIZE, limit=SIZE) as other:  # its tag reaches the limit
        before = held_by_both(device, other)
        if fate == "is gone":
            os.kill(other.pid, signal.SIGKILL)
        saver.pause(release="retain")
        saver.release_retained(other.pool)
        assert saver.report().committed_bytes == 0
        saver.check_integrity()
        if fate == "refuses":
            assert before - held_by_both(device, other) == counted(SIZE, device)
            assert other.report().pool_bytes == 0


def test_memory_from_another_process_can_be_leased_and_handed_to_a_third(
    device: str, other: RemoteSaver
) -> None:
    # The CUDA driver cannot export imported memory.
    with remote_saver(device, nbytes=SIZE) as third:
        third.pause()
        saver, tensor = giver(device)
        saver.pause()
        other.resume()
        other.fill(42)
        other.give(saver.pool_ticket())
        saver.resume()
        assert third.attach(saver.share("kv")) == 42
        third.detach()
        assert int(tensor[-1]) == 42
        saver.pause(release="hand_over", to=third.pool)
        assert third.resume() == (42, 42)


def test_hand_over_refuses_bad_tickets(device: str) -> None:
    saver, tensor = giver(device)
    receiver = MemorySaver(device)
    ticket = receiver.pool_ticket()
    with pytest.raises(ValueError, match="go together"):
        saver.pause(release="hand_over")
    with pytest.raises(ValueError, match="go together"):
        saver.pause(to=ticket)
    for wrong, kind, message in (
        ({"device_key": "GPU-1"}, ValueError, "cannot go to"),
        ({"token": "0" * 32}, memsaver.LeaseError, "unknown pool ticket"),
        ({"socket_name": "unknown"}, memsaver.LeaseError, "does not answer"),
    ):
        with pytest.raises(kind, match=message):
            saver.pause(release="hand_over", to=memsaver.PoolTicket(**{**vars(ticket), **wrong}))
    assert not saver.is_paused("kv") and bool((tensor == 7).all())


def test_pause_revokes_import_of_ended_lease(device: str, other: RemoteSaver) -> None:
    saver, _ = giver(device)
    assert other.attach(saver.share("kv")) == 7
    with pytest.raises(memsaver.LeaseError, match=f"'kv' by process {other.pid}"):
        saver.pause()
    other.detach()
    assert other.held()[0] == 1
    before = held_by_both(device, other)
    saver.pause(release="retain")
    saver.resume()
    assert other.held()[0] == 1 and held_by_both(device, other) == counted(before, device)
    saver.pause()
    assert other.held()[0] == 0
    assert before - held_by_both(device, other) == counted(SIZE, device)
    saver.resume()
    saver.check_integrity()
    assert other.attach(saver.share("kv")) is not None


def _has_stopped(pid: int) -> bool:
    """Return whether all threads of a process have stopped, so that none can answer."""
    states = [
        file.read_text().rpartition(")")[2].split()[0]
        for file in Path(f"/proc/{pid}/task").glob("*/stat")
    ]
    return set(states) == {"T"}


def test_pause_names_silent_peer_and_changes_nothing(
    device: str, other: RemoteSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, tensor = giver(device)
    other.attach(saver.share("kv"))
    other.detach()
    os.kill(other.pid, signal.SIGSTOP)
    until(lambda: _has_stopped(other.pid))
    with monkeypatch.context() as patch:
        patch.setattr("memsaver.sharing.server.REVOKE_SECONDS", 0.3)
        with pytest.raises(
            memsaver.LeaseError, match=f"process {other.pid} does not release 1 imported extents"
        ):
            saver.pause()
    assert not saver.is_paused("kv") and bool((tensor == 7).all())
    os.kill(other.pid, signal.SIGCONT)
    until(lambda: other.held()[0] == 0)  # the peer obeys late
    saver.pause()
    assert saver.report().committed_bytes == 0


def test_retaining_pause_replaces_many_extents_by_few(device: str) -> None:
    # The tag gets its extents from the pool one by one, like a tag that grows on a GPU.
    saver = MemorySaver(device)
    parts = [saver.empty(2 * MIB, torch.uint8, tag=f"part{i}").fill_(i) for i in range(40)]
    whole = saver.empty(80 * MIB, torch.uint8, tag="whole").fill_(1)
    saver.pause("whole")
    saver.pause(release="retain")
    for extents in (40, 2):
        saver.resume("whole")
        assert saver.report().tags["whole"].extents == extents and saver.report().pool_bytes == 0
        saver.pause("whole", release="retain")
        assert saver.report().pool_bytes == whole.nbytes
        saver.check_integrity()
    saver.resume("whole")
    whole.fill_(2)
    saver.pause("whole")
    saver.resume()
    for part in parts:
        part.fill_(1)
    saver.check_integrity()


def test_allocation_uses_pool_memory_that_a_peer_has_imported(device: str) -> None:
    giver = memsaver.MemorySaver(device)
    given = giver.empty(4 * MIB, torch.uint8, tag="given")
    taker = memsaver.MemorySaver(device, limit_bytes=4 * MIB)
    giver.pause(release="hand_over", to=taker.pool_ticket())
    assert taker.report().pool_bytes == 4 * MIB
    segment = "2.0" if device == "cpu" else "20.0"  # torch requests segments of 20 MiB
    with (
        pytest.raises(memsaver.OutOfMemory, match=f"{segment} MiB are missing under the limit of"),
        taker.region("a region"),
    ):
        torch.empty(6 * MIB, dtype=torch.uint8, device=device)
    with pytest.raises(
        memsaver.OutOfMemory, match="2.0 MiB are missing under the limit of 4.0 MiB"
    ):
        taker.empty(6 * MIB, torch.uint8, tag="too much")
    giver.resume()
    giver.pause(release="hand_over", to=taker.pool_ticket())
    halves = [taker.empty(2 * MIB, torch.uint8, tag=f"half {i}").fill_(i) for i in range(2)]
    assert [int(half[0]) for half in halves] == [0, 1]
    assert taker.report().pool_bytes == 0
    giver.resume()
    given.fill_(1)
