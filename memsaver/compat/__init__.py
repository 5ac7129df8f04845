"""Drop-in replacements for two other memory savers, and the supported versions of engines.

`install` makes a replacement importable under the other saver's name.

>>> import memsaver.compat
>>> memsaver.compat.install("torch_memory_saver")  # before anything imports the real one
>>> from torch_memory_saver import torch_memory_saver
"""

import importlib
import importlib.metadata
import importlib.util
import re
import sys

from memsaver.errors import StateError
from memsaver.memory.torch_allocator import hold_workspaces, keep_graphs_unregistered

__all__ = ["IN_PROCESS", "OLDEST", "hook_sglang", "install", "is_older", "require", "uninstall"]

IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
OLDEST = {"vllm": (0, 24), "sglang": (0, 5, 16)}
_OURS = {
    "torch_memory_saver": "memsaver.compat.torch_memory_saver",
    "vllm.device_allocator.cumem": "memsaver.compat.vllm",
}


def is_older(version: str, oldest: tuple[int, ...]) -> bool:
    """Return whether a version such as "0.24.1+cu130" comes before the oldest supported one."""
    return tuple(map(int, re.findall(r"\d+", version)[: len(oldest)])) < oldest


def require(package: str) -> str:
    """Return the installed version of an engine's package.

    Args:
        package: A key of `OLDEST`.

    Returns:
        The version.

    Raises:
        ValueError: The package is missing, or older than the oldest supported version.
    """
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"engine.kind={package} needs the Python package {package}; run: pip install {package}"
        )
    version, oldest = importlib.metadata.version(package), OLDEST[package]
    if is_older(version, oldest):
        least = ".".join(map(str, oldest))
        raise ValueError(
            f"{package} {version} is older than {least}; run: pip install '{package}>={least}'"
        )
    return version


def install(*names: str) -> None:
    """Install memsaver's replacements under the import names of other savers, in this process.

    Either all names are installed or none. Installing a name twice is not an error.

    Because engines capture graphs, the call also sets ``NCCL_GRAPH_REGISTER=0``, unless the
    variable is set or a process group exists. Otherwise NCCL would continue to use the pages that
    collectives' buffers had before a pause. From then on, memsaver also keeps cuBLAS's workspaces
    when it empties torch's cache.

    Args:
        *names: ``"torch_memory_saver"``, ``"vllm.device_allocator.cumem"`` or both.

    Raises:
        ValueError: No name is given, or a name is unknown.
        StateError: The real module is imported already. Its objects may be in use, and two memory
            savers in one process do not know of each other.
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
    """Register a hook with which SGLang places its memory on tags, in this process.

    SGLang applies its hooks when it loads its plugins. ``SGLANG_PLUGINS=memsaver`` does the same in
    each of SGLang's processes.

    Raises:
        ImportError: SGLang is not installed.
    """
    importlib.import_module("memsaver.compat.sglang_plugin").put_in_place()


def uninstall(*names: str) -> None:
    """Remove replacements from the import names under which `install` put them.

    Objects that were imported from a replacement stay valid. ``NCCL_GRAPH_REGISTER`` and the
    handling of cuBLAS's workspaces stay as `install` left them.

    Args:
        *names: Names to uninstall; all if empty.
    """
    for name in names or _OURS:
        if _installed(name):
            del sys.modules[name]


def _installed(name: str) -> bool:
    return (
        name in _OURS and name in sys.modules and sys.modules[name] is sys.modules.get(_OURS[name])
    )
