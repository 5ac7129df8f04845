"""An agreement with hooks at every moment of every stage, in which tests raise errors or kill."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from memsaver.ops.rows import RowCopies
from trainer_bridge.sync.agree import Agreement, T
from trainer_bridge.sync.writer import LowRank, Writer

STAGES = ("prepare", "open", "write", "verify", "commit")
MOMENTS = ("before", "inside", "done", "said", "decided")
"""Moments of a stage on one rank.

`before` and `done` are before and after its step; an error raised there is an error of the step.
`inside` is called by the code that runs the step. At `said` the rank is about to tell the others,
and at `decided` it knows that all ranks continue.
"""

Hook = Callable[[str, str], None]
"""Called with (stage, moment)."""


def joined(store: dist.Store, rank: int, size: int, timeout: float = 60.0) -> Agreement:
    """Create the agreement of ranks (processes or threads) that share a store."""
    return Agreement(gloo(store, rank, size), dist.PrefixStore("came", store), timeout=timeout)


def gloo(store: dist.Store, rank: int, size: int) -> Any:
    patience = timedelta(seconds=60)
    return dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, patience)  # type: ignore[attr-defined]


class HookedAgreement(Agreement):
    """An agreement that calls `hook`, which may be replaced at any time.

    Attributes:
        hook: The hook; None for none.
        stage: The running stage, or the last one.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        timeout: float = 60.0,
        hook: Hook | None = None,
    ) -> None:
        super().__init__(gloo(store, rank, size), _HookedStore(store, self), timeout=timeout)  # type: ignore[arg-type]
        self.hook = hook
        self.stage = ""

    def at(self, moment: str) -> None:
        if self.hook is not None:
            self.hook(self.stage, moment)

    def agree(self, stage: str, step: Callable[[], T]) -> list[T]:
        def hooked() -> T:
            self.at("before")
            value = step()
            self.at("done")
            return value

        self.stage = stage
        values = super().agree(stage, hooked)
        self.at("decided")
        return values


class _HookedStore:
    """A store with the moment `said`, in which the arrival of a rank is recorded."""

    def __init__(self, store: dist.Store, agreement: HookedAgreement) -> None:
        self._store = store
        self._agreement = agreement

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)
        self._agreement.at("said")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def half_written(act: Callable[[], None]) -> contextlib.AbstractContextManager[object]:
    """Call `act` in the middle of each sync's writing inside the block.

    At that moment the rank has begun to write its first target.
    """
    write, start = Writer.start, RowCopies.start

    def hooked(self: Writer, pages: Mapping[int, Tensor], derived: Mapping[str, LowRank]) -> None:
        begun: list[RowCopies] = []

        def started(table: RowCopies, *args: Any) -> None:
            start(table, *args)
            begun.append(table)
            if len(begun) == 1:
                act()

        with mock.patch.object(RowCopies, "start", started):
            write(self, pages, derived)

    return mock.patch.object(Writer, "start", hooked)
