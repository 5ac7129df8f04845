"""Fixtures of runs that several tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.helpers.recipes.tiny_runs import MakeRun, run_maker, without_pictures


@pytest.fixture(scope="session")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> MakeRun:
    return run_maker(tmp_path_factory)


@pytest.fixture(scope="module", autouse=True)
def no_waits_for_the_disk() -> Iterator[None]:
    """Leave files in the system's cache, which outlives the processes that tests kill."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def no_pictures() -> Iterator[None]:
    with without_pictures():
        yield
