"""Tests here count descriptors, maps and threads exactly, whatever ran before them in the same process."""

from __future__ import annotations

import pytest

from tests.helpers.memory import settled_fds


@pytest.fixture(scope="module", autouse=True)
def settled() -> None:
    """What other files left goes before the first count, not between two: gloo's process groups, which only a
    collection of cycles ends, are the most of it."""
    settled_fds()
