r"""Values of a recipe's YAML file and of `key=value` overrides.

`${` in a text is written as `\${`: in recipes of before, it began a reference to another key.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import yaml

from recipes.errors import RecipeError, one_line, shown

_FLOAT = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")  # 1e-6, text in YAML 1.1
_REFERENCE = re.compile(r"(?<!\\)(?:\\\\)*\$\{")
_PART = re.compile(r"\[(\d+)\]|([^.\[]+)")


def _is_no_date(resolver: tuple[str, Any]) -> bool:
    return not resolver[0].endswith(":timestamp")


class _Form:
    """Form of scalars: a number may be written 1e-6, and a date is a text."""

    yaml_implicit_resolvers: ClassVar = {
        first: list(filter(_is_no_date, resolvers))
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Loader(_Form, yaml.SafeLoader):
    """Loader that refuses a key which stands twice in a mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := [key for key in keys if keys.count(key) > 1]:
            rule, place = f"key {twice[0]} stands twice", node.start_mark
            raise yaml.constructor.ConstructorError(None, None, rule, place)
        return super().construct_mapping(node, deep)


class _Dumper(_Form, yaml.SafeDumper):
    """Writer of what `_Loader` reads."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, [*"-+.0123456789"])


def read_values(file: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the values of a file with the overrides applied in order.

    Raises:
        RecipeError: The file or an override is not YAML, or has a reference; names the place.
    """
    with _yaml(file.name):
        values = _parsed(file.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("must be a mapping of keys to values")
    return with_overrides(values, overrides)


def with_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return values with `key=value` overrides applied in order.

    Raises:
        RecipeError: An override is not YAML, or has a reference; names it.
    """
    for override in overrides:
        with _yaml(f"command line: {shown(override)}"):
            key, equals, value = override.partition("=")
            if not equals or not all(key.split(".")):
                raise ValueError("must be key=value, for example steps=3")
            values = _with_override(values, key, _parsed(value))
    return values


@contextlib.contextmanager
def _yaml(place: str) -> Iterator[None]:
    """Turn what is wrong with YAML inside the block into a `RecipeError` that names the place."""
    try:
        yield
    except (yaml.YAMLError, OSError, ValueError, RecursionError) as error:
        raise RecipeError(f"{place}: {one_line(error)}; write YAML") from None


def _parsed(text: str) -> Any:
    return _texts(yaml.load(text, _Loader), _plain)


def values_text(values: Mapping[str, Any]) -> str:
    """Return values as YAML, which `read_values` reads back as equal values."""
    return yaml.dump(_texts(values, _escaped), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _texts(value: Any, change: Any) -> Any:
    """Return nested values with all texts changed."""
    if isinstance(value, dict):
        return {key: _texts(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [_texts(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def _plain(text: str) -> str:
    if _REFERENCE.search(text):
        rule = f"{shown(text, 60)} has a reference, which recipes do not resolve"
        raise ValueError(rf"{rule}; write the value, or \${{ for a text with ${{")
    return re.sub(r"(\\*)\\\$\{", lambda match: match[1][: len(match[1]) // 2] + "${", text)


def _escaped(text: str) -> str:
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


class _Items(dict[int, Any]):
    """New values of items of a list, by their indices."""


def _with_override(values: dict[str, Any], key: str, value: Any) -> Any:
    """Return the values with a dotted key set, such as task.mixture[0].weight."""
    for index, name in reversed(_PART.findall(key)):
        value = _Items({int(index): value}) if index else {name: value}
    return _merged(values, value)


def _merged(old: Any, new: Any) -> Any:
    """Return a value with another one merged into it, if both are mappings."""
    if isinstance(new, _Items):
        if not isinstance(old, list) or new.keys() - range(len(old)):
            raise ValueError("names no item of a list")
        return [_merged(item, new.get(index, item)) for index, item in enumerate(old)]
    if isinstance(new, dict) and isinstance(old, dict):
        return old | {key: _merged(old.get(key), value) for key, value in new.items()}
    return new
