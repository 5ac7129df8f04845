"""Fixtures of the pages' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.recipes.runs import without_pictures


@pytest.fixture
def no_pictures() -> Iterator[None]:
    with without_pictures():
        yield
