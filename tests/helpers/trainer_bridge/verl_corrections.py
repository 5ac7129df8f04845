"""verl's rollout corrections, run from its sources without its dependencies."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import torch

HELPER = "trainer/ppo/rollout_corr_helper.py"
FUNCTIONS = "utils/torch_functional.py"


def corrections(verl: Path) -> dict[str, Any]:
    """Return the names of verl's module of corrections, given the package's folder."""
    functions = _run(verl / FUNCTIONS, {"masked_sum", "masked_mean"})
    masks = type("verl_F", (), {name: staticmethod(value) for name, value in functions.items()})
    return _run(verl / HELPER, None, verl_F=masks)


def _run(file: Path, wanted: set[str] | None, **names: Any) -> dict[str, Any]:
    """Run a file's functions, all or the `wanted`, and its constants, without imports of verl."""
    tree = ast.parse(file.read_text(), str(file))
    kept = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.Assign))]
    kept += [node for node in tree.body if isinstance(node, ast.AnnAssign)]
    if wanted is not None:
        kept = [node for node in kept if getattr(node, "name", None) in wanted]
    names |= {"torch": torch, "math": __import__("math"), "__name__": file.stem}
    lazy = ast.parse("from __future__ import annotations").body  # annotations name verl's classes
    code = compile(ast.Module([*lazy, *kept], []), str(file), "exec")
    exec(code, names)
    return names
