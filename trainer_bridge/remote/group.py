"""Blocking handles on groups of Ray actors, and the cluster and devices that the actors run on.

ray is imported on first use.
"""

import contextlib
import functools
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Self

from memsaver.system.interrupts import held
from rollout.errors import RankError
from rollout.process_group import Ports
from trainer_bridge.errors import ActorDied, ActorTimeout, OtherRankFailed, RankFailed, SyncError
from trainer_bridge.remote.placement import Placement

# After a failure, how long to wait for other ranks: one of them may have caused it.
GRACE_SECONDS = 5.0
# The same after an error of communication between nodes: time for Ray to notice a lost node.
LOST_NODE_SECONDS = 90.0
LOOK_SECONDS = 5.0  # between two looks at the nodes of ranks that have not answered
_ECHOES = (SyncError, RankError, OtherRankFailed)  # errors that another rank has caused


# Methods whose results or arguments differ between ranks. A group of several ranks refuses them.
ONE_RANK = {
    "alias_update", "as_peer", "begin_update", "commit_update", "drain_events", "hand_over_to",
    "report", "take_usage", "verify_update", "weight_layout", "write_update",
}  # fmt: skip


OnDeath = Callable[[int, ActorDied], Mapping[int, Any]]
"""Called with the rank of a dead actor and the error. Returns, by rank, references to wait for in
place of earlier ones, or None for ranks whose answers are given up."""


class RemoteActor:
    """A handle on one Ray actor (an `ActorBase`), its name in errors, and its node's address."""

    def __init__(self, handle: Any, name: str, node: str = "") -> None:
        self.handle = handle
        self.name = name
        self.node = node

    def start(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method, and return a reference to its answer."""
        return self.handle.call.remote(method, *args, **kwargs)

    def answer(self, reference: Any, method: str) -> Any:
        """Wait for the answer, and raise the method's error, or ActorDied if the actor is gone."""
        import ray

        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise error.cause from error
            raise
        except ray.exceptions.RayActorError as error:
            if error.actor_init_failed:  # the text ends with the constructor's error
                reason = f"could not start ({str(error).strip().splitlines()[-1].strip()})"
                raise ActorDied(self.name, "__init__", reason) from error
            reason = f"died with its node {self.node}" if self.lost() else "died"
            raise ActorDied(self.name, method, reason) from error

    def lost(self) -> bool:
        """Return whether the actor's node is not part of the cluster any more."""
        return bool(self.node) and self.node not in node_addresses()


class RemoteGroup:
    """A group of actors, one per rank, that has the public methods of its actors.

    A call runs on all ranks and blocks until all have answered. An error that all ranks raise alike
    is raised unchanged. Otherwise `RankFailed` names the first rank whose error was not caused by
    another rank. `ActorDied` and `ActorTimeout` name the actor and the method. A dead actor ends
    the call immediately.
    """

    def __init__(self, ranks: Sequence[RemoteActor], timeout: float) -> None:
        self.ranks = tuple(ranks)  # in the order of their ranks
        self.timeout = timeout  # seconds for one call
        self.ports: Ports | None = None  # on which ranks of a process group find each other

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a public method of the actors, which runs on all ranks; rank 0's answer counts."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name in ONE_RANK and len(self.ranks) > 1:
            raise ValueError(f"{name}() needs one rank, not {self.name}; call it on one of each()")
        return functools.partial(self.call, name)

    @property
    def name(self) -> str:
        return ", ".join(rank.name for rank in self.ranks)

    def each(self) -> list[Self]:
        """Return one group per rank."""
        return [type(self)([rank], self.timeout) for rank in self.ranks]

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method on every rank, and return rank 0's answer, which equals all others."""
        return self.call_all(method, *args, **kwargs)[0]

    def call_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on every rank, and return the answers in the order of the ranks."""
        if len(self.ranks) > 1:
            args, kwargs = _stored_once(args, kwargs)
        return self._gather(method, [rank.start(method, *args, **kwargs) for rank in self.ranks])

    def call_each(self, method: str, args: Sequence[tuple[Any, ...] | None]) -> list[Any]:
        """Call a method with different arguments on each rank, and return the answers by rank.

        `args` has positional arguments by rank. A rank with None is not called, and its answer is
        None.
        """
        pairs = zip(self.ranks, args, strict=True)
        started = [None if own is None else rank.start(method, *own) for rank, own in pairs]
        return self._gather(method, started)

    def _gather(
        self,
        method: str,
        references: Sequence[Any],
        on_death: OnDeath | None = None,
        called: int | None = None,
    ) -> list[Any]:
        """Wait for the answers, by rank.

        An error is raised unchanged if `called` ranks, by default all of them, raise it alike.
        """
        import ray

        waiting = {
            reference: rank for rank, reference in enumerate(references) if reference is not None
        }
        called = len(waiting) if called is None else called
        answers: list[Any] = [None] * len(references)
        failed: list[tuple[int, Exception]] = []
        end = time.monotonic() + self.timeout
        while waiting:
            seconds = max(0.0, end - time.monotonic())
            done, _ = ray.wait(list(waiting), timeout=min(seconds, LOOK_SECONDS))
            if not done and seconds > LOOK_SECONDS:
                self._require_nodes(waiting.values(), method)
                continue
            if not done:
                break
            rank = waiting.pop(done[0])
            try:
                answers[rank] = self.ranks[rank].answer(done[0], method)
            except ActorDied as error:
                if on_death is None:
                    raise
                instead = on_death(rank, error)
                waiting = {key: rank for key, rank in waiting.items() if rank not in instead}
                waiting |= {key: rank for rank, key in instead.items() if key is not None}
                failed = [failure for failure in failed if failure[0] not in instead]
                end = time.monotonic() + self.timeout
            except Exception as error:  # may be caused by another rank, which reports it next
                failed.append((rank, error))
                end = min(end, time.monotonic() + self._grace(error))
        if failed:
            raise self._cause(method, failed, called)
        if waiting:
            silent = ", ".join(self.ranks[rank].name for rank in waiting.values())
            raise ActorTimeout(silent, method, f"gave no answer for {self.timeout:g} s")
        return answers

    def _require_nodes(self, waiting: Iterable[int], method: str) -> None:
        """Raise ActorDied if the node of a rank is lost; a new actor would wait there forever."""
        for rank in (self.ranks[number] for number in waiting):
            if rank.lost():
                raise ActorDied(rank.name, method, f"died with its node {rank.node}")

    def _grace(self, error: Exception) -> float:
        """Return the seconds to wait for other ranks after the error of one."""
        several = len({rank.node for rank in self.ranks}) > 1
        between = isinstance(error, (*_ECHOES, RuntimeError))  # torch raises the latter
        return LOST_NODE_SECONDS if several and between else GRACE_SECONDS

    def _cause(
        self, method: str, failed: Sequence[tuple[int, Exception]], called: int
    ) -> Exception:
        """Return the error to raise: the first that was not caused by another rank."""
        rank, first = min(failed, key=lambda failure: isinstance(failure[1], _ECHOES))
        if len(failed) == called and len({(type(error), str(error)) for _, error in failed}) == 1:
            return first
        error = RankFailed(self.ranks[rank].name, method, first)
        error.__cause__ = first
        return error


def _stored_once(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Store arguments once, and return references: Ray would store them again for every call."""
    import ray

    return tuple(ray.put(arg) for arg in args), {name: ray.put(kwargs[name]) for name in kwargs}


START_SECONDS = 60.0  # limit for Ray to find free devices
_REPORTS = "RAY_USAGE_STATS_ENABLED"
CONNECT_SECONDS = 10.0  # limit for a cluster's port to answer

STORE_BYTES = 256 << 20
"""Default size of Ray's object store. Only batches and messages pass through it, never weights."""


class Place(NamedTuple):
    """The place of actors: Ray options that give an actor its part of a device, and the node."""

    options: dict[str, Any]
    node: str


@contextlib.contextmanager
def connected(address: str | None, actors: int, store_bytes: int = STORE_BYTES) -> Iterator[None]:
    """Connect to a Ray cluster for the block.

    A process that is already connected stays connected. `address` is that of a running cluster.
    None takes RAY_ADDRESS, or starts a small cluster, with CPUs for `actors` and an object store of
    `store_bytes`, and ends it with the block.

    Raises:
        ValueError: No cluster answers at the address, or a node's object store is smaller.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    # Ray sets the variable in a job; job scripts may export it empty, which Ray takes as not set.
    address = address or os.environ.get("RAY_ADDRESS", "").strip() or None
    options: dict[str, Any] = {"address": address}
    if address is None:
        cpus = max(actors, cores())
        options = {"address": "local", "num_cpus": cpus, "object_store_memory": store_bytes}
        options["include_dashboard"] = False
    try:
        # Interrupting the start of a cluster would leave its agents running.
        with contextlib.nullcontext() if address else held(), _process_kept():
            with _reachable(address):
                ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
        if address is not None:
            _require_stores(store_bytes)
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _reachable(address: str | None) -> Iterator[None]:
    """Raise a ValueError if no cluster answers at an address; Ray would try for a minute."""
    host, _, port = (address or "").rpartition(":")
    try:
        if port.isdigit() and "://" not in host:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        yield
    except OSError as error:  # Ray's ConnectionError is one
        cause = str(error.__cause__ or error).strip().splitlines() or ["timeout"]
        remedy = "start one (ray start --head), or set cluster.address to that of a running one"
        raise ValueError(f"no Ray cluster answers at {address} ({cause[-1]}); {remedy}") from error


def _require_stores(nbytes: int) -> None:
    """Raise a ValueError that names a node whose object store is smaller than `nbytes`."""
    import ray

    for node in ray.nodes():
        size = node["Resources"].get("object_store_memory", nbytes)
        if node["Alive"] and size < nbytes:
            text = f"Ray's object store on {node['NodeManagerAddress']} has {size:.0f} of the"
            remedy = f"start the node by ray start --object-store-memory={nbytes}"
            raise ValueError(f"{text} {nbytes} bytes of cluster.object_store_gib; {remedy}")


def node_addresses() -> dict[str, str]:
    """Return the id of each node that is alive, by its address."""
    import ray

    return {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}


@contextlib.contextmanager
def _process_kept() -> Iterator[None]:
    """Disable Ray's usage reports for the block, and restore the SIGTERM handler after it."""
    handler, reports = signal.getsignal(signal.SIGTERM), os.environ.get(_REPORTS)
    os.environ[_REPORTS] = "0"
    try:
        yield
    finally:
        del os.environ[_REPORTS]
        if reports is not None:
            os.environ[_REPORTS] = reports
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and handler not in (signal.SIG_DFL, None):
            signal.signal(signal.SIGTERM, handler)


def cores() -> int:
    """Return the number of CPU cores available to this process."""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def reserved(placement: Placement, on_gpu: bool) -> Iterator[list[Place]]:
    """Reserve the devices of a placement for the block.

    A machine is a placement group on its own Ray node, and a device is one bundle of it, so all
    actors of a device get the same GPU. An autoscaling cluster has time to grow. The block gets the
    place of each device. Devices that are not free within `START_SECONDS` raise a ValueError.
    """
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    devices, gpu = placement.bundles(), {"GPU": 1} if on_gpu else {}
    with contextlib.ExitStack() as undo:
        groups: list[Any] = []
        nodes: list[str] = []  # ids
        end = time.monotonic() + START_SECONDS
        for machine in range(placement.machines):
            bundles = [{"CPU": ranks, **gpu} for node, _, ranks in devices if node == machine]
            others = {"ray.io/node-id": f"!in({','.join(nodes)})"}
            selector = [others] * len(bundles) if nodes else None
            group = placement_group(bundles, strategy="STRICT_PACK", bundle_label_selector=selector)
            groups.append(group)
            undo.callback(ray.util.remove_placement_group, group)
            try:
                ray.get(group.ready(), timeout=max(0.0, end - time.monotonic()))
            except ray.exceptions.GetTimeoutError as error:
                raise _no_room(bundles, machine, placement.machines) from error
            nodes.append(ray.util.placement_group_table(group)["bundles_to_node_id"][0])
        address = {node: address for address, node in node_addresses().items()}
        yield [
            Place(
                {
                    "num_cpus": 1,
                    "num_gpus": 1 / ranks if on_gpu else 0,
                    "scheduling_strategy": PlacementGroupSchedulingStrategy(groups[node], index),
                },
                address.get(nodes[node], nodes[node]),
            )
            for node, index, ranks in devices
        ]


def _no_room(bundles: Sequence[Mapping[str, int]], machine: int, machines: int) -> ValueError:
    """Return the error of a machine, by number, for which the cluster has no room."""
    import ray

    available = ray.available_resources()
    free = {name: available.get(name, 0) for name in bundles[0]}
    kinds = [(bundle, len([*same])) for bundle, same in groupby(bundles)]
    need = " and ".join(f"{count} x {bundle}" for bundle, count in kinds)
    on = f" on machine {machine + 1} of {machines}" if machines > 1 else ""
    return ValueError(
        f"the Ray cluster has no room for {need}{on} (free: {free}, "
        f"nodes: {len(node_addresses())}); stop other jobs of the cluster, or use fewer devices"
    )
