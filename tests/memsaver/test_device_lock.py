"""The device lock between real processes, without a GPU."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from memsaver.errors import BackendError, LockTimeout, MemSaverError
from memsaver.system import device_lock as module
from memsaver.system.device_lock import DeviceLock, device_lock
from tests.helpers.memsaver.savers import at_once
from tests.helpers.peers import Peer


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "runtime"
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder


@pytest.fixture
def key() -> str:
    return f"GPU-{secrets.token_hex(8)}"  # a key that no other test uses


def _there(pipe: Connection, folder: str, run: str, *arguments: object) -> None:
    os.environ["XDG_RUNTIME_DIR"] = folder
    globals()[run](pipe, *arguments)


@contextlib.contextmanager
def peer(run: Callable[..., None], *arguments: object) -> Iterator[Peer]:
    """Run a function of this module in another process, and wait until it has started."""
    process = Peer(_there, os.environ["XDG_RUNTIME_DIR"], run.__name__, *arguments)
    try:
        process.hear()
        yield process
    finally:
        process.bury()


def _count(pipe: Connection, key: str, counter: Path) -> None:
    """Count up in two threads."""
    pipe.send("ready")
    pipe.recv()

    def work() -> None:
        for _ in range(150):
            with device_lock(key):
                counter.write_text(str(int(counter.read_text()) + 1))

    at_once(work, work)
    pipe.send("done")


def test_lock_excludes_threads_of_three_processes(key: str, tmp_path: Path, runtime: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(peer(_count, key, counter)) for _ in range(3)]
        for process in peers:
            process.tell("go")
        assert [process.hear(60) for process in peers] == ["done"] * 3
    assert counter.read_text() == "900"
    assert stat.S_IMODE((runtime / "memsaver").stat().st_mode) == 0o700
    (file,) = (runtime / "memsaver").iterdir()
    assert file.stat().st_size < 128, "the file grows"


def _hold(pipe: Connection, key: str) -> None:
    with DeviceLock(key):
        pipe.send("held")
        pipe.recv()


def test_timeout_names_holder_and_kill_frees_lock(key: str, runtime: Path) -> None:
    with peer(_hold, key) as holder:
        started = time.monotonic()
        with pytest.raises(LockTimeout) as caught, DeviceLock(key, timeout=0.3):
            pass
        assert time.monotonic() - started >= 0.3
        message = str(caught.value)
        assert f"process {holder.pid} (python" in message and "frees the lock" in message
        assert (
            key in message and "waited 0.3 s" in message and re.search(r" for \d+\.\d s", message)
        )
        assert isinstance(caught.value, MemSaverError)
        with pytest.raises(LockTimeout), DeviceLock(key, timeout=0):
            pass
        holder.kill()
        with DeviceLock(key, timeout=60):
            assert holder.dies_within(60) and holder.process.exitcode == -signal.SIGKILL
    (file,) = (runtime / "memsaver").iterdir()
    assert file.name == f"{key}.lock" and str(os.getpid()) in file.read_text()
    fds = [
        link.name
        for link in Path("/proc/self/fd").iterdir()
        if link.is_symlink() and link.readlink() == file
    ]
    assert fds and not any(os.get_inheritable(int(fd)) for fd in fds)
    file.unlink()  # as a cleanup of /tmp does
    with peer(_hold, key), pytest.raises(LockTimeout), DeviceLock(key, timeout=0.1):
        raise AssertionError("two holders")


def test_timeout_names_holding_thread_of_this_process(key: str) -> None:
    held, leave, lock = threading.Event(), threading.Event(), DeviceLock(key, timeout=0.1)

    def hold() -> None:
        threading.current_thread().name = "holder-thread"
        with lock:
            held.set()
            leave.wait(60)

    def wait() -> None:
        held.wait(60)
        with pytest.raises(LockTimeout, match="thread 'holder-thread' of this process"), lock:
            pass
        leave.set()

    at_once(hold, wait)
    with lock:
        pass


def test_lock_is_reentrant(key: str) -> None:
    lock = DeviceLock(key, timeout=0.2)
    with lock:
        with lock:
            assert not _free_elsewhere(key)
        assert not _free_elsewhere(key)
    assert _free_elsewhere(key)
    with contextlib.suppress(KeyError), lock:
        raise KeyError
    assert _free_elsewhere(key)


def _free_elsewhere(key: str) -> bool:
    """Return whether another file description, as in another process, could take the lock."""
    fd = os.open(Path(os.environ["XDG_RUNTIME_DIR"]) / "memsaver" / f"{key}.lock", os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _in_child(action: Callable[[], int]) -> int:
    """Return the exit status of a forked child."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        os._exit(action())
    finally:
        os._exit(99)


def _fork(pipe: Connection, key: str) -> None:
    lock = DeviceLock(key, timeout=0.1)

    def refused() -> int:
        try:
            with lock:
                return 1
        except Exception as error:
            return 0 if f"process {os.getppid()} (" in str(error) else 2

    def taken() -> int:
        with lock:
            return 0

    def released() -> int:
        lock.__exit__(None, None, None)  # as at the end of the parent's with block
        return 0

    with lock:
        assert _in_child(refused) == _in_child(released) == 0
        assert _in_child(refused) == 0  # the child's exit freed nothing
    assert _in_child(taken) == 0
    with lock:
        if os.fork() == 0:
            pipe.send("child")
            pipe.poll(60)
        os._exit(0)  # the parent dies as the holder; the child lives on


def test_forked_child_does_not_hold_the_lock(key: str) -> None:
    with peer(_fork, key) as parent:  # the last child sends the message
        assert parent.dies_within(60) and parent.process.exitcode == 0
        with DeviceLock(key, timeout=60):
            pass


def link(path: Path) -> None:
    path.symlink_to(path.parent / "elsewhere")


UNSAFE: dict[str, tuple[Callable[[Path, str], object], str]] = {
    "mode": (lambda folder, key: (folder.mkdir(), folder.chmod(0o755)), "with mode 755"),
    "symlink": (lambda folder, key: link(folder), "not a link"),
    "file": (lambda folder, key: folder.touch(0o700), "cannot make the folder"),
    "file is a symlink": (
        lambda folder, key: (folder.mkdir(0o700), link(folder / f"{key}.lock")),
        "cannot use",
    ),
}


@pytest.mark.parametrize("wrong", UNSAFE)
def test_unsafe_lock_folder_is_refused(wrong: str, key: str, runtime: Path) -> None:
    folder, lock = runtime / "memsaver", DeviceLock(key, timeout=1)
    (runtime / "elsewhere").mkdir(0o700)
    make, message = UNSAFE[wrong]
    make(folder, key)
    with pytest.raises(BackendError, match=message), lock:
        pass
    folder.rename(runtime / "away")
    with lock:  # a refusal leaves the lock usable
        pass


def test_lock_folder_is_temporary_without_runtime_folder(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for unusable in ("", "relative", str(tmp_path / "absent"), None):
        monkeypatch.setenv("XDG_RUNTIME_DIR", unusable or "")
        if unusable is None:
            monkeypatch.delenv("XDG_RUNTIME_DIR")
        assert module.lock_folder() == tmp_path / f"memsaver-{os.geteuid()}"
    with DeviceLock(key):
        assert (tmp_path / f"memsaver-{os.geteuid()}" / f"{key}.lock").exists()


def test_lock_folder_of_another_user_is_avoided(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    taken, original = tmp_path / f"memsaver-{os.geteuid()}", os.lstat
    taken.mkdir(0o777)

    def lstat(path: Path) -> os.stat_result:
        status = original(path)
        return (
            os.stat_result([*status[:4], status.st_uid + 1, *status[5:]])
            if Path(path) == taken
            else status
        )

    monkeypatch.setattr(os, "lstat", lstat)
    with DeviceLock(key):
        assert [file.name for file in (tmp_path / "cache" / "memsaver" / "locks").iterdir()] == [
            f"{key}.lock"
        ]
    assert not list(taken.iterdir())


def test_cpu_needs_no_lock_file(runtime: Path) -> None:
    lock = device_lock("cpu")
    with lock, lock:
        assert not list(runtime.iterdir())
