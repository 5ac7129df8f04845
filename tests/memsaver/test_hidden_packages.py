"""Tests of a file or folder of the user that hides a package: import and doctor name it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memsaver.doctor import run_check
from memsaver.system.hidden_packages import HIDES, PACKAGES, hiding
from tests.helpers.docs.pages import ROOT


@pytest.mark.parametrize("file", ["rollout.py", "rollout/__init__.py"])
def test_own_file_that_hides_a_package_is_named_by_doctor(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()  # without __init__.py a folder of Python's path hides nothing
    assert not any(hiding(name, str(tmp_path)) for name in PACKAGES)
    assert run_check("packages").status == "ok"
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    assert hiding("rollout", str(tmp_path)) == tmp_path / file
    check = run_check("packages")
    assert (check.status, check.finding) == ("warn", f"{tmp_path / file} {HIDES}")
    assert "rename it" in check.remedy


@pytest.mark.parametrize(
    ("words", "name"),
    [(["-c", "import trainer_bridge.adoption.trl"], "rollout"), (["-m", "memsaver"], "recipes")],
)
def test_import_beside_a_folder_that_hides_a_package_names_it(
    words: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    own = tmp_path / name / "__init__.py"
    own.parent.mkdir()
    own.touch()
    ended = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
    line = f"ImportError: {own} {HIDES}; rename it, or start Python in another folder"
    assert ended.returncode == 1 and ended.stderr.splitlines()[-1] == line
