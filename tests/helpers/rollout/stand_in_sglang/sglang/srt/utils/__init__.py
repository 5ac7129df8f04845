import contextlib
import os
import signal


def kill_process_tree(
    parent_pid: int, include_parent: bool = True, wait_timeout: float | None = None
) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(parent_pid, signal.SIGKILL)
