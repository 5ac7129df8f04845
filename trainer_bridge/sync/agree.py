"""Let ranks agree before each step that cannot be undone: all of them go on, or none does."""

import itertools
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
_GRACE_SECONDS = 5.0  # for ranks that are on their way when another one is lost
_PLAIN = Plain(  # what ranks of a sync say
    ParamSlice, ModuleTensor, Manifest, WeightLayout, WeightOffer, UpdateReceipt,
    Ticket, SourceShard,
)  # fmt: skip


class Agreement:
    """The ranks of a process group that make the same stages in the same order; one rank alone
    without a group.

    What a rank says goes to the others by gloo: a collective that ends on one rank was begun by
    all, so a rank that comes late never goes on alone. Nothing is unpickled. After a time-out, or
    when a rank is gone, the object is of no more use: the ranks do not know any longer what the
    others do.
    """

    def __init__(
        self,
        cpu: dist.ProcessGroup | None = None,
        store: dist.Store | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        timeout: float = 60.0,
    ) -> None:
        """Make the agreement of the ranks of `cpu`, on each of them.

        Args:
            cpu: A group that has gloo for CPU tensors.
            store: Of the group, this object's own (a PrefixStore): who has come is noted there.
            group: Of the same ranks, perhaps with a faster backend for GPUs; None: `cpu`.
            timeout: Seconds that a rank waits for the others in one stage.
        """
        self.rank, self.size = (0, 1) if cpu is None else (cpu.rank(), cpu.size())
        self.cpu, self.group, self.timeout = cpu, group or cpu, timeout
        self._store = store
        self._round = 0
        self._broken: str | None = None

    def agree(self, stage: str, step: Callable[[], T]) -> list[T]:
        """Run `step` here; return every rank's result, by rank, once it has succeeded on all.

        Raises:
            Exception: That of the step, if it failed here, after the others were told.
            SyncError: Names the stage, and the ranks that failed with their errors, or those that
                gave no answer in time.
        """
        if self.cpu is None:
            return [step()]
        if self._broken is not None:
            raise SyncError(stage, f"{self._broken}; restart all ranks")
        error: Exception | None = None
        said: tuple[bool, Any]
        try:
            said = True, step()
        except Exception as problem:  # the others are told, then it is raised
            error, said = problem, (False, f"{type(problem).__name__}: {problem}")
        try:
            answers = self._exchange(stage, _PLAIN.text((stage, *said)))
        except SyncError as problem:
            self._broken = str(problem)
            raise (problem if error is None else error) from problem
        if error is not None:
            raise error
        failed = [f"rank {rank}: {value}" for rank, (_, ok, value) in enumerate(answers) if not ok]
        if failed:
            raise SyncError(stage, "; ".join(failed))
        return [value for _, _, value in answers]

    def _exchange(self, stage: str, mine: str) -> list[tuple[str, bool, Any]]:
        assert self.cpu is not None and self._store is not None
        begun, self._round = time.monotonic(), self._round + 1
        try:
            self._store.set(str(self.rank), str(self._round))
            texts = gather_texts(mine, self.cpu, timeout=timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise SyncError(stage, self._who_is_missing(begun, error)) from error
        answers = [_PLAIN.value(text) for text in texts]
        if strays := sorted({said[0] for said in answers} - {stage}):
            raise SyncError(
                stage, f"other ranks are in stage {strays[0]!r}: all ranks must make the same calls"
            )
        return answers

    def _who_is_missing(self, begun: float, error: RuntimeError) -> str:
        """Say which ranks have not come to this round; those that are alive get time to come."""
        until = min(begun + self.timeout, time.monotonic() + _GRACE_SECONDS)
        try:
            while (missing := self._missing()) and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
        except RuntimeError as gone:
            return f"the ranks' store does not answer ({gone}); its process may have ended"
        if not missing:
            return f"the exchange broke off ({error})"
        names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        waited = time.monotonic() - begun
        return f"rank {self.rank} waited {waited:.1f} s, {names} did not come ({error})"

    def _missing(self) -> list[int]:
        assert self._store is not None
        come = (
            int(self._store.get(str(rank))) if self._store.check([str(rank)]) else 0
            for rank in range(self.size)
        )
        return [rank for rank, rounds in enumerate(come) if rounds < self._round]


def backend_of(group: dist.ProcessGroup, device_type: str) -> str | None:
    """Return what a group exchanges tensors of a device with: "gloo", "nccl"; None: nothing."""
    config = str(dist.get_backend_config(group))
    return dict(part.split(":", 1) for part in config.split(",")).get(device_type)


_made = itertools.count()


def group_agreement(group: dist.ProcessGroup | None, *, timeout: float = 60.0) -> Agreement:
    """Make the agreement of a process group's ranks, on all of them, each as often as the others.

    Args:
        group: None: this process alone. A group without gloo gets one beside it.
        timeout: See `Agreement`.
    """
    if group is None or dist.get_world_size(group) == 1:
        return Agreement(timeout=timeout)
    cpu = group
    if backend_of(group, "cpu") != "gloo":
        ranks = dist.get_process_group_ranks(group)
        made = dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=timeout))
        assert isinstance(made, dist.ProcessGroup)
        cpu = made
    store = dist.PrefixStore(f"memsaver/sync/{next(_made)}", group.get_group_store())
    return Agreement(cpu, store, group=group, timeout=timeout)
