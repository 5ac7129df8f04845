"""Processes that call what users wrote; they end with all that they start, whatever happens."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from recipes.supervisor import SIGNALED

GRACE = 1.0
"""Seconds that a process may take to end after it has closed its socket, or after a kill."""
ENDING = 5.0
"""Seconds that a supervisor may take to end all that its worker has started."""
STALLED = 10
"""Seconds that one read or write of a message may take, so that no worker can block the run."""
_COMMAND = (
    "import sys; sys.path[:] = {path}; from recipes.supervisor import main; "
    "from {module} import serve; main(serve, {ids})"
)


class SupervisedProcess:
    """A process that serves messages, and leads a process group.

    Ctrl-C in a terminal does not reach the group. All of it ends with the thread that started it.

    Args:
        module: Module whose function `serve` gets the other end of the connection.
        quiet: Whether what the process prints is dropped.

    Attributes:
        connection: Readable when a message is there, or the process ends.
    """

    def __init__(self, module: str, *, quiet: bool = False) -> None:
        ours, theirs = socket.socketpair()
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STALLED, 0))
        printed = subprocess.DEVNULL if quiet else None
        with theirs:
            ids = f"{theirs.fileno()}, {os.getpid()}"
            code = _COMMAND.format(path=sys.path, module=module, ids=ids)
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        self._socket, self._hung_up = ours, False
        self.connection = Connection(os.dup(ours.fileno()))

    def send(self, message: Any) -> None:
        """Send a message; the end of the process is noticed when the answer is read."""
        with contextlib.suppress(OSError):  # It has ended, or does not read.
            self.connection.send(message)

    def receive(self) -> Any:
        """Read a message.

        Raises:
            EOFError: The process has ended, or stalls in the middle of a message.
        """
        return self._read(self.connection.recv)

    def receive_text(self, longest: int) -> str:
        """Read a message of `Connection.send_bytes`, which is not unpickled.

        Args:
            longest: Bytes of the longest message that is read.

        Raises:
            EOFError: The process has ended, or stalls, or sends something else.
        """
        return bytes(self._read(partial(self.connection.recv_bytes, longest))).decode()

    def _read(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (EOFError, OSError) as error:
            self._hung_up = True
            raise EOFError from error

    def kill(self) -> str:
        """End the process and all processes that it started; return how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE if self._hung_up else 0)
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):  # Processes that left the group may hold the other end.
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            code = self._process.wait(GRACE)
        except subprocess.TimeoutExpired:  # In an uninterruptible system call.
            return "SIGKILL"
        number = -code if code < 0 else code - SIGNALED
        known = number in signal.valid_signals()
        return signal.Signals(number).name if known else f"exit status {code}"
