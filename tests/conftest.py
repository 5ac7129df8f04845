"""Select the tests of a run, their order, and the devices that they run on."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test waits for a network, or depends on one

from tests.helpers import case_selection
from tests.helpers.ray_cluster import pytest_runtest_teardown, ray_cluster  # noqa: F401  a hook and a fixture
from tests.helpers.triton_interpreter import quicken

if os.environ.get("TRITON_INTERPRET") == "1":
    quicken()

torch.set_num_threads(1)  # more threads slow tiny models down, above all on a busy machine
gc.disable()  # until tests run: importing all files creates a million objects and no garbage

# Every run tries the same examples, without a deadline: the time of an example depends more on the
# machine than on the code.
hypothesis.settings.register_profile("steady", derandomize=True, deadline=None)
hypothesis.settings.load_profile("steady")

LONG = ("tests/plans/", "tests/recipes/", "tests/trainer_bridge/", "tests/rollout/")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        help="also run tests marked `extended`, and full matrices of cases",
    )
    parser.addoption("--part", default="1/1", help="of the tests, as 1/2: files by their limits")
    parser.addoption("--soak", action="store_true", help="run soak tests with their full counts")


def pytest_configure(config: pytest.Config) -> None:
    case_selection.choose(
        soak=config.getoption("--soak"),
        whole=config.getoption("--all") or torch.cuda.is_available(),
    )


@pytest.hookimpl(trylast=True)  # after -m and -k, so that parts divide what is left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Exclude tests that this run or machine is not for, and sort the others.

    They keep the order of pytest-randomly, but tests of the Ray cluster come first and then the
    packages with long files, so that the workers end together.
    """
    wanted = [item for item in items if _wanted(item, config.getoption("--all"))]
    wanted = case_selection.part(wanted, config.getoption("--part"))
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
    """Exclude imported objects from the garbage collections of the tests."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep each file on one worker, and all files that use the Ray cluster on the same worker."""
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
    """Fail a file that leaves torch's default process group behind, instead of the next file."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        pytest.fail("a test of this file left torch.distributed's default process group")


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Return every backend in turn: the host and, marked ``gpu``, CUDA."""
    return request.param
