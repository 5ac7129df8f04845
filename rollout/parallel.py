"""Tensor parallelism: the collectives of an engine whose ranks all run the same requests.

Every rank has its own heads, MLP columns and vocabulary rows (`rollout.weights.params`). The first
rank tells the others of requests and steps (`rollout.engine.step_decisions`); all schedule and
sample identically. A wait for a rank that failed ends with the group's timeout.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.distributed_c10d import BroadcastOptions

from memsaver import StateError
from memsaver.memory import on_a_tag
from memsaver.ops.layout import round_up
from memsaver.system.plain import all_gather_plain, bytes_text, text_bytes
from rollout.errors import RankError
from rollout.ops.row_wise import add_parts
from rollout.process_group import host_group

_T = TypeVar("_T")
_GRACE_SECONDS = 2.0  # for the other ranks to post the stage in which they stopped
STAGING_BYTES = 32 << 20
# Memory of NCCL for the ranks of an engine, as measured with 2 and 4 H100 of one host, captured
# collectives included.
GROUP_BYTES = 906 << 20
_ALIGNMENT = 256  # bytes: alignment of NCCL's buffers


class TensorParallel:
    """A process's rank in a tensor-parallel engine, and its collectives.

    All ranks call the same methods in the same order. With one rank, nothing is exchanged.

    Attributes:
        exact: Whether partial sums are added in the order of the ranks. A sum of two has the same
            bits in any order.
    """

    def __init__(self, size: int, group: dist.ProcessGroup | None, *, exact: bool = False) -> None:
        """Join a group of `size` ranks, gloo for the CPU or NCCL for GPUs; None for one rank."""
        ranks = 1 if group is None else dist.get_world_size(group)
        if ranks != size:
            rule = f"needs Engine(..., group=) of as many ranks, got {ranks}; make them equal"
            raise ValueError(f"tensor_parallel_size={size} {rule}")
        self.size, self.exact = size, exact
        self.rank = 0 if group is None else dist.get_rank(group)
        self.failure: str | None = None
        self._group = group
        self._host = None if group is None else host_group(group)
        self._told: list[dist.Work] = []
        self._staging: Tensor | None = None

    def stage_captures(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the buffer on which collectives in captured graphs work, outside of every tag.

        NCCL registers the buffers of captured collectives with the other ranks, which would access
        a tag's old pages after a pause. `width` is the largest `width` of `join`.

        Raises:
            StateError: The buffer lies on a tag, because the caller is inside a region.
        """
        if self.size == 1:
            return
        row = (1 + self.size) * -(-width // self.size) * dtype.itemsize
        nbytes = round_up(max(STAGING_BYTES, row + _ALIGNMENT), _ALIGNMENT)
        self._staging = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if on_a_tag(self._staging):
            raise StateError(
                "cannot build a tensor-parallel engine inside a region; build it outside, its "
                "memory has its own tags"
            )

    def sum(self, x: Tensor, stage: str) -> Tensor:
        """Sum the ranks' partial sums `x` [T, hidden] in place, and return the sum."""
        if self.size > 2 and self.exact:
            self._exchange(stage, lambda: self._sum_in_order(x))
        elif self.size > 1:
            self._exchange(stage, lambda: self._sum(x))
        return x

    def agree(self, values: list[int], device: torch.device, stage: str) -> list[int]:
        """Return the minimum of each value over the ranks, once all ranks have called this."""
        if self.size == 1:
            return values
        least = torch.tensor(values, dtype=torch.int64, device=device)
        self._exchange(
            stage, lambda: dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._group)
        )
        return least.tolist()

    def tell(self, text: str, flags: Sequence[int]) -> None:
        """Send a text and flags from the first rank to the others, without waiting for them."""
        parts = [text_bytes(text)] if text else []
        head = torch.tensor([sum(map(len, parts)), *flags])

        def send() -> None:
            # A rank that failed never receives; the collectives of the step tell of that.
            self._told = [work for work in self._told if not work.is_completed()]
            self._told += map(self._from_first, (head, *parts))

        self._exchange("decision", send)

    def hear(self, flags: int, seconds: float | None = None) -> tuple[str, list[int]]:
        """Wait for a text and as many flags of the first rank; by default the group's seconds."""
        head = torch.empty(1 + flags, dtype=torch.int64)
        self._exchange("decision", lambda: self._from_first(head, seconds).wait())
        size, *given = head.tolist()
        content = torch.empty(size, dtype=torch.uint8)
        if size:
            self._exchange("decision", lambda: self._from_first(content).wait())
        return bytes_text(content), given

    def _from_first(self, tensor: Tensor, seconds: float | None = None) -> dist.Work:
        assert self._host is not None
        options = BroadcastOptions()
        if seconds is not None:
            options.timeout = timedelta(seconds=seconds)
        return self._host.broadcast([tensor], options)

    def agree_ready(
        self, reason: str | None, kept: bool, device: torch.device
    ) -> tuple[str | None, bool]:
        """Return why a rank cannot generate, or None, and whether all KV caches are intact.

        `reason` and `kept` are this rank's answers. The group communicates on `device`. A RankError
        says that a rank has failed.
        """
        self.check_others()  # instead of waiting for the group's timeout
        mine = [self.size if reason is None else self.rank, int(kept)]
        first, whole = self.agree(mine, device, "readiness")
        return f"tensor-parallel rank {first} cannot" if first < self.size else None, bool(whole)

    def embed(self, token_ids: Tensor, rows: Tensor) -> Tensor:
        """Return the embeddings [T, hidden] of int64 ids [T], bitwise as from one whole table.

        `rows` are this rank's rows of the table, [vocab / size, hidden].
        """
        if self.size == 1:
            return F.embedding(token_ids, rows)
        at = token_ids - self.rank * len(rows)
        elsewhere = (at < 0) | (at >= len(rows))
        mine = F.embedding(at.masked_fill(elsewhere, 0), rows)
        mine.masked_fill_(elsewhere.unsqueeze(1), 0)
        self._exchange("embedding", lambda: self._sum(mine))  # zeros and one row: no rounding
        return mine

    def join(self, columns: Tensor, width: int) -> Tensor:
        """Concatenate all ranks' [T, columns] to [T, width], without the padding past `width`."""
        if self.size == 1:
            return columns
        gathered = columns.new_empty((self.size, *columns.shape))
        if len(columns):  # a step that completes no prompt has no rows
            self._exchange("logits", lambda: self._gather(columns.contiguous(), gathered))
        return gathered.transpose(0, 1).flatten(1)[:, :width]

    def _sum(self, x: Tensor) -> None:
        if not _capturing():
            dist.all_reduce(x, group=self._group)
            return
        assert self._staging is not None
        staged = self._staging.view(x.dtype)
        for part in x.view(-1).split(len(staged)):
            mine = staged[: len(part)].copy_(part)
            dist.all_reduce(mine, group=self._group)
            part.copy_(mine)

    def _sum_in_order(self, x: Tensor) -> None:
        most = STAGING_BYTES // (self.size * x.shape[1] * x.itemsize)
        for part in x.split(max(1, most)):
            gathered = part.new_empty((self.size, *part.shape))
            self._gather(part, gathered)
            part.copy_(add_parts(gathered.unbind(0)))

    def _gather(self, columns: Tensor, gathered: Tensor) -> None:
        """Gather [T, columns] of every rank into [ranks, T, columns]."""
        if not _capturing():
            dist.all_gather(list(gathered.unbind(0)), columns, group=self._group)
            return
        assert self._staging is not None
        staged, width = self._staging.view(columns.dtype), columns.shape[1]
        aligned = _ALIGNMENT // columns.itemsize
        most = (len(staged) - aligned) // (width * (1 + self.size))
        for at in range(0, len(columns), most):
            part = columns[at : at + most]
            mine = staged[: part.numel()].view(part.shape).copy_(part)
            theirs = staged[round_up(part.numel(), aligned) :][: self.size * part.numel()]
            dist.all_gather_into_tensor(theirs.view(-1, width), mine, group=self._group)
            gathered[:, at : at + most].copy_(theirs.view(self.size, *part.shape))

    def check_same(self, subject: str, value: str) -> None:
        """Raise a ValueError naming the ranks whose value differs from rank 0's.

        Such ranks would not compute the same results. `subject` names the value in the message.
        """
        if self.size == 1:
            return
        values = self._exchange(subject, lambda: all_gather_plain(value, self._group))
        if differing := [rank for rank, theirs in enumerate(values) if theirs != values[0]]:
            raise ValueError(
                f"{subject} of tensor-parallel ranks {differing} differs from rank 0's; give all "
                f"ranks the same"
            )

    # ---------------------------------------------------------------- failures

    def check_others(self) -> None:
        """Raise a RankError if another rank has posted that it failed or gave up waiting."""
        peers = [rank for rank in range(self.size) if rank != self.rank]
        if any(self._store.check([self._key(rank)]) for rank in peers):
            raise self._left("cannot continue alone")

    def fail(self, error: BaseException) -> None:
        """Record that this rank failed, and post it for the other ranks, which will wait for it."""
        if self.size > 1 and self.failure is None:
            text = f"failed: {type(error).__name__}: {error}"
            self.failure = f"tensor-parallel rank {self.rank} {text}"
            self._post(text)

    def _exchange(self, stage: str, collective: Callable[[], _T]) -> _T:
        try:
            return collective()
        # torch.distributed raises its subclasses for a timeout and for a lost connection
        except RuntimeError as error:
            if _capturing():
                raise
            self._post(f"waited in stage {stage!r}")
            raise self._left(f"gave up waiting in stage {stage!r}") from error

    def _left(self, why: str) -> RankError:
        """Record that this rank goes on no longer, and return the error."""
        place, states = f"rank {self.rank} of {self.size}", self._peer_states()
        self.failure = f"tensor-parallel {place} {why}: {states}; restart all ranks"
        return RankError(self.failure)

    def _post(self, text: str) -> None:
        try:
            self._store.set(self._key(self.rank), text)
        except RuntimeError:  # the process that hosts the store is gone; `_peer_states` reports it
            return

    def _peer_states(self) -> str:
        """Describe the other ranks: the text that each has posted, or that it is silent."""
        posted: dict[int, str] = {}
        missing = [rank for rank in range(self.size) if rank != self.rank]
        end = time.monotonic() + _GRACE_SECONDS
        try:
            while missing and time.monotonic() < end:
                for rank in missing:
                    if self._store.check([self._key(rank)]):
                        posted[rank] = self._store.get(self._key(rank)).decode()
                missing = [rank for rank in missing if rank not in posted]
                time.sleep(0.05)
        except RuntimeError:
            return (
                f"ranks {missing} do not answer, and the rank that hosts the group's store is gone"
            )
        return ", ".join(
            [f"rank {rank} {text}" for rank, text in posted.items()]
            + [f"rank {rank} is silent" for rank in missing]
        )

    @property
    def _store(self) -> dist.Store:
        assert self._group is not None
        return self._group.get_group_store()

    def _key(self, rank: int) -> str:
        return f"memsaver/tensor-parallel/{rank}"


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
