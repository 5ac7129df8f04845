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
from collections.abc import Iterator
from pathlib import Path

from memsaver.errors import BackendError, LockTimeout
from memsaver.native.shim import cache_dir
from memsaver.system.interrupts import deliver, held
from memsaver.system.machine import command_of, process_name

_FIRST_SLEEP_SECONDS = 50e-6
_LONGEST_SLEEP_SECONDS = 0.001  # mapping takes about as long
_COMMAND_BYTES = 80  # of the record in the file, padded, so that every record overwrites the last


def device_lock(
    device_key: str, timeout: float = 30.0
) -> contextlib.AbstractContextManager[object]:
    """The lock of a backend's device: none for ``"cpu"``, whose mappings are the process's own."""
    return contextlib.nullcontext() if device_key == "cpu" else DeviceLock(device_key, timeout)


@contextlib.contextmanager
def undone_under(
    lock: contextlib.AbstractContextManager[object],
) -> Iterator[contextlib.ExitStack]:
    """Yield what unwinds under the lock where the body raises; the body empties it where it ends.

    It unwinds without the lock where that cannot be had: half an operation would be worse.
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
    """Context manager; re-entrant in a thread, and shared by all instances of one device in a
    process.

    Entering raises ``LockTimeout``, which names the holder, after ``timeout`` seconds, and
    ``BackendError`` when the lock file cannot be used safely. A forked child holds nothing, also
    inside a ``with`` of its parent.
    """

    def __init__(self, device_key: str, timeout: float = 30.0) -> None:
        if not 0 <= timeout <= threading.TIMEOUT_MAX:
            raise ValueError(
                f"timeout={timeout} must be from 0 to {threading.TIMEOUT_MAX:.0f} seconds"
            )
        assert device_key and "/" not in device_key, device_key
        self.device_key = device_key
        self.timeout = timeout
        self._shared = _SHARED.setdefault(device_key, _ProcessLock(device_key))

    def __enter__(self) -> DeviceLock:
        self._shared.acquire(self.timeout)
        return self

    def __exit__(self, *exc: object) -> None:
        self._shared.release()


class _ProcessLock:
    """This process's end of one device's lock: a lock among its threads, then the file."""

    def __init__(self, device_key: str) -> None:
        self._device_key = device_key
        self._fd = -1
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._threads = threading.Lock()
        self._owner: int | None = None  # the thread that holds it
        self._depth = 0
        self._record = b""  # who we are, in front of the time

    def after_fork(self) -> None:
        """Starts afresh in the child: closing leaves the parent's lock alone; unlocking the shared
        file description would not.
        """
        self._close()
        self._start_afresh()

    def acquire(self, timeout: float) -> None:
        thread = threading.get_ident()
        if self._owner == thread:
            self._depth += 1
            return
        deadline = time.monotonic() + timeout
        if not self._threads.acquire(timeout=timeout):
            raise LockTimeout(self._explain(timeout))
        try:
            self._lock_file(deadline, timeout)
            self._owner, self._depth = thread, 1
        except BaseException:  # also an interrupt while waiting
            self._owner = None
            self._unlock()
            raise

    def release(self) -> None:
        if self._owner != threading.get_ident():
            return  # entered before a fork: the lock stayed with the parent
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._unlock()

    def _unlock(self) -> None:
        try:
            if self._fd >= 0:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def _lock_file(self, deadline: float, timeout: float) -> None:
        sleep = _FIRST_SLEEP_SECONDS
        while not self._try_file():
            left = deadline - time.monotonic()
            if left <= 0:
                raise LockTimeout(self._explain(timeout))
            deliver()
            time.sleep(min(sleep, left))
            sleep = min(2 * sleep, _LONGEST_SLEEP_SECONDS)
        with contextlib.suppress(OSError):  # a full disk costs the name in a message, not the lock
            os.pwrite(self._fd, self._record + b"%.3f\n" % time.time(), 0)

    def _try_file(self) -> bool:
        if self._fd < 0:
            self._open()
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise BackendError(
                f"cannot lock the file of {self._device_key}: {error}; set XDG_RUNTIME_DIR"
            ) from error
        if os.fstat(self._fd).st_nlink:
            return True
        self._close()  # a cleaner of /tmp removed the file: everyone else locks its successor
        return self._try_file()

    def _open(self) -> None:
        path = lock_folder() / f"{self._device_key}.lock"
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BackendError(
                f"cannot open the lock file of {self._device_key}: {error}; remove {path}"
            ) from error
        command = command_of(os.getpid()).encode()[:_COMMAND_BYTES]
        self._record = b"%10d %-*s " % (os.getpid(), _COMMAND_BYTES, command)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _explain(self, timeout: float) -> str:
        holder, command, since = self._last_record()
        if (owner := self._owner) is not None:
            name = next(
                (thread.name for thread in threading.enumerate() if thread.ident == owner), "?"
            )
            who, advice = f"thread {name!r} of this process", "Wait until that thread is done"
        elif holder:
            who = process_name(holder, command)
            advice = f"Wait until it is done, end process {holder} (that frees the lock)"
        else:
            who, advice = "a process that has not written its name yet", "Wait until it is done"
        held = f" for {max(0.0, time.time() - since):.1f} s" if holder else ""
        return (
            f"the memory lock of {self._device_key} is held by {who}{held}; "
            f"waited {timeout:.1f} s. {advice}, or pass a larger timeout."
        )

    def _last_record(self) -> tuple[int, str, float]:
        """Process id, command and time of who locked the file last; process 0 when nobody wrote."""
        try:
            words = os.pread(self._fd, 256, 0).decode(errors="replace").split()
            return int(words[0]), " ".join(words[1:-1]), float(words[-1])
        except (OSError, IndexError, ValueError):
            return 0, "", 0.0


_SHARED: dict[str, _ProcessLock] = {}


def _after_fork() -> None:
    for lock in _SHARED.values():
        lock.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def lock_folder() -> Path:
    """The private folder of the lock files, made on first use; refuses one that others could have
    prepared.

    Anybody can take its name in the temporary folder; then it is in the user's cache.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and is_own_folder(runtime) and os.access(runtime, os.W_OK | os.X_OK):
        folder = Path(runtime) / "memsaver"
    else:
        folder = Path(tempfile.gettempdir()) / f"memsaver-{os.geteuid()}"
        if _is_foreign(folder):
            folder = cache_dir() / "locks"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        found = os.lstat(folder)
    except OSError as error:
        raise BackendError(
            f"cannot make the folder of the lock files: {error}; set XDG_RUNTIME_DIR"
        ) from error
    if not stat.S_ISDIR(found.st_mode):
        why = "is not a folder (a symbolic link is refused)"
    elif found.st_uid != os.geteuid():
        why = f"belongs to user {found.st_uid}, not to {os.geteuid()}"
    elif found.st_mode & 0o077:
        why = f"is open to other users (mode {stat.S_IMODE(found.st_mode):o}, not 700)"
    else:
        return folder
    raise BackendError(
        f"{folder} {why}: lock files there are not safe; remove it, or set XDG_RUNTIME_DIR"
    )


def _is_foreign(path: Path) -> bool:
    try:
        return os.lstat(path).st_uid != os.geteuid()
    except FileNotFoundError:
        return False


def is_own_folder(path: str) -> bool:
    try:
        found = os.stat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
