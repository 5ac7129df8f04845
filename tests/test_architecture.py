"""The import direction of docs/architecture.md, read from the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHAIN = ["memsaver", "kvcache", "rollout", "trainer_bridge", "recipes"]

# Import of the key is allowed only in files that start with one of these paths.
ALONE = {
    "cuda": ["memsaver/backends/cuda.py"],
    "triton": ["memsaver/ops/", "kvcache/ops/", "rollout/ops/", "trainer_bridge/ops/"],
    "ray": [
        "rollout/actor.py",
        *(f"trainer_bridge/{name}.py" for name in ("actor", "coordinator", "placement", "remote")),
    ],
    "transformers": ["rollout/model/", "trainer_bridge/", "recipes/"],
    "omegaconf": ["recipes/"],
    "torch.distributed.fsdp": ["trainer_bridge/"],
}


def sources() -> list[Path]:
    return [path for package in CHAIN for path in sorted((ROOT / package).rglob("*.py"))]


def imports(path: Path) -> list[str]:
    """Every module that a file imports, anywhere in it."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.append(node.module)
    return found


def starts(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_chain(path: Path) -> None:
    relative = str(path.relative_to(ROOT))
    package = CHAIN.index(relative.split("/")[0])
    for module in imports(path):
        for later in CHAIN[package + 1 :]:
            assert not starts(module, later), f"{relative} imports {module}: {later} comes after {CHAIN[package]}"
        for name, places in ALONE.items():
            if starts(module, name):
                assert relative.startswith(tuple(places)), f"{relative} may not import {module}"


def test_importing_memsaver_is_cheap() -> None:
    heavy = {"ray", "triton", "transformers", "omegaconf"}
    code = f"import sys, torch; before = set(sys.modules); import memsaver; print({heavy} & set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "set()"
