"""Requests in both directions, with file descriptors, over one local socket of two processes.

Each end has two threads. One reads, so that answers arrive while a request is being served. The
other serves the requests of the peer, one at a time.
"""

import contextlib
import itertools
import json
import os
import queue
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from memsaver.errors import MemSaverError
from memsaver.system.sockets import credentials
from memsaver.system.threads import forkable

_FDS = 200  # descriptors in a message; the kernel accepts 253
_TEXT = 1 << 15  # bytes in a message
HEADER = struct.Struct("<?Q?")  # whether it is an answer, its number, whether more parts follow
_SEND_SECONDS = 5.0  # the peer always reads, unless its process is stopped

Reply = tuple[dict[str, Any], Sequence[int]]
Serve = Callable[[str, dict[str, Any], list[int]], Reply]
"""(operation, arguments, descriptors) -> (answer, descriptors to send and then close).

Its exceptions reach the caller as ``CallRefused``. It must close the descriptors that it receives.
"""

_endpoints: "weakref.WeakSet[Endpoint]" = weakref.WeakSet()


class ConnectionClosed(ConnectionError):
    """The peer is gone."""


class CallRefused(Exception):
    """The peer refused the request; the text names the reason."""


class Endpoint:
    """One end of a connection between two processes.

    Args:
        connection: Connected socket, which the endpoint closes.
        serve: Serves the peer's requests, in the working thread.
        on_close: Called once, in the reading thread, when either end has closed.
        name: Prefix for the names of the two threads.
        on_late: Called in the reading thread with an answer whose caller has given up. It must not
            use `call`.
        prompt: Operations that never wait, served in the reading thread.
    """

    def __init__(
        self,
        connection: socket.socket,
        serve: Serve,
        on_close: Callable[[], None],
        name: str,
        on_late: Callable[[dict[str, Any]], None] = lambda answer: None,
        prompt: Collection[str] = (),
    ) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, send_timeout(_SEND_SECONDS))
        self._socket = connection
        self._serve = serve
        self._on_close = on_close
        self._on_late = on_late
        self._prompt = prompt
        # Any thread may call, so numbers pair requests with answers. Each caller waits at its own
        # queue, which the reading thread fills.
        self._numbers = itertools.count(1)
        self._waiting: dict[int, queue.SimpleQueue[tuple[dict[str, Any], list[int]]]] = {}
        # The reading thread puts requests of the peer here, and the working thread serves them.
        self._requests: queue.SimpleQueue[tuple[int, dict[str, Any], list[int]] | None] = (
            queue.SimpleQueue()
        )
        # `_sending` keeps the parts of a message together and the descriptor open. It is held
        # during a send, which may block. `_lock` guards `_waiting` and `closed`, and no thread
        # waits for anything while it holds it, so the reading thread never stops for long.
        self._sending = forkable(threading.Lock())
        self._lock = forkable(threading.Lock())
        self.closed = False
        self.peer_pid, _ = credentials(connection)
        self._name = name
        _endpoints.add(self)

    def start(self) -> None:
        """Start the threads, which call `serve` and `on_close`.

        Raises:
            RuntimeError: No thread can be started. The connection has ended.
        """
        work = threading.Thread(target=self._work, name=f"{self._name}-work", daemon=True)
        read = threading.Thread(target=self._read, name=f"{self._name}-read", daemon=True)
        try:
            work.start()
            read.start()
        except RuntimeError:
            self.closed = True
            self._requests.put(None)
            self._socket.close()
            raise

    def call(
        self, op: str, *, timeout: float, fds: Sequence[int] = (), **arguments: Any
    ) -> tuple[dict[str, Any], list[int]]:
        """Send a request, and wait up to `timeout` seconds for its answer and descriptors.

        The arguments are sent as JSON. The caller has to close all descriptors, sent and received.

        Raises:
            CallRefused: The peer refused the request.
            ConnectionClosed: The peer is gone.
            TimeoutError: No answer arrived in time.
        """
        number = next(self._numbers)
        answers: queue.SimpleQueue[tuple[dict[str, Any], list[int]]] = queue.SimpleQueue()
        with self._lock:
            if self.closed:
                raise ConnectionClosed("the connection is closed")
            self._waiting[number] = answers
        try:
            self._send(False, number, {"op": op, **arguments}, fds)
            with contextlib.suppress(queue.Empty):
                return self._accepted(*answers.get(timeout=timeout))
        finally:
            with self._lock:  # an answer after this point is late
                self._waiting.pop(number, None)
        with contextlib.suppress(queue.Empty):
            return self._accepted(*answers.get_nowait())
        raise TimeoutError(f"process {self.peer_pid} gave no answer for {timeout:g} s")

    def _accepted(
        self, answer: dict[str, Any], received: list[int]
    ) -> tuple[dict[str, Any], list[int]]:
        if "closed" in answer:
            raise ConnectionClosed(f"process {self.peer_pid} is gone, so nothing answers")
        if "refused" in answer:
            raise CallRefused(answer["refused"])
        return answer, received

    def tell(self, op: str, **arguments: Any) -> None:
        """Send a request without waiting for its answer."""
        with contextlib.suppress(ConnectionClosed, TimeoutError):
            self._send(False, next(self._numbers), {"op": op, **arguments}, ())

    def close(self) -> None:
        """End the connection; the peer notices."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def abandon(self) -> None:
        """Drop the connection in a forked child, because it stays the parent's."""
        self.closed = True
        self._socket.close()

    def _send(self, answer: bool, number: int, message: dict[str, Any], fds: Sequence[int]) -> None:
        text = json.dumps(message).encode()
        count = max(1, -(-len(text) // _TEXT), -(-len(fds) // _FDS))
        with self._sending:
            for part in range(count):
                head = HEADER.pack(answer, number, part + 1 < count)
                body = text[part * _TEXT : (part + 1) * _TEXT]
                try:
                    socket.send_fds(
                        self._socket, [head + body], list(fds[part * _FDS : (part + 1) * _FDS])
                    )
                except OSError as error:
                    if part:
                        self.close()  # the rest of a half-sent message cannot follow
                    if isinstance(error, BlockingIOError):
                        raise TimeoutError(f"process {self.peer_pid} reads nothing") from error
                    raise ConnectionClosed(f"process {self.peer_pid} is gone ({error})") from error

    def _receive(self) -> tuple[bool, int, dict[str, Any], list[int]] | None:
        """Return the next message, or ``None`` if the peer is gone or sends an invalid one."""
        text, fds, more = b"", [], True
        try:
            while more:
                data, got, _, _ = socket.recv_fds(
                    self._socket, _TEXT + 64, _FDS, socket.MSG_CMSG_CLOEXEC
                )
                fds += got
                answer, number, more = HEADER.unpack_from(data)  # struct.error: the end
                text += data[HEADER.size :]
            content = json.loads(text)
            if not isinstance(content, dict):
                raise ValueError(content)
            return answer, number, content, fds
        except (OSError, struct.error, ValueError, RecursionError):
            close_all(fds)
            return None

    def _read(self) -> None:
        while message := self._receive():
            answer, number, content, fds = message
            if not answer:
                if content.get("op") in self._prompt:
                    # The working thread may be waiting for a lock whose holder needs this request.
                    self._reply(number, content, fds)
                else:
                    self._requests.put((number, content, fds))
                continue
            # A caller that is giving up either finds the answer or leaves it to this thread.
            with self._lock:
                waiting = self._waiting.get(number)
                if waiting is not None:
                    waiting.put((content, fds))
            if waiting is None:
                close_all(fds)
                self._on_late(content)
        with self._lock:
            self.closed = True
            for waiting in self._waiting.values():
                waiting.put(({"closed": True}, []))
        self._requests.put(None)
        self.close()  # ends a send in progress
        with self._sending:  # a send must not find its descriptor reused for another file
            self._socket.close()
        self._on_close()

    def _work(self) -> None:
        while request := self._requests.get():
            self._reply(*request)

    def _reply(self, number: int, content: dict[str, Any], fds: list[int]) -> None:
        reply, sent = self._answer(content, fds)
        with contextlib.suppress(ConnectionClosed, TimeoutError):
            self._send(True, number, reply, sent)
        close_all(sent)

    def _answer(self, content: dict[str, Any], fds: list[int]) -> Reply:
        try:
            return self._serve(content.pop("op", None), content, fds)
        except (MemSaverError, CallRefused, MemoryError) as error:
            return {"refused": str(error)}, []
        except Exception as error:  # a bug here must not leave the peer waiting
            return {"refused": f"{type(error).__name__}: {error}"}, []


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def send_timeout(seconds: float) -> bytes:
    """Pack the value of SO_SNDTIMEO, which unlike Python's timeout does not limit receiving."""
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


def _forget_in_child() -> None:
    for endpoint in list(_endpoints):
        endpoint.abandon()


os.register_at_fork(after_in_child=_forget_in_child)
