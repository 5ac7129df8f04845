"""Defines what memsaver raises.

Every message names the cause and the next step; nothing ever exits the process.
"""

from __future__ import annotations

from collections.abc import Mapping


class MemSaverError(RuntimeError):
    """Base of every error of this package."""


class TagError(MemSaverError):
    """Unknown tag, or a content policy that contradicts the one the tag has."""


class StateError(MemSaverError):
    """The operation does not fit the state of the tag (paused, in use, undefined content)."""


class LeaseError(MemSaverError):
    """A lease is in the way, was refused, or its owner is gone."""


class LockTimeout(MemSaverError):
    """Another process, or thread, that maps or unmaps memory of the same GPU took too long."""


class CompilerError(MemSaverError):
    """A C or C++ compiler is missing or failed."""


class BackendError(MemSaverError):
    """The driver or the kernel refused a call; the message carries its name for the error."""


class OutOfMemory(MemSaverError, MemoryError):
    """Memory is short; nothing was changed.

    Attributes:
        requested_bytes: what the failed operation needed.
        missing_bytes: how much more would have been enough (0 when the driver does not say).
        holders: who holds the rest, bytes by name (tags, and on a GPU torch's cache and other
            processes).
    """

    def __init__(
        self, message: str, requested_bytes: int, missing_bytes: int, holders: Mapping[str, int]
    ) -> None:
        super().__init__(message)
        self.requested_bytes = requested_bytes
        self.missing_bytes = missing_bytes
        self.holders = dict(holders)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.requested_bytes, self.missing_bytes, self.holders)


class HostMemoryError(OutOfMemory):
    """Host memory for saved content is short; nothing was changed."""


def format_bytes(nbytes: int) -> str:
    """``1536`` -> ``"1.5 KiB"``."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
