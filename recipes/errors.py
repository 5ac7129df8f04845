"""Errors that a user of the command `memsaver` can meet, and the texts they are made of."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOES_NOT_FIT = 3  # exit status of `memsaver plan`


class RecipeError(ValueError):
    """A recipe that cannot run (exit status 2).

    The message has a line for each fault: place, key and value, rule, remedy.
    """


class ScorerError(ValueError):
    """Error of reward functions: no answer of a step has a reward.

    The message is one line with function, cause, problem, answer and remedy.
    """


class RunError(RuntimeError):
    """A run that failed (exit status 1); the message is one line.

    Args:
        stage: Stage that failed; also an attribute.
        cause: Cause of the failure; also an attribute.
        remedy: What the user can do; also an attribute. None: the message ends with the cause.
    """

    def __init__(self, stage: str, cause: str, remedy: str | None = None) -> None:
        super().__init__(stage, cause, remedy)  # All arguments, so that it can be unpickled.
        self.stage, self.cause, self.remedy = stage, cause, remedy

    def __str__(self) -> str:
        return f"{self.stage} failed: {self.cause}" + (f"; {self.remedy}" if self.remedy else "")


class LostWorker(RunError):
    """An actor that died or does not answer; the run can continue from its last checkpoint."""


def one_line(error: BaseException) -> str:
    """Return the text of an exception on one line, or the name of its type if it has no text."""
    return " ".join(str(error).split()) or type(error).__name__


def typed(error: BaseException) -> str:
    """Return the type and the text of an exception on one line."""
    return f"{type(error).__name__}: {one_line(error)}"


def shown(value: Any, limit: int = 120) -> str:
    """Return a value on one line, as an override would set it, cut to `limit` characters."""
    if isinstance(value, list) and all(isinstance(item, str | int) for item in value):
        text = f"[{','.join(map(str, value))}]"
    elif value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    else:
        text = str(value)
    text = " ".join("".join(char if char.isprintable() else " " for char in text).split()) or "''"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, to which an s is added unless the number is 1.

    >>> counted(1, "step"), counted(2, "step")
    ('1 step', '2 steps')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@contextlib.contextmanager
def writable(option: str) -> Iterator[None]:
    """Turn an OSError inside the block into a `RecipeError` that names the option."""
    try:
        yield
    except OSError as error:
        why = error.strerror or one_line(error)
        raise RecipeError(
            f"{option}: cannot be written: {why}; name a place that you may write"
        ) from None


def check_empty(option: str, folder: Path) -> None:
    """Refuse a folder to write that an option names, if it has files.

    Raises:
        RecipeError: The folder is not empty.
        OSError: It is no folder, or cannot be read.
    """
    if folder.exists() and any(folder.iterdir()):
        raise RecipeError(
            f"{option} {folder}: is not empty; name a new folder; nothing was written"
        )


def refused(key: str, value: Any, rule: str, instead: Any) -> RecipeError:
    """Return the error of a key whose value breaks a rule, with a value that does not."""
    return RecipeError(f"{key}={shown(value)}: {rule}; set {key}={shown(instead)}")
