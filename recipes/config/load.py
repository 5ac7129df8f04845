"""Load recipes: a YAML file and `key=value` overrides become a checked `Recipe`."""

import dataclasses
import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from recipes.config.older import GONE, values_now, words_now
from recipes.config.recipe import FIELDS, Recipe, field_of, is_section, keys_of, remedy_of
from recipes.config.rules import broken_rules, idle_keys
from recipes.config.yaml_values import read_values, values_text
from recipes.errors import RecipeError, shown

PACKAGE = Path(__file__).parent.parent


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `key=value` overrides in order.

    Args:
        path: A YAML file, with or without its ending, or the name of a packaged recipe.
        overrides: Settings such as `steps=3`, whose values are YAML.

    Returns:
        The checked recipe.

    Raises:
        RecipeError: The message has a line for each fault: place, key and value, rule, remedy.
    """
    file = find_recipe(path)
    values = read_values(file, overrides)
    algorithm = values.get("algorithm", "grpo")
    if (words := words_now(overrides, algorithm)) != [*overrides]:
        values, overrides = read_values(file, words), words
    values = values_now(values, algorithm)
    typed = [override.partition("=")[0] for override in overrides]

    def placed(key: str, fault: str) -> str:
        """Add the place where the value of a key was written to its fault."""
        on_line = any(_within(key, name) or _within(name, key) for name in typed)
        return f"{'command line' if on_line else file.name}: {fault}"

    try:
        recipe = _adapter().validate_python(values)
        faults = broken_rules(recipe)
    except ValidationError as error:
        faults = explain(error, values)
    if faults:
        raise RecipeError("\n".join(placed(key, fault) for key, fault in faults))
    replaced = read_values(file) if "loss.kind" in typed else {}
    if idle := list(_without_effect(recipe, overrides, replaced)):
        raise RecipeError("\n".join(idle))
    return recipe


@functools.cache
def _adapter() -> TypeAdapter[Recipe]:
    """Return pydantic's checks of a recipe, which take as long to build as a recipe to read."""
    return TypeAdapter(Recipe)


def find_recipe(path: str | Path) -> Path:
    """Return the YAML file that `path` names, with or without `.yaml`, or a packaged recipe."""
    given = Path(path)
    yaml = given.name + ".yaml"
    for candidate in (given, given.parent / yaml, PACKAGE / given.name, PACKAGE / yaml):
        if candidate.is_file():
            return candidate
    close = difflib.get_close_matches(given.name.removesuffix(".yaml"), packaged_recipes(), n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise RecipeError(
        f"recipe={path}: no such file or packaged recipe; {hint}`memsaver recipes` lists them"
    )


def packaged_recipes() -> list[str]:
    """Return the names of the packaged recipes."""
    return sorted(file.stem for file in PACKAGE.glob("*.yaml"))


def first_sentence(packaged: str) -> str:
    """Return the first sentence of the comment at the top of a packaged recipe."""
    lines = (PACKAGE / f"{packaged}.yaml").read_text().splitlines()
    comment = takewhile(lambda line: re.match(r"# \S", line), lines)
    return " ".join(line[2:] for line in comment).partition(". ")[0].rstrip(".")


def recipe_text(recipe: Recipe) -> str:
    """Return the resolved recipe as YAML, which `load` reads back as an equal recipe."""
    return values_text(dataclasses.asdict(recipe))


def explain(error: ValidationError, values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the key and a line of every fault that pydantic found in the values of a recipe."""
    by_key: dict[str, list[ErrorDetails]] = {}
    for details in error.errors():
        by_key.setdefault(_key(details["loc"]), []).append(details)
    return [(key, _line(key, faults, values)) for key, faults in by_key.items()]


def _key(location: tuple[int | str, ...]) -> str:
    """Return the key of a fault; below a key, pydantic's location names types and items."""
    if not is_section(str(location[0])):
        return str(location[0])
    key = ".".join(map(str, location[:2]))
    if key in ("task.mixture", "eval.sets") and len(location) > 2:
        return ".".join([f"{key}[{location[2]}]", *map(str, location[3:4])])
    return key


def _line(key: str, faults: list[ErrorDetails], values: dict[str, Any]) -> str:
    """Return one line about the faults of a key; a choice of types has a fault for each type."""
    if faults[0]["type"] == "unexpected_keyword_argument":
        return f"{shown(key)}: {GONE.get(key) or f'unknown key; {_suggest(key)}'}"
    if faults[0]["type"] == "missing":
        return f"{key}: is required and has no value; {remedy_of(key)}"
    value: Any = values
    for part in re.findall(r"\w+", key):
        value = value[int(part) if part.isdigit() else part]
    rules = [_rule(fault) for fault in faults]
    rule = re.sub(r" or an instance of \w+", "", " or ".join(dict.fromkeys(rules)))
    description = FIELDS[field_of(key)].description
    reason = f" ({description.rstrip('.')})" if description else ""
    return f"{key}={shown(value)}: must {rule}{reason}; {remedy_of(key)}"


def _rule(fault: ErrorDetails) -> str:
    if fault["type"] == "string_pattern_mismatch":
        return "have this form"  # the key's description follows
    return fault["msg"].partition(" should ")[2] or fault["msg"]


def _suggest(key: str) -> str:
    section, _, name = key.rpartition(".")
    known = {full_key.rpartition(".")[2]: full_key for full_key in keys_of(section)}
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"did you mean {known[close[0]]}?"
    return f"known here: {', '.join(known.values())}"


def _within(key: str, section: str) -> bool:
    return f"{key}.".replace("[", ".").startswith(f"{section}.".replace("[", "."))


def _without_effect(
    recipe: Recipe, overrides: Sequence[str], replaced: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a line for each override without effect, except for those that set null.

    `replaced` are the values of the file, if `loss.kind` is overridden: a packaged loss that
    replaces the user's has an effect.
    """
    own_loss = ":" in str((replaced.get("loss") or {}).get("kind"))
    ignored = idle_keys(recipe)
    for override in overrides:
        key, _, value = override.partition("=")
        for idle, why in ignored.items():
            if value != "null" and _within(key, idle) and not (own_loss and key == "loss.kind"):
                fault = f"has no effect with {why}; change that, or drop {key}"
                yield f"command line: {shown(override)}: {fault}"
