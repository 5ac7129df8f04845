"""Carries what the ranks of two engines say to each other: one sealed line a pair. Bulk bytes go by
`transport`.
"""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Iterator, Sequence

from memsaver.common.plain import Forged
from rollout.disagg.line import Line
from rollout.disagg.messages import PLAIN, Closed, Hello, Message
from rollout.errors import PeerLostError

_GONE = (EOFError, OSError, Forged, ValueError)  # the last: what is no message


class Peers:
    """The ranks of the other engine, by their rank. `lost`: why the first of them is given up, None
    while all live;
    `loss`: its rank, or how many there are. From a loss on nothing is sent or received.
    """

    def __init__(
        self, name: str, connections: Sequence[Line], hello: Hello, timeout: float
    ) -> None:
        """Greets all of them. name: "prefill" or "decode". ValueError where the engines do not fit
        together.
        """
        self.name, self.timeout = name, timeout
        self.lost: str | None = None
        self.loss = len(connections)
        for connection in connections:
            connection.set_timeout(timeout)
            connection.send(PLAIN.text(hello))
        met = [(self._hello(connection), connection) for connection in connections]
        if sorted(each.tp_rank for each, _ in met) != list(range(len(met))) or any(
            each.tp_size != len(met) for each, _ in met
        ):
            ranks = [f"{each.tp_rank} of {each.tp_size}" for each, _ in met]
            raise ValueError(f"connect to every {name} rank once; these are {', '.join(ranks)}")
        met.sort(key=lambda each: each[0].tp_rank)
        self.hellos = [each for each, _ in met]
        self._connections = [connection for _, connection in met]
        self._open = list(self._connections)  # those that may still say something
        for each in self.hellos:
            if each.geometry != hello.geometry:
                raise ValueError(
                    f"the {name} engine has {each.geometry}, this one {hello.geometry}; "
                    f"they must be equal"
                )

    def _hello(self, connection: Line) -> Hello:
        try:
            message = PLAIN.value(connection.receive())
        except TimeoutError as error:
            raise PeerLostError(
                f"a {self.name} rank did not say who it is for {self.timeout:g} s"
            ) from error
        assert isinstance(message, Hello)
        return message

    def __len__(self) -> int:
        return len(self._connections)

    def send(self, peer: int, message: Message) -> None:
        """A peer that is gone, or reads nothing for the time-out, is noticed, not raised."""
        if self.lost is None:
            try:
                self._connections[peer].send(PLAIN.text(message))
            except OSError as error:
                self.lose(peer, f"is gone ({error})")

    def send_all(self, message: Message) -> None:
        for peer in range(len(self)):
            self.send(peer, message)

    def receive(self, seconds: float) -> Iterator[tuple[int, Message]]:
        """All messages that are there, by peer; waits for the first one for so long."""
        while self.lost is None and self._open and (ready := _ready(self._open, seconds)):
            seconds = 0
            for connection in ready:
                peer = self._connections.index(connection)
                try:
                    message: Message = PLAIN.value(self._connections[peer].receive())
                except _GONE as error:
                    self.lose(peer, f"is gone ({type(error).__name__})")
                    return
                if isinstance(message, Closed):
                    self._open.remove(self._connections[peer])  # its end is no loss
                yield peer, message

    def lose(self, peer: int, why: str) -> None:
        """The first reason counts."""
        if self.lost is None:
            self.lost, self.loss = f"{self.name} rank {peer} {why}", peer

    def end(self) -> None:
        """Say that no more comes, and wait until the others have gone."""
        self.send_all(Closed())
        for _ in self.receive(self.timeout):
            pass
        self.close()

    def close(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.close()


def _ready(lines: Sequence[Line], seconds: float) -> list[Line]:
    """Returns those with something to read; waits for the first one for so long."""
    with selectors.DefaultSelector() as selector:
        for line in lines:
            selector.register(line, selectors.EVENT_READ, line)
        return [key.data for key, _ in selector.select(seconds)]
