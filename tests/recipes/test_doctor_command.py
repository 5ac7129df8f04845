"""`memsaver doctor`: the table, the last line, the exit status."""

from __future__ import annotations

import pytest

from memsaver.doctor import CHECKS
from recipes.cli import main


def test_doctor_examines_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    assert main(["doctor", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith(f"{len(CHECKS)} checks, ") and lines[-1].endswith(" need attention")
    assert all(any(line.startswith(name) for line in lines) for name in CHECKS)


def test_doctor_fails_for_a_missing_device_and_refuses_overrides(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--device", "cuda:99"]) == 1
    seen = capsys.readouterr()
    assert "fail" in seen.out and "Traceback" not in seen.out + seen.err
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "steps=3"])
    assert "unrecognized arguments: steps=3" in capsys.readouterr().err
