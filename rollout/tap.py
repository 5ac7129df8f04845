"""Results of the operations inside a forward pass, for a listener that compares them."""

import contextlib
from collections.abc import Callable, Iterator

from torch import Tensor

Listener = Callable[[str, Tensor], None]
"""(operation, its result [T, ...]); a CUDA graph calls it only during the capture."""

_listeners: list[Listener] = []


def tap(operation: str, result: Tensor) -> Tensor:
    """Pass an operation's result to the listeners, and return it."""
    for listen in _listeners:
        listen(operation, result)
    return result


def tapped() -> bool:
    """Return whether there is a listener, for results that only listeners need."""
    return bool(_listeners)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Pass results to `listener` inside the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
