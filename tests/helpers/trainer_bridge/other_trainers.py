"""Other trainers' sources, imported without all that they need."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from tests.helpers.docs.pages import ROOT

STAND_IN = str(ROOT / "tests/helpers/rollout/stand_in_vllm")


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
    """What TRL imports for data sets and for servers, as far as it is not installed."""
    names = ["pandas", "datasets"]
    absent = [name for name in names if name not in sys.modules and not find_spec(name)]
    if STAND_IN in sys.path:  # it has no servers
        absent += ["vllm.utils.network_utils", "vllm.distributed.weight_transfer.nccl_engine"]
    return {name: Empty(name) for name in absent}
