"""Fixtures of kvcache's tests."""

from collections.abc import Iterator

import pytest

from memsaver import MemorySaver
from tests.helpers.kvcache.blocks import DEVICE


@pytest.fixture
def saver() -> Iterator[MemorySaver]:
    saver = MemorySaver(device="cuda:0" if DEVICE == "cuda" else "cpu")
    yield saver
    saver.close()
