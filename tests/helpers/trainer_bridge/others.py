"""Other trainers' sources, imported without all that they need."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType


class Empty(ModuleType):
    """A package that has every class, each without anything in it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def missing_for_trl() -> dict[str, ModuleType]:
    """What TRL imports beside its generation, for data sets, as far as it is not installed."""
    names = ("pandas", "datasets")
    absent = (name for name in names if importlib.util.find_spec(name) is None)
    return {name: Empty(name) for name in absent if name not in sys.modules}
