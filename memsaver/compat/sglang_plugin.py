"""The plugin that SGLang loads in each of its processes (entry point ``sglang.srt.plugins``).

It does nothing unless ``SGLANG_PLUGINS``, SGLang's own variable, names it:
``SGLANG_PLUGINS=memsaver``.
"""

from __future__ import annotations

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
    """Offers what SGLang asks of its ``TorchMemorySaverAdapter``, on our tags."""

    @property
    def saver(self) -> MemorySaver:
        """Returns the saver that has the tags of the current device."""
        return self._savers.current()

    def check_validity(self, caller_name: str) -> None:
        """Does nothing: memory is always on tags here."""

    def configure_subprocess(self) -> contextlib.AbstractContextManager[None]:
        """Does nothing: there is no library to preload, the subprocess loads this plugin."""
        return configure_subprocess()

    def cuda_graph(self, *args: Any, **kwargs: Any) -> Any:
        """Like the drop-in's, with the content kept: graphs replay over what they have there."""
        return super().cuda_graph(*args, **{**kwargs, "enable_cpu_backup": True})


def register() -> None:
    """Put SGLang's memory onto our tags, where it is started with ``enable_memory_saver=True``:
    weights, KV cache, and the graphs' with ``SGLANG_MEMORY_SAVER_CUDA_GRAPH=1``.
    """
    if NAME in map(str.strip, os.environ.get("SGLANG_PLUGINS", "").split(",")):
        put_in_place()


def put_in_place() -> None:
    """Tell SGLang's registry of hooks to make our adapter; SGLang applies its hooks afterwards.

    Sets ``NCCL_GRAPH_REGISTER=0`` and keeps cuBLAS's workspaces as ``memsaver.compat.install``
    does.
    """
    keep_graphs_unregistered()
    hold_workspaces()
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    _hook(hooks.HookRegistry, hooks.HookType.AROUND)


@functools.cache
def _hook(registry: Any, around: Any) -> None:
    registry.register(_MAKER, make, around)


def make(original: Callable[[bool], Any], enable: bool) -> Any:
    """Make the adapter; SGLang's own, which does nothing, where no saver is enabled."""
    return SglangAdapter() if enable else original(enable)
