"""A lock of each GPU over all processes of a user: mapping and unmapping wait for each other,
copies do not.

The lock is ``flock`` on a file in a private folder. The kernel frees it when its holder ends,
however that happens; the file itself stays, at a fixed size. Processes meet only where they see the
same folder (``XDG_RUNTIME_DIR``, else the temporary folder, else the user's cache): another
container, or another of these variables, is another lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from memsaver.errors import BackendError, LockTimeout
from memsaver.system.files import cache_dir
from memsaver.system.gpu_processes import process_name
from memsaver.system.interrupts import deliver, held
from memsaver.system.threads import forkable

TIMEOUT_SECONDS = 30.0
_FIRST_SLEEP_SECONDS = 50e-6
_LONGEST_SLEEP_SECONDS = 0.001  # mapping takes about as long

Lock = contextlib.AbstractContextManager[object]


@cache
def device_lock(device_key: str) -> Lock:
    """Return the lock of a backend's device, one in this process.

    ``"cpu"`` has none: its mappings are the process's own.
    """
    return contextlib.nullcontext() if device_key == "cpu" else DeviceLock(device_key)


@contextlib.contextmanager
def undone_under(lock: Lock) -> Iterator[contextlib.ExitStack]:
    """Yield a stack that unwinds under the lock where the body raises; the body empties it where it
    ends.

    The stack unwinds without the lock where that cannot be had: half an operation would be worse.
    """
    undo = contextlib.ExitStack()
    try:
        yield undo
    except BaseException as error:
        with held(), contextlib.ExitStack() as outer:
            if not isinstance(error, LockTimeout):  # it would not be had a second time
                with contextlib.suppress(LockTimeout, BackendError):
                    outer.enter_context(lock)
            outer.enter_context(undo)
            raise


class DeviceLock:
    """Context manager over threads and processes; re-entrant in a thread.

    Entering raises ``LockTimeout``, which names the holder, after ``timeout`` seconds, and
    ``BackendError`` where the lock file cannot be used safely. A forked child holds nothing, also
    inside a ``with`` of its parent.
    """

    def __init__(self, device_key: str, timeout: float = TIMEOUT_SECONDS) -> None:
        assert device_key and "/" not in device_key, device_key
        self._device_key, self._timeout = device_key, timeout
        self._threads = forkable(threading.RLock())
        self._thread = ""  # the name of the thread that holds it
        self._depth = 0
        self._fd = -1
        _locks.add(self)

    def __enter__(self) -> DeviceLock:
        deadline = time.monotonic() + self._timeout
        if not self._threads.acquire(timeout=self._timeout):
            raise self._timed_out(f"thread {self._thread!r} of this process")
        try:
            if not self._depth:
                self._lock_file(deadline)
                self._thread = threading.current_thread().name
            self._depth += 1
        except BaseException:  # also an interrupt while waiting
            self._unlock()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        if self._depth:  # 0: entered before a fork, the lock stayed with the parent
            self._depth -= 1
            self._unlock()

    def _unlock(self) -> None:
        try:
            if not self._depth and self._fd >= 0:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def after_fork(self) -> None:
        """Hold nothing in the child: closing the file leaves the parent's lock alone, unlocking
        the shared file description would not.
        """
        self._depth = 0
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _lock_file(self, deadline: float) -> None:
        sleep = _FIRST_SLEEP_SECONDS
        while not self._try_file():
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._timed_out(self._holder())
            deliver()
            time.sleep(min(sleep, left))
            sleep = min(2 * sleep, _LONGEST_SLEEP_SECONDS)
        with contextlib.suppress(OSError):  # a full disk costs the name in a message, not the lock
            os.pwrite(self._fd, b"%10d %.3f\n" % (os.getpid(), time.time()), 0)

    def _try_file(self) -> bool:
        try:
            if self._fd < 0:
                path = lock_folder() / f"{self._device_key}.lock"
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                self._fd = os.open(path, flags, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise BackendError(
                f"cannot use the lock file of {self._device_key}: {error}; remove it, or set "
                "XDG_RUNTIME_DIR"
            ) from error
        if os.fstat(self._fd).st_nlink:
            return True
        self._close()  # a cleaner of /tmp removed the file: everyone else locks its successor
        return self._try_file()

    def _holder(self) -> str:
        """Return who locked the file last, and for how long."""
        try:
            pid, since = os.pread(self._fd, 64, 0).split()
            return f"{process_name(int(pid))} for {max(0.0, time.time() - float(since)):.1f} s"
        except (OSError, ValueError):
            return "a process that has not written its name yet"

    def _timed_out(self, holder: str) -> LockTimeout:
        return LockTimeout(
            f"the memory lock of {self._device_key} is held by {holder}; waited "
            f"{self._timeout:.1f} s. Wait until it is done, or end it (that frees the lock)"
        )


_locks: weakref.WeakSet[DeviceLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in _locks:
        lock.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def lock_folder() -> Path:
    """Return the private folder of the lock files, made on first use.

    Raises:
        BackendError: Others could have prepared the folder, or it cannot be made.
    """
    folder = _place()
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        found = os.lstat(folder)
    except OSError as error:
        raise BackendError(
            f"cannot make the folder of the lock files: {error}; set XDG_RUNTIME_DIR"
        ) from error
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
        return folder
    raise BackendError(
        f"{folder} is not safe for lock files: it must be a folder, not a link, of user "
        f"{os.geteuid()} with mode 700, and is user {found.st_uid}'s with mode "
        f"{stat.S_IMODE(found.st_mode):o}; remove it, or set XDG_RUNTIME_DIR"
    )


def _place() -> Path:
    """Anybody can take a name in the temporary folder: then the user's cache serves."""
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    writable = os.access(runtime, os.W_OK | os.X_OK)
    if runtime.is_absolute() and _owner(runtime) == os.geteuid() and writable:
        return runtime / "memsaver"
    folder = Path(tempfile.gettempdir()) / f"memsaver-{os.geteuid()}"
    return folder if _owner(folder) in (None, os.geteuid()) else cache_dir() / "locks"


def _owner(path: Path) -> int | None:
    try:
        return os.lstat(path).st_uid
    except OSError:
        return None
