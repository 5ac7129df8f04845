"""Receiver of what a loop reports: stages, figures, answers and notes; nothing comes back."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from recipes.loops.sampling import Samples
from recipes.rewards import Scored
from trainer_bridge.sync import SyncReceipt


class Sink:
    """Receiver of a loop's reports; this base class keeps none.

    A loop works with any sink. `recipes.logs.monitor.Monitor` records and shows a run.
    """

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Report a part of the run: "step 3", "the last evaluation" or "the last export"."""
        yield

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Report a stage that lasts as long as the block."""
        yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Report work that times its own stages, such as a hand-over of `Cycle`."""
        yield

    def synced(self, receipt: SyncReceipt, corrected: bool) -> None:
        """Report a weight sync, and whether the loss is corrected for such a rollout."""

    def read_memory(self, phase: str) -> None:
        """Report that a side ("rollout" or "train") has its memory."""

    def answered(self, samples: Samples, scores: Sequence[Scored]) -> None:
        """Report answers that belong to the next row, with their scores."""

    def row(self, row: dict[str, Any]) -> None:
        """Report the figures of a step (kind "train") or of an evaluation (kind "eval")."""

    def silent(self, step: int, steps: int) -> None:
        """Report that the last `steps` steps, up to this one, had no signal."""

    def note(self, text: str) -> None:
        """Report a line for the user."""
