"""Errors that memsaver raises.

Every message names the cause and a remedy. No error exits the process.
"""

from collections.abc import Mapping


class MemSaverError(RuntimeError):
    """Base class of all errors of this package."""


class TagError(MemSaverError):
    """A tag is unknown, has a different content policy than requested, or lacks a given tensor."""


class StateError(MemSaverError):
    """An operation does not fit the state of a tag (paused, in use, undefined content)."""


class LeaseError(MemSaverError):
    """A lease blocks an operation, was refused, or has lost its owner."""


class LockTimeout(MemSaverError):
    """Another process or thread held the lock for mapping memory of the same GPU for too long."""


class CompilerError(MemSaverError):
    """A C or C++ compiler is missing or failed."""


class BackendError(MemSaverError):
    """The driver or the kernel refused a call; the message contains its name for the error."""


class OutOfMemory(MemSaverError, MemoryError):
    """Device memory, or the address space of a tag, is short. Nothing was changed.

    Args:
        message: Text that names the cause and a remedy.

    Attributes:
        requested_bytes: Bytes that the failed operation needed.
        missing_bytes: Additional bytes that would have been enough; 0 if the driver does not say.
        holders: Bytes by holder: tags, the page pool, and on a GPU torch and other processes. Empty
            if address space is short.
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
    """Host memory, for saved content or a buffer, is short. Nothing was changed.

    `holders` has no tags, only the bytes of saved content where these are known.
    """


def format_bytes(nbytes: int) -> str:
    """Format a number of bytes for people, such as ``"1.5 KiB"`` for 1536."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
