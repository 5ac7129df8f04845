"""Drop-in replacements for two other memory savers, under their own names where a program asks for
that, and which versions of other projects' engines are known.

>>> import memsaver.compat
>>> memsaver.compat.install("torch_memory_saver")  # before anything imports the real one
>>> from torch_memory_saver import torch_memory_saver
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import sys

from memsaver.errors import StateError
from memsaver.memory.torch_allocator import hold_workspaces, keep_graphs_unregistered

__all__ = ["IN_PROCESS", "OLDEST", "hook_sglang", "install", "require", "uninstall"]

IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
OLDEST = {"vllm": (0, 24), "sglang": (0, 5, 16)}
_OURS = {
    "torch_memory_saver": "memsaver.compat.torch_memory_saver",
    "vllm.device_allocator.cumem": "memsaver.compat.vllm",
}


def require(package: str) -> str:
    """Returns the version; ``ValueError`` without the package, or with one older than was read."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"engine.kind={package} needs the package {package}; run: pip install {package}"
        )
    version, oldest = importlib.metadata.version(package), OLDEST[package]
    if tuple(map(int, re.findall(r"\d+", version)[: len(oldest)])) < oldest:
        least = ".".join(map(str, oldest))
        raise ValueError(
            f"{package} {version} is older than {least}; run: pip install '{package}>={least}'"
        )
    return version


def install(*names: str) -> None:
    """Put our modules under these import names, for this process: all or none; twice is no error.

    Names: ``"torch_memory_saver"``, ``"vllm.device_allocator.cumem"``. ``StateError`` when the real
    module is imported already: somebody may hold objects of it, and two memory savers in one
    process do not know of each other.

    Engines capture graphs. So it sets ``NCCL_GRAPH_REGISTER=0`` where the variable is not set: NCCL
    would go on using the pages that collectives' buffers had before a pause. And from then on
    cuBLAS's workspaces of this process are kept, whoever of ours empties torch's cache.
    """
    if not names or any(name not in _OURS for name in names):
        raise ValueError(
            f"install takes one or more of {', '.join(map(repr, _OURS))}, not {list(names)}"
        )
    for name in names:
        if name in sys.modules and not _installed(name):
            raise StateError(
                f"{name} is imported already, "
                f"from {getattr(sys.modules[name], '__file__', None) or 'somewhere'}; "
                f"call memsaver.compat.install({name!r}) before anything imports it, "
                "at the top of the program"
            )
    keep_graphs_unregistered()
    hold_workspaces()
    for name in names:
        sys.modules[name] = importlib.import_module(_OURS[name])


def hook_sglang() -> None:
    """Have SGLang put its memory onto our tags in this process, by its own registry of hooks.

    It applies them when it loads its plugins. ``SGLANG_PLUGINS=memsaver`` does the same in each of
    its processes. ``ImportError`` without the package.
    """
    importlib.import_module("memsaver.compat.sglang_plugin").put_in_place()


def uninstall(*names: str) -> None:
    """Take our modules out again (no name: all). What was imported from them stays what it is."""
    for name in names or _OURS:
        if _installed(name):
            del sys.modules[name]


def _installed(name: str) -> bool:
    return (
        name in _OURS and name in sys.modules and sys.modules[name] is sys.modules.get(_OURS[name])
    )
