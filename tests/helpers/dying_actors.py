"""Actors that die or kill at a chosen moment, and a wait for processes to end."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from rollout.actor import RolloutActor
from tests.helpers.trainer_bridge.sync_hooks import half_written
from trainer_bridge.remote.actor import TrainerActor
from trainer_bridge.sync.weight_sync import SyncReceipt


def dying_trainer(first: int) -> type[TrainerActor]:
    """Return an actor class that dies in the middle of each sync of a version from `first` on.

    The class is local, so that it is pickled by value.
    """

    class Dying(TrainerActor):
        def sync_weights(self, version: int) -> SyncReceipt:
            def die() -> None:
                if version >= first:
                    os.kill(os.getpid(), signal.SIGKILL)

            with half_written(die):
                return self.held.sync_weights(version)

        def nap(self) -> None:
            time.sleep(1)

    return Dying


def killing_trainer() -> type[TrainerActor]:
    """Return an actor class that kills a given process when half of the copies are written."""

    class Killing(TrainerActor):
        def kill_in_sync(self, pid: int) -> None:
            self.victim = pid

        def sync_weights(self, version: int) -> SyncReceipt:
            def kill() -> None:
                if victim := self.__dict__.pop("victim", None):
                    os.kill(victim, signal.SIGKILL)

            with half_written(kill):
                return self.held.sync_weights(version)

    return Killing


def dying_engine(flag: Path) -> type[RolloutActor]:
    """Return an actor class that dies while it generates, if `flag` exists, and removes `flag`.

    The class is local, so that it is pickled by value.
    """

    class DyingRollout(RolloutActor):
        def generate(self, prompts: list[Any], params: list[Any]) -> Any:
            def die(finished: int, samples: int, tokens: int) -> None:
                if tokens >= 4 and flag.exists():
                    flag.unlink()
                    os.kill(os.getpid(), signal.SIGKILL)

            return self.held.generate(prompts, params, on_progress=die)

    return DyingRollout


def wait_gone(pids: list[int], seconds: float = 20.0) -> None:
    """Wait until the processes have ended; a zombie counts as ended."""
    deadline = time.monotonic() + seconds
    while alive := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, f"processes {alive} were left behind"
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
