"""A Python interpreter as a tool."""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import IO, Any

SECONDS = 5.0
"""Seconds that a program may take."""
LONGEST = 5_000
"""Characters of what it prints that the model sees."""
_KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG")  # of the run's variables, among which may be keys


class Python:
    """A tool that runs Python programs, each in a process and an empty folder of its own.

    It gives no reward: `task.rewards` judges the last answer. The limits of the environment's
    process hold for its programs, too.
    """

    def reset(self, **row: Any) -> None:
        """Begin a conversation, of which nothing is kept."""

    def python(self, code: str) -> str:
        """Run a Python program, and return what it prints.

        Args:
            code: The program. It has to print its result; nothing of it is left for the next one.
        """
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
            tempfile.TemporaryFile() as printed,
            tempfile.TemporaryFile() as failed,
        ):
            status = _run(code, folder, printed, failed)
            if status:
                raise RuntimeError(_last_line(failed) or f"the program ended with status {status}")
            printed.seek(0)
            text = printed.read(4 * LONGEST).decode(errors="replace")
        if len(text) > LONGEST:
            text = f"{text[:LONGEST]}..."
        return text or "(the program printed nothing)"


def _run(code: str, folder: str, printed: IO[bytes], failed: IO[bytes]) -> int:
    """Run a program and end all that it has started; return its exit status."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", code],
        cwd=folder,
        env={name: os.environ[name] for name in _KEPT if name in os.environ},
        stdin=subprocess.DEVNULL,
        stdout=printed,
        stderr=failed,
        process_group=0,
    )
    try:
        return process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"the program took longer than {SECONDS:g} s") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_line(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - LONGEST))
    return file.read().decode(errors="replace").strip().rpartition("\n")[2]
