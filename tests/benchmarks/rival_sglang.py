"""SGLang's own RadixCache, from an installed `sglang` or its wheel on PYTHONPATH, without the rest
of sglang.

The files that make the cache are executed as they are; every other module of sglang, which needs a
GPU or dozens of packages, is an empty stand-in. The allocator that it frees to does nothing.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import sys
from array import array
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

CACHE = "sglang.srt.mem_cache"
FILES = ("radix_cache", "base_prefix_cache", "cache_init_params", "events", "evict_policy", "utils")
GENUINE = {f"{CACHE}.{name}" for name in FILES}


class _StandIn(ModuleType):
    """A module that has every name, as an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for all of sglang but the genuine files, which their paths lead to."""

    def __init__(self, package: str) -> None:
        self.package = Path(package)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.split(".")[0] != "sglang" or name in GENUINE:
            return None
        spec = ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = [str(self.package.joinpath(*name.split(".")[1:]))]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class SGLangRadix:
    """Their cache, with the calls that are compared."""

    def __init__(self, module: Any, params: Any, page_size: int) -> None:
        self._module, self._params = module, params
        nothing = SimpleNamespace(device="cpu", free_segment=lambda value, start_pos: None)
        self.cache = module.RadixCache.create_simulated(mock_allocator=nothing, page_size=page_size)

    def key(self, tokens: NDArray[np.int32]) -> array[int]:
        """As its scheduler has them."""
        return array("q", tokens.astype(np.int64).tobytes())

    def slots(self, tokens: int) -> torch.Tensor:
        return torch.arange(tokens)

    def match(self, key: array[int]) -> int:
        return int(self._match(key).device_prefix_len)

    def match_slots(self, key: array[int]) -> torch.Tensor:
        found: torch.Tensor = self.cache.path_device_indices(self._match(key).last_device_node)
        return found

    def _match(self, key: array[int]) -> Any:
        return self.cache.match_prefix(
            self._params.MatchPrefixParams(key=self._module.RadixKey(token_ids=key))
        )

    def insert(self, key: array[int], slots: torch.Tensor) -> int:
        given = self._params.InsertParams(key=self._module.RadixKey(token_ids=key), value=slots)
        return int(self.cache.insert(given).prefix_len)

    def inserted(self, slots: torch.Tensor, known: int) -> None:
        """Nothing: its allocator is one that does nothing."""

    def evict(self, tokens: int) -> int:
        return int(self.cache.evict(self._params.EvictParams(num_tokens=tokens)).num_tokens_evicted)


def find() -> str | None:
    """Where sglang lies, without importing it; None: nowhere."""
    spec = importlib.util.find_spec("sglang")
    places: Sequence[str] = (spec.submodule_search_locations or []) if spec is not None else []
    return places[0] if places else None


def version() -> str:
    return importlib.metadata.version("sglang")


def load(package: str, page_size: int) -> SGLangRadix:
    """From then on this process has the genuine files and stand-ins for sglang."""
    finder = _StandIns(package)
    sys.meta_path.insert(0, finder)
    try:
        module = importlib.import_module(f"{CACHE}.radix_cache")
        return SGLangRadix(module, importlib.import_module(f"{CACHE}.base_prefix_cache"), page_size)
    finally:
        sys.meta_path.remove(finder)
