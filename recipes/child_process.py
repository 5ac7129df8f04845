"""Calls of functions in another Python process, which ends with the call.

As a script, this file makes the call; it reads and writes pickles.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from recipes.errors import one_line, typed

_Result = TypeVar("_Result")


class ChildError(RuntimeError):
    """A call in another process that failed; the text is the reason."""


def call_in_child(
    function: Callable[..., _Result],
    *arguments: Any,
    environment: dict[str, str],
    patience: float | None = None,
    quiet: bool = False,
) -> _Result:
    """Call a function of a module in another process, and return its result.

    Args:
        function: The function. Its module does not come from the working directory.
        *arguments: Its arguments, which are pickled, as the result is.
        environment: Variables that the process has besides those of this one.
        patience: Seconds after which the process is killed; None: any time.
        quiet: Whether to drop what the process prints, but for the last line if it dies.

    Raises:
        ChildError: The function raised an error, the process died, or the call took too long.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
            input=pickle.dumps((function, arguments)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if quiet else None,
            timeout=patience,
        )
    except subprocess.TimeoutExpired:
        raise ChildError(f"it took more than {patience:g} s") from None
    if done.returncode:
        last = (done.stderr or b"").decode(errors="replace").strip().rpartition("\n")[2]
        raise ChildError(last or f"exit status {done.returncode}")
    result, error = pickle.loads(done.stdout)
    if error:
        raise ChildError(error)
    return result  # type: ignore[no-any-return]


def _answer() -> tuple[Any, str]:
    """Return the result of the call that stdin has, and its error."""
    try:
        function, arguments = pickle.load(sys.stdin.buffer)
        return function(*arguments), ""
    except Exception as error:
        # The text of a ValueError, RecipeError among them, says all.
        return None, one_line(error) if isinstance(error, ValueError) else typed(error)


if __name__ == "__main__":
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # A library may print while it is imported.
    pipe.write(pickle.dumps(_answer()))
    pipe.flush()
