"""Calls to an object in an engine's process, over a connection between the two processes.

Calls and answers are pickled, so the other end must be trusted. A pipe that both processes inherit
has no other end. `listen` and `connect` use an abstract Unix socket, which any process of the
machine can open. Before they unpickle anything, both ends refuse a process of another user, and a
process that does not know the name of the socket, which is a secret.
"""

import contextlib
import hmac
import os
import pickle
import selectors
import socket
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

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


class NamedSocket(NamedTuple):
    """A socket at which a process listens, with the name that the other process must know."""

    name: str
    listener: socket.socket


def listen(name: str) -> NamedSocket:
    """Open a socket that other processes of this machine can reach if they know `name`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_address(name))
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return NamedSocket(name, listener)


def accept(named: NamedSocket, seconds: float) -> Connection:
    """Wait for a process of the same user that knows the name.

    Nothing that another process sends extends the wait, or keeps the right process from connecting.

    Raises:
        TimeoutError: The process did not connect in `seconds`.
    """
    end = time.monotonic() + seconds
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as waiting:
        waiting.register(named.listener, selectors.EVENT_READ)
        while (left := end - time.monotonic()) > 0:
            for ready in {key.fileobj for key, _ in waiting.select(left)}:
                assert isinstance(ready, socket.socket)
                if ready is not named.listener:
                    if _has_proof(ready, named.name, "connects"):
                        ready.sendall(_proof(named.name, "listens"))
                        return _channel(ready)
                    waiting.unregister(ready)
                    ready.close()
                    continue
                connection = opened.enter_context(named.listener.accept()[0])
                if credentials(connection)[1] == os.getuid():
                    waiting.register(connection, selectors.EVENT_READ)
                else:
                    connection.close()
    raise TimeoutError(f"no process that knows the socket's name connected in {seconds:g} s")


def connect(name: str) -> Connection:
    """Connect to the process that listens at `name`, and wait until it accepts.

    Raises:
        OSError: No process listens there, a process of another user does, or one that ends before
            it proves that it knows the name.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(_address(name))
        if (uid := credentials(connection)[1]) != os.getuid():
            raise PermissionError(f"user {uid} listens at the socket, not user {os.getuid()}")
        connection.sendall(_proof(name, "connects"))
        if not _has_proof(connection, name, "listens"):
            raise ConnectionAbortedError("the process that listens at the socket did not accept")
    except BaseException:
        connection.close()
        raise
    return _channel(connection)


def serve(name: str, side: ActorBase) -> None:
    """Connect to the process that listens at `name`, and answer its calls until it is gone.

    Raises:
        OSError: As `connect`.
    """
    with connect(name) as channel, contextlib.suppress(EOFError, ConnectionError):
        while True:  # Only this thread calls `side`, which therefore needs no lock.
            answer_call(channel, side)


def _address(name: str) -> str:
    # Every process of the machine can list the addresses, so an address does not tell the name.
    return f"\0memsaver-{os.getuid()}-{_proof(name, 'address').hex()}"


def _proof(name: str, role: str) -> bytes:
    """Return the bytes that only a process that knows the name can send in a role."""
    return hmac.digest(name.encode(), role.encode(), "sha256")


def _has_proof(connection: socket.socket, name: str, role: str) -> bool:
    """Return whether the bytes that have come, or come next, are the proof."""
    expected = _proof(name, role)
    try:
        return hmac.compare_digest(connection.recv(len(expected)), expected)
    except ConnectionError:
        return False


def _channel(connection: socket.socket) -> Connection:
    connection.setblocking(True)
    return Connection(connection.detach())
