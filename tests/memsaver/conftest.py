"""Tests here count descriptors, imports, maps and bytes exactly, whatever ran before them in the
same process.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest

from tests.helpers.memory import settled_fds
from tests.helpers.memsaver.savers import connections


@pytest.fixture(scope="module", autouse=True)
def settled() -> Iterator[None]:
    """What other files left goes before the first count, not between two: gloo's process groups,
    which only a collection of cycles ends, are the most of it. What lives on is left out of the
    collections of this file, which then take a millisecond each instead of a hundred.
    """
    settled_fds()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def collected(settled: None) -> None:
    """The savers of the test before that only cycles keep, and what its connections hold until
    threads close them, must not go while this one counts.
    """
    gc.collect()
    patience = time.monotonic() + 0.5
    while connections() and time.monotonic() < patience:
        time.sleep(0.002)


@pytest.fixture
def fds(collected: None) -> int:
    """Descriptors that are open when those of earlier tests are closed, and those that the first
    other process brings for good are there.
    """
    forkserver.ensure_running()
    return settled_fds()
