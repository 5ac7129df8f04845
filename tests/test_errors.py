"""Errors of all packages cross processes: pickled and unpickled, they keep text and attributes."""

from __future__ import annotations

import importlib
import inspect
import pickle
from typing import Any

import pytest

EXAMPLES: dict[str, Any] = {
    "cause": "OSError: gone",
    "error": OSError("gone"),
    "count": 3,
    "sequence": 1,
    "token": 2,
    "values": (-0.5, -0.25),
    "requested_bytes": 2**20,
    "missing_bytes": 2**19,
    "holders": {"params": 2**20},
}
MODULES = [
    importlib.import_module(f"{package}.errors")
    for package in ("memsaver", "rollout", "trainer_bridge", "recipes")
]
ERRORS = [
    kind
    for module in MODULES
    for kind in vars(module).values()
    if inspect.isclass(kind) and issubclass(kind, Exception) and kind.__module__ == module.__name__
]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_error_survives_pickling(kind: type[Exception]) -> None:
    own = kind.__init__
    names = [*inspect.signature(own).parameters][1:] if inspect.isfunction(own) else ["message"]
    error = kind(*(EXAMPLES.get(name, f"some {name}") for name in names))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind and str(copy) == str(error) != ""
    assert vars(copy).keys() == vars(error).keys()
    plain = {name: value for name, value in vars(error).items() if name not in ("cause", "error")}
    assert plain.items() <= vars(copy).items()
