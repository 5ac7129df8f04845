"""Attributes of objects, and functions of a module, that are replaced for a while."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any


@contextlib.contextmanager
def having(target: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object inside the block, and restore them after it."""
    usual = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in usual.items():
            setattr(target, name, value)


def replaced(
    module: Any, **functions: Callable[..., Any]
) -> contextlib.AbstractContextManager[None]:
    """Replace functions of a module inside the block; each gets the usual one before its arguments.

    Other threads that call the module meanwhile also call the new functions.
    """
    new = {name: partial(call, getattr(module, name)) for name, call in functions.items()}
    return having(module, **new)
