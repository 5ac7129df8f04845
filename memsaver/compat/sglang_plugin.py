"""Plugin that SGLang loads in each of its processes (entry point ``sglang.srt.plugins``).

It does nothing unless ``SGLANG_PLUGINS``, SGLang's own variable, names it:
``SGLANG_PLUGINS=memsaver``.
"""

import contextlib
import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

from memsaver.compat.torch_memory_saver import TorchMemorySaver, configure_subprocess
from memsaver.memory.torch_allocator import hold_workspaces, keep_graphs_unregistered
from memsaver.saver import MemorySaver

NAME = "memsaver"
_MAKER = "sglang.srt.utils.torch_memory_saver_adapter.TorchMemorySaverAdapter.create"


class SglangAdapter(TorchMemorySaver):
    """Replacement for SGLang's ``TorchMemorySaverAdapter`` that places memory on tags."""

    @property
    def saver(self) -> MemorySaver:
        """Return the saver of the current device."""
        return self._savers.current()

    def check_validity(self, caller_name: str) -> None:
        """Pass without a check, because memory is always on tags here."""

    def configure_subprocess(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: no library is preloaded, because the subprocess loads this plugin."""
        return configure_subprocess()

    def cuda_graph(self, *args: Any, **kwargs: Any) -> Any:
        """Capture a graph like the drop-in, and keep its content for the replay after a pause."""
        return super().cuda_graph(*args, **{**kwargs, "enable_cpu_backup": True})


def register() -> None:
    """Place SGLang's memory on tags if ``SGLANG_PLUGINS`` names memsaver.

    SGLang must be started with ``enable_memory_saver=True``. The tags hold its weights and KV cache
    and, with ``SGLANG_MEMORY_SAVER_CUDA_GRAPH=1``, its graphs.
    """
    if NAME in map(str.strip, os.environ.get("SGLANG_PLUGINS", "").split(",")):
        put_in_place()


def put_in_place() -> None:
    """Register the adapter with SGLang's registry of hooks, which SGLang applies afterwards.

    Like `memsaver.compat.install`, the call sets ``NCCL_GRAPH_REGISTER=0`` and keeps cuBLAS's
    workspaces.
    """
    keep_graphs_unregistered()
    hold_workspaces()
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    _hook(hooks.HookRegistry, hooks.HookType.AROUND)


@functools.cache
def _hook(registry: Any, around: Any) -> None:
    registry.register(_MAKER, make, around)


def make(original: Callable[[bool], Any], enable: bool) -> Any:
    """Create the adapter, or SGLang's own inactive one if no saver is enabled."""
    return SglangAdapter() if enable else original(enable)
