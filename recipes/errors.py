"""The errors a user of `memsaver run` can meet, each one line."""

import contextlib
from collections.abc import Iterator
from typing import Any

DOES_NOT_FIT = 3  # exit status of `memsaver plan`


class RecipeError(ValueError):
    """A recipe that cannot run (exit status 2): a line for each fault, of where, key and value,
    rule and remedy.
    """


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


def shown(value: Any, limit: int = 120) -> str:
    """Return a value on one line, as an override takes it back if it is short enough."""
    if isinstance(value, list) and all(isinstance(item, str | int) for item in value):
        text = f"[{','.join(map(str, value))}]"
    elif value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    else:
        text = str(value)
    text = " ".join("".join(char if char.isprintable() else " " for char in text).split()) or "''"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


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
