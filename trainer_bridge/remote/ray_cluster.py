"""A Ray cluster to run on, and one reservation for each device of a run."""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import product, starmap
from typing import Any

from memsaver.common.signals import held

START_SECONDS = 60.0  # for Ray to find room
_NO_REPORTS = "RAY_USAGE_STATS_ENABLED"
# Of Ray's object store: batches and messages only, weights never pass through it.
_STORE_BYTES = 256 << 20
_ACTORS = 2  # a device: a trainer rank and an engine rank

Place = dict[str, Any]
"""Options of an actor: half of a device."""


@contextlib.contextmanager
def connected(address: str | None, devices: int) -> Iterator[None]:
    """Connects to a Ray cluster for the block, or starts one for `devices`, and ends that."""
    import ray

    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS")  # Ray sets it in a job
    try:
        if address is not None:  # the environment of its workers is the cluster's and the job's own
            with _sigterm_kept():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        else:
            # Interrupted halfway, a cluster leaves agents behind, which never learn that it is
            # gone.
            with held(), _sigterm_kept():
                _start(devices)
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """ray.init puts a handler of its own in the place of the caller's."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and handler not in (signal.SIG_DFL, None):
        signal.signal(signal.SIGTERM, handler)


def _start(devices: int) -> None:
    import ray

    before = os.environ.get(_NO_REPORTS)
    os.environ[_NO_REPORTS] = "0"  # read by the processes that ray.init starts
    try:
        ray.init(
            address="local",
            num_cpus=max(_ACTORS * devices, cores()),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=_STORE_BYTES,
        )
    finally:
        if before is None:
            del os.environ[_NO_REPORTS]
        else:
            os.environ[_NO_REPORTS] = before


def cores() -> int:
    """Counts the cores of this process."""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def reserved(nodes: int, devices: int, on_gpu: bool) -> Iterator[list[Place]]:
    """Yields where to run the actors of each device, node by node; one bundle a device, so that its
    actors get the same GPU.

    Raises a ValueError where the cluster has no such nodes, or they are not free in time.
    """
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle: dict[str, float] = {"CPU": _ACTORS, "GPU": 1} if on_gpu else {"CPU": _ACTORS}
    _check_nodes(nodes, {name: amount * devices for name, amount in bundle.items()})
    with contextlib.ExitStack() as undo:
        groups = []
        for _ in range(nodes):
            groups.append(placement_group([bundle] * devices, strategy="STRICT_PACK"))
            undo.callback(ray.util.remove_placement_group, groups[-1])
        end = time.monotonic() + START_SECONDS
        for group in groups:
            try:
                ray.get(group.ready(), timeout=max(0.0, end - time.monotonic()))
            except ray.exceptions.GetTimeoutError as error:
                wanted, free = f"{nodes} x {devices} x {bundle}", _named(ray.available_resources())
                raise ValueError(
                    f"the Ray cluster has no room for {wanted} (free: {free}); end what runs there"
                ) from error
        half = {"num_cpus": 1, "num_gpus": 0.5 if on_gpu else 0}
        bundles = product(groups, range(devices))
        strategies = starmap(PlacementGroupSchedulingStrategy, bundles)
        yield [{**half, "scheduling_strategy": strategy} for strategy in strategies]


def _check_nodes(count: int, needed: dict[str, float]) -> None:
    """Refuses a cluster that is too small, so that nobody waits for what will never be there."""
    import ray

    def suffices(node: dict[str, float]) -> bool:
        return all(node.get(name, 0) >= amount for name, amount in needed.items())

    there = [_named(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    large = list(filter(suffices, there))
    if len(large) < count:
        raise ValueError(
            f"the Ray cluster has {len(large)} nodes with {needed}, {count} are needed "
            f"(its nodes: {there}); use fewer devices, or a larger cluster"
        )


def _named(resources: dict[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in resources.items() if name in ("CPU", "GPU")}
