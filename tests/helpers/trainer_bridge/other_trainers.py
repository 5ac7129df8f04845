"""Stand-ins for packages that the sources of other trainers import but tests do not need."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from tests.helpers.docs.pages import ROOT

STAND_IN = str(ROOT / "tests/helpers/rollout/stand_in_vllm")


class Empty(ModuleType):
    """A package that contains an empty class of any name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def missing_for_trl() -> dict[str, ModuleType]:
    """Return stand-ins for missing packages that TRL imports for data sets and servers."""
    names = ["pandas", "datasets"]
    absent = [name for name in names if name not in sys.modules and not find_spec(name)]
    if STAND_IN in sys.path:  # the stand-in for vLLM has no servers
        absent += ["vllm.utils.network_utils", "vllm.distributed.weight_transfer.nccl_engine"]
    return {name: Empty(name) for name in absent}
