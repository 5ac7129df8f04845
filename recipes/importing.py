"""Import of the functions that a recipe names as `package.module:function`."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from recipes.errors import RecipeError, one_line


def import_function(key: str, name: str) -> Callable[..., Any]:
    """Import `module:function`, also from a module in the working directory.

    Raises:
        RecipeError: The module cannot be imported, or has no such function. The message begins with
            `key`.
    """
    module_name, _, attribute = name.partition(":")
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)
    try:
        function = getattr(importlib.import_module(module_name), attribute, None)
    except (Exception, SystemExit) as error:
        rule = f"cannot import {module_name}: {type(error).__name__}: {one_line(error)}"
        absent = isinstance(error, ModuleNotFoundError)
        remedy = "run in the folder of the module, or set PYTHONPATH" if absent else "correct it"
        raise RecipeError(f"{key}: {rule}; {remedy}") from error
    if not callable(function):
        rule = f"{module_name} has no function {attribute}; define it, or correct the name"
        raise RecipeError(f"{key}: {rule}")
    return function
