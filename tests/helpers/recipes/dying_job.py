"""The command `memsaver`, whose rollout actor is killed once, when step 3 starts to generate."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import AbstractContextManager

import psutil

from recipes.cli import main
from recipes.logs.monitor import Monitor
from tests.helpers.dying_actors import wait_gone


class Killing:
    """Replacement of `Monitor.stage` that kills the rollout actor in step 3."""

    def __init__(self) -> None:
        self.stage, self.steps, self.done = Monitor.stage, 0, False

    def __call__(self, monitor: Monitor, name: str) -> AbstractContextManager[None]:
        if name == "generate_sequences":
            self.steps += 1
            if self.steps == 3:
                pids = rollout_actors()
                assert len(pids) == 1, pids
                os.kill(pids[0], signal.SIGKILL)
                wait_gone(pids)
        return self.stage(monitor, name)


def rollout_actors() -> list[int]:
    """Return the pids of rollout actors below the nearest process above this one that has some."""
    for parent in psutil.Process().parents():
        pids = [
            process.pid
            for process in parent.children(recursive=True)
            if (process.cmdline() or [""])[0].startswith("ray::RolloutRankActor")
        ]
        if pids:
            return pids
    return []


if __name__ == "__main__":
    killing = Killing()
    Monitor.stage = lambda monitor, name: killing(monitor, name)  # type: ignore[method-assign]
    sys.exit(main())
