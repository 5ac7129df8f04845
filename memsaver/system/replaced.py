"""Functions of a module that are replaced for a while, to watch what calls them."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any


@contextlib.contextmanager
def replaced(module: Any, **functions: Callable[..., Any]) -> Iterator[None]:
    """Replace functions of a module inside the block; each gets the usual one before its arguments.

    Other threads that call the module meanwhile also call the new functions.
    """
    usual = {name: vars(module)[name] for name in functions}
    vars(module).update({name: partial(new, usual[name]) for name, new in functions.items()})
    try:
        yield
    finally:
        vars(module).update(usual)
