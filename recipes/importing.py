"""Import and call of the functions that a recipe names."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from memsaver.system.named_functions import import_named
from recipes.errors import RecipeError, typed


def import_function(key: str, name: str) -> Callable[..., Any]:
    """Import what `import_named` takes; its error becomes a RecipeError that begins with `key`."""
    try:
        function: Callable[..., Any] = import_named(name)
    except ValueError as error:
        raise RecipeError(f"{key}: {error}") from error
    return function


@contextlib.contextmanager
def calling(key: str) -> Iterator[None]:
    """Turn an exception of a named function inside the block into a RecipeError about `key`."""
    try:
        yield
    except (Exception, SystemExit) as error:
        rule = f"raised {typed(error)}; correct it (--verbose shows where)"
        raise RecipeError(f"{key}: {rule}") from error
