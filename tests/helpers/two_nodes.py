"""Two Ray nodes on this host, each in a network namespace, joined by a virtual cable.

Processes of one node can map each other's memory, and processes of different nodes cannot, as on
two machines. The test's functions run in a process on the first node (`python -m
tests.helpers.two_nodes`), which is connected to the cluster. Where the kernel lets users create
namespaces, this needs no privileges.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.ray_cluster import SETTINGS, until

ADDRESSES = ("10.77.0.1", "10.77.0.2")
HEAD = f"{ADDRESSES[0]}:6379"
STORE_BYTES = 128 << 20
HEALTH = {
    "RAY_AUTH_MODE": "disabled",
    # A node that is cut off is lost after about twelve seconds.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
    # It ends its own processes after about twenty seconds.
    "RAY_grpc_client_keepalive_time_ms": "3000",
    "RAY_grpc_client_keepalive_timeout_ms": "5000",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
}
REMEDY = (
    "network namespaces are refused; allow them for users (sysctl user.max_user_namespaces, "
    "kernel.apparmor_restrict_unprivileged_userns=0), or run the tests as root"
)


class Nodes:
    """Both nodes, as seen from the process on the first one."""

    def __init__(self, folder: Path, gpus: int) -> None:
        self._folder, self._gpus = folder, gpus
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        # It keeps the second namespace.
        self._cable = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])

    def open(self) -> None:
        """Join the namespaces, start both nodes, and connect this process to the cluster."""
        self._connect()
        self._start(0)
        until(lambda: _answers(HEAD), lambda: self.log(0))
        self._start(1)
        until(_joined, lambda: self.log(0))
        until(lambda: ADDRESSES[1] in _alive(), lambda: self.log(1))

    def _connect(self) -> None:
        pid = str(self._cable.pid)
        self._inside = ["nsenter", "--preserve-credentials", "--net", "--target", pid]
        until(lambda: _network(self._cable.pid) != _network(os.getpid()))
        self._ip([], f"link add near type veth peer name far netns {pid}")
        for inside, name, address in (
            ([], "near", ADDRESSES[0]),
            (self._inside, "far", ADDRESSES[1]),
        ):
            for command in ("set lo up", f"set {name} up"):
                self._ip(inside, f"link {command}")
            self._ip(inside, f"address add {address}/24 dev {name}")

    def _start(self, number: int) -> None:
        head = ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={self._folder}"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        command += [f"--address={HEAD}"] if number else head
        command += [f"--node-ip-address={ADDRESSES[number]}", "--disable-usage-stats"]
        command += ["--num-cpus=4", f"--num-gpus={self._gpus}"]
        command += [f"--object-store-memory={STORE_BYTES}"]
        environment = dict(os.environ)
        if self._gpus:
            environment |= {"CUDA_VISIBLE_DEVICES": str(number), "NCCL_NET": "Socket"}
            environment |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
            environment["NCCL_HOSTID"] = f"node{number}"
        with (self._folder / f"node{number}.log").open("ab") as log:
            self._nodes[number] = subprocess.Popen(
                [*(self._inside if number else []), *command],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def log(self, number: int) -> str:
        return (self._folder / f"node{number}.log").read_text()[-2000:]

    def kill_far(self) -> None:
        """Kill all processes of the second node, as a machine that loses its power.

        Its raylet goes first, so that it cannot report the deaths of the others.
        """
        self._kill(self.processes())
        if 1 in self._nodes:  # not if the first node did not start
            self._nodes[1].wait()

    @staticmethod
    def _kill(processes: Iterable[psutil.Process]) -> None:
        for process in sorted(processes, key=lambda process: process.name() != "raylet"):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.pid != os.getpid():
                    process.send_signal(signal.SIGKILL)

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the second node."""
        return self._in_network(self._cable.pid)

    def _in_network(self, pid: int) -> list[psutil.Process]:
        """Return the processes, except for the cable, in a process's network."""
        network, found = _network(pid), []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):  # it may end meanwhile
                runs = process.status() != psutil.STATUS_ZOMBIE and process.pid != self._cable.pid
                if runs and _network(process.pid) == network:
                    found.append(process)
        return found

    def end(self) -> None:
        import ray

        ray.shutdown()
        self.kill_far()
        self._kill(self._in_network(os.getpid()))
        for node in self._nodes.values():
            node.wait(30)
        self._cable.kill()

    def _ip(self, inside: Sequence[str], command: str) -> None:
        subprocess.run([*inside, "ip", *command.split()], check=True)


def _network(pid: int) -> int:
    return os.stat(f"/proc/{pid}/ns/net").st_ino


def _joined() -> bool:
    """Connect to the cluster, whose first node may register long after its address answers."""
    import ray

    with contextlib.suppress(ConnectionError):
        ray.init(address=HEAD, log_to_driver=False, logging_level="ERROR")
    return bool(ray.is_initialized())


def _alive() -> list[str]:
    import ray

    return [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]


def _answers(address: str) -> bool:
    host, port = address.split(":")
    with contextlib.suppress(OSError):
        socket.create_connection((host, int(port)), 1).close()
        return True
    return False


class Driver:
    """The process on the first node, seen from the test's."""

    def __init__(self, folder: Path, gpus: int = 0) -> None:
        self._pipe, theirs = Pipe()
        environment = {**os.environ, **SETTINGS, **HEALTH}
        environment.pop("RAY_ADDRESS", None)
        root = Path(__file__).parents[2]
        environment["PYTHONPATH"] = f"{root}:{environment.get('PYTHONPATH', '')}"
        command = [
            "unshare",
            "--user",
            "--map-root-user",
            "--net",
            sys.executable,
            "-m",
            __spec__.name,
        ]
        self.process = subprocess.Popen(
            [*command, str(theirs.fileno()), str(folder), str(gpus)],
            pass_fds=[theirs.fileno()],
            env=environment,
            cwd=root,
        )
        theirs.close()
        self._hear()

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(nodes, *args)`, called there; the function is a module's."""
        self._pipe.send((function.__module__, function.__qualname__, args))
        return self._hear()

    def _hear(self) -> Any:
        try:
            good, value = self._pipe.recv()
        except EOFError:
            pytest.fail(f"the process on the first node ended ({self.process.wait()}): {REMEDY}")
        if not good:
            pytest.fail(value)
        return value

    def end(self) -> None:
        self._pipe.close()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()


@contextlib.contextmanager
def opened(gpus: int = 0) -> Iterator[Driver]:
    """Yield a driver on two nodes, and end both."""
    with tempfile.TemporaryDirectory(
        prefix="two", dir="/tmp"
    ) as folder:  # sockets have short names
        driver = Driver(Path(folder), gpus)
        try:
            yield driver
        finally:
            driver.end()


def main(words: Sequence[str]) -> None:
    pipe, folder, gpus = Connection(int(words[0])), Path(words[1]), int(words[2])
    nodes = Nodes(folder, gpus)
    try:
        nodes.open()
        pipe.send((True, None))
        while True:
            module, name, args = pipe.recv()
            try:
                answer = True, getattr(importlib.import_module(module), name)(nodes, *args)
            except BaseException:
                answer = False, traceback.format_exc()
            pipe.send(answer)
    except EOFError:
        pass
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        nodes.end()


if __name__ == "__main__":
    main(sys.argv[1:])
