"""Rules of a section, and the error of a field that breaks one."""

from __future__ import annotations


class FieldError(ValueError):
    """A field that breaks its rule; `recipes.recipe.loading` puts the file and the full key in
    front of it.
    """

    def __init__(self, name: str, value: object, rule: str, remedy: str) -> None:
        self.name, self.value, self.rule, self.remedy = name, value, rule, remedy
        super().__init__(f"{name}={value}: {rule}; {remedy}")


def require(section: object, name: str, ok: bool, rule: str, remedy: str) -> None:
    if not ok:
        raise FieldError(name, getattr(section, name), rule, remedy)


def at_least(section: object, low: int, **remedies: str) -> None:
    for name, remedy in remedies.items():
        require(section, name, getattr(section, name) >= low, f"must be at least {low}", remedy)
