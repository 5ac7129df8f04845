"""Import and call of the functions that a recipe names as `package.module:function`."""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from recipes.errors import RecipeError, typed


def import_function(key: str, name: str) -> Callable[..., Any]:
    """Import `module:function`, also from a module in the working directory.

    Raises:
        RecipeError: The module cannot be imported, or has no such function. The message begins with
            `key`.
    """
    module_name, _, attribute = name.partition(":")
    if module_name.endswith(".py"):
        file = Path(module_name)
        where = "" if file.parent == Path() else f", with PYTHONPATH={file.parent.absolute()}"
        rule = "names a file instead of a module"
        raise RecipeError(f"{key}: {rule}; name {file.stem}:{attribute}{where}")
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)
    try:
        function = getattr(importlib.import_module(module_name), attribute, None)
    except (Exception, SystemExit) as error:
        rule = f"cannot import {module_name}: {typed(error)}"
        absent = isinstance(error, ModuleNotFoundError)
        remedy = "run in the folder of the module, or set PYTHONPATH" if absent else "correct it"
        raise RecipeError(f"{key}: {rule}; {remedy}") from error
    if not callable(function):
        rule = f"{module_name} has no function {attribute}; define it, or correct the name"
        raise RecipeError(f"{key}: {rule}")
    return function


@contextlib.contextmanager
def calling(key: str) -> Iterator[None]:
    """Turn an exception of a named function inside the block into a RecipeError about `key`."""
    try:
        yield
    except (Exception, SystemExit) as error:
        rule = f"raised {typed(error)}; correct it (--verbose shows where)"
        raise RecipeError(f"{key}: {rule}") from error
