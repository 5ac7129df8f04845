"""Shared by all tests: the interpreter where there is no GPU, and ``gpu`` tests skipped there."""

import os

import pytest
import torch

from tests.helpers import soak

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
torch.set_num_threads(1)  # tiny models only lose by more, above all on a busy machine


COUNTING = ("tests/memsaver/",)
LONG = ("tests/recipes/", "tests/rollout/", "tests/trainer_bridge/")  # files that take up to a minute or two


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="full counts of every soak test, not the short forms")


def pytest_configure(config: pytest.Config) -> None:
    soak.choose(config.getoption("--soak"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that count maps, descriptors and addresses first, before others leave some behind; then long files, so that
    the workers end together, on short ones."""
    items.sort(key=lambda item: (not item.nodeid.startswith(COUNTING), not item.nodeid.startswith(LONG)))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Every backend: the same test runs on the host and, marked ``gpu``, on CUDA."""
    return request.param
