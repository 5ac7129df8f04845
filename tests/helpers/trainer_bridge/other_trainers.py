"""Stand-ins for packages that the sources of other trainers import but tests do not need."""

from __future__ import annotations

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.helpers.docs.pages import ROOT

# As in an environment where memsaver is installed; the one of the tests may be older.
VERL_VARIABLES = {
    "VERL_ENGINE_VENDOR": "memsaver",
    "VERL_USE_EXTERNAL_PLUGINS": "none",
    "VERL_USE_EXTERNAL_MODULES": "memsaver.compat.verl_plugin",
}
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


class EmptyPackages(MetaPathFinder, Loader):
    """Finder of last resort, for packages of which nothing is used, and all of their modules."""

    def __init__(self, *roots: str) -> None:
        self._roots = roots

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        found = name.partition(".")[0] in self._roots
        return ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: Any = Empty(spec.name)
        module.__path__ = []
        module.__version__ = "0.10.0"
        if spec.name == "msgspec":
            module.field = dict
        return module  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        return


def add_missing_for_verl(*names: str) -> None:
    """Let verl import packages of which nothing is used: those named, slow ones and absent ones."""
    others = ["tensordict", "codetiming", "orjson", "msgspec", "hydra"]
    sys.meta_path.insert(0, EmptyPackages("peft", "datasets", "pandas"))  # 4 s of CPU time
    sys.meta_path.append(EmptyPackages(*names, *(name for name in others if not find_spec(name))))


def use_verl(wheels: Path, folder: Path) -> None:
    """Make verl importable in this process, with the plugin and with a stand-in for vLLM 0.24.

    `wheels` contains verl, and `folder` is a new folder. Nothing undoes the call.
    """
    (folder / "vllm-0.24.0.dist-info").mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.24.0\n"
    (folder / "vllm-0.24.0.dist-info/METADATA").write_text(metadata)
    sys.path[:] = [STAND_IN, *sys.path, str(wheels), str(folder)]
    add_missing_for_verl("vllm")
    os.environ.update(VERL_VARIABLES)
    import ray
    import vllm

    vllm.__version__ = "0.24.0"  # type: ignore[attr-defined]
    job: Any = Empty("context")
    job.get_job_id = lambda: f"job-{folder.parent.name}"
    ray.get_runtime_context = lambda: job  # the real function would start a cluster
