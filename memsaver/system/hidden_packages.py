"""Packages of this installation that a file or folder of the same name hides from `import`."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kvcache", "rollout", "trainer_bridge", "recipes")
HIDES = "hides memsaver's package of the same name"
REMEDY = "rename it, or start Python in another folder"


def hiding(name: str, *before: str) -> Path | None:
    """Return what Python finds under the name of a package of ours instead of our package.

    Args:
        name: One of `PACKAGES`.
        *before: Folders that are searched before those of `sys.path`.

    Returns:
        Its file, or its folder if that has no `__init__.py`; None if Python finds our package, or
        that of another clone, from which it takes memsaver, too.
    """
    spec = PathFinder.find_spec(name, [*before, *sys.path])
    if spec is None:
        return None
    found = Path(spec.origin or next(iter(spec.submodule_search_locations or ())))
    folder = found.parent if found.name == "__init__.py" else found
    clone = folder.parent / Path(__file__).relative_to(ROOT)
    return None if clone.exists() else found


def refuse_hidden(*names: str) -> None:
    """Raise an ImportError that names what hides one of these packages."""
    for name in names:
        if found := hiding(name):
            raise ImportError(f"{found} {HIDES}; {REMEDY}")
