"""Every public name has its place in the reference."""

from __future__ import annotations

import importlib
import re

import pytest

from tests.helpers.docs.pages import ROOT

PACKAGES = ["memsaver", "kvcache", "rollout", "trainer_bridge", "recipes"]


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_in_the_reference(package: str) -> None:
    page = (ROOT / "docs" / "reference" / f"{package}.md").read_text()
    entries = re.findall(r"^::: ([\w.]+)$", page, re.M)
    assert len(entries) == len(set(entries))
    shown = {entry.rpartition(".")[2] for entry in entries}
    assert set(importlib.import_module(package).__all__) <= shown
    for entry in entries:
        module, _, name = entry.rpartition(".")
        found = importlib.import_module(module)
        assert hasattr(found, name) or importlib.import_module(entry), entry
