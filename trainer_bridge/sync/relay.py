"""Bring bytes to targets whose pages a rank cannot map: message by message to the rank that speaks
for the target, which writes them into its pages, or passes them on by its handle.

All ranks know the one order of the rounds: in round (step, number) each rank sends message `number`
of those that it has for the rank `step` places further, and takes one from the rank `step` places
before. So a rank has at most one message under way each way, and two buffers for each: the next is
packed, and the last one unpacked, while one travels.

    pack n+1 | wait for n | post n+1 | unpack n

A rank whose packing or unpacking fails makes the exchanges all the same, with bytes that nobody
will serve, and raises afterwards: so the others need not wait for a time-out. What a rank that dies
means is said of `Wire`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, cycle, pairwise, zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from memsaver.ops.layout import round_up, row_major
from memsaver.ops.rows import RowCopies
from memsaver.system.devices import device_key
from rollout.protocols import UpdatableEngine
from rollout.weights import PackedBox
from trainer_bridge.errors import SyncError
from trainer_bridge.sync.agree import Agreement, backend_of
from trainer_bridge.sync.plan import Copy, SyncPlan
from trainer_bridge.sync.writer import LowRank, Writer, copy_rows

MESSAGE_BYTES = 64 << 20
_ALIGNMENT = 16  # of a box in a message: what the kernels like
_log = logging.getLogger("memsaver")

Pair = tuple[int, int]
"""A rank, and a target that it has bytes for."""


# ---------------------------------------------------------------- which way bytes go


@dataclass(frozen=True, kw_only=True)
class Routes:
    """The ways of a sync's bytes: into mapped pages wherever a rank can map them, else to the rank
    that speaks for the target.

    pairs: all that have bytes to write. speakers: of each target. blocked: `obstacles` of each
    rank.
    """

    pairs: Collection[Pair]
    speakers: Sequence[int]
    blocked: Sequence[Mapping[int, str]]

    @property
    def indirect(self) -> set[Pair]:
        """Return the pairs whose bytes go to the speaker, which is perhaps itself the sender."""
        return {(rank, target) for rank, target in self.pairs if target in self.blocked[rank]}

    @property
    def relayed(self) -> set[Pair]:
        """Return the pairs whose bytes go from one rank to another."""
        return {(rank, target) for rank, target in self.indirect if rank != self.speakers[target]}

    @property
    def handled(self) -> set[int]:
        """Return the targets whose speaker passes bytes on by the handle, not into the pages."""
        return {target for target, rank in enumerate(self.speakers) if target in self.blocked[rank]}

    def warn(self) -> None:
        """Log which bytes do not go into mapped pages, and why."""
        if pairs := sorted(self.indirect):
            shown = ", ".join(f"{rank}->{target}" for rank, target in pairs[:8])
            more = f" and {len(pairs) - 8} more" if len(pairs) > 8 else ""
            rank, target = pairs[0]
            why = self.blocked[rank][target]
            _log.warning("weight sync by messages for rank->target %s%s: %s", shown, more, why)


def obstacle(place: str, target: str) -> str | None:
    """Say why this process, its device at `place`, cannot map pages at `target`; None: it can.

    Places are as of `memsaver.system.devices.place_of`; one without a host is on this one. Of a
    GPU that is hidden here (CUDA_VISIBLE_DEVICES) only mapping can tell; it is tried.
    """
    (host, _, mine), (other, _, theirs) = place.rpartition("/"), target.rpartition("/")
    if host and other and host != other:
        return f"{other} is another machine than {host}"
    if not theirs.startswith("GPU-") or theirs == mine:
        return None
    numbers = range(torch.cuda.device_count())
    gpus = {device_key(torch.device("cuda", number)): number for number in numbers}
    if mine not in gpus or theirs not in gpus:
        return None
    reaches = torch.cuda.can_device_access_peer(gpus[mine], gpus[theirs])
    return None if reaches else f"{mine} cannot reach {theirs}"


def obstacles(place: str, plan: SyncPlan) -> dict[int, str]:
    """Return the targets whose pages this rank, at `place`, cannot map, and why."""
    places = {target.place for target in plan.targets}
    found = {where: obstacle(place, where) for where in places}
    return {
        n: why for n, target in enumerate(plan.targets) if (why := found[target.place]) is not None
    }


# ---------------------------------------------------------------- between ranks


class Wire:
    """A message each way at a time. Ranks that exchange make the same exchanges in the same order.

    It is NCCL between ranks with GPUs of their own, else gloo.

    A rank that is gone: on gloo the others' `wait` raises a `SyncError`, at once or after the
    group's time-out. On NCCL nothing is raised here: the others wait on the device, and NCCL's
    watchdog ends their processes after the group's time-out (unless TORCH_NCCL_ASYNC_ERROR_HANDLING
    says otherwise), as with any collective of the training itself. After an exchange that broke off
    the ranks may be out of step: start them anew.
    """

    def __init__(
        self, agreement: Agreement, routes: Routes, places: Sequence[str], device: torch.device
    ) -> None:
        """All ranks of the group make it together: NCCL's communicator is made here, because a
        first exchange among some of the ranks would hang.

        Args:
            agreement: Of the ranks.
            routes: Of all ranks.
            places: Of each rank's device.
            device: Of this rank's shards.
        """
        group, cpu = agreement.group, agreement.cpu
        assert group is not None and cpu is not None
        ranks = {rank for rank, _ in routes.relayed}
        ranks |= {routes.speakers[target] for _, target in routes.relayed}
        theirs = {places[rank] for rank in ranks}
        apart = len(theirs) == len(ranks) and all("/GPU-" in place for place in theirs)
        self.on_gpu = apart and not routes.handled and backend_of(group, "cuda") == "nccl"
        self.group = group if self.on_gpu else cpu
        self.device = device if self.on_gpu else torch.device("cpu")
        if self.on_gpu:
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    def post(
        self, sent: tuple[Tensor, int] | None, taken: tuple[Tensor, int] | None
    ) -> Callable[[], None]:
        """Begin to send a tensor to a rank, and to fill one from another: uint8, contiguous.

        Returns:
            What waits until both are through: the host on gloo, the current stream on NCCL.
        """
        both = [(dist.isend, sent), (dist.irecv, taken)]
        operations = [
            dist.P2POp(way, end[0], group=self.group, group_peer=end[1])
            for way, end in both
            if end is not None
        ]
        works: list[dist.Work] = []

        def wait() -> None:
            for work in works:
                work.wait()

        peers = ", ".join(str(end[1]) for end in (sent, taken) if end is not None)
        _exchanged(lambda: works.extend(dist.batch_isend_irecv(operations)), peers)
        return lambda: _exchanged(wait, peers)


def _exchanged(step: Callable[[], None], peers: str) -> None:
    try:
        step()
    except RuntimeError as error:
        raise SyncError("write", f"the exchange with ranks {peers} broke off ({error})") from error


class Message(NamedTuple):
    """A message of rank `rank` for `target`: copies, each with the byte of the message from
    which on its elements lie, row-major. nbytes: with the gaps between them.
    """

    rank: int
    target: int
    copies: list[tuple[Copy, int]]
    nbytes: int

    def boxes(self) -> list[PackedBox]:
        """Return what a handle takes."""
        return [
            PackedBox(
                at=at, offset=copy.offset, shape=copy.shape, strides=copy.strides, dtype=copy.dtype
            )
            for copy, at in self.copies
        ]

    def packing(
        self, sources: Mapping[str, Tensor], derived: Collection[str], scratch: Tensor
    ) -> Writer:
        """Make what casts the message from the shards into a stage; see `Writer`."""
        packed = (replace(c, offset=at, strides=row_major(c.shape)) for c, at in self.copies)
        return Writer(packed, sources, derived, scratch)

    def unpacking(self, stage: Tensor) -> RowCopies:
        """Make what copies the message from a stage into a target's pages."""
        rows = []
        for copy, at in self.copies:
            whole = replace(copy, start=(0,) * len(copy.shape))
            packed = stage[at : at + copy.nbytes].view(copy.torch_dtype).view(copy.shape)
            rows.append(copy_rows(whole, packed))
        return RowCopies(rows, stage.device)


def messages(copies: Iterable[Copy], limit: int) -> list[Message]:
    """Pack `copies` in order: each message of one rank and target, at most `limit` bytes long."""
    made: list[Message] = []
    for copy in copies:
        for part in parts(copy, limit):
            last = made[-1] if made else None
            at = round_up(last.nbytes, _ALIGNMENT) if last is not None else 0
            ends = (part.rank, part.target)
            if last is None or (last.rank, last.target) != ends or at + part.nbytes > limit:
                made.append(Message(*ends, [(part, 0)], part.nbytes))
            else:
                last.copies.append((part, at))
                made[-1] = last._replace(nbytes=at + part.nbytes)
    return made


def parts(copy: Copy, limit: int) -> Iterator[Copy]:
    """Yield boxes of at most `limit` bytes: rows together, or parts of a longer row."""
    if copy.nbytes <= limit:
        yield copy
        return
    assert limit >= copy.torch_dtype.itemsize
    dim = next(dim for dim, size in enumerate(copy.shape) if size > 1)
    each = max(1, limit // (copy.nbytes // copy.shape[dim]))
    for first in range(0, copy.shape[dim], each):
        yield from parts(copy.part(dim, first, min(each, copy.shape[dim] - first)), limit)


# ---------------------------------------------------------------- one rank's part


class _Buffer:
    """stage: uint8 where the kernels are. wire: where messages travel, the same or pinned."""

    def __init__(self, nbytes: int, device: torch.device, wire: torch.device) -> None:
        self.stage = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.wire = self.stage
        if wire.type != device.type:
            self.wire = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def pack(self, outgoing: _Outgoing, factors: Mapping[str, LowRank]) -> None:
        """Bring a message to the wire; waits, where that is another device."""
        message, packing = outgoing
        packing.start({message.target: self.stage}, factors)
        self._copy(self.wire, self.stage, message.nbytes)

    def arrived(self, nbytes: int) -> None:
        self._copy(self.stage, self.wire, nbytes)

    def _copy(self, to: Tensor, source: Tensor, nbytes: int) -> None:
        if to is not source:
            to[:nbytes].copy_(source[:nbytes])


class _Outgoing(NamedTuple):
    """A message of this rank, and what packs it."""

    message: Message
    packing: Writer


class _Exchange(NamedTuple):
    """One round of this rank. post: begins to send and to take, and returns what waits for both. A
    message to itself stays where it was packed, and is passed on by the handle.
    """

    pack: Callable[[Mapping[str, LowRank]], None]
    post: Callable[[], Callable[[], None]]
    unpack: Callable[[Mapping[int, Tensor]], None]


def _nothing(*_: object) -> None:
    """Do nothing in a part of an exchange."""


_IDLE = _Exchange(_nothing, lambda: _nothing, _nothing)


class Relay:
    """One rank's part of all that is not written into mapped pages. Tables are made once, as in
    `Writer`.

    All ranks make it, and run it, together. Memory: for each way that is used, two buffers as long
    as the longest message, at most `MESSAGE_BYTES`, and as much pinned where messages travel
    through the host.
    """

    def __init__(
        self,
        plan: SyncPlan,
        routes: Routes,
        wire: Wire | None,
        sources: Mapping[str, Tensor],
        handles: Mapping[int, UpdatableEngine],
        *,
        rank: int,
        derived: Collection[str],
        scratch: Tensor,
    ) -> None:
        """Make the tables.

        Args:
            plan: Of all ranks.
            routes: Of all ranks.
            wire: None where nothing goes from one rank to another.
            sources: This rank's tensors, by name.
            handles: On the targets that this rank speaks for.
            rank: This one.
            derived: As in `Writer`.
            scratch: As in `Writer`, on the device of the sources.
        """
        self._plan, self._routes, self._rank = plan, routes, rank
        self._handles, self._wire = handles, wire
        self._sends = [
            _Outgoing(message, message.packing(sources, derived, scratch))
            for message in self._messages(rank)
        ]
        senders = {pair[0] for pair in routes.relayed if routes.speakers[pair[1]] == rank}
        taken = {sender: self._messages(sender, rank) for sender in senders}
        device = scratch.device
        travels = torch.device("cpu") if wire is None else wire.device
        sends = [message.nbytes for message, _ in self._sends]
        self._out = [_Buffer(max(sends, default=0), device, travels) for _ in range(2)]
        takes = [message.nbytes for message in chain.from_iterable(taken.values())]
        self._into = [_Buffer(max(takes, default=0), device, travels) for _ in range(2)]
        # Whose pages this rank has to map, to unpack into them.
        self.targets = {each.target for each in chain.from_iterable(taken.values())}
        self.targets -= routes.handled
        self._exchanges = [*self._make_exchanges(taken), _IDLE]
        self._error: Exception | None = None

    def run(self, pages: Mapping[int, Tensor], factors: Mapping[str, LowRank]) -> dict[int, int]:
        """Make all exchanges and wait.

        Returns:
            The digests of what this rank sent, by target; another wrote it.

        Raises:
            Exception: What went wrong here, after the exchanges.
            SyncError: An exchange broke off.
        """
        self._error = None
        self._try(partial(self._exchanges[0].pack, factors))
        wait = self._exchanges[0].post()
        for exchange, following in pairwise(self._exchanges):
            self._try(partial(following.pack, factors))
            wait()
            wait = following.post()
            self._try(partial(exchange.unpack, pages))
        if self._into[0].stage.is_cuda:  # the leases end next
            torch.cuda.current_stream(self._into[0].stage.device).synchronize()
        if self._error is not None:
            raise self._error
        digests = Counter[int]()
        for _, packing in self._sends:
            digests.update(packing.digests())
        return digests

    def _try(self, step: Callable[[], None]) -> None:
        """Run a step; after one that failed the rest is left out."""
        if self._error is None:
            try:
                step()
            except Exception as error:
                self._error = error

    def _messages(self, sender: int, to: int | None = None) -> list[Message]:
        blocked = self._routes.blocked[sender]
        copies = (copy for copy in self._plan.copies(sender) if copy.target in blocked)
        made = messages(copies, MESSAGE_BYTES)
        return [message for message in made if to in (None, self._to(message))]

    def _to(self, message: Message) -> int:
        return self._routes.speakers[message.target]

    def _make_exchanges(self, taken: Mapping[int, Sequence[Message]]) -> Iterator[_Exchange]:
        turn, world = cycle(range(2)), len(self._plan.places)
        for step in (*range(1, world), 0):  # to itself last: nobody waits for that
            to, source = (self._rank + step) % world, (self._rank - step) % world
            sends = [sent for sent in self._sends if self._to(sent.message) == to]
            for sent, message in zip_longest(sends, taken.get(source, [])):
                yield self._exchange(sent, to, message, source, next(turn))

    def _exchange(
        self, sent: _Outgoing | None, to: int, taken: Message | None, source: int, turn: int
    ) -> _Exchange:
        """Make a round: `sent` goes to the rank `to`, and `taken` comes from the rank `source`."""
        out, into = self._out[turn], self._into[turn]
        pack = _nothing if sent is None else partial(out.pack, sent)
        if sent is not None and to == self._rank:
            return _Exchange(pack, _IDLE.post, self._unpacking(sent.message, out))
        assert self._wire is not None
        going = sent and (out.wire[: sent.message.nbytes], to)
        coming = taken and (into.wire[: taken.nbytes], source)
        unpack = _nothing if taken is None else self._unpacking(taken, into)
        return _Exchange(pack, partial(self._wire.post, going, coming), unpack)

    def _unpacking(
        self, message: Message, buffer: _Buffer
    ) -> Callable[[Mapping[int, Tensor]], None]:
        """Return what is done with a message that has arrived in `buffer`."""
        target, nbytes = message.target, message.nbytes
        if target in self._routes.handled:
            boxes, handle = message.boxes(), self._handles[target]
            # A copy: a view that is pickled takes all bytes of its buffer along.
            return lambda pages: handle.write_update(boxes, buffer.wire[:nbytes].clone())
        table = message.unpacking(buffer.stage)

        def unpack(pages: Mapping[int, Tensor]) -> None:
            buffer.arrived(nbytes)
            table.start(pages[target])

        return unpack
