"""Run a recipe with a one-stage wake-up: the whole engine wakes before the weight sync.

This is how systems without tags switch. A recipe that fits only with a staged wake-up ends with the
error that names the missing bytes:

    python -m benchmarks.one_stage examples/plans/qwen2.5-32b-8xh100.yaml [KEY=VALUE ...]
"""

import sys
from collections.abc import Sequence
from functools import wraps
from typing import Any

import recipes.run
from recipes.cli import main
from rollout.tag_names import WEIGHTS
from trainer_bridge import Cycle


class OneStage:
    """A rollout whose weights and KV cache wake together; all other calls pass through."""

    def __init__(self, rollout: Any) -> None:
        self._rollout = rollout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rollout, name)

    def wake_up(self, tags: Sequence[str], **options: Any) -> None:
        if WEIGHTS in tags:
            self._rollout.wake_up(None)


@wraps(Cycle)
def one_stage_cycle(trainer: Any, rollout: Any, **options: Any) -> Cycle:
    return Cycle(trainer, OneStage(rollout), **options)


if __name__ == "__main__":
    recipes.run.Cycle = one_stage_cycle  # type: ignore[assignment, misc]
    sys.exit(main(["run", *sys.argv[1:], "cycle.overlap=[]"]))
