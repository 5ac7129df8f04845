"""Triton's interpreter without its repeated work.

At a launch and at each call of a device function, the interpreter searches the members of
`triton.language` for builtins and replaces them until the launch ends. For each value, it makes
types and shapes. Both take longer than the arithmetic of small blocks, and are remembered here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from triton.language import core
from triton.runtime import interpreter


def quicken() -> None:
    """Search each part of `triton.language` once, and make each type and shape once."""
    names = vars(interpreter)
    names["_patch_lang"] = _once_a_launch(names["_patch_lang"], names["_LangPatchScope"])
    names["_patch_builtin"] = _searched_once(names["_patch_attr"])
    names["_get_np_dtype"] = _by_name(names["_get_np_dtype"])
    builder = names["interpreter_builder"]
    # checks of integers, whose results the interpreter ignores without its option `debug`
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    core.block_type.__init__ = _quick_block_type(core.block_type.__init__)
    core.tensor.__init__ = _quick_tensor(core.tensor.__init__)


def _once_a_launch(patch: Any, scope_type: Any) -> Callable[[Any], Any]:
    patched = set[int]()

    def patch_lang(fn: Any) -> Any:
        if id(fn.__globals__) in patched:  # a device function, whose names the launch has replaced
            return scope_type()
        scope, launched = patch(fn), not patched
        patched.add(id(fn.__globals__))
        if launched:
            restore = scope.restore

            def ended() -> None:
                patched.clear()
                restore()

            scope.restore = ended
        return scope

    return patch_lang


def _searched_once(patch_attr: Any) -> Callable[[Any, Any, Any], None]:
    builtins: dict[Any, list[tuple[str, Any]]] = {}

    def patch_builtin(part: Any, builder: Any, scope: Any) -> None:
        if part not in builtins:
            members = inspect.getmembers(part)
            builtins[part] = [pair for pair in members if core.is_builtin(pair[1])]
        for name, member in builtins[part]:
            if getattr(part, name) is member:
                patch_attr(part, name, member, builder, scope)

    return patch_builtin


def _by_name(np_dtype: Any) -> Callable[[Any], Any]:
    found: dict[str, Any] = {}

    def of(dtype: Any) -> Any:
        name = str(dtype)
        if name not in found:
            found[name] = np_dtype(dtype)
        return found[name]

    return of


def _quick_block_type(init: Any) -> Callable[..., None]:
    made: dict[Any, dict[str, Any]] = {}

    def quick(self: Any, element_ty: Any, shape: Any) -> None:
        key = str(element_ty), *(getattr(size, "value", size) for size in shape)
        if key not in made:
            init(self, element_ty, shape)
            made[key] = dict(vars(self))
        vars(self).update(made[key])

    return quick


def _quick_tensor(init: Any) -> Callable[..., None]:
    made: dict[str, dict[str, Any]] = {}

    def quick(self: Any, handle: Any, type: Any) -> None:
        name = str(type)
        if name not in made:
            init(self, handle, type)
            made[name] = {key: value for key, value in vars(self).items() if key != "handle"}
        vars(self).update(made[name], handle=handle)

    return quick
