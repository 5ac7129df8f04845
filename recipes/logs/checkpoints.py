"""Checkpoints and exports of a run: the newest, the best, and which of them stay."""

import contextlib
import errno
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from memsaver.system.files import replace_text, sync
from recipes.errors import RecipeError, RunError, one_line
from recipes.logs.metric_rows import METRICS, SAMPLES
from trainer_bridge.errors import RankFailed
from trainer_bridge.models import read_values

FULL = (errno.ENOSPC, errno.EDQUOT)


class _Begun(NamedTuple):
    """A checkpoint that is being written; see `Checkpoints.begin`."""

    step: int
    keep: int
    finish: Callable[[bool], bool]


class Checkpoints:
    """Owner of the checkpoints and exports in the folder of a run.

    Args:
        run: Folder of the run.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._latest = run / "checkpoints" / "latest"
        self._best = run / "checkpoints" / "best"
        self._begun: _Begun | None = None

    @property
    def exist(self) -> bool:
        """Return whether there is a complete checkpoint."""
        return self._latest.is_file()

    @property
    def done(self) -> int:
        """Return the number of updates in the newest complete checkpoint; 0 without one."""
        return int(self.newest().name.removeprefix("step_")) if self.exist else 0

    def newest(self) -> Path:
        if not self.exist:
            again = f"memsaver run {shlex.quote(str(self._run / 'recipe.yaml'))}"
            raise RecipeError(f"--resume {self._run}: holds no checkpoint; start again: {again}")
        return _named_by(self._latest)

    def best(self) -> Path | None:
        """Return the checkpoint of the best evaluation; None if none is kept."""
        return _named_by(self._best) if self._best.is_file() else None

    def of(self, step: int | None) -> Path:
        """Return the checkpoint of a step, or the newest one for None.

        Raises:
            RecipeError: There is no such checkpoint; the message names the steps that have one.
        """
        if step is None and self.exist:
            return self.newest()
        steps = self._steps()
        if step in steps:
            return self._folder(step)
        if not steps:
            rule = "holds no checkpoint yet; its run saves one every checkpoint.every steps"
            raise RecipeError(f"{self._run}: {rule}")
        listed = ", ".join(map(str, steps))
        raise RecipeError(f"--step {step}: {self._run} has checkpoints of these steps: {listed}")

    def chosen(self, step: int | None, best: bool) -> Path:
        """Return the best checkpoint, or the one of a step as `of` does.

        Raises:
            RecipeError: There is no such checkpoint.
        """
        if not best:
            return self.of(step)
        if (found := self.best()) is None:
            rule = "keeps no best checkpoint: nothing beat the initial weights, or none was saved"
            raise RecipeError(f"--best: {self._run} {rule}; leave --best out for the newest")
        return found

    def values(self) -> dict[str, Any]:
        """Return the values that the run added to its newest checkpoint."""
        values: dict[str, Any] = {}
        checkpoint = str(self.newest())
        with contextlib.suppress(ValueError):  # Loading the checkpoint reports the fault.
            values = read_values(checkpoint)["extra"]
        return values

    def begin(
        self, step: int, keep: int, write: Callable[[Path], None], finish: Callable[[bool], bool]
    ) -> None:
        """Begin to save the checkpoint of a step; complete an earlier one before.

        Args:
            step: The step.
            keep: How many of the newest checkpoints up to this step stay.
            write: Creates the folder that it is given, until `finish` completely or not at all.
            finish: Returns whether the folder is complete; with True, it waits until it is.
        """
        self.complete()
        with self.writing(f"the checkpoint of step {step}"):
            _write(self._folder(step), write)
        self._begun = _Begun(step, keep, finish)

    def complete(self, wait: bool = True) -> bool:
        """Make the checkpoint that was begun the newest one, if there is one.

        Args:
            wait: Whether to wait until it is written.

        Returns:
            Whether none is being written any more.
        """
        if (begun := self._begun) is None:
            return True
        self._begun = None
        with self.writing(f"the checkpoint of step {begun.step}"):
            if not begun.finish(wait):
                self._begun = begun
                return False
            for file in (self._run / SAMPLES, self._run / METRICS):
                if file.is_file():
                    sync(file)  # A power cut leaves no gap before the checkpoint.
            replace_text(self._latest, f"step_{begun.step}\n")
            self._remove_old(begun.keep)
        return True

    def mark_best(self, step: int, keep: int) -> None:
        """Name the checkpoint of a step as the best; it stays until another one is the best.

        If that step has no checkpoint, none is the best. The previous best goes unless it is among
        the `keep` newest.
        """
        if self._begun is not None and self._begun.step == step:
            self.complete()
        with self.writing("checkpoints/best"):
            if not self._folder(step).is_dir():
                self._best.unlink(missing_ok=True)
            else:
                replace_text(self._best, f"step_{step}\n")
            self._remove_old(keep)

    def _remove_old(self, keep: int) -> None:
        """Remove checkpoints up to `done` except for the `keep` newest and the best."""
        best = self.best()
        steps = [step for step in self._steps() if step <= self.done]
        for old in map(self._folder, steps[:-keep]):
            if old != best:  # A removal that is interrupted leaves no half checkpoint.
                shutil.rmtree(old.rename(old.with_name(f"{old.name}.partial")))

    def _folder(self, step: int) -> Path:
        return self._latest.parent / f"step_{step}"

    def _steps(self) -> list[int]:
        names = [path.name.removeprefix("step_") for path in self._latest.parent.glob("step_*")]
        return sorted(int(name) for name in names if name.isdigit())

    def export_of(self, step: int) -> Path:
        """Return the folder of the exported model of a step."""
        return self._run / "exports" / f"step_{step}"

    def save_export(self, step: int, write: Callable[[Path], None]) -> None:
        """Export the model of a step; `write` is as of `save`."""
        with self.writing(f"the export of step {step}"):
            _write(self.export_of(step), write)

    def how_to_continue(self) -> str:
        """Return how the user can continue the run, for a message."""
        if self.exist:
            return f"continue with: memsaver run --resume {shlex.quote(str(self._run.absolute()))}"
        return "start again: there is no checkpoint yet"

    @contextlib.contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Turn an OSError inside the block, also of a rank, into a `RunError` with a remedy."""
        try:
            yield
        except (OSError, RankFailed) as failed:
            error = failed.error if isinstance(failed, RankFailed) else failed
            if not isinstance(error, OSError):
                raise
            repair = "free disk space" if error.errno in FULL else "correct that"
            remedy = f"{repair}, then {self.how_to_continue()}"
            raise RunError(f"writing {what}", one_line(failed), remedy) from failed


def _named_by(file: Path) -> Path:
    return file.parent / file.read_text().strip()


def _write(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` create a folder; remove the partial ones of a run that was killed before."""
    folder = folder.resolve()  # Actors may have another working directory.
    folder.parent.mkdir(exist_ok=True)
    for partial in folder.parent.glob("step_*.partial"):
        shutil.rmtree(partial)
    write(folder)
