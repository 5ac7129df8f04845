"""Import and call of what a recipe names: `package.module:function` or `folder/file.py:function`.

This imports no torch, for the processes of reward functions.
"""

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from recipes.errors import RecipeError, typed

_FILE = "memsaver_file_"
"""Begins the name of a file's module; the path follows in hexadecimal, without a dot."""


def import_named(name: str) -> Any:
    """Import a function, also from a module in the working directory.

    A file becomes a module of its own. It can import the modules in its folder.

    Args:
        name: `package.module:function` or `folder/file.py:function`, by the working directory.

    Raises:
        RecipeError: The module cannot be imported, or has no such function; with the remedy.
    """
    place, _, attribute = name.rpartition(":")
    try:
        module = _module_of_file(_path(place)) if place.endswith(".py") else _module(place)
    except (Exception, SystemExit) as error:
        rule = f"cannot import {place}: {typed(error)}"
        remedy = "correct it"
        if isinstance(error, ModuleNotFoundError):
            remedy = "run in the folder of the module, or set PYTHONPATH"
        elif isinstance(error, FileNotFoundError):
            remedy = "give its path by the working directory"
        raise RecipeError(f"{rule}; {remedy}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        rule = f"{place} has no function {attribute}; define it, or correct the name"
        raise RecipeError(rule)
    return function


def absolute_name(name: str) -> str:
    """Return the name with which another working directory finds the same file."""
    place, colon, attribute = name.rpartition(":")
    return f"{_path(place)}:{attribute}" if colon and place.endswith(".py") else name


def _module(name: str) -> ModuleType:
    _find_beside(os.getcwd())
    return importlib.import_module(name)


def _path(place: str) -> str:
    return str(Path(place).expanduser().absolute())


def _module_of_file(path: str) -> ModuleType:
    _find_beside(os.path.dirname(path))
    return importlib.import_module(_FILE + path.encode().hex())


class _FileFinder:
    """Finder of modules that `_FILE` and a path name, also for what other processes unpickle."""

    @staticmethod
    def find_spec(name: str, *place: Any) -> ModuleSpec | None:
        if not name.startswith(_FILE):
            return None
        path = bytes.fromhex(name.removeprefix(_FILE)).decode()
        return importlib.util.spec_from_file_location(name, path)


sys.meta_path.append(_FileFinder)


def _find_beside(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)


@dataclass(frozen=True)
class NamedFunction:
    """A function that is imported where it is called, so that it pickles as its name."""

    name: str

    def __call__(self, *args: Any) -> Any:
        return import_named(self.name)(*args)


def import_function(key: str, name: str) -> Callable[..., Any]:
    """Import what `import_named` takes; its error begins with `key`."""
    try:
        function: Callable[..., Any] = import_named(name)
    except RecipeError as error:
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
