"""Parameters and buffers of a module by checkpoint name, without a walk over it in every sync."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import chain
from typing import Any

from torch import Tensor, nn

from rollout.model import stored_buffers

WRAPPED = "_checkpoint_wrapped_module."


class ModuleTensors:
    """Reads the tensors of a module, without keeping any of them alive.

    A walk over a module takes milliseconds. It is repeated only after a submodule, a parameter or a
    buffer has been added, removed, renamed or replaced.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._tables: list[dict[str, Any]] = []  # submodules, parameters and buffers of each module
        self._keys: list[str] = []
        self._known: list[Callable[[], Any]] = []  # weak references to the tables' values
        self._places: list[tuple[str, dict[str, Any], str]] = []  # of the tensors: name, table, key

    def __call__(self) -> dict[str, Tensor]:
        """Return the current parameters and stored buffers by checkpoint name, tied ones once."""
        if not self._tables or self._changed():
            self._walk()
        return {name: table[key] for name, table, key in self._places}

    def _changed(self) -> bool:
        """Return whether an entry of a table differs; a dead reference is not an entry of None."""
        if [*chain.from_iterable(self._tables)] != self._keys:
            return True
        values = chain.from_iterable(map(dict.values, self._tables))
        return not all(
            known is _nothing if value is None else value is known()
            for value, known in zip(values, self._known, strict=True)
        )

    def _walk(self) -> None:
        modules: list[Any] = [*self._module.modules()]
        self._tables = [*chain.from_iterable(map(_tables, modules))]
        self._keys = [*chain.from_iterable(self._tables)]
        values = [*chain.from_iterable(map(dict.values, self._tables))]
        self._known = [_nothing if value is None else weakref.ref(value) for value in values]
        tables = chain.from_iterable([table] * len(table) for table in self._tables)
        where = dict(zip(map(id, values), zip(tables, self._keys, strict=True), strict=True))
        tensors = named_tensors(self._module)
        self._places = [(name, *where[id(tensor)]) for name, tensor in tensors.items()]


def _tables(module: Any) -> tuple[dict[str, Any], ...]:
    return module._modules, module._parameters, module._buffers


def _nothing() -> None:
    return None


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and stored buffers, without the names of checkpoint wrappers."""
    named = dict(module.named_parameters()) | stored_buffers(module)
    return {name.replace(WRAPPED, ""): tensor for name, tensor in named.items()}
