"""One connection of two ranks: both prove that they know the key, then every message is sealed.

Nobody waits without a limit, for a stranger least of all. Two engines have one such line for each
pair of ranks, and what they say is plain data; bulk bytes go by a `Writer` and a `Reader`.
"""

import contextlib
import hmac
import os
import queue
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcache.config import FP4_DTYPE, FP8_DTYPES
from kvcache.pools import MHATokenToKVPool
from kvcache.staging import Watermark, pool_layers
from memsaver import Ticket
from memsaver.system.sealed import Forged, Plain, seal, unseal
from rollout.model.decoder import ModelConfig
from rollout.serving.kv_cache import Cache
from rollout.types import PeerLostError, SamplingParams

Address = str | tuple[str, int]
"""A path (one host) or (host, port)."""

_GONE = (EOFError, OSError, Forged, ValueError)  # the last: what is no message
_LENGTH = struct.Struct("<Q")
_NONCE_BYTES = 32
_GREET_SECONDS = 5.0  # for either side of a handshake: a rank of ours takes milliseconds
_GREETED_AT_ONCE = 32  # connections; more are turned away, and a rank of ours dials again
_LARGEST = 1 << 28  # bytes of a message


@dataclass(frozen=True, kw_only=True)
class Hello:
    """Names a rank. geometry: of the model and of what the pool keeps; must be equal on both sides.

    ring_bytes, ticket: of a decode rank's ring, and what a writer needs to reach it."""

    tp_size: int
    tp_rank: int
    geometry: str
    ring_bytes: int = 0
    ticket: Any = None


@dataclass(frozen=True, kw_only=True)
class Range:
    """Bytes of a decode rank's ring for tokens [first, first + tokens) of a prompt."""

    first: int
    tokens: int
    offset: int
    nbytes: int
    round: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, kw_only=True)
class Ask:
    """decode -> prefill: compute this prompt, into the ranges, and its samples' first tokens.

    Numbers rise by one. indices: of the samples that share the prompt; they and the seed decide.
    """

    number: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    indices: tuple[int, ...]
    ranges: tuple[Range, ...]


@dataclass(frozen=True, kw_only=True)
class First:
    """The first token of each sample, and the version of the weights that computed it."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int


@dataclass(frozen=True, kw_only=True)
class Filled:
    """prefill -> decode: this writer's part of the `nth` range is written, or on its way."""

    number: int
    nth: int
    first: First


@dataclass(frozen=True, kw_only=True)
class Refused:
    """prefill -> decode: nothing will come, and why."""

    number: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Freed:
    """decode -> prefill: the ring's watermark."""

    watermark: Watermark


@dataclass(frozen=True, kw_only=True)
class Closed:
    """decode -> prefill: no more requests."""


Message = Hello | Ask | Filled | Refused | Freed | Closed
PLAIN = Plain(
    Hello, Ask, Range, First, Filled, Refused, Freed, Closed, SamplingParams, Watermark, Ticket
)
"""How they travel."""


def staged_layers(cache: Cache) -> tuple[Tensor, Tensor]:
    """Keys and values of all layers, to be staged; ValueError for all but full attention."""
    kv_layout = cache.layout
    if (
        not isinstance(cache.pool, MHATokenToKVPool)
        or kv_layout.sliding_window is not None
        or cache.sparsity is not None
    ):
        raise ValueError(
            "a prefill/decode split needs full attention with heads in every layer, without "
            "sliding windows, latent or linear layers and double sparsity; use one engine for this "
            "model"
        )
    if kv_layout.dtype in FP8_DTYPES or kv_layout.dtype == FP4_DTYPE:
        raise ValueError(
            "a prefill/decode split needs kv_cache_dtype='auto'; fp8 scales and FP4 codes are not "
            "staged"
        )
    return pool_layers(cache.pool)


def kv_heads(model: ModelConfig) -> int:
    """Returns the number of KV heads of the whole model."""
    # staged_layers has seen to the kind.
    heads: int = getattr(model.mixers[0], "num_kv_heads")  # noqa: B009
    return heads


def geometry(model: ModelConfig, cache: Cache, dtype: torch.dtype) -> str:
    """The model and its rows, ranks left out: equal for engines that can exchange pages."""
    widths = [(name, width) for name, (_, width) in cache.layout.rows.items()]
    return f"{kv_heads(model)} KV heads of {widths} in {dtype}, {model}"


class Line:
    """`send`, `receive` raise OSError, EOFError or `Forged`; the line is of no more use then."""

    def __init__(
        self, connection: socket.socket, key: bytes, role: str, other: str, timeout: float
    ) -> None:
        connection.settimeout(timeout)
        self._socket, self._key = connection, key
        self._places = {"send": role, "receive": other}
        self._counts = {"send": 0, "receive": 0}

    def fileno(self) -> int:
        return self._socket.fileno()

    def set_timeout(self, seconds: float) -> None:
        """Limits the wait for each message, either way."""
        self._socket.settimeout(seconds)

    def send(self, text: str) -> None:
        data = seal(self._key, self._place("send"), text)
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> str:
        (length,) = _LENGTH.unpack(_exactly(self._socket, _LENGTH.size))
        if length > _LARGEST:
            raise Forged(f"a message of {length} bytes")
        return unseal(self._key, self._place("receive"), _exactly(self._socket, length))

    def close(self) -> None:
        self._socket.close()

    def _place(self, way: str) -> str:
        self._counts[way] += 1
        return f"{self._places[way]} {self._counts[way]}"


def accept(address: Address, count: int, key: bytes, timeout: float = 600.0) -> list[Line]:
    """A decode rank's side: waits for `count` prefill ranks, which know the same secret key.
    TimeoutError tells how many came; strangers are turned away, however silent or many.
    """
    met: queue.SimpleQueue[Line] = queue.SimpleQueue()
    free = threading.Semaphore(_GREETED_AT_ONCE)
    lines = list[Line]()
    end = time.monotonic() + timeout

    def greet(connection: socket.socket) -> None:
        try:
            met.put(_greeted(connection, key))
        except (OSError, EOFError, Forged):
            connection.close()
        finally:
            free.release()

    with _listening(address, _GREETED_AT_ONCE) as listener:
        while len(lines) < count:
            if (left := end - time.monotonic()) <= 0:
                raise TimeoutError(
                    f"{len(lines)} of {count} prefill ranks came to {address} in {timeout:g} s"
                )
            listener.settimeout(min(left, 0.05))
            try:
                connection, _ = listener.accept()
            except OSError:  # nobody for now, or one that left at once
                pass
            else:
                if free.acquire(blocking=False):
                    threading.Thread(
                        target=greet, args=[connection], name="rollout-greet", daemon=True
                    ).start()
                else:
                    connection.close()
            while not met.empty() and len(lines) < count:
                lines.append(met.get())
    return lines


def dial(addresses: Sequence[Address], key: bytes, timeout: float = 60.0) -> list[Line]:
    """A prefill rank's side: a connection to every decode rank. TimeoutError names the address."""
    return [_dial(address, key, time.monotonic() + timeout) for address in addresses]


def _dial(address: Address, key: bytes, end: float) -> Line:
    while True:
        family = socket.AF_UNIX if isinstance(address, str) else socket.getaddrinfo(*address)[0][0]
        connection = socket.socket(family)
        try:
            connection.settimeout(_GREET_SECONDS)
            connection.connect(address)
            return _greeting(connection, key)
        except (OSError, EOFError) as error:
            connection.close()
            if time.monotonic() > end:
                raise TimeoutError(
                    f"no decode rank listens at {address} ({error}); start it first, with the "
                    f"same key"
                ) from error
            time.sleep(0.05)


def _greeted(connection: socket.socket, key: bytes) -> Line:
    """Greets as the side that was dialled: tells only random bytes before the other's proof."""
    connection.settimeout(_GREET_SECONDS)
    mine = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(mine)
    answer = _exactly(connection, 2 * _NONCE_BYTES)
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"dials", mine + theirs)):
        raise Forged("a stranger, or a rank with another key")
    connection.sendall(_proof(key, b"listens", mine + theirs))
    session = _proof(key, b"session", mine + theirs)
    return Line(connection, session, "listens", "dials", _GREET_SECONDS)


def _greeting(connection: socket.socket, key: bytes) -> Line:
    connection.settimeout(_GREET_SECONDS)
    theirs, mine = _exactly(connection, _NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(mine + _proof(key, b"dials", theirs + mine))
    if not hmac.compare_digest(
        _exactly(connection, _NONCE_BYTES), _proof(key, b"listens", theirs + mine)
    ):
        raise OSError("who listens there does not know the key")
    session = _proof(key, b"session", theirs + mine)
    return Line(connection, session, "dials", "listens", _GREET_SECONDS)


def _proof(key: bytes, what: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, what + nonces, "sha256")


def _exactly(connection: socket.socket, count: int) -> bytes:
    """So many bytes, all within the socket's time-out."""
    parts, patience = [], connection.gettimeout()
    end = None if patience is None else time.monotonic() + patience
    try:
        while count:
            if end is not None:
                connection.settimeout(max(1e-3, end - time.monotonic()))
            if not (part := connection.recv(min(count, 1 << 20))):
                raise EOFError("the other end has closed")
            parts.append(part)
            count -= len(part)
    finally:
        connection.settimeout(patience)
    return b"".join(parts)


@contextmanager
def _listening(address: Address, backlog: int) -> Iterator[socket.socket]:
    if isinstance(address, str):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            try:
                listener.listen(backlog)
                yield listener
            finally:
                os.unlink(address)
        return
    family = socket.getaddrinfo(*address)[0][0]
    with socket.create_server(address, family=family, backlog=backlog) as listener:
        yield listener


class Peers:
    """The ranks of the other engine, by their rank. `lost`: why the first of them is given up, None
    while all live;
    `loss`: its rank, or how many there are. From a loss on nothing is sent or received.
    """

    def __init__(
        self, name: str, connections: Sequence[Line], hello: Hello, timeout: float
    ) -> None:
        """Greets all as "prefill" or "decode". ValueError where the engines do not fit together."""
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
