"""`load`: a YAML file and dotlist overrides become a checked `Recipe`, or one line that says what to change."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from recipes.config import FieldError, Recipe
from recipes.errors import RecipeError, one_line

PACKAGE = Path(__file__).parent


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe and applies `key=value` overrides.

    `path` is a YAML file, with or without its ending; a name that is no file is looked up among the packaged recipes.
    Every mistake raises RecipeError with one line: file, key, value, rule, remedy.
    """
    file = find_recipe(path)
    merged = OmegaConf.create({})
    for layer, source in _layers(file, overrides):
        _check_keys(OmegaConf.to_container(layer, resolve=False), Recipe, "", source)
        merged = _merge(merged, layer, source)
    return _construct(Recipe, OmegaConf.to_container(_typed(merged, file.name), resolve=True), "", file.name)


def find_recipe(path: str | Path) -> Path:
    """The YAML file meant by `path`: itself, with `.yaml` added, or a packaged recipe of that name."""
    given = Path(path)
    yaml = given.name + ".yaml"
    for candidate in (given, given.with_name(yaml), PACKAGE / given.name, PACKAGE / yaml):
        if candidate.is_file():
            return candidate
    packaged = packaged_recipes()
    close = difflib.get_close_matches(given.name.removesuffix(".yaml"), packaged, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise RecipeError(f"recipe={path}: no such file; {hint}packaged recipes: {', '.join(packaged)}")


def packaged_recipes() -> list[str]:
    """Names that `load` takes without a file."""
    return sorted(file.stem for file in PACKAGE.glob("*.yaml"))


def save_recipe(recipe: Recipe, file: Path) -> None:
    """Writes the recipe as resolved; `load` of that file gives an equal recipe."""
    file.write_text(OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(recipe))))


def _layers(file: Path, overrides: Sequence[str]) -> list[tuple[DictConfig, str]]:
    """The file, then each override, as untyped mappings with the words to call them by."""
    try:
        content = OmegaConf.load(file)
    except (YAMLError, OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{file.name}: is not readable as YAML: {one_line(error)}; correct the file") from None
    if not isinstance(content, DictConfig):
        raise RecipeError(f"{file.name}: must be a mapping of keys to values; write it as 'key: value' lines")
    layers = [(content, file.name)]
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key or not all(key.split(".")):
            raise RecipeError(f"{override}: is not an override; write it as key=value, for example steps=3")
        try:
            layers.append((OmegaConf.from_dotlist([override]), "command line"))
        except (YAMLError, OmegaConfBaseException) as error:
            raise RecipeError(f"command line: {override}: bad value: {one_line(error)}; quote it") from None
    return layers


def _merge(base: Any, layer: DictConfig, source: str) -> Any:
    try:
        return OmegaConf.merge(base, layer)
    except (OmegaConfBaseException, TypeError) as error:
        raise RecipeError(f"{source}: {one_line(error)}; correct the value") from None


def _check_keys(values: Any, cls: type, prefix: str, source: str) -> None:
    """Every key is a field of `cls`, every section a mapping."""
    known = _fields(cls)
    for key, value in values.items():
        full = f"{prefix}{key}"
        if key not in known:
            raise RecipeError(f"{source}: {full}: unknown key; {_suggest(str(key), list(known), prefix)}")
        if dataclasses.is_dataclass(known[key]):
            if not isinstance(value, Mapping):
                names = ", ".join(_fields(known[key]))
                raise RecipeError(f"{source}: {full}={value}: must be a section; set {full}.KEY, KEY one of {names}")
            _check_keys(value, known[key], f"{full}.", source)


def _fields(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _suggest(key: str, known: list[str], prefix: str) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"did you mean {prefix}{close[0]}?" if close else f"known here: {', '.join(prefix + name for name in known)}"


def _typed(merged: DictConfig, source: str) -> DictConfig:
    try:
        typed = OmegaConf.merge(OmegaConf.structured(Recipe), merged)
        missing = sorted(OmegaConf.missing_keys(typed))
    except OmegaConfBaseException as error:
        full = (error.full_key or "?").partition("[")[0]  # of a list: the whole list
        shown = f"{full}={_shown(merged, full)}"
        raise RecipeError(f"{source}: {shown}: must be {_wanted(full)}; correct its type") from None
    if missing:
        raise RecipeError(f"{source}: {missing[0]}: is required and has no value; set {missing[0]}=VALUE")
    assert isinstance(typed, DictConfig)
    return typed


def _shown(merged: DictConfig, full: str) -> str:
    """The value as written, interpolations unresolved."""
    value: Any = OmegaConf.to_container(merged, resolve=False)
    for part in full.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return "null" if value is None else str(value)


def _wanted(full: str) -> str:
    """The type of a field in a user's words."""
    hint: Any = Recipe
    for part in full.split("."):
        if not dataclasses.is_dataclass(hint):
            break
        hint = _fields(typing.cast(type, hint)).get(part, hint)
    names: dict[Any, str] = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    names |= {list[int]: "a list of integers, as [2, 3]", list[str]: "a list of words, as [params, optim]"}
    if isinstance(hint, types.UnionType):
        inner = [names.get(part, "a section of keys") for part in typing.get_args(hint) if part is not type(None)]
        return " or ".join([*inner, "null"])
    return names.get(hint, "a section of keys")


def _construct(cls: type, values: Any, prefix: str, source: str) -> Any:
    """Builds the dataclasses from the inside out, giving a broken rule its full key."""
    hints = _fields(cls)
    assert isinstance(values, Mapping)
    built = {
        key: _construct(hints[key], value, f"{prefix}{key}.", source) if dataclasses.is_dataclass(hints[key]) else value
        for key, value in values.items()
    }
    try:
        return cls(**built)
    except FieldError as error:
        value = "null" if error.value is None else error.value
        raise RecipeError(f"{source}: {prefix}{error.name}={value}: {error.rule}; {error.remedy}") from None
