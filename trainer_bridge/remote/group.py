"""Blocking handles on Ray actors that are called alike, and the cluster they run on, with one
reservation for each device of a run; ray is imported when first needed.
"""

import contextlib
import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product, starmap
from typing import Any, Self

from memsaver.system.interrupts import held
from rollout.errors import RankError
from trainer_bridge.errors import ActorDied, ActorTimeout, OtherRankFailed, RankFailed, SyncError

# For the other ranks to answer, too, when one has failed: it may be by another's fault.
_GRACE_SECONDS = 5.0
_ECHOES = (SyncError, RankError, OtherRankFailed)  # what a rank raises because of another


# Each rank has an answer of its own, or its own peer: a group of several refuses them.
ONE_RANK = {
    "alias_update", "as_peer", "begin_update", "commit_update", "drain_events", "hand_over_to",
    "report", "take_usage", "verify_update", "weight_layout", "write_update",
}  # fmt: skip


class RemoteActor:
    """A handle on one Ray actor (an `ActorBase`), and what to call it in an error."""

    def __init__(self, handle: Any, name: str) -> None:
        self.handle = handle
        self.name = name

    def start(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call the method; return a reference to the answer."""
        return self.handle.call.remote(method, *args, **kwargs)

    def answer(self, reference: Any, method: str) -> Any:
        """Wait for the answer, or what the method raised; ActorDied where there will be none."""
        import ray

        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise error.cause from error
            raise
        except ray.exceptions.RayActorError as error:
            if error.actor_init_failed:  # what the constructor raised is the last line of the text
                reason = f"could not be made ({str(error).strip().splitlines()[-1].strip()})"
                raise ActorDied(self.name, "__init__", reason) from error
            raise ActorDied(self.name, method, "died") from error


class RemoteGroup:
    """Actors that are called alike, rank by rank; a call blocks until all have answered. Often it
    is one actor. Their public methods are the group's.

    What all ranks raise, or the only one, is raised here; `RankFailed` names the rank where others
    did not raise it. `ActorDied` and `ActorTimeout` name the actor and the method; nobody waits for
    the others when one has died.
    """

    def __init__(self, ranks: Sequence[RemoteActor], timeout: float) -> None:
        """timeout: seconds for one call."""
        self.ranks = tuple(ranks)
        self.timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a public method of the actors, which runs on every rank; rank 0 answers."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name in ONE_RANK and len(self.ranks) > 1:
            raise ValueError(f"{name}() is of one rank, these are {self.name}; ask one of each()")
        return functools.partial(self.call, name)

    @property
    def name(self) -> str:
        return ", ".join(rank.name for rank in self.ranks)

    def each(self) -> list[Self]:
        """Return every rank as a group of its own."""
        return [type(self)([rank], self.timeout) for rank in self.ranks]

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call the method on every rank; return rank 0's answer, which is everybody's."""
        return self.call_all(method, *args, **kwargs)[0]

    def call_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call the method on every rank; return all answers, by rank."""
        if len(self.ranks) > 1:
            args, kwargs = _stored_once(args, kwargs)
        return self._gather(method, [rank.start(method, *args, **kwargs) for rank in self.ranks])

    def call_each(self, method: str, args: Sequence[tuple[Any, ...] | None]) -> list[Any]:
        """Call each rank with its own arguments; None is not called, and its answer is None."""
        pairs = zip(self.ranks, args, strict=True)
        return self._gather(
            method, [None if mine is None else rank.start(method, *mine) for rank, mine in pairs]
        )

    def _gather(self, method: str, references: Sequence[Any]) -> list[Any]:
        import ray

        waiting = {
            reference: rank for rank, reference in enumerate(references) if reference is not None
        }
        called = len(waiting)
        answers: list[Any] = [None] * len(references)
        failed: list[tuple[int, Exception]] = []
        end = time.monotonic() + self.timeout
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not done:
                break
            rank = waiting.pop(done[0])
            try:
                answers[rank] = self.ranks[rank].answer(done[0], method)
            except ActorDied:
                raise
            except Exception as error:  # another rank's may be the cause
                failed.append((rank, error))
                end = min(end, time.monotonic() + _GRACE_SECONDS)
        if failed:
            raise self._cause(method, failed, called)
        if waiting:
            silent = ", ".join(self.ranks[rank].name for rank in waiting.values())
            raise ActorTimeout(silent, method, f"gave no answer for {self.timeout:g} s")
        return answers

    def _cause(
        self, method: str, failed: Sequence[tuple[int, Exception]], called: int
    ) -> Exception:
        """Return the error to raise: the first that no other rank is to blame for."""
        rank, first = min(failed, key=lambda each: isinstance(each[1], _ECHOES))
        if len(failed) == called and len({(type(error), str(error)) for _, error in failed}) == 1:
            return first
        error = RankFailed(self.ranks[rank].name, method, first)
        error.__cause__ = first
        return error


def _stored_once(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return references in place of arguments: Ray would store them once for every call."""
    import ray

    return tuple(ray.put(arg) for arg in args), {name: ray.put(kwargs[name]) for name in kwargs}


START_SECONDS = 60.0  # for Ray to find room
_REPORTS = "RAY_USAGE_STATS_ENABLED"
# Of Ray's object store: batches and messages only, weights never pass through it.
_STORE_BYTES = 256 << 20
_ACTORS = 2  # a device: a trainer rank and an engine rank

Place = dict[str, Any]
"""Options of an actor: half of a device."""


@contextlib.contextmanager
def connected(address: str | None, devices: int) -> Iterator[None]:
    """Connect to a Ray cluster for the block, or start one for `devices`, and end it."""
    import ray

    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS")  # Ray sets it in a job
    options: dict[str, Any] = {"address": address}
    if address is None:
        cpus = max(_ACTORS * devices, cores())
        options = {"address": "local", "num_cpus": cpus, "object_store_memory": _STORE_BYTES}
        options["include_dashboard"] = False
    try:
        # A cluster whose start is interrupted leaves agents behind, which never learn it is gone.
        with contextlib.nullcontext() if address else held(), _process_kept():
            ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _process_kept() -> Iterator[None]:
    """Inside, a cluster that is started reports no use; ray.init's SIGTERM handler is undone."""
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
    """Return the number of cores of this process."""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def reserved(nodes: int, devices: int, on_gpu: bool) -> Iterator[list[Place]]:
    """Yield where to run the actors of each device, node by node; one bundle a device, so that its
    actors get the same GPU.

    Raises a ValueError where they are not free in time. A cluster that grows may have them then.
    """
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle: dict[str, float] = {"CPU": _ACTORS, "GPU": 1} if on_gpu else {"CPU": _ACTORS}
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
                there = ray.available_resources()
                free = {name: there.get(name, 0) for name in bundle}
                raise ValueError(
                    f"the Ray cluster has no room for {nodes} x {devices} x {bundle} (free: {free})"
                    "; end what runs there, or use fewer devices"
                ) from error
        half = {"num_cpus": 1, "num_gpus": 0.5 if on_gpu else 0}
        bundles = product(groups, range(devices))
        strategies = starmap(PlacementGroupSchedulingStrategy, bundles)
        yield [{**half, "scheduling_strategy": strategy} for strategy in strategies]
