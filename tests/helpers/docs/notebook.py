"""The notebook of the examples, run without Jupyter: its code cells in order, in one namespace.

`python -m tests.helpers.docs.notebook [FILE]` runs it, and stores what the cells print and show.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from PIL.Image import Image

from tests.helpers.docs.pages import ROOT

NOTEBOOK = ROOT / "examples" / "first_run.ipynb"


def run(cells: list[dict[str, Any]]) -> None:
    """Run the code cells, and replace their outputs and numbers."""
    names: dict[str, Any] = {"__name__": "notebook"}
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, 1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            value = run_cell("".join(cell["source"]), names)
        cell["execution_count"] = number
        cell["outputs"] = [*text_output(printed.getvalue()), *picture_output(value, number)]


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run the code of a cell, and return the value of its last line if that is an expression."""
    tree, last = ast.parse(source), None
    if isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
    exec(compile(tree, "cell", "exec"), names)
    return None if last is None else eval(compile(last, "cell", "eval"), names)


def text_output(text: str) -> list[dict[str, Any]]:
    lines = text.splitlines(keepends=True)
    return [{"name": "stdout", "output_type": "stream", "text": lines}] if text else []


def picture_output(value: Image | None, number: int) -> list[dict[str, Any]]:
    """Return a picture as Jupyter stores it."""
    if value is None:
        return []
    file = io.BytesIO()
    value.save(file, format="png")
    data = {"image/png": base64.b64encode(file.getvalue()).decode()}
    shown = {"data": data, "execution_count": number, "metadata": {}}
    return [{"output_type": "execute_result", **shown}]


if __name__ == "__main__":
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else NOTEBOOK
    notebook = json.loads(file.read_text())
    run(notebook["cells"])
    file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
