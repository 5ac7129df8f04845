"""Control between the ranks of two engines: their messages, and the socket that carries them.

Messages are plain data over one zmq ROUTER socket a rank: decode ranks listen, prefill ranks dial.
CURVE, with keys that all ranks derive from one secret, keeps everybody else out. Bulk bytes go by a
`Transport`.
"""

import hashlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import zmq
from torch import Tensor
from zmq.utils import z85

from kvcache.config import FP4_DTYPE, FP8_DTYPES
from kvcache.ops import staged_bytes
from kvcache.pools import MHATokenToKVPool
from kvcache.staging import Watermark, pool_layers
from memsaver import Ticket
from memsaver.system.plain import Plain
from rollout.model.decoder import ModelConfig
from rollout.parallel import TensorParallel
from rollout.requests import SamplingParams
from rollout.serving.kv_cache import Cache

_PROBE_SECONDS = 0.25
_OPTIONS: dict[int, int | bytes] = {
    zmq.IPV6: 1,
    zmq.PROBE_ROUTER: 1,  # each end learns of the other by an empty message
    zmq.ROUTER_MANDATORY: 1,  # a message to a rank that is gone is an error
    zmq.IMMEDIATE: 1,  # also for the end that dials
    zmq.LINGER: 1000,
    zmq.HANDSHAKE_IVL: 5000,  # a rank of ours takes milliseconds
    zmq.HEARTBEAT_IVL: 1000,
    zmq.MAXMSGSIZE: 1 << 28,
}


class Hello(NamedTuple):
    """Names a rank, and what both engines must agree on.

    Attributes:
        geometry: Model and rows of the pool; equal on both sides.
        ring_bytes: Size of a decode rank's ring.
        ticket: What a prefill rank needs to open the ring.
    """

    tp_size: int
    tp_rank: int
    geometry: str
    ring_bytes: int = 0
    ticket: Any = None


class Range(NamedTuple):
    """Bytes [offset, end) of a decode rank's ring for tokens [first, first + tokens) of a prompt.

    Attributes:
        id, round: The allocator's, see `StagingAllocator`.
    """

    first: int
    tokens: int
    id: int
    offset: int
    end: int
    round: int


class Ask(NamedTuple):
    """decode -> prefill: compute this prompt into the ranges, and its samples' first tokens.

    Attributes:
        number: Rises by one with each request.
        indices: Of the samples that share the prompt; with the seed they decide what is drawn.
    """

    number: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    indices: tuple[int, ...]
    ranges: tuple[Range, ...]


class First(NamedTuple):
    """The first token of each sample, and the version of the weights that computed it."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int


class Filled(NamedTuple):
    """prefill -> decode: this writer's part of the `nth` range is written, or being sent."""

    number: int
    nth: int
    first: First


class Refused(NamedTuple):
    """prefill -> decode: the prompt will not be computed, and why."""

    number: int
    reason: str


class Closed(NamedTuple):
    """decode -> prefill: no more requests."""


Message = Hello | Ask | Filled | Refused | Watermark | Closed
"""A decode rank says by a `Watermark` which ranges of its ring may be filled."""
_PLAIN = Plain(Hello, Ask, Range, First, Filled, Refused, Watermark, Closed, SamplingParams, Ticket)


def encode(message: Message) -> bytes:
    """Return the message as it travels; `decode` reads it."""
    return _PLAIN.text(message).encode()


def decode(data: bytes) -> Message:
    """Return the message in `data`; raise a ValueError where there is none."""
    message: Message = _PLAIN.value(data.decode())
    return message


class StagedCache(NamedTuple):
    """Keys and values of all layers of one rank, which are staged.

    Attributes:
        heads: KV heads of the whole model.
        geometry: Model and rows of the pool, in words.
        rank, size: Of the engine.
    """

    k: Tensor
    v: Tensor
    heads: int
    geometry: str = ""
    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, model: ModelConfig, cache: Cache, ranks: TensorParallel) -> Self:
        """Raise a ValueError where the cache is not plain full attention."""
        kept = cache.layout
        if (
            not isinstance(cache.pool, MHATokenToKVPool)
            or kept.sliding_window is not None
            or cache.sparsity is not None
            or kept.dtype in (*FP8_DTYPES, FP4_DTYPE)
        ):
            raise ValueError(
                "a prefill/decode split needs full attention with heads in every layer, without "
                "sliding windows, latent or linear layers and double sparsity, and with "
                "kv_cache_dtype='auto'; use one engine for this model"
            )
        k, v = pool_layers(cache.pool)
        heads: int = getattr(model.mixers[0], "num_kv_heads")  # noqa: B009
        widths = [(name, width) for name, (_, width) in kept.rows.items()]
        geometry = f"{heads} KV heads of {widths} in {k.dtype}, {model}"
        return cls(k, v, heads, geometry, ranks.rank, ranks.size)

    def nbytes(self, tokens: int, heads: int) -> int:
        """Return the bytes of so many heads of so many tokens."""
        return staged_bytes(self.k, self.v, tokens, heads)

    def greeting(self, **ring: Any) -> Hello:
        """Return what the rank says of itself; ring: the fields of a decode rank's ring."""
        return Hello(tp_size=self.size, tp_rank=self.rank, geometry=self.geometry, **ring)


def curve_keys(key: bytes) -> tuple[bytes, bytes]:
    """Return the public and the secret CURVE key of every rank that knows `key`.

    The public key never travels and cannot be computed without `key`, so that only a rank of ours
    can begin a handshake.
    """
    secret = z85.encode(hashlib.sha256(b"rollout.disagg " + key).digest())
    return zmq.curve_public(secret), secret


class RankPeers:
    """The ranks of the other engine, by rank. Owns the socket.

    Attributes:
        hellos: What each rank said of itself.
        lost: Why the first rank was given up; None while all live. After a loss nothing is sent
            or received.
        loss: The rank that was given up first; the number of ranks while there is none.
    """

    def __init__(
        self,
        name: str,
        hello: Hello,
        key: bytes,
        timeout: float,
        connect_timeout: float,
        *,
        listen: tuple[str, int] | None = None,
        dial: Sequence[str] = (),
    ) -> None:
        """Exchange greetings with all ranks.

        Args:
            name: "prefill" or "decode", the other engine.
            hello: This rank's own.
            key: The secret of all ranks.
            timeout: Seconds after which a rank is lost that takes no message or whose machine is
                silent.
            connect_timeout: Seconds to wait for the greetings.
            listen: Endpoint of this rank, and the number of ranks that dial it.
            dial: Endpoints of ranks that listen, now or later.

        Raises:
            TimeoutError: Too few ranks came.
            ValueError: The engines do not fit together.
        """
        self.name, self.timeout = name, timeout
        self.lost: str | None = None
        self.loss = len(dial) if listen is None else listen[1]
        self._listens = listen is not None
        self._socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.ROUTER)
        self._probed = 0.0
        try:
            self._set_options(key)
            if listen is not None:
                self._socket.bind(listen[0])
            for address in dial:
                self._socket.connect(address)
            met = self._meet(self.loss, hello, connect_timeout)
            self._check(list(met.values()), hello)
        except BaseException:
            self.close()
            raise
        self._peers = sorted(met, key=lambda peer: met[peer].tp_rank)
        self.hellos = [met[peer] for peer in self._peers]
        self._open = set(range(len(met)))  # ranks that may still say something

    def _set_options(self, key: bytes) -> None:
        public, secret = curve_keys(key)
        milliseconds = int(self.timeout * 1000)
        options: dict[int, int | bytes] = _OPTIONS | {
            zmq.SNDTIMEO: milliseconds,
            zmq.HEARTBEAT_TIMEOUT: milliseconds,
            zmq.CURVE_PUBLICKEY: public,
            zmq.CURVE_SECRETKEY: secret,
        }
        options |= {zmq.CURVE_SERVER: 1} if self._listens else {zmq.CURVE_SERVERKEY: public}
        for option, value in options.items():
            self._socket.setsockopt(option, value)

    def _meet(self, count: int, hello: Hello, seconds: float) -> dict[bytes, Hello]:
        """Return the greetings by routing id.

        The end that listens greets first; the end that dials does so when it has heard all, so
        that no rank gets a request while it still waits for greetings.
        """
        met: dict[bytes, Hello] = {}
        greeted = set[bytes]()
        end = time.monotonic() + seconds
        while len(met) < count:
            if not self._socket.poll(max(0, int((end - time.monotonic()) * 1000))):
                raise TimeoutError(
                    f"met {len(met)} of {count} {self.name} ranks in {seconds:g} s; start all, "
                    "with the same key, and addresses that are the decode ranks'"
                )
            peer, *frames = self._socket.recv_multipart()
            if any(frames):
                message = decode(b"".join(frames))
                assert isinstance(message, Hello)
                met[peer] = message
            elif self._listens and peer not in greeted:
                greeted.add(peer)
                self._try_send(peer, encode(hello))
        for peer in met.keys() - greeted:
            self._try_send(peer, encode(hello))
        return met

    def _check(self, hellos: Sequence[Hello], mine: Hello) -> None:
        met = sorted((each.tp_rank, each.tp_size) for each in hellos)
        if met != [(rank, len(met)) for rank in range(len(met))]:
            ranks = ", ".join(f"{rank} of {size}" for rank, size in met)
            raise ValueError(f"connect to every {self.name} rank once; these are {ranks}")
        for each in hellos:
            if each.geometry != mine.geometry:
                raise ValueError(
                    f"the {self.name} engine has {each.geometry}, this one {mine.geometry}; "
                    f"they must be equal"
                )

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def closed(self) -> int:
        """Count the ranks that have said `Closed`."""
        return len(self) - len(self._open)

    def send(self, rank: int, message: Message) -> None:
        """Send a message; give the rank up where it is gone or takes none for the time-out."""
        if self.lost is None and (error := self._try_send(self._peers[rank], encode(message))):
            self.lose(rank, f"is gone ({error})")

    def send_all(self, message: Message) -> None:
        """Send a message to every rank."""
        for rank in range(len(self)):
            self.send(rank, message)

    def receive(self, seconds: float) -> Iterator[tuple[int, Message]]:
        """Yield the messages that have come, by rank; wait for the first for up to `seconds`."""
        gone = self._probe()  # before what they said last is read
        milliseconds = int(seconds * 1000)
        while self.lost is None and self._open and self._socket.poll(milliseconds):
            milliseconds = 0
            peer, *frames = self._socket.recv_multipart()
            if peer not in self._peers or not any(frames):
                continue
            rank = self._peers.index(peer)
            try:
                message = decode(b"".join(frames))
            except ValueError as error:
                self.lose(rank, f"is gone ({error})")
                return
            if isinstance(message, Closed):
                self._open.discard(rank)  # its end is no loss
            else:
                yield rank, message
        for rank in gone & self._open:
            self.lose(rank, "is gone")

    def _probe(self) -> set[int]:
        """Return the ranks whose connection has ended, by an empty message now and then."""
        if time.monotonic() - self._probed < _PROBE_SECONDS:
            return set()
        self._probed = time.monotonic()
        errors = {rank: self._try_send(self._peers[rank], b"", zmq.NOBLOCK) for rank in self._open}
        return {rank for rank, error in errors.items() if error and error.errno == zmq.EHOSTUNREACH}

    def _try_send(self, peer: bytes, data: bytes, flags: int = 0) -> zmq.ZMQError | None:
        try:
            self._socket.send_multipart([peer, data], flags)
        except zmq.ZMQError as error:
            return error
        return None

    def lose(self, rank: int, why: str) -> None:
        """Give a rank up; the first reason counts."""
        if self.lost is None:
            self.lost, self.loss = f"{self.name} rank {rank} {why}", rank

    def end(self) -> None:
        """Say that no more comes, wait until the other engine has gone, and close."""
        self.send_all(Closed())
        end = time.monotonic() + self.timeout
        while self.lost is None and time.monotonic() < end:
            for _ in self.receive(_PROBE_SECONDS):
                pass
        self.close()

    def close(self) -> None:
        """Close the socket, once what was sent has left, or a second has passed."""
        self._socket.context.destroy()
