"""Late, malformed, unwanted and unread messages cost neither descriptors nor time."""

from __future__ import annotations

import os
import queue
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from memsaver.sharing import rpc
from memsaver.sharing.server import ShareServer
from tests.helpers.memory import open_fds, uncollected
from tests.helpers.memsaver.savers import until


class Ends:
    """A serving endpoint, and the other end of its connection as a bare socket."""

    def __init__(self) -> None:
        self.ours, self.raw = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.raw.settimeout(60)
        self.closed: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.late: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.end = rpc.Endpoint(
            self.ours, self.serve, lambda: self.closed.put(True), "test", self.late.put
        )
        self.end.start()

    def serve(self, op: str, arguments: dict[str, Any], fds: list[int]) -> rpc.Reply:
        rpc.close_all(fds)
        return arguments, []

    def send(self, answer: bool, number: int, text: bytes, fds: Sequence[int] = ()) -> None:
        socket.send_fds(self.raw, [rpc.HEADER.pack(answer, number, False) + text], list(fds))


@pytest.fixture
def ends(fds: int) -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.raw.close()
    assert ends.closed.get(timeout=60)
    until(lambda: open_fds() == fds)


def test_late_answer_leaves_no_descriptors(ends: Ends) -> None:
    with pytest.raises(TimeoutError, match="gave no answer for 0.05 s"):
        ends.end.call("anything", timeout=0.05)
    before = open_fds()
    ends.send(True, 1, b'{"lease": 7}', [0, 1, 2])
    assert ends.late.get(timeout=60) == {"lease": 7}
    assert open_fds() == before


HEADER = rpc.HEADER.pack(False, 1, False)
GARBAGE = {
    "short": b"?",
    "empty": HEADER,
    "list": HEADER + b"[1]",
    "bytes": HEADER + b"\xff",
    "deep": HEADER + b"[" * 9999,
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_malformed_message_ends_connection(ends: Ends, garbage: bytes) -> None:
    with uncollected():
        socket.send_fds(ends.raw, [garbage], [0])
        assert ends.raw.recv(1) == b""
    with pytest.raises(rpc.ConnectionClosed):
        ends.end.call("anything", timeout=60)


def test_call_times_out_when_peer_does_not_read(ends: Ends) -> None:
    ends.ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, rpc.send_timeout(0.1))
    with pytest.raises(TimeoutError, match="reads nothing"):
        ends.end.call("anything", timeout=120, blob="x" * 1_000_000)


class Server:
    """Fake ShareServer that refuses every operation."""

    def refuse(self, link: object, **arguments: Any) -> rpc.Reply:
        raise rpc.CallRefused(str(sorted(arguments)))

    lease = unlease = offer = give = refuse


@pytest.mark.parametrize("op", ["lease", "give", "nonsense"])
def test_descriptors_of_refused_request_are_closed(op: str, fds: int) -> None:
    with pytest.raises(rpc.CallRefused):
        ShareServer.serve(Server(), None, op, {}, [os.dup(0), os.dup(0)])  # type: ignore[arg-type]
    assert open_fds() == fds
