"""Load recipes: a YAML file and `key=value` overrides become a checked `Recipe`."""

import dataclasses
import difflib
import functools
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from recipes.config.recipe import (
    FIELDS,
    Recipe,
    field_of,
    is_section,
    keys_of,
    remedy_of,
)
from recipes.config.rules import broken_rules, idle_keys
from recipes.errors import RecipeError, one_line, shown

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
    values = _renamed(_values(file, overrides))
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
    if idle := list(_without_effect(recipe, overrides)):
        raise RecipeError("\n".join(idle))
    return recipe


def load_saved(run_dir: Path) -> Recipe:
    """Read the recipe that a run wrote into its folder.

    Raises:
        RecipeError: As of `load`, or the file has a reference. A run writes none, and in somebody
            else's folder a reference could name variables of this user's environment.
    """
    file = run_dir / "recipe.yaml"
    for text in _texts(saved_values(file)):
        if _REFERENCE.search(text):
            rule = f"holds the reference {shown(text, 60)}, which no run writes"
            raise RecipeError(f"{file}: {rule}; replace the reference by a value")
    return load(file)


def saved_values(file: Path) -> dict[str, Any]:
    """Return the values of a recipe's file as they are written, with references unresolved."""
    from omegaconf import OmegaConf
    from yaml import YAMLError

    try:
        values: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        if not isinstance(values, dict):
            raise ValueError("must be a mapping of keys to values")
    except (YAMLError, OSError, ValueError, RecursionError) as error:
        raise RecipeError(f"{file}: {one_line(error)}; restore the file of the run") from None
    return values


_REFERENCE = re.compile(r"(?<!\\)(?:\\\\)*\$\{")  # `_literal` writes `\${` for the text `${`


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts among nested values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


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
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(_literal(dataclasses.asdict(recipe))))


def _literal(value: Any) -> Any:
    """Encode `${` in texts, so that loading them back finds no references to other keys."""
    if isinstance(value, dict):
        return {key: _literal(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_literal(item) for item in value]
    return re.sub(r"(\\*)(\$\{)", r"\1\1\\\2", value) if isinstance(value, str) else value


def _values(file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values of a file with the overrides applied and references resolved."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    bad = (OmegaConfBaseException, YAMLError, OSError, ValueError, TypeError, RecursionError)
    place = file.name
    try:
        merged = OmegaConf.load(file)
        if not isinstance(merged, DictConfig):
            raise ValueError("must be a mapping of keys to values")
        for override in overrides:
            place = f"command line: {shown(override)}"
            key, equals, _ = override.partition("=")
            if not equals or not all(key.split(".")):
                raise ValueError("must be key=value, for example steps=3")
            merged = _with_override(merged, key, override)
        place = shown(" and ".join([file.name, *overrides]))
        values: Any = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except bad as error:
        remedy = "write YAML, and ${KEY} of keys that have a value"
        raise RecipeError(f"{place}: {one_line(error)}; {remedy}") from None
    return values


def _renamed(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with an `eval.best` of before under its present name, told in a line."""
    section = values.get("eval")
    best = section.get("best") if isinstance(section, dict) else None
    if not (isinstance(best, str) and best.startswith("exact_match")):
        return values
    now = best.replace("exact_match", "correct", 1)
    print(f"memsaver: eval.best={best}: is called {now} now and read so", file=sys.stderr)
    return {**values, "eval": {**values["eval"], "best": now}}


def _with_override(merged: Any, key: str, override: str) -> Any:
    """Return the values with an override; a key such as task.mixture[0].weight names an item."""
    from omegaconf import ListConfig, OmegaConf

    if "[" not in key:
        return OmegaConf.unsafe_merge(merged, OmegaConf.from_dotlist([override]))
    value = OmegaConf.from_dotlist([f"value{override.removeprefix(key)}"])
    name, _, number = key.partition("[")
    items = OmegaConf.select(merged, name)
    if not isinstance(items, ListConfig) or int(number.partition("]")[0]) >= len(items):
        raise ValueError("names no item of a list")
    OmegaConf.update(merged, key, value._get_node("value"))
    return merged


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
        return f"{shown(key)}: unknown key; {_suggest(key)}"
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


def _without_effect(recipe: Recipe, overrides: Sequence[str]) -> Iterator[str]:
    """Yield a line for each override without effect, except for those that set null."""
    for override in overrides:
        key, _, value = override.partition("=")
        for idle, why in idle_keys(recipe).items():
            if value != "null" and _within(key, idle):
                fault = f"has no effect with {why}; change that, or drop {key}"
                yield f"command line: {shown(override)}: {fault}"
