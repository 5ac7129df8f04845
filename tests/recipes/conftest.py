"""Fixtures of runs that several tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.recipes.tiny_runs import MakeRun, run_maker, without_pictures


@pytest.fixture(scope="session")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> MakeRun:
    return run_maker(tmp_path_factory)


@pytest.fixture
def no_pictures() -> Iterator[None]:
    with without_pictures():
        yield
