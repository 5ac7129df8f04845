"""An engine's actor that kills its process once, in the middle of its answers."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from rollout.actor import RolloutActor


def dying_engine(flag: Path, rank: int = 0) -> type[RolloutActor]:
    """Return an actor class that dies while it generates, if `flag` exists, and removes `flag`.

    In an engine of several ranks, only rank `rank` dies. The class is local, so that it is pickled
    by value.
    """

    class DyingRollout(RolloutActor):
        def generate(self, prompts: list[Any], params: list[Any]) -> Any:
            def die(finished: int, samples: int, tokens: int) -> None:
                if tokens >= 4 and self._rank() == rank and flag.exists():
                    flag.unlink()
                    os.kill(os.getpid(), signal.SIGKILL)

            return self.held.generate(prompts, params, on_progress=die)

        def _rank(self) -> int:
            import torch.distributed as dist

            return dist.get_rank() if dist.is_initialized() else 0

    return DyingRollout
