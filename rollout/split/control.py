"""Control messages between the ranks of two engines, and the socket that carries them.

Messages are plain data over one zmq ROUTER socket per rank: decode ranks listen, prefill ranks
dial. CURVE encryption, with keys that all ranks derive from one secret, keeps other processes out.
A `Transport` moves the bulk bytes.
"""

import hashlib
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

from torch import Tensor

from kvcache.config import FP4_DTYPE, FP8_DTYPES
from kvcache.ops import staged_bytes
from kvcache.pools import MHATokenToKVPool
from kvcache.staging import Watermark, pool_layers
from memsaver import Ticket
from memsaver.system.plain import Plain
from rollout.model.decoder import ModelConfig
from rollout.parallel import TensorParallel
from rollout.requests import SamplingParams
from rollout.scheduling.kv_cache import Cache

try:
    import zmq
    from zmq.utils import z85
except ModuleNotFoundError as error:
    message = f"{error}; run: pip install 'memsaver[split]'"
    raise ModuleNotFoundError(message, name=error.name) from error

_PROBE_SECONDS = 0.25
_OPTIONS: dict[int, int | bytes] = {
    zmq.IPV6: 1,
    zmq.PROBE_ROUTER: 1,  # an empty message announces each end to its peer
    zmq.ROUTER_MANDATORY: 1,  # sending to a rank that is gone is an error
    zmq.IMMEDIATE: 1,  # extends that error to the end that dials
    zmq.LINGER: 1000,
    zmq.HANDSHAKE_IVL: 5000,  # a rank with the right key needs milliseconds
    zmq.HEARTBEAT_IVL: 1000,
    zmq.MAXMSGSIZE: 1 << 28,
}


class Hello(NamedTuple):
    """Greeting of a rank, with the properties on which both engines must agree."""

    tp_size: int
    tp_rank: int
    geometry: str  # model and pool rows as text; must be equal on both sides
    ring_bytes: int = 0  # size of a decode rank's ring; 0 in the greeting of a prefill rank
    ticket: Any = None  # transport-specific handle with which a prefill rank opens the ring


class Range(NamedTuple):
    """Ring bytes [offset, end) of a decode rank for tokens [first, first + tokens) of a prompt."""

    first: int
    tokens: int
    id: int  # `id` and `round` are those of the `StagingAllocator`
    offset: int
    end: int
    round: int


class Ask(NamedTuple):
    """Request of a decode rank: compute a prompt into ring ranges and draw the first tokens."""

    number: int  # counted from 0
    prompt: list[int]  # token ids
    params: SamplingParams
    seed: int
    indices: tuple[int, ...]  # samples that share the prompt; index and seed determine the draws
    ranges: tuple[Range, ...]


class First(NamedTuple):
    """First token and log-probability of each sample, and the weight version behind them."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int


class Filled(NamedTuple):
    """Announcement of a prefill rank: its part of range `nth` is written or being sent."""

    number: int
    nth: int
    first: First


class Refused(NamedTuple):
    """Answer of a prefill rank that will not compute a prompt, with the reason."""

    number: int
    reason: str


class Closed(NamedTuple):
    """Last message of a decode rank: it sends no more requests."""


Message = Hello | Ask | Filled | Refused | Watermark | Closed
"""All messages. A decode rank announces by a `Watermark` which ranges of its ring may be filled."""
_PLAIN = Plain(Hello, Ask, Range, First, Filled, Refused, Watermark, Closed, SamplingParams, Ticket)


def encode(message: Message) -> bytes:
    """Return the bytes of a message, which `decode` reads."""
    return _PLAIN.text(message).encode()


def decode(data: bytes) -> Message:
    """Return the message in `data`.

    Raises:
        ValueError: The bytes are not a message.
    """
    message: Message = _PLAIN.value(data.decode())
    return message


class StagedCache(NamedTuple):
    """The KV cache of one rank, all layers, as the source or target of staged copies."""

    k: Tensor  # [layers, slots, heads of the rank, D]
    v: Tensor  # [layers, slots, heads of the rank, Dv]
    heads: int  # KV heads of the whole model, over all ranks
    geometry: str = ""  # model and pool rows as text
    rank: int = 0
    size: int = 1  # ranks of the engine

    @classmethod
    def of(cls, model: ModelConfig, cache: Cache, ranks: TensorParallel) -> Self:
        """Describe the cache of an engine's rank.

        Raises:
            ValueError: The cache is not plain full attention.
        """
        layout = cache.layout
        if (
            not isinstance(cache.pool, MHATokenToKVPool)
            or layout.sliding_window is not None
            or cache.sparsity is not None
            or layout.dtype in (*FP8_DTYPES, FP4_DTYPE)
        ):
            raise ValueError(
                "a prefill/decode split needs full attention with heads in every layer, without "
                "sliding windows, latent or linear layers and double sparsity, and with "
                "kv_cache_dtype='auto'; use one engine for this model"
            )
        k, v = pool_layers(cache.pool)
        heads: int = getattr(model.mixers[0], "num_kv_heads")  # noqa: B009
        widths = [(name, width) for name, (_, width) in layout.rows.items()]
        geometry = f"{heads} KV heads of {widths} in {k.dtype}, {model}"
        if ranks.exact:  # the number of partial sums decides the bits
            geometry += f", exact with tensor_parallel_size={ranks.size}"
        return cls(k, v, heads, geometry, ranks.rank, ranks.size)

    def nbytes(self, tokens: int, heads: int) -> int:
        """Return the bytes of `heads` KV heads of `tokens` tokens, over all layers."""
        return staged_bytes(self.k, self.v, tokens, heads)

    def greeting(self, **ring: Any) -> Hello:
        """Return the greeting of this rank; a decode rank passes `ring_bytes` and `ticket`."""
        return Hello(tp_size=self.size, tp_rank=self.rank, geometry=self.geometry, **ring)


def curve_keys(key: bytes) -> tuple[bytes, bytes]:
    """Return the public and the secret CURVE key of every rank that knows `key`.

    The public key is never sent and cannot be computed without `key`, so a process without it
    cannot even begin a handshake.
    """
    secret = z85.encode(hashlib.sha256(b"rollout.split " + key).digest())
    return zmq.curve_public(secret), secret


def _destroy(socket: zmq.Socket[bytes]) -> None:
    socket.context.destroy()


class RankPeers:
    """The ranks of the peer engine, indexed by rank. Owns the socket.

    After the first loss of a rank, nothing is sent or received. `lost` describes which rank was
    lost first and why, or is None while all ranks are alive. `loss` is that rank, or the number of
    ranks while all are alive.
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
        """Exchange greetings with all ranks of the peer engine, "prefill" or "decode".

        `listen` is the endpoint of this rank and the number of ranks that dial it; `dial` are the
        endpoints of the ranks to dial, which may begin to listen later. All ranks of both engines
        share the secret `key`. A rank is lost if it accepts no message for `timeout` seconds, or
        its machine does not answer heartbeats for as long.

        Raises:
            TimeoutError: Not all ranks sent a greeting within `connect_timeout` seconds.
            ValueError: The ranks or models of the engines do not match.
        """
        self.name, self.timeout = name, timeout
        self.lost: str | None = None
        self.loss = len(dial) if listen is None else listen[1]
        self._listens = listen is not None
        self._socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.ROUTER)
        # A context that becomes garbage together with its socket waits forever for the socket.
        self._end = weakref.finalize(self, _destroy, self._socket)
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
        self._open = set(range(len(met)))  # ranks that have not sent `Closed`

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

        The listening end greets first. The dialing end greets once it has heard from every rank,
        so no rank receives a request while it still waits for greetings.
        """
        met: dict[bytes, Hello] = {}
        greeted = set[bytes]()
        end = time.monotonic() + seconds
        while len(met) < count:
            if not self._socket.poll(max(0, int((end - time.monotonic()) * 1000))):
                raise TimeoutError(
                    f"met {len(met)} of {count} {self.name} ranks in {seconds:g} s; start all, "
                    "with the same key and the addresses of the decode ranks"
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
        met = sorted((hello.tp_rank, hello.tp_size) for hello in hellos)
        if met != [(rank, len(met)) for rank in range(len(met))]:
            ranks = ", ".join(f"{rank} of {size}" for rank, size in met)
            raise ValueError(f"connect to every {self.name} rank once; these are {ranks}")
        for hello in hellos:
            if hello.geometry != mine.geometry:
                raise ValueError(
                    f"the {self.name} engine has {hello.geometry}, this one {mine.geometry}; "
                    f"they must be equal"
                )

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def closed(self) -> int:
        """Count the ranks that have sent `Closed`."""
        return len(self) - len(self._open)

    def send(self, rank: int, message: Message) -> None:
        """Send a message; declare the rank lost if it is gone or does not accept it in time."""
        if self.lost is None and (error := self._try_send(self._peers[rank], encode(message))):
            self.lose(rank, f"is gone ({error})")

    def send_all(self, message: Message) -> None:
        """Send a message to every rank."""
        for rank in range(len(self)):
            self.send(rank, message)

    def receive(self, seconds: float) -> Iterator[tuple[int, Message]]:
        """Yield (rank, message) for queued messages, waiting up to `seconds` for the first."""
        gone = self._probe()  # first, so that the last messages of a dead rank are still read
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
                self._open.discard(rank)  # a rank that ends after `Closed` is not lost
            else:
                yield rank, message
        for rank in gone & self._open:
            self.lose(rank, "is gone")

    def _probe(self) -> set[int]:
        """Return the ranks whose connection has ended, as an occasional empty message shows."""
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
        """Declare a rank lost; only the first call has an effect."""
        if self.lost is None:
            self.lost, self.loss = f"{self.name} rank {rank} {why}", rank

    def end(self) -> None:
        """Send `Closed`, wait up to the timeout for the peer engine to disconnect, and close."""
        self.send_all(Closed())
        end = time.monotonic() + self.timeout
        while self.lost is None and time.monotonic() < end:
            for _ in self.receive(_PROBE_SECONDS):
                pass
        self.close()

    def close(self) -> None:
        """Close the socket once queued messages have left, or after one second."""
        self._end()
