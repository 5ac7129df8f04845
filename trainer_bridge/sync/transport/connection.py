"""Settles, when the ranks connect, the ways of all bytes, the wire between ranks, and what that
costs.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from memsaver.common.machine import device_key
from trainer_bridge.sync.plan import Plan
from trainer_bridge.sync.transport.routes import Kind, Pair, Routes, Transport, choose, transports
from trainer_bridge.sync.transport.wire import Wire, make_wire

_log = logging.getLogger("memsaver")


@dataclass(frozen=True, kw_only=True)
class Connection:
    """routes, transports: the same on all ranks. wire: None where nothing goes from rank to rank.
    device: of this rank's shards.
    """

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
