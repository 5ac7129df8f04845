"""Names that a package defines, read from its sources without importing it."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from functools import cache
from pathlib import Path

SOURCES_ONLY = Path(sys.prefix) / "others"
"""Directory for packages that `make setup` downloads only for their sources.

It must come last on a path: a wheel in it has folders `tests` and `scripts`.
"""


class Wheel:
    """Sources of a package; `folder` is None if the package is not installed."""

    def __init__(self, package: str) -> None:
        spec = importlib.util.find_spec(package)
        places = spec and spec.submodule_search_locations
        sources_only = [SOURCES_ONLY / package] if (SOURCES_ONLY / package).is_dir() else []
        self.folder = next(map(Path, places or sources_only), None)

    @property
    def may_skip(self) -> bool:
        """Return whether tests may skip the package: CI must have all packages of `make setup`."""
        return self.folder is None and not os.environ.get("CI")

    @cache  # noqa: B019  there is one wheel per test module
    def sources(self) -> list[tuple[Path, str]]:
        assert self.folder is not None
        return [(path, path.read_text()) for path in sorted(self.folder.rglob("*.py"))]

    @cache  # noqa: B019
    def classes(self, name: str) -> list[ast.ClassDef]:
        """Return all classes of this name."""
        start = re.compile(rf"^class {name}\b", re.M)
        nodes = []
        for path, text in self.sources():
            if start.search(text):
                nodes += [
                    node
                    for node in ast.walk(ast.parse(text, str(path)))
                    if isinstance(node, ast.ClassDef) and node.name == name
                ]
        return nodes

    def lacks(self, name: str, fields: set[str]) -> set[str]:
        """Return the fields that the class lacks; of several classes, the best match counts."""
        missing = [fields - names_in(node) for node in self.classes(name)]
        return min(missing, key=len, default=fields)

    def has_method(self, name: str, method: str, first: list[str]) -> bool:
        """Return whether a class of this name has the method, with these parameters first."""
        kinds = ast.FunctionDef, ast.AsyncFunctionDef
        for node in self.classes(name):
            for member in node.body:
                if isinstance(member, kinds) and member.name == method:
                    args = [arg.arg for arg in member.args.args]
                    if args[: len(first)] == first:
                        return True
        return False


def names_in(node: ast.ClassDef) -> set[str]:
    """Return the names of a class's fields and members."""
    names: set[str] = set()
    for member in node.body:
        if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
            names.add(member.target.id)
        elif isinstance(member, ast.Assign):
            names.update(target.id for target in member.targets if isinstance(target, ast.Name))
    return names
