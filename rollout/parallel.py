"""Tensor parallel: one engine over several processes that run the same requests, and what they exchange.

Every rank holds its heads, MLP columns and vocabulary rows (`rollout.model.sharding`), schedules and samples the same
way, and so never has to be told what the others do. The group's own time-out ends a wait for a rank that fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rollout.errors import RankError

_GRACE_SECONDS = 2.0  # for the other ranks to say in which stage they stopped


class TensorParallel:
    """This process's rank among `size`; of one, nothing is exchanged. All ranks call the same methods in one order."""

    def __init__(self, size: int, group: dist.ProcessGroup | None) -> None:
        """group: of `size` ranks, gloo for the CPU, NCCL for GPUs; None for one rank. ValueError where they differ."""
        if group is None and size != 1:
            raise ValueError(f"tensor_parallel_size={size} needs Engine(..., group=) of as many ranks")
        ranks = 1 if group is None else dist.get_world_size(group)
        if ranks != size:
            raise ValueError(f"tensor_parallel_size={size} but the group has {ranks} ranks; make them equal")
        self.size = size
        self.rank = 0 if group is None else dist.get_rank(group)
        self.failure: str | None = None
        self._group = group

    def sum(self, x: Tensor, stage: str) -> Tensor:
        """x summed over the ranks, in place."""
        if self.size > 1:
            self._exchange(stage, lambda: dist.all_reduce(x, group=self._group))
        return x

    def agree(self, values: list[int], device: torch.device, stage: str) -> list[int]:
        """The smallest of each value over the ranks; waits for all of them."""
        if self.size == 1:
            return values
        least = torch.tensor(values, dtype=torch.int64, device=device)
        self._exchange(stage, lambda: dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._group))
        return least.tolist()

    def embed(self, token_ids: Tensor, rows: Tensor) -> Tensor:
        """Embeddings [T, hidden] of int64 [T], of which this rank holds `rows`; the same bits as from all rows."""
        if self.size == 1:
            return F.embedding(token_ids, rows)
        at = token_ids - self.rank * len(rows)
        elsewhere = (at < 0) | (at >= len(rows))
        mine = F.embedding(at.masked_fill(elsewhere, 0), rows)
        return self.sum(mine.masked_fill_(elsewhere.unsqueeze(1), 0), "embedding")

    def join(self, columns: Tensor, width: int) -> Tensor:
        """[T, width] of all ranks' [T, columns], one after the other; what is past `width` is padding and left out."""
        if self.size == 1:
            return columns
        gathered = columns.new_empty((self.size, *columns.shape))
        if len(columns):  # none where a step ends no prompt
            parts = list(gathered.unbind(0))
            self._exchange("logits", lambda: dist.all_gather(parts, columns.contiguous(), group=self._group))
        return gathered.transpose(0, 1).reshape(len(columns), self.size * columns.shape[1])[:, :width]

    def check_same(self, what: str, value: str) -> None:
        """ValueError naming the ranks whose `value` is not rank 0's: they would not compute the same."""
        if self.size == 1:
            return
        values: list[Any] = [None] * self.size
        self._exchange(what, lambda: dist.all_gather_object(values, value, group=self._group))
        if others := [rank for rank, each in enumerate(values) if each != values[0]]:
            raise ValueError(f"{what} of tensor-parallel ranks {others} differs from rank 0's; start all ranks alike")

    # ---------------------------------------------------------------- failures

    def fail(self, error: BaseException) -> None:
        """This rank leaves the common order: tells the others, which will miss it, and refuses to go on."""
        if self.size > 1 and self.failure is None:
            self.failure = f"tensor-parallel rank {self.rank} failed: {type(error).__name__}: {error}"
            self._say(f"failed: {type(error).__name__}: {error}")

    def _exchange(self, stage: str, collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as error:  # also what torch.distributed raises for a time-out and a lost connection
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise
            self._say(f"waited in stage {stage!r}")
            self.failure = (
                f"tensor-parallel rank {self.rank} of {self.size} waited in stage {stage!r} in vain: "
                f"{self._others()}; start all ranks anew"
            )
            raise RankError(self.failure) from error

    def _say(self, what: str) -> None:
        try:
            self._store.set(self._key(self.rank), what)
        except RuntimeError:  # the store went with the process that hosts it; `_others` says so
            return

    def _others(self) -> str:
        """What the other ranks said, and who said nothing."""
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
            return f"ranks {missing} do not answer, and the rank that hosts the group's store is gone"
        return ", ".join(
            [f"rank {rank} {text}" for rank, text in said.items()] + [f"rank {r} is silent" for r in missing]
        )

    @property
    def _store(self) -> dist.Store:
        assert self._group is not None
        return self._group.get_group_store()

    def _key(self, rank: int) -> str:
        return f"memsaver/tensor-parallel/{rank}"
