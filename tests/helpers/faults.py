"""Actors that die at a chosen moment, and waiting for what they leave behind to be gone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from rollout.types import WeightOffer, WriteReceipt
from trainer_bridge.actor import TrainerActor


def dying_trainer() -> type[TrainerActor]:
    """Kills its own process when half of the copies are written. (Made here, so that it is pickled by value.)"""

    class Dying(TrainerActor):
        def sync_weights(self, offer: WeightOffer) -> WriteReceipt:
            def die(done: int, total: int) -> None:
                if done >= total // 2:
                    os.kill(os.getpid(), signal.SIGKILL)

            return self.trainer.sync_weights(offer, on_copy=die)

        def nap(self) -> None:
            time.sleep(2)

    return Dying


def wait_gone(pids: list[int], seconds: float = 20.0) -> None:
    """Until the processes have ended; a zombie waits for its parent and holds nothing."""
    deadline = time.monotonic() + seconds
    while alive := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, f"processes {alive} were left behind"
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
