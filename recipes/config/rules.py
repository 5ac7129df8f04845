"""Rules of a section's keys, as rows of a table, and the error of a field that breaks one."""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple


class FieldError(ValueError):
    """A field that breaks its rule; `load` puts the file and the full key in front of it."""

    def __init__(self, name: str, value: object, rule: str, remedy: str) -> None:
        self.name, self.value, self.rule, self.remedy = name, value, rule, remedy
        super().__init__(f"{name}={value}: {rule}; {remedy}")


Check = tuple[Callable[[Any], object] | object, str]
"""Whether a value is good, or what tells it of one; and what it must be, or is not."""


class Rule(NamedTuple):
    """A row of a section's table. keys: apart by spaces. remedy: without one, the key's default."""

    keys: str
    good: Callable[[Any], object] | object
    words: str
    remedy: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """Keys of a recipe; who makes one gets a FieldError of the first rule that it breaks."""

    def rules(self) -> Iterator[Rule]:
        """The section's table; a row may rely on those above it."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        for keys, good, words, remedy in self.rules():
            for key in keys.split():
                value = attrgetter(key)(self)
                if not (good(value) if callable(good) else good):
                    raise FieldError(key, value, words, remedy or self._usual(key))

    def _usual(self, key: str) -> str:
        """Sets the default. A section is called as its class: `GrpoSection` is grpo."""
        name, within, _ = type(self).__name__.partition("Section")
        prefix = f"{name.lower()}." if within else ""
        return f"set {prefix}{key}={shown(default_of(type(self), key))}"


def default_of(cls: type, name: str) -> Any:
    """The default of a section's field; `MISSING`, of dataclasses or of omegaconf, without one."""
    field = next(field for field in dataclasses.fields(cls) if field.name == name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def shown(value: Any, limit: int = 120) -> str:
    """A value on one line, as an override takes it back if it is short enough."""
    if isinstance(value, list) and all(isinstance(each, str | int) for each in value):
        text = f"[{','.join(map(str, value))}]"
    elif value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    else:
        text = str(dict(value) if isinstance(value, Mapping) else value)
    text = " ".join("".join(char if char.isprintable() else " " for char in text).split()) or "''"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def at_least(low: int, why: str = "") -> Check:
    return lambda value: value >= low, f"must be at least {low}{why}"


def one_of(*names: str) -> Check:
    listed = " or ".join(names) if len(names) == 2 else f"one of {', '.join(names)}"
    return lambda value: value in names, f"must be {listed}"


def different_digits(numbers: Collection[int], more: str = "") -> Check:
    good = len(set(numbers)) == len(numbers) and all(number >= 1 for number in numbers)
    return good, f"must be different numbers of at least 1{more}"


POSITIVE: Check = (lambda value: 0 < value < math.inf, "must be positive")
NOT_NEGATIVE: Check = (lambda value: 0 <= value < math.inf, "must not be negative, nor infinite")
BETWEEN_0_AND_1: Check = (lambda value: 0 < value < 1, "must lie between 0 and 1")
FROM_0_BELOW_1: Check = (lambda value: 0 <= value < 1, "must lie in [0, 1)")
ABOVE_0_TO_1: Check = (lambda value: 0 < value <= 1, "must lie in (0, 1]")
DTYPE = one_of("float32", "bfloat16")
