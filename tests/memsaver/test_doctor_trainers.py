"""The doctor's rows for verl and TRL, in environments made of packages' metadata."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from memsaver.doctor import Check, run_check
from tests.helpers.docs.pages import ROOT

VARIABLES = ("VERL_ENGINE_VENDOR", "VERL_USE_EXTERNAL_PLUGINS", "VLLM_PLUGINS")
GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
ROWS = {"verl": ("verl", "verl.plugins"), "TRL": ("trl", "vllm.general_plugins")}
TRIED = {"verl": "0.9.1", "TRL": "1.16.0"}
MISSING = "is missing or broken -> install memsaver into this environment with pip"

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that adds a package to an otherwise empty environment."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)

    def add(package: str, version: str, groups: dict[str, dict[str, str]] | None = None) -> None:
        folder = tmp_path / f"{package}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {package}\nVersion: {version}\n")
        lines = [
            f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in entries.items())
            for group, entries in (groups or {}).items()
        ]
        (folder / "entry_points.txt").write_text("\n".join(lines))

    return add


def text_of(check: Check) -> str:
    return f"{check.status}: {check.finding} -> {check.remedy}"


@pytest.mark.parametrize("row", ROWS)
class TestRow:
    def test_absent_trainer_is_skipped(self, row: str, install: Install) -> None:
        install("memsaver", "0.1.0", GROUPS)
        assert run_check(row) == Check(row, "skip", "not installed")

    @pytest.mark.parametrize(
        ("version", "words"), [("", "; plugin found"), ("99.1.0", "99.1.0, tried only with")]
    )
    def test_supported_trainer_is_ok(
        self, row: str, version: str, words: str, install: Install
    ) -> None:
        install("memsaver", "0.1.0", GROUPS)
        install(ROWS[row][0], version or TRIED[row])
        check = run_check(row)
        assert check.status == "ok" and words in check.finding
        assert "not active here: set V" in check.finding
        assert "other-trainers.md" in check.finding

    def test_older_trainer_is_reported(self, row: str, install: Install) -> None:
        install("memsaver", "0.1.0", GROUPS)
        install(ROWS[row][0], "0.9.0")
        check = run_check(row)
        assert check.status == "warn" and check.finding.startswith("0.9.0: ")
        assert check.remedy == f"pip install '{ROWS[row][0]}>={TRIED[row]}'"

    @pytest.mark.parametrize("place", ["", "no_such_package.plugin", "memsaver.no_such_module"])
    def test_missing_or_broken_entry_point_is_reported(
        self, row: str, place: str, install: Install
    ) -> None:
        package, group = ROWS[row]
        entries = {"memsaver": place} if place else {"other": "memsaver.compat"}
        install("memsaver", "0.1.0", {**GROUPS, group: entries})
        install(package, TRIED[row])
        text = text_of(run_check(row))
        assert text.startswith("warn: ") and f"{group} {MISSING}" in text


@pytest.mark.parametrize(
    ("row", "variable", "value", "active"),
    [
        ("verl", "VERL_ENGINE_VENDOR", "memsaver", True),
        ("verl", "VERL_ENGINE_VENDOR", "other", False),
        ("TRL", "VLLM_PLUGINS", "other,memsaver", True),
        ("TRL", "VLLM_PLUGINS", "other", False),
    ],
)
def test_row_tells_whether_the_variable_activates_the_plugin(
    row: str,
    variable: str,
    value: str,
    active: bool,
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install("memsaver", "0.1.0", GROUPS)
    install(ROWS[row][0], TRIED[row])
    monkeypatch.setenv(variable, value)
    check = run_check(row)
    assert check.status == "ok"
    assert (f"active by {variable}=memsaver" in check.finding) == active
    assert (f"not active here: set {variable}=memsaver" in check.finding) != active
    assert {"verl", "trl"}.isdisjoint(sys.modules)


@pytest.mark.parametrize(
    ("policy", "status"),
    [("auto", "ok"), ("a, MemSaver", "ok"), ("none", "warn"), ("a,auto", "warn")],
)
def test_policy_of_verl_that_leaves_the_plugin_out_is_reported(
    policy: str, status: str, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("memsaver", "0.1.0", GROUPS)
    install("verl", TRIED["verl"])
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", policy)
    check = run_check("verl")
    assert check.status == status
    assert check.remedy == ("unset VERL_USE_EXTERNAL_PLUGINS" if status == "warn" else "")
