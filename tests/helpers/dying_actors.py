"""Actors that die, kill or wait at a chosen moment, and a wait for processes to end."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rollout.actor import RolloutActor
from tests.helpers.trainer_bridge.sync_hooks import half_written
from trainer_bridge.remote.actor import TrainerActor
from trainer_bridge.sync.weight_sync import SyncReceipt


def dying_trainer(rank: int = 0, first: int = 0) -> type[TrainerActor]:
    """Return an actor class that kills its process when half of the copies are written.

    Only rank `rank` dies, in versions from `first` on. The class is local, so that it is pickled by
    value.
    """

    class Dying(TrainerActor):
        def sync_weights(self, version: int) -> SyncReceipt:
            def die() -> None:
                if self.held.rank == rank and version >= first:
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


def waiting_engine(first: int, version: int) -> type[RolloutActor]:
    """Return an actor class that computes two steps of requests from `first` on, and then waits.

    They go on when the engine serves a version; meanwhile other calls do. The class is local, so
    that it is pickled by value.
    """

    class Waiting(RolloutActor):
        def build(self, *args: Any) -> None:
            super().build(*args)
            engine: Any = self.held
            usual, steps = engine.step, itertools.count()

            def step() -> Any:
                late = min(engine.unfinished, default=0) >= first
                if late and engine.weights_version < version and next(steps) >= 2:
                    time.sleep(0.005)
                    return []
                return usual()

            engine.step = step

    return Waiting


def dying_engine(flag: Path, rank: int = 0) -> type[RolloutActor]:
    """Return an actor class that dies after four steps, if `flag` exists, and removes `flag`.

    In an engine of several ranks, only rank `rank` dies. The class is local, so that it is pickled
    by value.
    """

    class DyingRollout(RolloutActor):
        def build(self, *args: Any) -> None:
            super().build(*args)
            engine: Any = self.held
            own = dist.get_rank() if dist.is_initialized() else 0
            name, steps = "obey" if own else "step", itertools.count()
            usual = getattr(engine, name)

            def step(*decision: Any) -> Any:
                outputs = usual(*decision)
                if engine.unfinished and own == rank and flag.exists() and next(steps) == 3:
                    flag.unlink()
                    os.kill(os.getpid(), signal.SIGKILL)
                return outputs

            setattr(engine, name, step)

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
