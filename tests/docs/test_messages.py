"""Test of docs/how-to/troubleshooting.md: the quoted messages are those of the product."""

from __future__ import annotations

import re

from tests.helpers.docs.pages import ROOT

PAGE = ROOT / "docs" / "how-to" / "troubleshooting.md"
PACKAGES = ("memsaver", "kvcache", "rollout", "trainer_bridge", "recipes")


def test_quoted_messages_are_in_the_sources() -> None:
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    text = re.sub(r'"\s*\n\s*f?"', "", "\n".join(file.read_text() for file in files))
    quoted = re.findall(r"^\| `([^`]+)`", PAGE.read_text(), re.M)
    assert len(quoted) >= 30 and len(set(quoted)) == len(quoted)
    for message in quoted:
        parts = [part.strip() for part in message.split("...")]
        longest = max(parts, key=len)  # which a reader can search for
        assert len(longest.split()) > 1 or f"class {longest}(" in text, message
        assert all(part in text for part in parts), message
