"""Relays what ranks send to those who speak for targets that they cannot map, message by message.

All ranks know the one order of the rounds: in round (step, number) each rank sends message `number`
of those that it has for the rank `step` places further, and takes one from the rank `step` places
before. So a rank has at most one message under way each way, and two buffers for each: the next is
packed, and the last one unpacked, while one travels.

    pack n+1 | wait for n | post n+1 | unpack n

A rank whose packing or unpacking fails makes the exchanges all the same, with bytes that nobody
will serve, and raises afterwards: so the others need not wait for a time-out. What a rank that dies
means is said of `Wire`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from memsaver.ops.layout import row_major
from rollout.protocols import UpdatableEngine
from rollout.types import PackedBox
from trainer_bridge.sync.cast_copy import CastCopy, placements
from trainer_bridge.sync.connection import Connection, Posted
from trainer_bridge.sync.plan import Copy, SyncPlan
from trainer_bridge.sync.shards import torch_dtype
from trainer_bridge.sync.writer import DerivedCopies, LowRank, Written

MESSAGE_BYTES = 64 << 20
_ALIGNMENT = 16  # of a box in a message: what the kernels like


class Packed(NamedTuple):
    """A copy, or a part of one; its elements lie row-major from byte `at` of the message."""

    copy: Copy
    at: int

    @property
    def packing(self) -> Copy:
        """The copy from the shard into the message."""
        return replace(self.copy, offset=self.at, strides=row_major(self.copy.shape))

    @property
    def unpacking(self) -> Copy:
        """The copy from a tensor of its shape into the target."""
        return replace(self.copy, start=(0,) * len(self.copy.shape))

    @property
    def box(self) -> PackedBox:
        """Returns what a handle takes."""
        copy = self.copy
        return PackedBox(
            at=self.at,
            offset=copy.offset,
            shape=copy.shape,
            strides=copy.strides,
            itemsize=copy.itemsize,
        )


class Message(NamedTuple):
    """A message from `rank`, for `target`. nbytes: with the gaps between boxes."""

    rank: int
    target: int
    pieces: tuple[Packed, ...]
    nbytes: int


def messages(copies: Iterable[Copy], limit: int) -> list[Message]:
    """Packs `copies` in order: each message of one rank and target, at most `limit` bytes long."""
    made: list[Message] = []
    pieces: list[Packed] = []
    end = 0
    for copy in copies:
        for part in parts(copy, limit):
            at = -(-end // _ALIGNMENT) * _ALIGNMENT
            last = pieces[-1].copy if pieces else part
            if pieces and (
                (last.rank, last.target) != (part.rank, part.target) or at + part.nbytes > limit
            ):
                made.append(Message(last.rank, last.target, tuple(pieces), end))
                pieces, at = [], 0
            pieces.append(Packed(part, at))
            end = at + part.nbytes
    if pieces:
        made.append(Message(pieces[-1].copy.rank, pieces[-1].copy.target, tuple(pieces), end))
    return made


def parts(copy: Copy, limit: int) -> Iterator[Copy]:
    """Yields boxes of at most `limit` bytes: rows together, or parts of a longer row."""
    if copy.nbytes <= limit:
        yield copy
        return
    if limit < copy.itemsize:
        raise ValueError(f"a message of {limit} bytes holds no element of {copy.dtype}; allow more")
    dim = next(dim for dim, size in enumerate(copy.shape) if size > 1)
    each = max(1, limit // (copy.nbytes // copy.shape[dim]))
    for first in range(0, copy.shape[dim], each):
        yield from parts(copy.part(dim, first, min(each, copy.shape[dim] - first)), limit)


class Buffer:
    """stage: uint8 where the kernels are. wire: where messages travel, the same or pinned."""

    def __init__(self, nbytes: int, device: torch.device, wire: torch.device) -> None:
        self.stage = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.wire = self.stage
        if wire.type != device.type:
            self.wire = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def send(self, nbytes: int) -> None:
        """Sends what is staged to the wire; waits, where that is another device."""
        if self.wire is not self.stage:
            self.wire[:nbytes].copy_(self.stage[:nbytes])

    def arrived(self, nbytes: int) -> None:
        if self.wire is not self.stage:
            self.stage[:nbytes].copy_(self.wire[:nbytes])


class Packing:
    """Casts the pieces of one message from the shards into any stage."""

    def __init__(
        self, message: Message, sources: Mapping[str, Tensor], derived: Collection[str]
    ) -> None:
        self.message = message
        self._sources = sources
        copies = [piece.packing for piece in message.pieces]
        plain = [copy for copy in copies if copy.name not in derived]
        self._derived = [copy for copy in copies if copy.name in derived]
        places = (placements(copy, sources[copy.name]) for copy in plain)
        self._cast = CastCopy(list(chain.from_iterable(places)))
        self._extra = 0
        self.nbytes = sum(copy.nbytes for copy in copies)  # without the gaps

    def start(self, stage: Tensor, factors: Mapping[str, LowRank]) -> None:
        """Packs on the current stream; derived parameters wait, and make their tables anew."""
        self._cast.start(stage)
        self._extra = 0
        if self._derived:
            made = DerivedCopies(self._derived, self._sources)
            made.start({self.message.target: stage}, factors)
            self._extra = made.digests()[self.message.target]

    def digest(self) -> int:
        """Returns the digest of what the last start packed; waits."""
        return self._cast.result() + self._extra


def unpacking(message: Message, stage: Tensor) -> CastCopy:
    """Makes what copies the pieces of one message from one stage into a target's pages."""
    places = []
    for piece in message.pieces:
        copy, packed = piece.unpacking, stage[piece.at : piece.at + piece.copy.nbytes]
        places += placements(copy, packed.view(torch_dtype(copy.dtype)).view(copy.shape))
    return CastCopy(places)


class _Sent(NamedTuple):
    packing: Packing
    to: int
    buffer: Buffer


class _Taken(NamedTuple):
    """unpack: called with the pages of all targets, once the message is in its buffer."""

    message: Message
    source: int
    buffer: Buffer
    unpack: Callable[[Mapping[int, Tensor]], None]


class _Exchange(NamedTuple):
    """One round of this rank."""

    sent: _Sent | None
    taken: _Taken | None


class _Steps:
    """Steps that are run until one fails; the rest is left out then, and `end` raises."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def run(self, step: Callable[[], None]) -> None:
        if self._error is None:
            try:
                step()
            except Exception as error:
                self._error = error

    def end(self) -> None:
        if self._error is not None:
            raise self._error


class Relay:
    """One rank's part of all that is not written into mapped pages. Tables are made once, as in
    `RankCopies`.

    All ranks make it, and run it, together. Memory: for each way that is used, two buffers as long
    as the longest message, at most `message_bytes`, and as much pinned where messages travel
    through the host.
    """

    def __init__(
        self,
        plan: SyncPlan,
        connection: Connection,
        sources: Mapping[str, Tensor],
        handles: Mapping[int, UpdatableEngine],
        *,
        rank: int,
        derived: Collection[str],
        message_bytes: int = MESSAGE_BYTES,
    ) -> None:
        """handles: on the targets that this rank speaks for. derived: as in `RankCopies`."""
        routes, wire, device = connection.routes, connection.wire, connection.device
        self._plan, self._routes, self._rank = plan, routes, rank
        self._limit = message_bytes
        self._handles, self._wire = handles, wire
        self._packings = [Packing(message, sources, derived) for message in self._messages(rank)]
        senders = {pair[0] for pair in routes.relayed if routes.speakers[pair[1]] == rank}
        taken: dict[int, list[Message]] = {}
        for sender in sorted(senders):
            taken[sender] = [m for m in self._messages(sender) if self._to(m) == rank]
        travels = torch.device("cpu") if wire is None else wire.device
        self._out = _buffers([packing.message for packing in self._packings], device, travels)
        self._into = _buffers(list(chain.from_iterable(taken.values())), device, travels)
        self._exchanges = self._make_exchanges(taken)

    @property
    def targets(self) -> list[int]:
        """Returns the targets whose pages this rank has to map, to unpack into them."""
        taken = [each.taken.message.target for each in self._exchanges if each.taken is not None]
        return sorted(set(taken) - self._routes.handled)

    def run(
        self, pages: Mapping[int, Tensor], factors: Mapping[str, LowRank]
    ) -> dict[int, Written]:
        """Makes all exchanges and waits; returns what this rank sent, by target; another wrote it.

        Raises what went wrong here after the exchanges, or a `SyncError` for one that broke off.
        """
        steps = _Steps()
        self._pack(0, factors, steps)
        under_way = self._post(0)
        for number, exchange in enumerate(self._exchanges):
            self._pack(number + 1, factors, steps)
            if under_way is not None:
                under_way.wait()
            under_way = self._post(number + 1)
            if exchange.taken is not None:
                steps.run(lambda taken=exchange.taken: taken.unpack(pages))  # type: ignore[misc]
        for packing in self._packings:
            if self._to(packing.message) == self._rank:
                steps.run(lambda packing=packing: self._pass_on(packing, factors))  # type: ignore[misc]
        for buffer in self._into:
            if buffer.stage.is_cuda:  # the leases end next
                torch.cuda.current_stream(buffer.stage.device).synchronize()
        steps.end()
        return self._written()

    def _messages(self, sender: int) -> list[Message]:
        copies = self._plan.copies(sender)
        return messages(
            [copy for copy in copies if (sender, copy.target) in self._routes.indirect], self._limit
        )

    def _to(self, message: Message) -> int:
        return self._routes.speakers[message.target]

    def _make_exchanges(self, taken: Mapping[int, Sequence[Message]]) -> list[_Exchange]:
        exchanges: list[_Exchange] = []
        world = len(self._plan.places)
        for step in range(1, world):
            to, source = (self._rank + step) % world, (self._rank - step) % world
            sends = [packing for packing in self._packings if self._to(packing.message) == to]
            takes = taken.get(source, [])
            for number in range(max(len(sends), len(takes))):
                sent = received = None
                if number < len(sends):
                    sent = _Sent(sends[number], to, self._out[len(exchanges) % 2])
                if number < len(takes):
                    into, message = self._into[len(exchanges) % 2], takes[number]
                    received = _Taken(message, source, into, self._unpack(message, into))
                exchanges.append(_Exchange(sent, received))
        return exchanges

    def _unpack(self, message: Message, buffer: Buffer) -> Callable[[Mapping[int, Tensor]], None]:
        """Returns what is done with a message that has arrived in `buffer`."""
        if message.target in self._routes.handled:
            boxes, handle = [piece.box for piece in message.pieces], self._handles[message.target]
            return lambda pages: handle.write_update(boxes, buffer.wire[: message.nbytes])
        table = unpacking(message, buffer.stage)

        def unpack(pages: Mapping[int, Tensor]) -> None:
            buffer.arrived(message.nbytes)
            table.start(pages[message.target])

        return unpack

    def _pack(self, number: int, factors: Mapping[str, LowRank], steps: _Steps) -> None:
        if number < len(self._exchanges) and (sent := self._exchanges[number].sent) is not None:
            steps.run(lambda: _staged(sent.packing, sent.buffer, factors))

    def _post(self, number: int) -> Posted | None:
        if number >= len(self._exchanges):
            return None
        assert self._wire is not None
        sent, taken = self._exchanges[number]
        out = into = None
        if sent is not None:
            out = sent.buffer.wire[: sent.packing.message.nbytes], sent.to
        if taken is not None:
            into = taken.buffer.wire[: taken.message.nbytes], taken.source
        return self._wire.post(out, into)

    def _pass_on(self, packing: Packing, factors: Mapping[str, LowRank]) -> None:
        """Passes this rank's own bytes on by the handle."""
        message, buffer = packing.message, self._out[0]
        _staged(packing, buffer, factors)
        boxes = [piece.box for piece in message.pieces]
        self._handles[message.target].write_update(boxes, buffer.wire[: message.nbytes])

    def _written(self) -> dict[int, Written]:
        written: dict[int, Written] = {}
        for packing in self._packings:
            target, nbytes, digest = packing.message.target, packing.nbytes, packing.digest()
            if (before := written.get(target)) is not None:
                nbytes, digest = nbytes + before.nbytes, digest + before.digest
            away = self._plan.targets[target].place != self._plan.places[self._rank]
            written[target] = Written(
                nbytes=nbytes, link_bytes=nbytes if away else 0, digest=digest
            )
        return written


def _staged(packing: Packing, buffer: Buffer, factors: Mapping[str, LowRank]) -> None:
    packing.start(buffer.stage, factors)
    buffer.send(packing.message.nbytes)


def _buffers(
    wanted: Sequence[Message], device: torch.device, travels: torch.device
) -> list[Buffer]:
    """Makes two buffers that hold any of the messages; none for none."""
    longest = max((message.nbytes for message in wanted), default=0)
    return [Buffer(longest, device, travels) for _ in range(2 if wanted else 0)]
