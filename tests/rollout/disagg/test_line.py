"""Ranks find each other past strangers who are silent, rude or many; what is not theirs is not
read, and nobody waits beyond a time-out.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memsaver.system.sealed import Forged
from rollout.disagg import accept, dial
from rollout.disagg.line import Address, Closed, Hello, Line, Peers, Refused
from rollout.types import PeerLostError
from tests.helpers.memsaver.savers import at_once
from tests.helpers.rollout.lines import line_pair

KEY = b"the ranks' secret"
HELLO = Hello(tp_size=1, tp_rank=0, geometry="equal")


STRANGERS = ["nobody", "leaves", "probe", "pickle"]


@pytest.fixture(params=["path", "port"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Address:
    if request.param == "path":
        return str(tmp_path / "line")
    with socket.create_server(("127.0.0.1", 0)) as free:
        return "127.0.0.1", free.getsockname()[1]


@contextlib.contextmanager
def pestered(address: Address, how: str) -> Iterator[None]:
    """By strangers, from before the ranks meet until they have."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    over, threads = threading.Event(), []

    def stranger() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), socket.socket(family) as connection:
                connection.connect(address)
                if how == "probe":
                    connection.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
                elif how == "pickle":
                    connection.sendall(pickle.dumps(Path("/")) * 10)
                elif how == "silent":
                    over.wait(60)
            time.sleep(0.005)

    for _ in range(40 if how == "silent" else 4):  # more than are greeted at once
        threads.append(threading.Thread(target=stranger, daemon=True))
        threads[-1].start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


# The silent are got rid of after 5 s, whatever they came by.
@pytest.mark.parametrize(
    ("address", "how"),
    [*itertools.product(("path", "port"), STRANGERS), ("path", "silent")],
    indirect=["address"],
)
def test_ranks_meet_whoever_else_comes(how: str, address: Address) -> None:
    with contextlib.ExitStack() as strangers:
        if how != "nobody":
            strangers.enter_context(pestered(address, how))
        accepted, (one,), (other,) = at_once(
            lambda: accept(address, 2, KEY, timeout=60),
            *[lambda: dial([address], KEY, timeout=60)] * 2,
        )
    for line in (one, other):
        line.send("from a dialler")
    for line in accepted:
        assert line.receive() == "from a dialler"
        line.send("from a listener")
    assert [line.receive() for line in (one, other)] == ["from a listener"] * 2
    for line in (*accepted, one, other):
        line.close()
    assert not isinstance(address, str) or not os.path.exists(address)


def test_another_key_and_nobody(address: Address) -> None:
    with pytest.raises(
        TimeoutError, match="no decode rank listens at .*start it first, with the same key"
    ):
        dial([address], KEY, timeout=0.3)

    def listen() -> Any:
        with pytest.raises(TimeoutError, match="0 of 1 prefill ranks came"):
            accept(address, 1, KEY, timeout=1.5)

    def call() -> Any:
        with pytest.raises(TimeoutError, match="with the same key"):
            dial([address], b"another", timeout=0.8)

    at_once(listen, call)


def test_what_a_stranger_puts_on_a_line_is_noticed() -> None:
    """In between, twice, in the other direction, or changed."""
    here, there = socket.socketpair()
    line = Line(here, b"session", "listens", "dials", 5.0)
    taps = [socket.socketpair() for _ in range(2)]
    Line(taps[0][0], b"session", "dials", "listens", 5.0).send("one")
    genuine = taps[0][1].recv(1 << 16)
    there.sendall(genuine)
    assert line.receive() == "one"
    for planted in (
        genuine,
        genuine[:-1] + b"X",
        b"\xff" * 8,
        len(genuine).to_bytes(8, "little") + b"\0" * len(genuine),
    ):
        there.sendall(planted)
        with pytest.raises(Forged):
            line.receive()
    line.close()


def test_a_peer_that_reads_nothing_or_says_half_is_lost_in_time() -> None:
    for what in ("reads nothing", "says half"):
        mine, theirs = line_pair()
        theirs.send('{"Hello":[1,0,"equal",0,null]}')
        peers = Peers("prefill", [mine], HELLO, timeout=0.5)
        started = time.monotonic()
        if what == "reads nothing":
            while peers.lost is None:
                peers.send(0, Refused(number=0, reason="x" * 100_000))
        else:
            os.write(theirs.fileno(), b"\x40")
            assert list(peers.receive(5)) == []
        assert peers.lost is not None and "prefill rank 0 is gone" in peers.lost
        assert time.monotonic() - started < 30
        peers.send_all(Closed())
        peers.close()


def test_a_rank_that_does_not_say_who_it_is() -> None:
    mine, _silent = line_pair()
    with pytest.raises(PeerLostError, match="did not say who it is for 0.2 s"):
        Peers("prefill", [mine], HELLO, timeout=0.2)
