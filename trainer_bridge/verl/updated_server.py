"""What verl's servers of an engine share: weight updates, and their failures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from memsaver import StateError

Outcome = tuple[int | None, str | None]
"""The version that a process serves, or None and the reason."""


class UpdatedServer(ABC):
    """Server that refuses requests after a failed weight update."""

    _undefined: str | None = None

    @abstractmethod
    async def serve_update(self) -> Sequence[Outcome]:
        """Let all processes that have weights serve one update, and return their outcomes."""

    @abstractmethod
    async def clear_kv_cache(self) -> None:
        """Forget keys and values of earlier weights."""

    @abstractmethod
    async def set_global_steps(self, global_steps: int) -> None:
        """Set the number of the weights, which answers report."""

    async def update_in_place(self, version: int) -> None:
        """Let the engine serve one update, then forget keys and values of the old weights.

        A StateError says that a process does not serve `version` afterwards. From any error on,
        requests are refused until an update succeeds.
        """
        try:
            outcomes = await self.serve_update()
            if wrong := [outcome for outcome in outcomes if outcome[0] != version]:
                raise StateError(
                    f"the engine serves (version, reason) {wrong}, not version {version}"
                )
            await self.clear_kv_cache()
        except BaseException as error:
            self._undefined = f"the last weight update failed: {type(error).__name__}: {error}"
            raise
        self._undefined = None
        await self.set_global_steps(version)

    def require_defined(self) -> None:
        """Raise a StateError if the last weight update failed."""
        if self._undefined is not None:
            raise StateError(f"cannot generate: {self._undefined}")
