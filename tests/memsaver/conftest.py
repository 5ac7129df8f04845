"""Fixtures that let tests count descriptors, imports, maps and bytes exactly.

The counts must not depend on earlier tests in the same process.
"""

from __future__ import annotations

import gc
import time
from multiprocessing import forkserver

import pytest

from tests.helpers.memory import settled_fds
from tests.helpers.memsaver.savers import connections


@pytest.fixture(scope="module", autouse=True)
def settled() -> None:
    """Collect the garbage of other test files before the first count.

    Most of it is gloo's process groups, which end only with a collection of cycles. The surviving
    objects are frozen for good, so that a collection takes a millisecond instead of a second:
    `gc.unfreeze` would also release a million imported objects to all later collections.
    """
    settled_fds()
    gc.freeze()


@pytest.fixture(autouse=True)
def collected(settled: None) -> None:
    """Collect the previous test's savers, and wait until threads have closed its connections."""
    gc.collect()
    patience = time.monotonic() + 0.5
    while connections() and time.monotonic() < patience:
        time.sleep(0.002)


@pytest.fixture
def fds(collected: None) -> int:
    """Return the number of open descriptors before the test.

    The descriptors that the first child process opens for good are included.
    """
    forkserver.ensure_running()
    return settled_fds()
