"""Settles, when ranks connect, the ways of all bytes, the wire between ranks, and the cost."""

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from memsaver.common.machine import device_key
from trainer_bridge.errors import SyncError
from trainer_bridge.sync.plan import Plan
from trainer_bridge.sync.transport.routes import Kind, Pair, Routes, Transport, choose, transports


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


_SECONDS = timedelta(seconds=60)  # for one message, where the group has no gloo of its own


_log = logging.getLogger("memsaver")


@dataclass(frozen=True, kw_only=True)
class Connection:
    """routes, transports: alike on all ranks. wire: None if not needed. device: of the shards."""

    routes: Routes
    transports: tuple[Transport, ...]
    wire: Wire | None
    device: torch.device


def obstacle(place: str, target: str) -> str | None:
    """Tells why this process, its device at `place`, cannot map pages at `target`; None: it can.

    Places are as of `memsaver.common.machine.place_of`; one without a host is on this one. Of a
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


def obstacles(place: str, plan: Plan) -> dict[int, str]:
    """Returns the targets whose pages this rank, at `place`, cannot map, and why."""
    places = {target.place for target in plan.targets}
    found = {where: obstacle(place, where) for where in places}
    return {
        n: why for n, target in enumerate(plan.targets) if (why := found[target.place]) is not None
    }


def connect(
    plan: Plan,
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
    plan: Plan,
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


def _all_sizes(plan: Plan) -> dict[Pair, int]:
    sizes: Counter[Pair] = Counter()
    for rank in range(len(plan.places)):
        for copy in plan.copies(rank):
            sizes[rank, copy.target] += copy.nbytes
    return dict(sizes)
