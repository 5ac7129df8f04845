"""Agreement of ranks before each step that cannot be undone: all of them continue, or none."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from memsaver import Ticket
from memsaver.system.plain import Plain, gather_texts
from rollout.weights import (
    Manifest,
    ModuleTensor,
    ParamSlice,
    UpdateReceipt,
    WeightLayout,
    WeightOffer,
)
from trainer_bridge.errors import SyncError
from trainer_bridge.sync.shards import SourceShard

T = TypeVar("T")
_POLL_SECONDS = 0.02
_GRACE_SECONDS = 5.0  # time for live ranks to arrive after another one is lost
_PLAIN = Plain(  # types that ranks of a sync exchange
    ParamSlice, ModuleTensor, Manifest, WeightLayout, WeightOffer, UpdateReceipt,
    Ticket, SourceShard,
)  # fmt: skip


class Agreement:
    """The ranks of a process group that run the same stages in the same order.

    Without a group it is a single rank. Ranks exchange results by gloo. A collective that ends on
    one rank was begun by all, so a late rank never continues alone. Nothing is unpickled. After a
    timeout, or when a rank is lost, every further call fails, because the ranks no longer know each
    other's state.
    """

    def __init__(
        self,
        cpu: dist.ProcessGroup | None = None,
        store: dist.Store | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        timeout: float = 60.0,
    ) -> None:
        """Create the agreement; every rank of `cpu` does.

        `cpu` has gloo for CPU tensors; None is a single rank. `group` has the same ranks for
        tensors on GPUs, perhaps with a faster backend; it defaults to `cpu`. Ranks record in
        `store` that they have arrived. It is a store of the group for this object alone (a
        PrefixStore). `timeout` limits, in seconds, how long a rank waits for the others in one
        stage.
        """
        self.rank, self.size = (0, 1) if cpu is None else (cpu.rank(), cpu.size())
        self.cpu, self.group, self.timeout = cpu, group or cpu, timeout
        self._store = store
        self._round = 0
        self._broken: str | None = None

    def agree(self, stage: str, step: Callable[[], T]) -> list[T]:
        """Run a step on every rank, and return all results by rank once all ranks succeeded.

        All ranks name the same stage. The step's result must be plain data.

        Raises:
            Exception: The error of the step on this rank, raised after the other ranks know of it.
            SyncError: Other ranks failed, or did not answer in time. The text names the stage, the
                ranks and their errors.
        """
        if self.cpu is None:
            return [step()]
        if self._broken is not None:
            raise SyncError(stage, f"{self._broken}; restart all ranks")
        error: Exception | None = None
        outcome: tuple[bool, Any]
        try:
            outcome = True, step()
        except Exception as problem:  # raised below, after the other ranks know of it
            error, outcome = problem, (False, f"{type(problem).__name__}: {problem}")
        try:
            answers = self._exchange(stage, _PLAIN.text((stage, *outcome)))
        except SyncError as problem:
            self._broken = str(problem)
            raise (problem if error is None else error) from problem
        if error is not None:
            raise error
        failed = [f"rank {rank}: {value}" for rank, (_, ok, value) in enumerate(answers) if not ok]
        if failed:
            raise SyncError(stage, "; ".join(failed))
        return [value for _, _, value in answers]

    def _exchange(self, stage: str, text: str) -> list[tuple[str, bool, Any]]:
        assert self.cpu is not None and self._store is not None
        begun, self._round = time.monotonic(), self._round + 1
        try:
            self._store.set(str(self.rank), str(self._round))
            texts = gather_texts(text, self.cpu, timeout=timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise SyncError(stage, self._who_is_missing(begun, error)) from error
        answers = [_PLAIN.value(answer) for answer in texts]
        if strays := sorted({answer[0] for answer in answers} - {stage}):
            raise SyncError(
                stage, f"other ranks are in stage {strays[0]!r}: all ranks must make the same calls"
            )
        return answers

    def _who_is_missing(self, begun: float, error: RuntimeError) -> str:
        """Describe which ranks have not arrived in this round, giving live ranks time to arrive."""
        until = min(begun + self.timeout, time.monotonic() + _GRACE_SECONDS)
        try:
            while (missing := self._missing()) and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
        except RuntimeError as gone:
            return f"the ranks' store does not answer ({gone}); its process may have ended"
        if not missing:
            return f"the exchange failed ({error})"
        names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        waited = time.monotonic() - begun
        return f"rank {self.rank} waited {waited:.1f} s, {names} did not arrive ({error})"

    def _missing(self) -> list[int]:
        assert self._store is not None
        arrivals = (
            int(self._store.get(str(rank))) if self._store.check([str(rank)]) else 0
            for rank in range(self.size)
        )
        return [rank for rank, rounds in enumerate(arrivals) if rounds < self._round]


def group_backend(group: dist.ProcessGroup, device_type: str) -> str | None:
    """Return the backend ("gloo", "nccl") of a group for a device type; None without one."""
    config = str(dist.get_backend_config(group))
    return dict(part.split(":", 1) for part in config.split(",")).get(device_type)


def group_agreement(group: dist.ProcessGroup | None, *, timeout: float = 60.0) -> Agreement:
    """Create the agreement of a process group's ranks; a collective call.

    `group` is None for this process alone. If it lacks gloo, a second group of the same ranks is
    created.
    """
    if group is None or dist.get_world_size(group) == 1:
        return Agreement(timeout=timeout)
    cpu = group
    if group_backend(group, "cpu") != "gloo":
        ranks = dist.get_process_group_ranks(group)
        gloo = dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=timeout))
        assert isinstance(gloo, dist.ProcessGroup)
        cpu = gloo
    store = group.get_group_store()
    number = store.add(f"memsaver/agreements/{group.rank()}", 1)  # the same on all ranks
    store = dist.PrefixStore(f"memsaver/agreement/{number}", store)
    return Agreement(cpu, store, group=group, timeout=timeout)
