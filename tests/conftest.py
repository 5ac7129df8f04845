"""Shared by all tests: which of them this run is for, in which order, and on which devices."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch

from tests.helpers import case_selection
from tests.helpers.ray_cluster import pytest_runtest_teardown, ray_cluster  # noqa: F401  a hook and a fixture

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
torch.set_num_threads(1)  # tiny models only lose by more, above all on a busy machine
gc.disable()  # until the tests run: imports of all files make a million objects and no garbage

# The same examples in every run, and no deadline: how long one takes says more of the machine than
# of the code.
hypothesis.settings.register_profile("steady", derandomize=True, deadline=None)
hypothesis.settings.load_profile("steady")

LONG = ("tests/plans/", "tests/recipes/", "tests/trainer_bridge/", "tests/rollout/")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        help="tests marked `extended` too, and whole matrices of cases",
    )
    parser.addoption(
        "--soak", action="store_true", help="full counts of every soak test, not the short forms"
    )


def pytest_configure(config: pytest.Config) -> None:
    case_selection.choose(
        soak=config.getoption("--soak"),
        whole=config.getoption("--all") or torch.cuda.is_available(),
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what this run or machine is not for. What is left stays in the order that
    pytest-randomly gave it, but the Ray cluster's tests come first and then the packages with long
    files, so that the workers end together.
    """
    wanted = [item for item in items if _wanted(item, config.getoption("--all"))]
    if len(wanted) < len(items):
        kept = set(wanted)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = sorted(
        wanted, key=lambda item: (not _on_ray(item), not item.nodeid.startswith(LONG))
    )
    if strays := [item.nodeid for item in items if _on_ray(item) and not _of_ray(item.nodeid)]:
        raise pytest.UsageError(
            f"tests marked `ray` belong to files named test_ray*.py: {strays[0]}"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """What was imported is not looked through by each of the tests' collections."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file stays on one worker, and one worker has all that use the one Ray cluster."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ray" if _of_ray(nodeid) else super()._split_scope(nodeid)

    return ByFile(config, log)


def _of_ray(nodeid: str) -> bool:
    return "/test_ray" in nodeid


def _wanted(item: pytest.Item, everything: bool) -> bool:
    gpus = item.get_closest_marker("gpus")
    needed = gpus.args[0] if gpus else int(item.get_closest_marker("gpu") is not None)
    extended = item.get_closest_marker("extended") is not None
    return needed <= torch.cuda.device_count() and (everything or not extended)


def _on_ray(item: pytest.Item) -> bool:
    return item.get_closest_marker("ray") is not None


@pytest.fixture(scope="module", autouse=True)
def no_group_is_left() -> Iterator[None]:
    """A file that leaves torch's default process group behind fails, not the next one that makes
    its own.
    """
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        pytest.fail("a test of this file left torch.distributed's default process group")


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Every backend: the same test runs on the host and, marked ``gpu``, on CUDA."""
    return request.param
