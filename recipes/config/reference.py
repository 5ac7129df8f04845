"""Reference of all recipe keys: Markdown for the docs, a JSON schema for editors."""

from typing import Any

from pydantic import TypeAdapter

from recipes.config.recipe import FIELDS, Recipe, default_of, is_section, keys_of
from recipes.errors import shown

HEAD = """\
# Recipe keys

`memsaver keys` prints this page. `memsaver keys --schema` prints a JSON schema, with which editors
complete and check YAML. How to run a recipe: [recipes and the command line](../recipes.md).
"""
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe."""
    return TypeAdapter(Recipe).json_schema()


def markdown() -> str:
    """Return the page of all keys, with a table for each section."""
    recipe = schema()
    lines = [HEAD, *_table("", recipe)]
    for section in filter(is_section, FIELDS):
        _, _, name = recipe["properties"][section]["$ref"].rpartition("/")
        lines += _table(section, recipe["$defs"][name])
    return "\n".join(lines).rstrip()


def _table(section: str, part: dict[str, Any]) -> list[str]:
    title = f"`{section}`" if section else "Top level"
    lines = [f"## {title}", "", part["description"], ""]
    lines += ["| key | takes | default | |", "|---|---|---|---|"]
    for key in keys_of(section):
        if not is_section(key):
            name = key.rpartition(".")[2]
            default = "required" if FIELDS[key].is_required() else f"`{shown(default_of(key))}`"
            takes = _takes(part["properties"][name])
            lines.append(f"| `{name}` | {takes} | {default} | {FIELDS[key].description} |")
    return [*lines, ""]


def _takes(part: dict[str, Any]) -> str:
    """Describe the values that a part of a schema allows."""
    if "anyOf" in part:
        return " or ".join(map(_takes, part["anyOf"]))
    if choices := part.get("enum", [part["const"]] if "const" in part else []):
        return ", ".join(f"`{choice}`" for choice in choices)
    if "$ref" in part:
        return "set"
    if part["type"] == "object":
        return "mapping"
    if part["type"] == "array":
        return f"list of {_takes(part['items'])}"
    limits = ", ".join(f"{sign} {part[bound]}" for bound, sign in BOUNDS.items() if bound in part)
    return f"{part['type']} {limits}".rstrip()
