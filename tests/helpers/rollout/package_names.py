"""Names of a package, by its sources: nothing of it is imported."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from functools import cache
from pathlib import Path

BROUGHT = Path(sys.prefix) / "others"
"""Where set-up puts what is read only. Last on a path: a wheel there has folders `tests` and
`scripts`.
"""


class Wheel:
    """folder: of the package; None where it is not there."""

    def __init__(self, package: str) -> None:
        found = importlib.util.find_spec(package)
        places = found and found.submodule_search_locations
        brought = [BROUGHT / package] if (BROUGHT / package).is_dir() else []
        self.folder = next(map(Path, places or brought), None)

    @property
    def may_skip(self) -> bool:
        """CI has what `make setup` brings."""
        return self.folder is None and not os.environ.get("CI")

    @cache  # noqa: B019  one for each module of tests
    def sources(self) -> list[tuple[Path, str]]:
        assert self.folder is not None
        return [(path, path.read_text()) for path in sorted(self.folder.rglob("*.py"))]

    @cache  # noqa: B019
    def classes(self, name: str) -> list[ast.ClassDef]:
        """All of that name."""
        start = re.compile(rf"^class {name}\b", re.M)
        found = []
        for path, text in self.sources():
            if start.search(text):
                found += [
                    node
                    for node in ast.walk(ast.parse(text, str(path)))
                    if isinstance(node, ast.ClassDef) and node.name == name
                ]
        return found

    def lacks(self, name: str, fields: set[str]) -> set[str]:
        """Fields and members that the class of that name does not have; the best, of several."""
        left = [fields - names_in(node) for node in self.classes(name)]
        return min(left, key=len, default=fields)

    def has_method(self, name: str, method: str, first: list[str]) -> bool:
        """A class of that name has the method, with these parameters first."""
        kinds = ast.FunctionDef, ast.AsyncFunctionDef
        for node in self.classes(name):
            for each in node.body:
                if isinstance(each, kinds) and each.name == method:
                    args = [arg.arg for arg in each.args.args]
                    if args[: len(first)] == first:
                        return True
        return False


def names_in(node: ast.ClassDef) -> set[str]:
    """Fields and members."""
    found: set[str] = set()
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            found.add(each.target.id)
        elif isinstance(each, ast.Assign):
            found.update(target.id for target in each.targets if isinstance(target, ast.Name))
    return found
