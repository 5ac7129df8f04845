"""Control sockets: ranks connect despite foreign connections, detect losses, and time out."""

from __future__ import annotations

import contextlib
import gc
import pickle
import runpy
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.split import control
from rollout.split.control import Closed, Hello, Message, RankPeers, Refused
from tests.helpers.memsaver.savers import at_once
from tests.helpers.ports import free_port
from tests.helpers.rollout.split_peer import Far

KEY = b"the ranks' secret"
HELLO = Hello(tp_size=1, tp_rank=0, geometry="equal")
REFUSED = Refused(number=0, reason="too long")


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "ipc":
        return f"ipc://{tmp_path}/line"
    return f"tcp://127.0.0.1:{free_port()}"


def listen(
    address: str, count: int = 1, key: bytes = KEY, seconds: float = 60.0, timeout: float = 2.0
) -> RankPeers:
    return RankPeers("prefill", HELLO, key, timeout, seconds, listen=(address, count))


def dial(
    address: str, rank: int = 0, size: int = 1, key: bytes = KEY, seconds: float = 60
) -> RankPeers:
    hello = Hello(tp_size=size, tp_rank=rank, geometry="equal")
    return RankPeers("decode", hello, key, 2.0, seconds, dial=[address])


def hear(peers: RankPeers) -> list[tuple[int, Message]]:
    """Wait until messages arrive or a peer is lost; return the messages."""
    end = time.monotonic() + 30
    while not (messages := list(peers.receive(0.05))) and peers.lost is None:
        assert time.monotonic() < end
    return messages


def send_garbage(address: str) -> None:
    kind, _, place = address.partition("://")
    host, _, port = place.partition(":")
    where: Any = place if kind == "ipc" else (host, int(port))
    with socket.socket(socket.AF_UNIX if kind == "ipc" else socket.AF_INET) as connection:
        connection.connect(where)
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100 + pickle.dumps(Path("/")) * 10)


def dial_with_wrong_key(address: str) -> None:
    far = Far(address, b"another", HELLO)
    time.sleep(0.1)
    far.close()


@contextlib.contextmanager
def disturbed(address: str, intrude: Callable[[str], None]) -> Iterator[None]:
    """Call `intrude` again and again inside the block."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(0.005):
            with contextlib.suppress(OSError):
                intrude(address)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join()


@pytest.mark.parametrize("intrude", [send_garbage, dial_with_wrong_key])
def test_ranks_connect_despite_foreign_connections(
    address: str, intrude: Callable[[str], None]
) -> None:
    with disturbed(address, intrude):
        listener, *dialers = at_once(
            lambda: listen(address, 2),
            *[lambda rank=rank: dial(address, rank, 2) for rank in (1, 0)],
        )
        listener.send_all(REFUSED)
        assert [hear(dialer) for dialer in dialers] == [[(0, REFUSED)]] * 2
        for rank, dialer in zip((1, 0), dialers, strict=True):
            dialer.send(0, REFUSED)
            assert hear(listener) == [(rank, REFUSED)]
    for peers in (*dialers, listener):
        peers.close()


@pytest.mark.parametrize("address", ["tcp"], indirect=True)
def test_connect_times_out_without_peer_or_matching_key_or_greeting(address: str) -> None:
    def refused(meet: Callable[[], RankPeers]) -> None:
        with pytest.raises(TimeoutError, match="met 0 of 1 .* start all, with the same key"):
            meet()

    refused(lambda: dial(address, seconds=0.2))
    at_once(
        lambda: refused(lambda: listen(address, seconds=0.9)),
        lambda: refused(lambda: dial(address, key=b"another", seconds=0.5)),
    )
    silent = Far(address, KEY, None)
    refused(lambda: listen(address, seconds=0.2))
    silent.close()


@pytest.fixture
def pair(address: str) -> tuple[RankPeers, Far]:
    far = Far(address, KEY, HELLO)
    return listen(address), far


def test_last_message_of_dead_peer_is_received_before_its_loss(
    pair: tuple[RankPeers, Far],
) -> None:
    peers, far = pair
    far.send(REFUSED)
    time.sleep(0.1)
    far.close()
    time.sleep(0.3)
    assert list(peers.receive(0)) == [(0, REFUSED)]
    assert peers.lost is not None and peers.lost.startswith("prefill rank 0 is gone")
    peers.send_all(Closed())
    peers.close()


def test_listener_that_ends_is_lost_unless_it_has_closed(address: str) -> None:
    for closes in (False, True):
        far = Far(address, KEY, HELLO, listens=True)
        peers = dial(address)
        if closes:
            far.send(Closed())
            while not peers.closed:
                assert not list(peers.receive(0.05))
        far.close()
        assert hear(peers) == [] if not closes else list(peers.receive(0.3)) == []
        assert (peers.lost is None) == closes
        peers.close()


def test_peer_that_sends_invalid_message_is_lost(pair: tuple[RankPeers, Far]) -> None:
    peers, far = pair
    far.send(b'{"Hello')
    assert hear(peers) == [] and "prefill rank 0 is gone" in str(peers.lost)
    peers.close()
    far.close()


@pytest.mark.parametrize("address", ["tcp"], indirect=True)
def test_peer_that_reads_nothing_is_lost_after_timeout(address: str) -> None:
    far = Far(address, KEY, HELLO)
    peers = listen(address, timeout=0.7)
    started = time.monotonic()
    while peers.lost is None:
        peers.send(0, Refused(number=0, reason="x" * 10_000))
    assert "prefill rank 0 is gone (Resource temporarily unavailable)" in peers.lost
    assert time.monotonic() - started < 30
    far.close()
    peers.close()


def test_error_of_a_missing_pyzmq_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ModuleNotFoundError, match=r"; run: pip install 'memsaver\[split\]'$"):
        runpy.run_path(control.__file__)


@pytest.mark.filterwarnings("ignore:unclosed socket:ResourceWarning")
def test_peers_that_were_not_closed_are_collected_as_garbage() -> None:
    peers = RankPeers("decode", HELLO, KEY, 2.0, 2.0)
    peers.hellos.append(peers)  # type: ignore[arg-type]
    released = weakref.ref(peers)
    del peers
    gc.collect()
    assert released() is None
