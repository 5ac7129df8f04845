"""Worker processes of the local Ray cluster, forked with the imports of actors.

A fresh worker imports ray, torch and transformers in seven seconds of CPU time. Ray's raylet runs
this file in place of Ray's `setup_worker.py`. It asks a process of the test run, which has all
modules, to fork the worker. A worker with a runtime environment of its own starts afresh.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import runpy
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

VARIABLE = "MEMSAVER_TEST_RAY_FORKS"  # the socket's path, for the raylet's processes
FRESH = "MEMSAVER_TEST_RAY_SETUP"  # Ray's own script
CONTEXT = "--serialized-runtime-env-context="
STANDARD = (0, 1, 2)  # descriptors


@contextlib.contextmanager
def forked_workers(environment: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a Ray cluster that starts inside fork its workers, until the context ends."""
    from ray._private import ray_constants, services

    from tests.helpers.peers import Peer

    name = ray_constants.SETUP_WORKER_FILENAME
    fresh = Path(services.__file__).parent / "workers" / name
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # sockets have short names
        environment.setenv(VARIABLE, f"{folder}/forks")
        environment.setenv(FRESH, str(fresh))
        environment.setattr(ray_constants, "SETUP_WORKER_FILENAME", __file__)
        peer = Peer(_serve, f"{folder}/forks")
        peer.hear()
        try:
            yield
        finally:
            peer.bury()


def _serve(pipe: Any, path: str) -> None:
    """Fork a worker per connection; `pipe` says that requests are accepted."""
    import trainer_bridge.remote.receiver  # noqa: F401

    assert "ray" not in sys.modules, "ray keeps settings of the process that imports it"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        pipe.send("listening")
        while True:
            connection, _ = listener.accept()
            with connection:
                data, files, *_ = socket.recv_fds(connection, 1 << 20, len(STANDARD))
                if not os.fork():
                    for inherited in (pipe, listener, connection):
                        inherited.close()
                    _become(*pickle.loads(data), files)
                for file in files:
                    os.close(file)


def _become(words: list[str], environment: dict[str, str], files: list[int]) -> None:
    """Run a worker's script in this process, and end it."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for file, standard in zip(files, STANDARD, strict=True):
            os.dup2(file, standard)
            os.close(file)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def main(words: list[str]) -> None:
    """Have a worker forked, or start it afresh as Ray would; `words` are the raylet's arguments."""
    context = next((word for word in words if word.startswith(CONTEXT)), CONTEXT)
    further = [word for word in words if not word.startswith((CONTEXT, "--language="))]
    own = json.loads(context.removeprefix(CONTEXT) or "{}").get("env_vars")
    if own or not further[0].endswith("default_worker.py"):
        os.execv(sys.executable, [sys.executable, os.environ[FRESH], *words])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(os.environ[VARIABLE])
        request = pickle.dumps((further, dict(os.environ)))
        socket.send_fds(connection, [request], STANDARD)


if __name__ == "__main__":
    main(sys.argv[1:])
