"""Transfer of bytes to targets whose pages a rank cannot map.

The bytes go in messages to the rank that owns the target. It writes them into the target's pages,
or passes them on through the target's handle. Replicas on one machine get the same message once:
their owners take turns to receive it, and the receiver writes it into the pages of all of them.

All ranks know the order of the rounds. In round (step, n) each rank sends its n-th message for the
rank `step` places after it, and receives a message from the rank `step` places before it. So a rank
has at most one message in flight in each direction. It has two buffers per direction, and packs the
next message and unpacks the last one during the transfer.

    pack n+1 | wait for n | post n+1 | unpack n

If packing or unpacking fails on a rank, the rank still takes part in all exchanges and raises its
error afterwards, so that other ranks need not wait for a timeout. The bytes are never served.
`Wire` describes what happens when a rank dies.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, cycle, pairwise, product, zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from memsaver.ops.layout import round_up, row_major
from memsaver.ops.rows import RowCopies
from memsaver.system.devices import device_key, machine_of
from rollout.protocols import UpdatableEngine
from rollout.weights import PackedBox
from trainer_bridge.errors import SyncError
from trainer_bridge.sync.agree import Agreement, group_backend
from trainer_bridge.sync.plan import Copy, SyncPlan
from trainer_bridge.sync.shards import Ints
from trainer_bridge.sync.writer import LowRank, Writer, rows_of_copy

MESSAGE_BYTES = 64 << 20
RELAY_BYTES = 4 * MESSAGE_BYTES  # buffers of a sync between machines, two per direction
_ALIGNMENT = 16  # bytes; where boxes of a message begin, so that kernels copy whole vectors
_log = logging.getLogger("memsaver")

Pair = tuple[int, int]
"""A rank, and a target that it writes to."""


# ---------------------------------------------------------------- routes


@dataclass(frozen=True, kw_only=True)
class Routes:
    """The routes of a sync's bytes: into mapped pages if possible, else through messages."""

    pairs: Collection[Pair]  # all that have bytes to write
    owners: Sequence[int]  # rank that owns each target
    blocked: Sequence[Mapping[int, str]]  # `obstacles` of each rank

    @property
    def indirect(self) -> set[Pair]:
        """Return the pairs whose bytes go to the target's owner, which may be the sender itself."""
        return {(rank, target) for rank, target in self.pairs if target in self.blocked[rank]}

    @property
    def relayed(self) -> set[Pair]:
        """Return the pairs whose bytes go from one rank to another."""
        return {(rank, target) for rank, target in self.indirect if rank != self.owners[target]}

    @property
    def handled(self) -> set[int]:
        """Return the targets whose owner cannot map the pages and passes bytes to the handle."""
        return {target for target, rank in enumerate(self.owners) if target in self.blocked[rank]}

    def alike(self, copies: Iterable[Copy], machines: Sequence[str]) -> list[Ints]:
        """Group the targets of one rank's messages; all targets of a group get the same ones.

        A group is on one machine, and each owner in it can map the pages of the whole group.
        `machines` has the machine of each target.
        """
        written = defaultdict[int, list[Copy]](list)
        for copy in copies:
            written[copy.target].append(replace(copy, target=0))
        groups = defaultdict[object, list[int]](list)
        for target, own in written.items():
            groups[machines[target], tuple(own)].append(target)
        alike: list[Ints] = []
        for group in map(sorted, groups.values()):
            mapped = all(t not in self.blocked[self.owners[u]] for t, u in product(group, group))
            alike += [tuple(group)] if mapped else [(target,) for target in group]
        return alike

    def warn(self) -> None:
        """Log a warning about pairs whose bytes do not go into mapped pages, with the reason."""
        if pairs := sorted(self.indirect):
            shown = ", ".join(f"{rank}->{target}" for rank, target in pairs[:8])
            more = f" and {len(pairs) - 8} more" if len(pairs) > 8 else ""
            rank, target = pairs[0]
            why = self.blocked[rank][target]
            _log.warning("weight sync by messages for rank->target %s%s: %s", shown, more, why)


def obstacle(place: str, target: str) -> str | None:
    """Return why this process cannot map pages of a target, or None if it can.

    `place` is that of this process's device, as from `memsaver.system.devices.place_of`; a place
    without a host is on this host. `target` is the place of the pages. For a GPU that is hidden
    from this process (CUDA_VISIBLE_DEVICES) the answer is None, because only an attempt to map can
    tell.
    """
    (host, _, gpu), (target_host, _, target_gpu) = place.rpartition("/"), target.rpartition("/")
    if host and target_host and host != target_host:
        return f"{target_host} is another machine than {host}"
    if not target_gpu.startswith("GPU-") or target_gpu == gpu:
        return None
    numbers = range(torch.cuda.device_count())
    gpus = {device_key(torch.device("cuda", number)): number for number in numbers}
    if gpu not in gpus or target_gpu not in gpus:
        return None
    reaches = torch.cuda.can_device_access_peer(gpus[gpu], gpus[target_gpu])
    return None if reaches else f"{gpu} cannot reach {target_gpu}"


def obstacles(place: str, plan: SyncPlan) -> dict[int, str]:
    """Return the targets whose pages a rank at `place` cannot map, with the reasons."""
    places = {target.place for target in plan.targets}
    reasons = {where: obstacle(place, where) for where in places}
    return {
        n: why
        for n, target in enumerate(plan.targets)
        if (why := reasons[target.place]) is not None
    }


# ---------------------------------------------------------------- exchanges between ranks


class Wire:
    """A connection of ranks that exchange one message at a time in each direction.

    It uses NCCL if each rank has its own GPU and no message ends at a target's handle, else gloo.
    Ranks that exchange messages make the same exchanges in the same order.

    If a rank dies, `wait` raises a `SyncError` on gloo, immediately or after the group's timeout.
    On NCCL nothing is raised: the other ranks wait on the device, and NCCL's watchdog ends their
    processes after the group's timeout (unless TORCH_NCCL_ASYNC_ERROR_HANDLING disables it), as
    with any collective of the training. After a failed exchange the ranks may be out of step:
    restart them.
    """

    def __init__(
        self, agreement: Agreement, routes: Routes, places: Sequence[str], device: torch.device
    ) -> None:
        """Connect the ranks; a collective call.

        It creates NCCL's communicator, because a first exchange among only some ranks would hang.
        """
        group, cpu = agreement.group, agreement.cpu
        assert group is not None and cpu is not None
        ranks = {rank for rank, _ in routes.relayed}
        ranks |= {routes.owners[target] for _, target in routes.relayed}
        devices = {places[rank] for rank in ranks}
        apart = len(devices) == len(ranks) and all("/GPU-" in place for place in devices)
        self.on_gpu = apart and not routes.handled and group_backend(group, "cuda") == "nccl"
        self.group = group if self.on_gpu else cpu
        self.device = device if self.on_gpu else torch.device("cpu")
        if self.on_gpu:
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    def post(
        self, sent: tuple[Tensor, int] | None, taken: tuple[Tensor, int] | None
    ) -> Callable[[], None]:
        """Begin to send a tensor to one rank, and to receive into a tensor from another.

        `sent` and `taken` each are a contiguous uint8 tensor and the other rank, or None. The
        result is a function that waits for both transfers: it blocks the host on gloo, the current
        stream on NCCL.
        """
        operations = [
            dist.P2POp(way, end[0], group=self.group, group_peer=end[1])
            for way, end in [(dist.isend, sent), (dist.irecv, taken)]
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
        raise SyncError("write", f"the exchange with ranks {peers} failed ({error})") from error


class Message(NamedTuple):
    """A message of one rank for one target."""

    rank: int  # the sender
    target: int  # number of the target that the copies name
    # Each with the offset in bytes of its row-major elements in the message.
    copies: list[tuple[Copy, int]]
    nbytes: int  # length of the message, including gaps for alignment
    to: int = 0  # the receiver
    targets: Ints = ()  # all targets that get the message

    def boxes(self) -> list[PackedBox]:
        """Return the boxes of the message, as a target's handle takes them."""
        return [
            PackedBox(
                at=at, offset=copy.offset, shape=copy.shape, strides=copy.strides, dtype=copy.dtype
            )
            for copy, at in self.copies
        ]

    def packing(
        self, sources: Mapping[str, Tensor], derived: Collection[str], scratch: Tensor
    ) -> Writer:
        """Build the writer that casts shards into the message; see `Writer`."""
        packed = (replace(c, offset=at, strides=row_major(c.shape)) for c, at in self.copies)
        return Writer(packed, sources, derived, scratch)

    def unpacking(self, stage: Tensor) -> RowCopies:
        """Build the table that copies the message from `stage` into the target's pages."""
        rows = []
        for copy, at in self.copies:
            whole = replace(copy, start=(0,) * len(copy.shape))
            packed = stage[at : at + copy.nbytes].view(copy.torch_dtype).view(copy.shape)
            rows.append(rows_of_copy(whole, packed))
        return RowCopies(rows, stage.device)


def messages(copies: Iterable[Copy], limit: int) -> list[Message]:
    """Pack `copies` in order into messages of one rank and target, of at most `limit` bytes."""
    packed: list[Message] = []
    for copy in copies:
        for part in parts(copy, limit):
            last = packed[-1] if packed else None
            at = round_up(last.nbytes, _ALIGNMENT) if last is not None else 0
            ends = (part.rank, part.target)
            if last is None or (last.rank, last.target) != ends or at + part.nbytes > limit:
                packed.append(Message(*ends, [(part, 0)], part.nbytes))
            else:
                last.copies.append((part, at))
                packed[-1] = last._replace(nbytes=at + part.nbytes)
    return packed


def parts(copy: Copy, limit: int) -> Iterator[Copy]:
    """Yield parts of a copy of at most `limit` bytes each: several rows, or a piece of one row."""
    if copy.nbytes <= limit:
        yield copy
        return
    assert limit >= copy.torch_dtype.itemsize
    dim = next(dim for dim, size in enumerate(copy.shape) if size > 1)
    count = max(1, limit // (copy.nbytes // copy.shape[dim]))
    for first in range(0, copy.shape[dim], count):
        yield from parts(copy.part(dim, first, min(count, copy.shape[dim] - first)), limit)


# ---------------------------------------------------------------- the rounds of one rank


class _Buffer:
    """The memory of one message, uint8: `stage` on the kernels' device, and `wire` for the backend.

    `wire` is the same tensor, or pinned host memory.
    """

    def __init__(self, nbytes: int, device: torch.device, wire: torch.device) -> None:
        self.stage = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.wire = self.stage
        if wire.type != device.type:
            self.wire = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def pack(self, outgoing: "_Outgoing", factors: Mapping[str, LowRank]) -> None:
        """Pack a message, and copy it to the wire; waits if the wire is on another device."""
        message, packing = outgoing
        packing.start({message.target: self.stage}, factors)
        self._copy(self.wire, self.stage, message.nbytes)

    def arrived(self, nbytes: int) -> None:
        self._copy(self.stage, self.wire, nbytes)

    def _copy(self, to: Tensor, source: Tensor, nbytes: int) -> None:
        if to is not source:
            to[:nbytes].copy_(source[:nbytes])


class _Outgoing(NamedTuple):
    """A message of this rank, and the writer that packs it."""

    message: Message
    packing: Writer


class _Exchange(NamedTuple):
    """One round of this rank.

    A message of a rank to itself is not sent: it goes from its buffer to the target's handle.
    """

    pack: Callable[[Mapping[str, LowRank]], None]
    post: Callable[[], Callable[[], None]]  # begins both transfers, returns the wait for them
    unpack: Callable[[Mapping[int, Tensor]], None]  # writes the incoming message into the pages


def _nothing(*_: object) -> None:
    """Do nothing, as a part of an exchange."""


_IDLE = _Exchange(_nothing, lambda: _nothing, _nothing)


class Relay:
    """One rank's part of the transfer of all bytes that do not go into mapped pages.

    Constructor and `run` are collective calls. Tables are built once, as in `Writer`. Each
    direction in use takes two buffers as long as the longest message, at most `MESSAGE_BYTES`. If
    messages travel through the host, it takes as much pinned host memory. To unpack messages, this
    rank must map the pages of `targets`. `node_bytes` are sent to other machines in each `run`.
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
        """Build the tables.

        `wire` is None if no bytes go from one rank to another. `handles` has the targets that this
        rank owns. `sources`, `derived` and `scratch` are as in `Writer`.
        """
        self._plan, self._routes, self._rank = plan, routes, rank
        self._handles, self._wire = handles, wire
        self._sends = [
            _Outgoing(message, message.packing(sources, derived, scratch))
            for message in self._messages(rank)
        ]
        senders = {pair[0] for pair in routes.relayed if routes.owners[pair[1]] == rank}
        machines = [machine_of(place) for place in plan.places]
        self.node_bytes = sum(
            message.nbytes for message, _ in self._sends if machines[message.to] != machines[rank]
        )
        taken = {sender: self._messages(sender, rank) for sender in senders}
        device = scratch.device
        travels = torch.device("cpu") if wire is None else wire.device
        sends = [message.nbytes for message, _ in self._sends]
        self._out = [_Buffer(max(sends, default=0), device, travels) for _ in range(2)]
        takes = [message.nbytes for message in chain.from_iterable(taken.values())]
        self._into = [_Buffer(max(takes, default=0), device, travels) for _ in range(2)]
        got = (message.targets for message in chain.from_iterable(taken.values()))
        self.targets = {*chain.from_iterable(got)} - routes.handled
        self._exchanges = [*self._make_exchanges(taken), _IDLE]
        self._error: Exception | None = None

    def run(self, pages: Mapping[int, Tensor], factors: Mapping[str, LowRank]) -> dict[int, int]:
        """Run all exchanges, and return the digests of the bytes that this rank sent, by target.

        `pages` has the pages of `targets`, and `factors` the factors of the derived parameters, by
        name. If packing or unpacking fails on this rank, its error is raised after the exchanges.
        An exchange that fails raises a SyncError.
        """
        self._error = None
        self._try(partial(self._exchanges[0].pack, factors))
        wait = self._exchanges[0].post()
        for exchange, following in pairwise(self._exchanges):
            self._try(partial(following.pack, factors))
            wait()
            wait = following.post()
            self._try(partial(exchange.unpack, pages))
        if self._into[0].stage.is_cuda:  # the leases of the pages end next
            torch.cuda.current_stream(self._into[0].stage.device).synchronize()
        if self._error is not None:
            raise self._error
        digests = Counter[int]()
        for message, packing in self._sends:
            (digest,) = packing.digests().values()
            digests.update(dict.fromkeys(message.targets, digest))
        return digests

    def _try(self, step: Callable[[], None]) -> None:
        """Run a step and keep its error; after an error, skip further steps."""
        if self._error is None:
            try:
                step()
            except Exception as error:
                self._error = error

    def _messages(self, sender: int, to: int | None = None) -> list[Message]:
        blocked, owners = self._routes.blocked[sender], self._routes.owners
        copies = [copy for copy in self._plan.copies(sender) if copy.target in blocked]
        machines = [machine_of(target.place) for target in self._plan.targets]
        groups = {group[0]: group for group in self._routes.alike(copies, machines)}
        turns = {first: cycle(map(owners.__getitem__, group)) for first, group in groups.items()}
        once = (copy for copy in copies if copy.target in groups)
        packed = (
            message._replace(to=next(turns[message.target]), targets=groups[message.target])
            for message in messages(once, MESSAGE_BYTES)
        )
        return [message for message in packed if to in (None, message.to)]

    def _make_exchanges(self, taken: Mapping[int, Sequence[Message]]) -> Iterator[_Exchange]:
        turn, world = cycle(range(2)), len(self._plan.places)
        for step in (*range(1, world), 0):  # to itself last: no rank waits for these messages
            to, source = (self._rank + step) % world, (self._rank - step) % world
            sends = [sent for sent in self._sends if sent.message.to == to]
            for sent, message in zip_longest(sends, taken.get(source, [])):
                yield self._exchange(sent, to, message, source, next(turn))

    def _exchange(
        self, sent: _Outgoing | None, to: int, taken: Message | None, source: int, turn: int
    ) -> _Exchange:
        """Build a round that sends `sent` to rank `to`, and receives `taken` from rank `source`."""
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
        """Return a function that writes a message in `buffer` to the target."""
        target, nbytes = message.target, message.nbytes
        if target in self._routes.handled:
            boxes, handle = message.boxes(), self._handles[target]
            # Pass a clone: pickling a view would include the whole buffer.
            return lambda pages: handle.write_update(boxes, buffer.wire[:nbytes].clone())
        table = message.unpacking(buffer.stage)

        def unpack(pages: Mapping[int, Tensor]) -> None:
            buffer.arrived(nbytes)
            for number in message.targets:
                table.start(pages[number])

        return unpack
