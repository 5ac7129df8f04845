"""The local Ray cluster of a test run, which all tests marked `ray` use one after the other.

It is a child of this process, which stays connected until the last of the tests has ended, so calls
that would start a cluster join this one.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch

from rollout import SamplingParams
from tests.helpers.forked_workers import python_that_forks

# A small engine, and prompts with seeded sampling, for answers that can be compared.
ENGINE = {"kv_tokens": 256, "page_size": 16}
PROMPTS = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]]
SAMPLED = [
    SamplingParams(max_tokens=8, temperature=0.8, n=2, seed=seed, ignore_eos=True)
    for seed in range(4)
]

CPUS = 8  # as Ray counts them: four devices of two actors
SETTINGS = {  # read by the processes that ray.init starts
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # start a process only for an actor
    "RAY_enable_worker_prestart": "0",
    "RAY_idle_worker_killing_time_threshold_ms": "200",
    "RAY_worker_niceness": "0",  # with Ray's 15, an actor takes minutes on a busy machine
}
# names of the processes of both sides
SIDES = ("ray::Rollout", "ray::Trainer", "ray::Dying", "ray::Killing", "ray::Engine", "ray::Verl")


class RayCluster:
    """The cluster, which the first test that needs it starts, and which ends after the last."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self._started = False

    def start(self) -> None:
        if self._started:
            return
        ray = pytest.importorskip("ray")
        environment = self._open.enter_context(pytest.MonkeyPatch.context())
        environment.delenv("RAY_ADDRESS", raising=False)
        for name, value in SETTINGS.items():
            environment.setenv(name, value)
        with pytest.MonkeyPatch.context() as patch:
            if not torch.cuda.is_available():  # on a GPU, actors start as anywhere
                python = self._open.enter_context(python_that_forks())
                patch.setattr(sys, "executable", python)  # in the command that starts actors
            ray.init(
                address="local",
                num_cpus=CPUS,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                object_store_memory=128 << 20,
            )
        self._open.callback(ray.shutdown)
        self._started = True

    def end(self) -> None:
        try:
            self.wait_free()
        finally:  # leftovers of one test must not delay every later one
            self._open.close()
            self._started = False

    def actors(self) -> list[int]:
        """Return the process ids of all trainers and rollouts."""
        pids = []
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if any(word.startswith(SIDES) for word in child.cmdline()):
                    pids.append(child.pid)
        return pids

    def wait_free(self) -> None:
        """Wait until no actor and no reservation is left; fail if some stay."""
        if not self._started:
            return
        import ray

        def left() -> str:
            return f"left behind: processes {self.actors()}; free: {ray.available_resources()}"

        until(lambda: ray.available_resources().get("CPU") == CPUS and not self.actors(), left)


def tokens(rollout: Any) -> list[Any]:
    """Return the tokens of each answer to PROMPTS."""
    answers = rollout.generate(PROMPTS, SAMPLED)
    return [[sample.token_ids for sample in group] for group in answers]


def until(
    ready: Callable[[], bool], what: Callable[[], str] = lambda: "", seconds: float = 120.0
) -> None:
    """Wait for a condition, which is certainly broken after `seconds`."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)


_cluster = RayCluster()


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    """Yield the cluster; a module must leave no actor on it."""
    _cluster.start()
    yield _cluster
    _cluster.wait_free()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the cluster after the last test on it, as later tests fork and count descriptors."""
    if nextitem is None or nextitem.get_closest_marker("ray") is None:
        _cluster.end()
