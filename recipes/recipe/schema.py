"""The keys of a recipe, read from its sections: their types in a user's words, and a value that
each takes.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from functools import cache
from typing import Any

from omegaconf import MISSING

from recipes.recipe.recipe import Recipe
from recipes.recipe.rules import default_of, shown

_WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    type(None): "null",
    list[int]: "a list of integers, as [2, 3]",
    Any: "auto, or a list of words, as [params, optim]",
    list[str]: "a list of words, as [params, optim]",
}
_GOOD = {
    "steps": "steps=3",
    "task.name": "task.name=toy",
    "model.config": "model.config.model_type=qwen3",
    "engine.options": "engine.options.attention_backend=triton",
}


@cache
def section_fields(cls: type) -> dict[str, Any]:
    """Name -> type of a section's fields."""
    return typing.get_type_hints(cls)


@cache
def leaves() -> dict[str, Any]:
    """Full key -> its type, of every key that takes a value, in order."""
    return dict(_keys(Recipe, ""))


def _keys(cls: type, prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, hint in section_fields(cls).items():
        key = f"{prefix}{name}"
        section = dataclasses.is_dataclass(hint) and isinstance(hint, type)
        found += _keys(hint, f"{key}.") if section else [(key, hint)]
    return found


def in_words(key: str) -> str:
    """Says what a key takes."""
    hint = leaves().get(key)
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else [hint]
    return " or ".join(_WORDS.get(part, "a section of keys") for part in parts)


def remedy(key: str) -> str:
    """`set key=value`, with the default where there is one."""
    if key not in leaves():
        return f"set {key}.KEY=VALUE"
    return f"set {_GOOD.get(key) or f'{key}={shown(_default(key))}'}"


def _default(key: str) -> Any:
    hint: Any = Recipe
    for part in key.split("."):
        owner, name = hint, part
        hint = section_fields(owner)[part]
    default = default_of(owner, name)
    assert default is not MISSING, f"{key} has no default; name a value in _GOOD"
    return default
