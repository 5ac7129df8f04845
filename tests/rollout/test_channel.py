"""Calls over a socket of this machine, to which processes connect that do not know its name."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import uuid4

import pytest

from rollout import channel
from trainer_bridge.adoption.verl.names import engine_pair, socket_name

SECONDS = 0.6
Misbehavior = Callable[[socket.socket], object]
STRANGERS: dict[str, Misbehavior] = {
    "silent": lambda stranger: None,
    "garbage": lambda stranger: stranger.sendall(b"\x80\x05K" * 40),
    "one byte": lambda stranger: stranger.sendall(b"x"),
    "gone": lambda stranger: stranger.close(),
}


@contextmanager
def strangers(place: bytes, misbehave: Misbehavior) -> Iterator[None]:
    """Connect to an address, which every process can list, again and again during the block."""
    stop, opened = threading.Event(), list[socket.socket]()

    def connect_often() -> None:
        while not stop.is_set():
            opened.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            opened[-1].connect(place)
            misbehave(opened[-1])
            stop.wait(0.02)

    thread = threading.Thread(target=connect_often)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        for stranger in opened:
            stranger.close()


@pytest.mark.parametrize("kind", [*STRANGERS, "other user"])
def test_strangers_neither_extend_the_wait_nor_take_the_place(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = uuid4().hex
    named = channel.listen(name)
    place = named.listener.getsockname()
    with named.listener, strangers(place, STRANGERS.get(kind, STRANGERS["silent"])):
        if kind == "other user":
            monkeypatch.setattr(channel, "credentials", lambda _: (1, os.getuid() + 1))
        started = time.monotonic()
        with pytest.raises(TimeoutError, match="no process that knows the socket's name"):
            channel.accept(named, SECONDS)
        assert SECONDS <= time.monotonic() - started < 10 * SECONDS
        monkeypatch.undo()
        connected = list[object]()
        right = threading.Thread(target=lambda: connected.append(channel.connect(name)))
        right.start()
        with channel.accept(named, 30.0) as calls:
            right.join()
            calls.send_bytes(b"call")
            assert connected[0].recv_bytes() == b"call"  # type: ignore[attr-defined]


def test_listener_that_does_not_know_the_name_is_refused() -> None:
    """Simulate a process that binds an address which it found in the list of all addresses."""
    name = uuid4().hex
    with channel.listen(name).listener as listener:
        place = listener.getsockname()
        assert name.encode() not in place
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.bind(place)
        stranger.listen()

        def answer() -> None:
            connection, _ = stranger.accept()
            with connection:
                connection.sendall(connection.recv(100))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionAbortedError, match="did not accept"):
            channel.connect(name)
        thread.join()


def test_two_jobs_with_equal_ids_open_sockets_of_their_own() -> None:
    pair = engine_pair("01000000", 0, 0)
    first, second = (channel.listen(socket_name(pair, uuid4().hex)) for _ in range(2))
    first.listener.close()
    second.listener.close()
