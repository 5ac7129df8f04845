"""The Python tool: what programs print, how they fail, and that nothing of them is left."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from recipes.environments import EnvironmentProcess, Python, python_tool
from tests.helpers.memsaver.savers import until

SLEEP = "import time; time.sleep(61.5)"
CHILD = (
    f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', '{SLEEP}']); open('f', 'w')"
)


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("print(6 * 7)", "42\n"),
        ("x = 6 * 7", "(the program printed nothing)"),
        ("print('ä' * 6000)", "ä" * 5000 + "..."),
        ("import os; print(os.listdir('.'), os.environ.get('SECRET'))", "[] None\n"),
        ("input()", "EOFError: EOF when reading a line"),
        ("raise KeyError(1)", "KeyError: 1"),
        ("import sys; sys.stderr.write('x' * 10**6 + '\\nlast\\n'); sys.exit(3)", "last"),
        ("import os; os.kill(os.getpid(), 9)", "the program ended with status -9"),
        ("\0", "embedded null byte"),
    ],
)
def test_the_model_sees_what_a_program_prints_or_its_error(
    code: str, printed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "key")
    try:
        assert Python().python(code) == printed
    except Exception as error:
        assert str(error) == printed


def test_nothing_of_a_program_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither files nor processes, whether it ends or takes too long."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    descriptors = len(os.listdir("/proc/self/fd"))
    assert Python().python(f"{CHILD}; print(1)") == "1\n"
    monkeypatch.setattr(python_tool, "SECONDS", 0.7)
    with pytest.raises(TimeoutError, match="took longer than 0.7 s"):
        Python().python(f"{CHILD}; {SLEEP}")
    until(lambda: not any(map(sleeps, psutil.process_iter(["cmdline", "status"]))))
    assert [*tmp_path.iterdir()] == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


def sleeps(process: psutil.Process) -> bool:
    ended = process.info["status"] == psutil.STATUS_ZOMBIE
    return "time.sleep(61.5)" in str(process.info["cmdline"]) and not ended


def test_it_is_an_environment() -> None:
    """Each call is a program of its own, in the process of the environment."""
    name = "recipes.environments:Python"
    with closing(EnvironmentProcess(20.0)) as process:
        described = process.ask(name, "describe", ())
        (tool,) = described["tools"]
        assert tool["function"]["parameters"]["required"] == ["code"]
        assert not described["rewards"] and not described["replies"]
        assert process.ask(name, "reset", {"question": "?"}) == ""
        calls = [json.dumps({"code": code}) for code in ("x = 1; print(x)", "print(x)")]
        said = [process.ask(name, "tool", "python", call) for call in calls]
        assert said[0] == ["1\n", False] and said[1][1]
        assert "NameError: name 'x' is not defined" in said[1][0]
