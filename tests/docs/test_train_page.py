"""Test of docs/how-to/train.md: every command of the page, in order, with a tiny model."""

from __future__ import annotations

import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from recipes.cli import main
from recipes.logs.monitor import Monitor
from tests.helpers.docs.pages import ROOT, typed
from tests.helpers.recipes.models import save_byte_model

PAGE = ROOT / "docs" / "how-to" / "train.md"
# Only these differ from what the page says: its model is a download, and learns on a GPU.
SMALL = ["device=cpu", "sampling.max_tokens=4", "loop.prompts_per_step=3", "eval.problems=2"]
FULL_RUN = "memsaver run recipe.yaml --run-dir first"
FETCH = "memsaver fetch smollm2-135m"


def test_commands_of_train_page_lead_from_an_empty_folder_to_an_answer_of_the_exported_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.syspath_prepend(str(work))
    for file in (ROOT / "examples" / "train").iterdir():
        if file.is_file():
            shutil.copy(file, work)
    monkeypatch.setattr(Monitor, "write_pictures", lambda monitor: None)  # as a report does
    model = save_byte_model(tmp_path / "model")
    lines = typed(PAGE)
    assert lines[0] == "python make_data.py" and FULL_RUN in lines and FETCH in lines
    for line in lines:
        if line in (FULL_RUN, FETCH):  # The next run command does the same in three steps.
            continue
        program, *words = shlex.split(line)
        if program == "python":
            monkeypatch.setattr(sys, "argv", words)
            runpy.run_path(words[0], run_name="__main__")
            continue
        assert program == "memsaver"
        small = [f"model.path={model}", *SMALL] if words[0] == "run" else []
        capsys.readouterr()
        assert main([*words, *small]) == 0, line
    assert (work / "my-model" / "model.safetensors").is_file()
    assert list((work / "first").glob("**/events.out.tfevents.*"))
