"""Test of examples/first_run.ipynb: its cells run in order and show what the file has stored."""

from __future__ import annotations

import json
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.helpers.docs.notebook import NOTEBOOK, run
from tests.helpers.peers import Peer


def shown(file: Path) -> list[tuple[int, str]]:
    """Return the number of the cell and the kind of each output."""
    cells: list[dict[str, Any]] = json.loads(file.read_text())["cells"]
    numbered = [(cell["execution_count"], cell["outputs"]) for cell in cells if "outputs" in cell]
    return [(number, output["output_type"]) for number, outputs in numbered for output in outputs]


def run_shortened(pipe: Connection, file: Path) -> None:
    """Run a copy of the notebook whose run has 2 instead of 14 steps, with the same outputs."""
    text = NOTEBOOK.read_text()
    assert text.count("=14") == 3  # steps, and steps between evaluations and checkpoints
    notebook = json.loads(text.replace("=14", "=2"))
    tempfile.tempdir = str(file.parent)
    run(notebook["cells"])
    file.write_text(json.dumps(notebook))
    pipe.send("done")


def test_notebook_runs_from_top_to_bottom_and_shows_what_it_has_stored(tmp_path: Path) -> None:
    copy = tmp_path / "copy.ipynb"
    peer = Peer(run_shortened, copy)
    assert peer.hear(300) == "done"
    peer.bury()
    assert shown(copy) == shown(NOTEBOOK)
    assert [kind for _, kind in shown(copy)].count("execute_result") == 2  # pictures
    assert list(tmp_path.glob("first-run-*/run/report.html"))
