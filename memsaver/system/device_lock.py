"""Lock each GPU across all processes of a user while memory is mapped or unmapped.

Copies do not take the lock. It is an ``flock`` on a file in a private folder. The kernel frees the
lock when its holder ends for any reason; the file stays, at a fixed size. Processes share the lock
only if they see the same folder (``XDG_RUNTIME_DIR``, else the temporary folder, else the user's
cache): another container, or another value of these variables, means another lock.
"""

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
_LONGEST_SLEEP_SECONDS = 0.001  # about the time that mapping takes

Lock = contextlib.AbstractContextManager[object]


@cache
def device_lock(device_key: str) -> Lock:
    """Return this process's lock object for a device; the CPU's mappings need no lock."""
    return contextlib.nullcontext() if device_key == "cpu" else DeviceLock(device_key)


@contextlib.contextmanager
def undone_under(lock: Lock) -> Iterator[contextlib.ExitStack]:
    """Yield an undo stack that unwinds under the lock if the body raises.

    The body empties the stack when it succeeds. If the lock cannot be acquired, the stack unwinds
    without it, because half an operation would be worse.
    """
    undo = contextlib.ExitStack()
    try:
        yield undo
    except BaseException as error:
        with held(), contextlib.ExitStack() as outer:
            if not isinstance(error, LockTimeout):  # a second wait would time out, too
                with contextlib.suppress(LockTimeout, BackendError):
                    outer.enter_context(lock)
            outer.enter_context(undo)
            raise


class DeviceLock:
    """Context manager that excludes other threads and processes; re-entrant in a thread.

    Entering raises ``LockTimeout``, which names the holder, after ``timeout`` seconds, and
    ``BackendError`` if the lock file cannot be used safely. A forked child does not hold the lock,
    even inside a ``with`` block of its parent.
    """

    def __init__(self, device_key: str, timeout: float = TIMEOUT_SECONDS) -> None:
        assert device_key and "/" not in device_key, device_key
        self._device_key, self._timeout = device_key, timeout
        # A lock file excludes other processes, but not other threads of this one, which share the
        # descriptor. So a thread first takes `_threads`, and only its holder touches the fields
        # below and the file. Other threads read `_thread` for a message, where it may be stale.
        self._threads = forkable(threading.RLock())
        self._thread = ""  # the name of the holding thread
        self._depth = 0
        self._fd = -1
        _locks.add(self)

    def __enter__(self) -> "DeviceLock":
        deadline = time.monotonic() + self._timeout
        if not self._threads.acquire(timeout=self._timeout):
            raise self._timed_out(f"thread {self._thread!r} of this process")
        try:
            if not self._depth:
                self._lock_file(deadline)
                self._thread = threading.current_thread().name
            self._depth += 1
        except BaseException:  # including an interrupt while waiting
            self._unlock()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        if self._depth:  # 0: entered before a fork, so the parent holds the lock
            self._depth -= 1
            self._unlock()

    def _unlock(self) -> None:
        try:
            if not self._depth and self._fd >= 0:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def after_fork(self) -> None:
        """Drop the lock in the child but keep the parent's.

        Closing the file does that; unlocking the shared file description would free both.
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
            os.pwrite(self._fd, b"%10d %.3f\n" % (os.getpid(), time.monotonic()), 0)

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
        self._close()  # a cleaner of /tmp removed the file: other processes lock its successor
        return self._try_file()

    def _holder(self) -> str:
        """Describe the process that locked the file last, and for how long it has held it."""
        try:
            pid, since = os.pread(self._fd, 64, 0).split()
            return f"{process_name(int(pid))} for {max(0.0, time.monotonic() - float(since)):.1f} s"
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
    """Return the private folder of the lock files, created on first use.

    Raise ``BackendError`` if it cannot be created, or if other users could have tampered with it.
    """
    folder = _place()
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        info = os.lstat(folder)
    except OSError as error:
        raise BackendError(
            f"cannot make the folder of the lock files: {error}; set XDG_RUNTIME_DIR"
        ) from error
    if stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077:
        return folder
    raise BackendError(
        f"{folder} is not safe for lock files: it must be a folder, not a link, of user "
        f"{os.geteuid()} with mode 700, but belongs to user {info.st_uid} with mode "
        f"{stat.S_IMODE(info.st_mode):o}; remove it, or set XDG_RUNTIME_DIR"
    )


def _place() -> Path:
    """Choose the lock folder, which is in the cache if another user owns the temporary one."""
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
