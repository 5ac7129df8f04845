"""An agreement that calls a hook at every moment of every stage: there a test raises, or kills.
And something that happens in the middle of a sync's writing.
"""

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
"""Of a stage on one rank. before, done: its step; an error there is one of the step. inside: called
by who runs the step. said: this rank is about to tell the others. decided: this rank knows that all
ranks go on.
"""

Hook = Callable[[str, str], None]
"""(stage, moment)."""


def joined(store: dist.Store, rank: int, size: int, timeout: float = 60.0) -> Agreement:
    """The agreement of ranks that share a store: processes, or threads of this one."""
    return Agreement(gloo(store, rank, size), dist.PrefixStore("came", store), timeout=timeout)


def gloo(store: dist.Store, rank: int, size: int) -> Any:
    patience = timedelta(seconds=60)
    return dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, patience)  # type: ignore[attr-defined]


class HookedAgreement(Agreement):
    """`hook` may be set anew at any time. stage: the one that runs, or the last one."""

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
    """A store, with the moment in which it is noted there that a rank has come."""

    def __init__(self, store: dist.Store, agreement: HookedAgreement) -> None:
        self._store = store
        self._agreement = agreement

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)
        self._agreement.at("said")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def half_written(act: Callable[[], None]) -> contextlib.AbstractContextManager[object]:
    """In the block, `act` is called in the middle of every sync's writing: this rank has begun with
    the first of its targets.
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
