"""Calls to an object in an engine's process, over a connection between the two processes.

Calls and answers are pickled, so the other end must be trusted. A pipe that both processes inherit
has no other end. `listen` and `connect` use an abstract Unix socket, which any process of the
machine can open; both of its ends refuse a process of another user.
"""

from __future__ import annotations

import os
import pickle
import socket
from multiprocessing.connection import Connection
from typing import Any

from memsaver.system.sockets import credentials
from rollout.actor_base import ActorBase

Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""Method, arguments and keywords of a call."""


def send_call(channel: Connection, call: Call | None) -> None:
    """Send a call, whose answer `receive_answer` waits for; the answer to None is None."""
    channel.send_bytes(pickle.dumps(call))


def receive_answer(channel: Connection) -> tuple[bool, Any]:
    """Return (True, result) or (False, error); an EOFError says that the other end is gone."""
    good, answer = pickle.loads(channel.recv_bytes())
    return good, answer


def answer_call(channel: Connection, side: ActorBase) -> None:
    """Wait for a call, and send its answer; an EOFError says that the other end is gone."""
    call: Call | None = pickle.loads(channel.recv_bytes())
    answer: tuple[bool, Any] = True, None
    try:
        if call is not None:
            method, args, kwargs = call
            answer = True, side.call(method, *args, **kwargs)
    except Exception as error:
        answer = False, error
    channel.send_bytes(pickle.dumps(answer))


def serve(channel: Connection, side: ActorBase) -> None:
    """Answer calls, one after the other, until the other end is gone."""
    while True:
        try:
            answer_call(channel, side)
        except (EOFError, ConnectionError):
            return


def listen(name: str) -> socket.socket:
    """Open a socket that other processes of this machine can reach by `name`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_address(name))
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def accept(listener: socket.socket, seconds: float) -> Connection:
    """Wait for a process of the same user to connect; raise a TimeoutError after `seconds`."""
    listener.settimeout(seconds)
    while True:
        connection, _ = listener.accept()
        if credentials(connection)[1] == os.getuid():
            return _channel(connection)
        connection.close()


def connect(name: str) -> Connection:
    """Connect to the process that listens at `name`.

    Raises:
        OSError: No process listens there, or a process of another user.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(_address(name))
        if (uid := credentials(connection)[1]) != os.getuid():
            raise PermissionError(f"user {uid} listens at {name}, not user {os.getuid()}")
    except BaseException:
        connection.close()
        raise
    return _channel(connection)


def _address(name: str) -> str:
    return f"\0memsaver-{os.getuid()}-{name}"


def _channel(connection: socket.socket) -> Connection:
    connection.setblocking(True)
    return Connection(connection.detach())
