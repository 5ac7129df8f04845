"""Tensor parallel: one engine over several processes that run the same requests, and what they
exchange.

Every rank holds its heads, MLP columns and vocabulary rows (`rollout.weights.params`), schedules
and samples the same way, and so never has to be told what the others do. The group's own time-out
ends a wait for a rank that fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from memsaver import StateError
from memsaver.memory import on_a_tag
from memsaver.ops.layout import round_up
from memsaver.system.plain import all_gather_plain
from rollout.errors import RankError

_GRACE_SECONDS = 2.0  # for the other ranks to say in which stage they stopped
_STAGING_BYTES = 32 << 20
_ALIGNMENT = 256  # bytes: of what NCCL reads and writes


class TensorParallel:
    """This process's rank among `size`; of one, nothing is exchanged. All ranks call the same
    methods in one order.
    """

    def __init__(self, size: int, group: dist.ProcessGroup | None) -> None:
        """group: of `size` ranks, gloo for the CPU, NCCL for GPUs; None for one rank. ValueError
        where they differ.
        """
        ranks = 1 if group is None else dist.get_world_size(group)
        if ranks != size:
            rule = f"needs Engine(..., group=) of as many ranks, got {ranks}; make them equal"
            raise ValueError(f"tensor_parallel_size={size} {rule}")
        self.size = size
        self.rank = 0 if group is None else dist.get_rank(group)
        self.failure: str | None = None
        self._group = group
        self._staging: Tensor | None = None

    def stage_captures(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """Prepares for the capture of graphs: their collectives then work on memory of this object,
        outside of every tag. NCCL registers the buffers of captured collectives with the other
        ranks, who would use a tag's old pages after a pause. width: of `join`.
        """
        if self.size == 1:
            return
        row = (1 + self.size) * -(-width // self.size) * dtype.itemsize
        nbytes = round_up(max(_STAGING_BYTES, row + _ALIGNMENT), _ALIGNMENT)
        self._staging = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if on_a_tag(self._staging):
            raise StateError(
                "a tensor-parallel engine is being made inside a region; make it outside, it has "
                "tags of its own"
            )

    def sum(self, x: Tensor, stage: str) -> Tensor:
        """x summed over the ranks, in place."""
        if self.size > 1:
            self._exchange(stage, lambda: self._sum(x))
        return x

    def agree(self, values: list[int], device: torch.device, stage: str) -> list[int]:
        """The smallest of each value over the ranks; waits for all of them."""
        if self.size == 1:
            return values
        least = torch.tensor(values, dtype=torch.int64, device=device)
        self._exchange(
            stage, lambda: dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._group)
        )
        return least.tolist()

    def agree_ready(
        self, reason: str | None, kept: bool, device: torch.device
    ) -> tuple[str | None, bool]:
        """Returns why one of the ranks cannot generate, and whether all have kept their KV cache.

        reason: why this rank cannot; None where it can.
        """
        mine = [self.size if reason is None else self.rank, int(kept)]
        first, whole = self.agree(mine, device, "what others discarded")
        return f"tensor-parallel rank {first} cannot" if first < self.size else None, bool(whole)

    def embed(self, token_ids: Tensor, rows: Tensor) -> Tensor:
        """Embeddings [T, hidden] of int64 [T], of which this rank holds `rows`; the same bits as
        from all rows.
        """
        if self.size == 1:
            return F.embedding(token_ids, rows)
        at = token_ids - self.rank * len(rows)
        elsewhere = (at < 0) | (at >= len(rows))
        mine = F.embedding(at.masked_fill(elsewhere, 0), rows)
        return self.sum(mine.masked_fill_(elsewhere.unsqueeze(1), 0), "embedding")

    def join(self, columns: Tensor, width: int) -> Tensor:
        """[T, width] of all ranks' [T, columns], one after the other; what is past `width` is
        padding and left out.
        """
        if self.size == 1:
            return columns
        gathered = columns.new_empty((self.size, *columns.shape))
        if len(columns):  # none where a step ends no prompt
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

    def _gather(self, columns: Tensor, gathered: Tensor) -> None:
        """[T, columns] of every rank into [ranks, T, columns]."""
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

    def check_same(self, what: str, value: str) -> None:
        """ValueError naming the ranks whose `value` is not rank 0's: they would not compute the
        same.
        """
        if self.size == 1:
            return
        values: list[Any] = []
        self._exchange(what, lambda: values.extend(all_gather_plain(value, self._group)))
        if others := [rank for rank, each in enumerate(values) if each != values[0]]:
            raise ValueError(
                f"{what} of tensor-parallel ranks {others} differs from rank 0's; give all "
                f"ranks the same"
            )

    # ---------------------------------------------------------------- failures

    def check_others(self) -> None:
        """RankError where another rank has said by now that it takes no further part."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        if any(self._store.check([self._key(rank)]) for rank in others):
            self.failure = (
                f"tensor-parallel rank {self.rank} of {self.size} goes on alone: "
                f"{self._others()}; start all ranks anew"
            )
            raise RankError(self.failure)

    def fail(self, error: BaseException) -> None:
        """This rank leaves the common order: tells the others, which will miss it, and refuses to
        go on.
        """
        if self.size > 1 and self.failure is None:
            text = f"failed: {type(error).__name__}: {error}"
            self.failure = f"tensor-parallel rank {self.rank} {text}"
            self._say(text)

    def _exchange(self, stage: str, collective: Callable[[], object]) -> None:
        try:
            collective()
        # also what torch.distributed raises for a time-out and a lost connection
        except RuntimeError as error:
            if _capturing():
                raise
            self._say(f"waited in stage {stage!r}")
            self.failure = (
                f"tensor-parallel rank {self.rank} of {self.size} waited in stage {stage!r} "
                f"in vain: {self._others()}; start all ranks anew"
            )
            raise RankError(self.failure) from error

    def _say(self, what: str) -> None:
        try:
            self._store.set(self._key(self.rank), what)
        except RuntimeError:  # the store went with the process that hosts it; `_others` says so
            return

    def _others(self) -> str:
        """Returns what the other ranks said, and who said nothing."""
        said: dict[int, str] = {}
        missing = [rank for rank in range(self.size) if rank != self.rank]
        end = time.monotonic() + _GRACE_SECONDS
        try:
            while missing and time.monotonic() < end:
                for rank in missing:
                    if self._store.check([self._key(rank)]):
                        said[rank] = self._store.get(self._key(rank)).decode()
                missing = [rank for rank in missing if rank not in said]
                time.sleep(0.05)
        except RuntimeError:
            return (
                f"ranks {missing} do not answer, and the rank that hosts the group's store is gone"
            )
        return ", ".join(
            [f"rank {rank} {text}" for rank, text in said.items()]
            + [f"rank {r} is silent" for r in missing]
        )

    @property
    def _store(self) -> dist.Store:
        assert self._group is not None
        return self._group.get_group_store()

    def _key(self, rank: int) -> str:
        return f"memsaver/tensor-parallel/{rank}"


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
