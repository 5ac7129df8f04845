"""A consensus that calls a hook at every moment of every stage: there a test raises, or kills."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from trainer_bridge.sync.agree import StoreConsensus, T

STAGES = ("prepare", "open", "write", "verify", "commit")
MOMENTS = ("before", "inside", "done", "said", "decided")
"""Of a stage on one rank. before, done: its step; an error there is one of the step. inside: called
by who runs the step. said: the store has this rank's answer. decided: this rank knows that all
ranks go on.
"""

KEY = b"of the tests' ranks"

Hook = Callable[[str, str], None]
"""(stage, moment)."""


class HookedConsensus(StoreConsensus):
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
        super().__init__(_HookedStore(store, self), rank, size, key=KEY, timeout=timeout)  # type: ignore[arg-type]
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
    """A store, with the moment in which a rank's answer is in it."""

    def __init__(self, store: dist.Store, consensus: HookedConsensus) -> None:
        self._store = store
        self._consensus = consensus

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)
        self._consensus.at("said")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)
