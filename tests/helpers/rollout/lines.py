"""Both ends of a rank's line in one process."""

from __future__ import annotations

import socket

from rollout.disagg.line import PLAIN, Line, Message

SESSION = b"of this pair"


def line_pair(timeout: float = 5.0) -> tuple[Line, Line]:
    here, there = socket.socketpair()
    return Line(here, SESSION, "listens", "dials", timeout), Line(
        there, SESSION, "dials", "listens", timeout
    )


class Far:
    """The other end of a rank's line."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def send(self, message: Message) -> None:
        self._line.send(PLAIN.text(message))

    def recv(self) -> Message:
        return PLAIN.value(self._line.receive())

    def close(self) -> None:
        self._line.close()
