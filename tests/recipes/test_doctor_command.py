"""`memsaver doctor`: the table, the last line, the exit status."""

from __future__ import annotations

import pytest

from memsaver.doctor import CHECKS, Check
from recipes.cli import main


def test_the_command_examines_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    assert main(["doctor", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith(f"{len(CHECKS)} checks, ") and lines[-1].endswith(" need attention")
    text = " ".join(" ".join(lines).split())
    for row in CHECKS:
        assert any(line.startswith(row.name) for line in lines) == (row.looks_at != "gpu"), row.name
        assert row.name in text, row.name
    assert sum("no GPU" in line for line in lines) == 1


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("skip", 0), ("fail", 1)])
def test_only_a_failed_check_makes_the_exit_status_1(
    status: str, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []
    check = Check("thing", status, "found", "remedy")
    monkeypatch.setattr("memsaver.doctor.examine", lambda device: asked.append(device) or [check])
    assert main(["doctor"]) == code
    assert asked == [None]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"1 checks, {int(status in ('warn', 'fail'))} need attention"


def test_a_device_that_is_not_there_is_told_and_an_override_is_none_of_its_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--device", "cuda:99"]) == 1
    seen = capsys.readouterr()
    assert "fail" in seen.out and "Traceback" not in seen.out + seen.err
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "steps=3"])
    assert "unrecognized arguments: steps=3" in capsys.readouterr().err
