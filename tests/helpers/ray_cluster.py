"""The one local Ray cluster of a test run: all tests marked `ray` use it, one after the other.

It is below this process, which stays connected to it until the last of those tests has ended: calls
that would start a cluster of their own join it. Jobs can be submitted to it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

CPUS = 8  # as Ray counts them: four devices of two actors
SETTINGS = {  # read by the processes that ray.init starts
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # a process only for an actor that is made
    "RAY_enable_worker_prestart": "0",
    "RAY_idle_worker_killing_time_threshold_ms": "200",
    "RAY_worker_niceness": "0",  # 15 otherwise: beside busy processes an actor starts in minutes
}
# how processes of either side are called
SIDES = ("ray::Rollout", "ray::Trainer", "ray::Dying", "ray::Killing")


class RayCluster:
    """Started by the first test that asks for it, ended behind the last."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self._url: str | None = None

    def start(self) -> None:
        if self._url is not None:
            return
        ray = pytest.importorskip("ray")
        environment = self._open.enter_context(pytest.MonkeyPatch.context())
        environment.delenv("RAY_ADDRESS", raising=False)
        for name, value in SETTINGS.items():
            environment.setenv(name, value)
        made = ray.init(
            address="local",
            num_cpus=CPUS,
            # jobs need it; where Ray lacks what it takes, all else runs without
            include_dashboard=None,
            dashboard_port=0,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=128 << 20,
        )
        self._open.callback(ray.shutdown)
        self._url = f"http://{made.address_info['webui_url']}"

    def end(self) -> None:
        try:
            self.wait_free()
        finally:  # what one test has left behind is not waited for after each of the others
            self._open.close()
            self._url = None

    def submit(self, entrypoint: str, environment: dict[str, Any]) -> tuple[Any, str]:
        """A client for jobs, and the id of this one.

        The node's agent that starts jobs comes up after the cluster.
        """
        from ray.job_submission import JobSubmissionClient

        client, job = JobSubmissionClient(self._url), ""

        def submitted() -> bool:
            nonlocal job
            try:
                job = client.submit_job(
                    entrypoint=entrypoint, runtime_env={"env_vars": environment}
                )
            except RuntimeError as error:
                if "No available agent" not in str(error):
                    raise
            return bool(job)

        until(submitted)
        return client, job

    def actors(self) -> list[int]:
        """Processes of trainers and rollouts, whoever made them."""
        found = []
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if any(word.startswith(SIDES) for word in child.cmdline()):
                    found.append(child.pid)
        return found

    def wait_free(self) -> None:
        """Until no side and no reservation is left; who leaves some behind fails here."""
        if self._url is None:
            return
        import ray

        def left() -> str:
            return f"left behind: processes {self.actors()}; free: {ray.available_resources()}"

        until(lambda: ray.available_resources().get("CPU") == CPUS and not self.actors(), left)


def until(
    ready: Callable[[], bool], what: Callable[[], str] = lambda: "", seconds: float = 120.0
) -> None:
    """seconds: after which something is wrong; not how long it should take."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)


_cluster = RayCluster()


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    """The cluster; nothing of the module is left on it at the end."""
    _cluster.start()
    yield _cluster
    _cluster.wait_free()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Behind the last test that uses the cluster: those that follow fork, and count descriptors."""
    if nextitem is None or nextitem.get_closest_marker("ray") is None:
        _cluster.end()
