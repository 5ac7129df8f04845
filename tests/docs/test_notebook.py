"""Test of examples/first_run.ipynb: its cells run in order and show what the file has stored."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.helpers.docs.notebook import NOTEBOOK
from tests.helpers.docs.pages import ROOT


def shown(file: Path) -> list[tuple[int, str]]:
    """Return the number of the cell and the kind of each output."""
    cells: list[dict[str, Any]] = json.loads(file.read_text())["cells"]
    numbered = [(cell["execution_count"], cell["outputs"]) for cell in cells if "outputs" in cell]
    return [(number, output["output_type"]) for number, outputs in numbered for output in outputs]


def test_notebook_runs_from_top_to_bottom_and_shows_what_it_has_stored(tmp_path: Path) -> None:
    copy = Path(shutil.copy(NOTEBOOK, tmp_path))
    command = [sys.executable, "-m", "tests.helpers.docs.notebook", str(copy)]
    places = {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    subprocess.run(command, cwd=tmp_path, env={**os.environ, **places}, check=True, timeout=300)
    assert shown(copy) == shown(NOTEBOOK)
    assert [kind for _, kind in shown(copy)].count("execute_result") == 2  # pictures
    assert list(tmp_path.glob("first-run-*/run/report.html"))
