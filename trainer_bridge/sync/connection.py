"""Settles, when ranks connect, the ways of all bytes, the wire between ranks, and the cost."""

import functools
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from memsaver.system.machine import device_key
from trainer_bridge.errors import SyncError
from trainer_bridge.sync.plan import SyncPlan

_log = logging.getLogger("memsaver")
_SECONDS = timedelta(seconds=60)  # for one message, where the group has no gloo of its own
_DEVICE = 6  # of the arguments of rebuild_cuda_tensor
# Of them, the same for every ticket.
_KNOWN = {0: torch.Tensor, 4: torch.storage.TypedStorage, 5: torch.uint8}

Kind = Literal["pages", "relay", "handle"]
Mode = Literal["auto", "pages", "relay", "handle"]
Pair = tuple[int, int]
"""A rank, and a target that it has bytes for."""


@dataclass(frozen=True, kw_only=True)
class Routes:
    """speakers: the rank that speaks for each target. indirect: pairs whose bytes go to that rank,
    which is perhaps itself the sender; all others write into the pages. handled: targets whose
    speaker passes bytes on by the handle, not into the pages.
    """

    speakers: tuple[int, ...]
    indirect: frozenset[Pair] = frozenset()
    handled: frozenset[int] = frozenset()

    @property
    def relayed(self) -> set[Pair]:
        """Returns the pairs whose bytes go from one rank to another."""
        return {(rank, target) for rank, target in self.indirect if rank != self.speakers[target]}

    def direct(self, rank: int) -> set[int]:
        """Returns the targets into whose pages the rank writes what it has for them."""
        return {
            target for target in range(len(self.speakers)) if (rank, target) not in self.indirect
        }

    def kind(self, pair: Pair) -> Kind:
        if pair not in self.indirect:
            return "pages"
        return "handle" if pair[1] in self.handled else "relay"


def choose(
    mode: str,
    pairs: Collection[Pair],
    speakers: Sequence[int],
    obstacles: Sequence[Mapping[int, str]],
) -> Routes:
    """obstacles: by rank, the targets whose pages it cannot map, and why. mode "auto": pages
    wherever they can be mapped. A ValueError says why what is asked for cannot be had.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"transport={mode!r} must be one of {', '.join(get_args(Mode))}")
    blocked = frozenset((rank, target) for rank, target in pairs if target in obstacles[rank])
    deaf = frozenset(target for target, rank in enumerate(speakers) if target in obstacles[rank])
    routes = functools.partial(Routes, speakers=tuple(speakers))
    if mode == "auto":
        return routes(indirect=blocked, handled=deaf)
    if mode == "handle":
        return routes(indirect=frozenset(pairs), handled=frozenset(range(len(speakers))))
    if mode == "pages":
        if blocked:
            rank, target = min(blocked)
            why = f"{obstacles[rank][target]} ({len(blocked)} such pairs)"
            text = f"transport='pages': rank {rank} cannot map target {target}: {why}"
            raise ValueError(f"{text}; use transport='auto'")
        return routes()
    if deaf:
        target = min(deaf)
        raise ValueError(
            f"transport='relay': rank {speakers[target]}, which speaks for target {target}, cannot "
            f"map it: {obstacles[speakers[target]][target]}; use transport='handle'"
        )
    sent = frozenset((rank, target) for rank, target in pairs if rank != speakers[target])
    if not sent:
        rule = "each rank speaks for all targets that it writes"
        raise ValueError(f"transport='relay': {rule}; use transport='pages'")
    return routes(indirect=sent)


@dataclass(frozen=True, kw_only=True)
class Transport:
    """A way that bytes of a sync take, for a table. The same on every rank.

    pairs: (rank, target) whose bytes they are; of pages only those of different devices. nbytes: of
    a whole sync. staging_bytes: at most, of each rank that takes part, on its device and in host
    memory together. cost: against mapped pages. reason: why not pages.
    """

    kind: Kind
    through: str
    pairs: tuple[Pair, ...]
    nbytes: int
    staging_bytes: int
    cost: str
    reason: str

    def __str__(self) -> str:
        shown = ", ".join(f"{rank}->{target}" for rank, target in self.pairs[:8])
        more = f" and {len(self.pairs) - 8} more" if len(self.pairs) > 8 else ""
        return (
            f"weight sync by {self.kind} over {self.through} instead of mapped pages for "
            f"rank->target {shown}{more}: {self.nbytes / 2**20:.1f} MiB a sync, staging "
            f"{self.staging_bytes / 2**20:.0f} MiB a rank; {self.cost}. Why: {self.reason}"
        )


def transports(
    routes: Routes,
    sizes: Mapping[Pair, int],
    total: int,
    reasons: Mapping[Pair, str],
    *,
    wire: str,
    on_gpu: bool,
    buffers: Mapping[Kind, int],
) -> tuple[Transport, ...]:
    """Returns one for each kind that carries bytes. sizes: of the pairs known; total: of all pairs,
    known or not. wire: "gloo", "nccl". on_gpu: the shards are. buffers: bytes of staging, by kind.
    """
    nbytes: Counter[Kind] = Counter()
    pairs: dict[Kind, list[Pair]] = {kind: [] for kind in get_args(Kind)}
    for pair, size in sorted(sizes.items()):
        nbytes[routes.kind(pair)] += size
        pairs[routes.kind(pair)].append(pair)
    nbytes["pages"] = total - nbytes["relay"] - nbytes["handle"]
    relayed = any(pair in routes.relayed for pair in pairs["handle"])
    through = {
        "pages": "mapped memory",
        "relay": wire,
        "handle": f"{wire} and the handle" if relayed else "the handle",
    }
    return tuple(
        Transport(
            kind=kind,
            through=through[kind],
            pairs=tuple(pairs[kind]),
            nbytes=nbytes[kind],
            staging_bytes=buffers.get(kind, 0),
            cost=_cost(kind, wire, on_gpu),
            reason=_reason(pairs[kind], reasons) if kind != "pages" else "",
        )
        for kind in get_args(Kind)
        if nbytes[kind]
    )


def _cost(kind: Kind, wire: str, on_gpu: bool) -> str:
    if kind == "pages":
        return "one pass: cast, copy and digest"
    if kind == "relay" and wire == "nccl":
        return "packed, sent, unpacked: 2 more passes over device memory"
    passes = ", 2 passes over PCIe" if on_gpu else ""
    if kind == "relay":
        return f"packed, sent, unpacked: 2 more passes over memory{passes}"
    text = "packed, sent as messages, unpacked: 2 more passes over memory"
    return f"{text} and the messages' own copies{passes}"


def _reason(pairs: Sequence[Pair], reasons: Mapping[Pair, str]) -> str:
    found = [reasons[pair] for pair in pairs if pair in reasons]
    return found[0] if found else "asked for"


@dataclass(frozen=True, kw_only=True)
class IpcTicket:
    """Permission to map one tensor of another process; plain data. Good as long as that process
    keeps the tensor.

    It is cudaIpc's, for engines that are not ours: cudaMalloc's memory has no descriptor for
    `attach`. arguments: of rebuild_cuda_tensor, without those that are the same for every ticket.
    """

    arguments: tuple[Any, ...]
    device_key: str

    def map(self) -> Tensor:
        """Maps all bytes of the tensor, uint8, once in this process; it stays mapped until others
        have taken its place.

        Raises a ValueError if the GPU is not visible here. The ticket's own maker cannot map it.
        """
        return map_once(self)


def ipc_ticket(tensor: Tensor) -> IpcTicket:
    """tensor: contiguous, of cudaMalloc (not of expandable segments), the arena of an offer."""
    if not tensor.is_cuda or not tensor.is_contiguous():
        raise ValueError(
            f"cudaIpc shares contiguous CUDA tensors, got {tuple(tensor.shape)} on {tensor.device}"
        )
    _, arguments = reduce_tensor(tensor.detach().view(-1).view(torch.uint8))
    assert all(arguments[at] is known for at, known in _KNOWN.items()), (
        "torch shares CUDA tensors in another way"
    )
    plain = [tuple(each) if isinstance(each, torch.Size) else each for each in arguments]
    kept = tuple(each for at, each in enumerate(plain) if at not in _KNOWN)
    return IpcTicket(arguments=kept, device_key=device_key(tensor.device))


@functools.lru_cache(maxsize=16)  # torch counts how often a ticket is opened
def map_once(ticket: IpcTicket) -> Tensor:
    for index in range(torch.cuda.device_count()):
        if device_key(torch.device("cuda", index)) == ticket.device_key:
            arguments = list(ticket.arguments)
            for at, known in _KNOWN.items():
                arguments.insert(at, known)
            arguments[_DEVICE] = index  # the other process may count its GPUs otherwise
            return rebuild_cuda_tensor(*arguments)
    raise ValueError(
        f"{ticket.device_key} is not visible in this process; add it to CUDA_VISIBLE_DEVICES"
    )


class Posted:
    """An exchange under way."""

    def __init__(self, works: Sequence[dist.Work], peers: Sequence[int]) -> None:
        self._works = works
        self._peers = peers

    def wait(self) -> None:
        """Waits until both are through: the host on gloo, the current stream on NCCL."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise _lost(self._peers, error) from error


class Wire:
    """A message each way at a time. Ranks that exchange make the same exchanges in the same order.

    A rank that is gone: on gloo the others' `wait` raises a `SyncError`, at once or after the
    group's time-out. On NCCL nothing is raised here: the others wait on the device, and NCCL's
    watchdog ends their processes after the group's time-out (unless TORCH_NCCL_ASYNC_ERROR_HANDLING
    says otherwise), as with any collective of the training itself. After an exchange that broke off
    the ranks may be out of step: start them anew.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, device: torch.device) -> None:
        """device: where messages lie. All ranks of the group make it together: NCCL's communicator
        is made here, because a first exchange among some of the ranks would hang.
        """
        self.name, self.device = name, device
        self.group = group
        if name == "nccl":
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    def post(self, sent: tuple[Tensor, int] | None, taken: tuple[Tensor, int] | None) -> Posted:
        """Begin to send a tensor to a rank, and to fill one from another: uint8, contiguous."""
        operations = []
        if sent is not None:
            operations.append(dist.P2POp(dist.isend, sent[0], group=self.group, group_peer=sent[1]))
        if taken is not None:
            operations.append(
                dist.P2POp(dist.irecv, taken[0], group=self.group, group_peer=taken[1])
            )
        peers = sorted({each[1] for each in (sent, taken) if each is not None})
        try:
            return Posted(dist.batch_isend_irecv(operations), peers)
        except RuntimeError as error:
            raise _lost(peers, error) from error


def _lost(peers: Sequence[int], error: RuntimeError) -> SyncError:
    return SyncError(
        "write", f"the exchange with ranks {', '.join(map(str, peers))} broke off ({error})"
    )


def make_wire(
    group: dist.ProcessGroup,
    ranks: Collection[int],
    places: Sequence[str],
    device: torch.device,
    *,
    host: bool,
) -> Wire:
    """Makes a wire of NCCL if all `ranks`, which take part, have GPUs of their own and the group
    has it; otherwise of gloo.

    host: the bytes are wanted in host memory. A group without gloo gets one beside it, so all ranks
    call this.
    """
    backends = dict(part.split(":", 1) for part in str(dist.get_backend_config(group)).split(","))
    theirs = {places[rank] for rank in ranks}
    apart = len(theirs) == len(ranks) and all("/GPU-" in place for place in theirs)
    if apart and not host and backends.get("cuda") == "nccl":
        return Wire(group, "nccl", device)
    if backends.get("cpu") != "gloo":
        members = dist.get_process_group_ranks(group)
        made = dist.new_group(members, backend="gloo", timeout=_SECONDS)
        assert isinstance(made, dist.ProcessGroup)
        group = made
    return Wire(group, "gloo", torch.device("cpu"))


@dataclass(frozen=True, kw_only=True)
class Connection:
    """routes, transports: alike on all ranks. wire: None if not needed. device: of the shards."""

    routes: Routes
    transports: tuple[Transport, ...]
    wire: Wire | None
    device: torch.device


def obstacle(place: str, target: str) -> str | None:
    """Tells why this process, its device at `place`, cannot map pages at `target`; None: it can.

    Places are as of `memsaver.system.machine.place_of`; one without a host is on this one. Of a
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
    """Returns the targets whose pages this rank, at `place`, cannot map, and why."""
    places = {target.place for target in plan.targets}
    found = {where: obstacle(place, where) for where in places}
    return {
        n: why for n, target in enumerate(plan.targets) if (why := found[target.place]) is not None
    }


def connect(
    plan: SyncPlan,
    speakers: Sequence[int],
    blocked: Sequence[Mapping[int, str]],
    *,
    mode: str,
    rank: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
    message_bytes: int,
) -> Connection:
    """All ranks call it with the same arguments, but for `rank`, `device` and `group`; the first
    one logs a warning for each fallback. speakers: by target, the rank that speaks for it. blocked:
    `obstacles` of all ranks. A ValueError says what cannot be had, on all ranks.
    """
    sizes = _all_sizes(plan) if mode in ("relay", "handle") else plan.link_bytes
    routes = choose(mode, sizes.keys(), speakers, blocked)
    wire = _wire(plan, routes, blocked, device, group)
    bounce = device.type == "cuda" and (wire is None or wire.device.type == "cpu")
    buffer = min(message_bytes, max((sizes[pair] for pair in routes.indirect), default=0))
    if bounce:
        buffer *= 2
    handle = 4 * buffer if routes.relayed else 2 * buffer
    buffers: dict[Kind, int] = {"relay": 4 * buffer, "handle": handle}
    reasons: dict[Pair, str] = {}
    for number, each in enumerate(blocked):
        reasons |= {(number, target): why for target, why in each.items()}
    found = transports(
        routes,
        sizes,
        sum(plan.nbytes),
        reasons,
        wire="" if wire is None else wire.name,
        on_gpu=device.type == "cuda",
        buffers=buffers,
    )
    for transport in found:
        if rank == 0 and transport.kind != "pages":
            _log.warning("%s", transport)
    return Connection(routes=routes, transports=found, wire=wire, device=device)


def _wire(
    plan: SyncPlan,
    routes: Routes,
    blocked: Sequence[Mapping[int, str]],
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> Wire | None:
    if not routes.relayed:
        return None
    size = 0 if group is None else dist.get_world_size(group)
    if group is None or size != len(plan.places):
        rank, target = min(routes.relayed)
        why = blocked[rank].get(target, "a relay was asked for")
        raise ValueError(
            f"rank {rank} has bytes for target {target} to send to rank {routes.speakers[target]} "
            f"({why}), which needs a process group of the {len(plan.places)} trainer ranks, not of "
            f"{size}; pass group="
        )
    ranks = {rank for rank, _ in routes.relayed} | {
        routes.speakers[target] for _, target in routes.relayed
    }
    return make_wire(group, ranks, plan.places, device, host=bool(routes.handled))


def _all_sizes(plan: SyncPlan) -> dict[Pair, int]:
    sizes: Counter[Pair] = Counter()
    for rank in range(len(plan.places)):
        for copy in plan.copies(rank):
            sizes[rank, copy.target] += copy.nbytes
    return dict(sizes)
