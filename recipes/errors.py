"""The errors a user of `memsaver run` can meet, each one line."""

import contextlib
from collections.abc import Iterator

DOES_NOT_FIT = 3  # exit status of `memsaver plan`


class RecipeError(ValueError):
    """A recipe that cannot run, in one line: where, key and value, rule, remedy (exit status 2)."""


class ScorerError(ValueError):
    """A task's scorer that raised or gave no score, in one line: task, problem, answer, remedy."""


class RunError(RuntimeError):
    """A run that failed, in one line: stage, cause, perhaps a remedy (exit status 1)."""

    def __init__(self, stage: str, cause: str, remedy: str | None = None) -> None:
        self.stage = stage
        self.cause = cause
        super().__init__(f"{stage} failed: {cause}" + (f"; {remedy}" if remedy else ""))


class LostWorker(RunError):
    """An actor died or gives no answer; what the last checkpoint holds can be gone on from."""


def one_line(error: BaseException) -> str:
    """The text of an exception on one line, or its type where it has no text."""
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def writable(option: str) -> Iterator[None]:
    """Raises a `RecipeError` of this option for what cannot be written inside."""
    try:
        yield
    except OSError as error:
        why = error.strerror or one_line(error)
        raise RecipeError(
            f"{option}: cannot be written: {why}; name a place that is yours"
        ) from None
