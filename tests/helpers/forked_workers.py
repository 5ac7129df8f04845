"""Ray workers that are forked from a process with the imports of both sides.

An actor's process takes 7 s of CPU time for its imports. Here a script takes the place of Python in
the command of workers. It sends its command to a server, which forks a process for it, and ends
when this process has ended. The script executes other commands itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from tests.helpers.peers import Peer

_SCRIPT = """#!{python} -SE
import json, os, socket, sys
if sys.argv[1].endswith("_worker.py"):
    server = socket.socket(socket.AF_UNIX)
    server.connect({path!r})
    socket.send_fds(server, [b"."], [1, 2])
    server.sendall(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode())
    server.shutdown(socket.SHUT_WR)
    server.recv(1)
else:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
"""


@contextlib.contextmanager
def python_that_forks() -> Iterator[str]:
    """Yield the path of the script."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        path, script = f"{folder}/socket", Path(folder, "python")
        script.write_text(_SCRIPT.format(python=sys.executable, path=path))
        script.chmod(0o755)
        server = Peer(_serve, path)
        try:
            server.hear()
            yield str(script)
        finally:
            server.bury()


def _serve(pipe: Connection, path: str) -> None:
    assert "ray" not in sys.modules, "Ray reads a worker's settings when it is imported"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # leave no zombies
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        pipe.send("listens")
        while True:
            connection, _ = listener.accept()
            if os.fork():
                connection.close()
                continue
            listener.close()
            pipe.close()
            _become(connection)


def _become(connection: socket.socket) -> None:
    """Run the command of the script at the other end, and end this process."""
    try:
        os.setsid()
        multiprocessing.current_process().daemon = False  # a worker may have children
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _, files, _, _ = socket.recv_fds(connection, 1, 2)
        for number, file in zip((1, 2), files, strict=True):
            os.dup2(file, number)
            os.close(file)
        with connection.makefile("rb") as stream:
            args, environment, folder = json.loads(stream.read())
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = _enter(args) if args[0].endswith("setup_worker.py") else args
        runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)


def _enter(args: list[str]) -> list[str]:
    """Enter a worker's own environment, and return the rest of its command."""
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.workers import setup_worker

    known, rest = setup_worker.parser.parse_known_args(args[1:])
    os.environ.update(RuntimeEnvContext.deserialize(known.serialized_runtime_env_context).env_vars)
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    if importlib.util.find_spec("sitecustomize"):  # Python imports it when it starts
        importlib.import_module("sitecustomize")
    return rest
