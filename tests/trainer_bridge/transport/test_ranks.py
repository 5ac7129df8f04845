"""The same plan by pages, relayed and by handles: the same bytes, the same digests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.ranks import results, start_ranks
from tests.helpers.trainer_bridge.sync_ranks import SMALL, Case, failing, sync_cases
from tests.helpers.trainer_bridge.targets import PageTarget
from trainer_bridge.errors import SyncError
from trainer_bridge.sync.relay import MESSAGE_BYTES, Message
from trainer_bridge.sync.writer import Writer

WORLD = 3
FAR = ["a", "b", "c"]
BESIDE = ["a", "a", "c"]  # hosts of the ranks that speak for them
CASES = {
    "pages": Case(),
    "far": Case(ranks=FAR, targets=BESIDE),
    "nobody": Case(ranks=FAR, targets=["x", "x", "x"]),
    "mixed": Case(ranks=["a", "a", "c"], targets=["a", "x", "c"]),
    "large": Case(ranks=FAR, targets=BESIDE, message_bytes=MESSAGE_BYTES),
    "some": Case(ranks=["a", "a", "c"], targets=["a", "x", "c"], only=("norm", "proj")),
    "low-rank pages": Case(low_rank=True),
    "low-rank mixed": Case(low_rank=True, ranks=["a", "a", "c"], targets=["a", "x", "c"]),
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    store = tmp_path_factory.mktemp("ranks") / "store"
    return results(start_ranks(sync_cases, WORLD, store, WORLD, "cpu", "bfloat16", CASES))


@pytest.mark.parametrize("name", CASES)
def test_every_way_brings_the_same(name: str, seen: list[dict]) -> None:
    for each in seen:
        assert each[name].right
        if CASES[name].only is None:
            alike = seen[0]["low-rank pages" if CASES[name].low_rank else "pages"]
            assert each[name].digests == alike.digests
    assert seen[0][name].own + seen[-1][name].own == seen[0][name].digests


def test_messages_of_a_handle_are_bounded(seen: list[dict]) -> None:
    for each in seen:
        for sent in each["nobody"].messages:
            assert sent and max(sent) <= SMALL
    assert not any(seen[0]["far"].messages)
    assert not seen[0]["mixed"].messages[0] and seen[0]["mixed"].messages[1]


TWO_GPUS = pytest.mark.gpus(2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "gpus"),
    [("gloo", 1), pytest.param("gloo", 2, marks=TWO_GPUS), pytest.param("nccl", 2, marks=TWO_GPUS)],
)
def test_the_same_between_gpus(backend: str, gpus: int, tmp_path: Path) -> None:
    hosts = {"relay": "aab", "handle": "xxx"}  # of the targets, beside ranks on a and b
    cases = {name: Case(ranks="ab", targets=targets) for name, targets in hosts.items()}
    cases["large"] = Case(ranks="ab", targets="aab", message_bytes=MESSAGE_BYTES)
    cases["pages"] = Case()
    seen = results(start_ranks(on_gpus, 2, tmp_path / "store", gpus, cases, backend=backend))
    for each in seen:
        for name in cases:
            assert each[name].right and each[name].digests == seen[0]["pages"].digests, name


def on_gpus(rank: int, gpus: int, cases: dict[str, Case]) -> dict:
    torch.cuda.set_device(rank % gpus)
    return sync_cases(rank, 2, f"cuda:{rank % gpus}", "bfloat16", cases)


# ---------------------------------------------------------------- failures


def second_message(rank: int, patch: pytest.MonkeyPatch) -> None:
    """Rank 1 cannot pack its second message."""
    _at_second_message(rank, patch, _raise)


def die(rank: int, patch: pytest.MonkeyPatch) -> None:
    _at_second_message(rank, patch, lambda: os._exit(1))


def deaf_handle(rank: int, patch: pytest.MonkeyPatch) -> None:
    """Rank 0's targets do not take what they are sent."""
    if rank == 0:
        patch.setattr(PageTarget, "write_update", lambda self, boxes, data: _raise())


def _at_second_message(rank: int, patch: pytest.MonkeyPatch, fail: Callable[[], None]) -> None:
    packed, packing = [0], Message.packing

    def broken(message: Message, *args: Any) -> Writer:
        made = packing(message, *args)
        start = made.start

        def started(*args: Any) -> None:
            packed[0] += 1
            if rank == 1 and packed[0] == 2:
                fail()
            start(*args)

        patch.setattr(made, "start", started)
        return made

    patch.setattr(Message, "packing", broken)


def _raise() -> None:
    raise OSError("cosmic ray")


BROKEN = {
    "relay": (second_message, CASES["far"], 1),
    "to a handle": (second_message, CASES["nobody"], 1),
    "handle": (deaf_handle, CASES["nobody"], 0),
}


def test_a_rank_that_fails_is_heard_of_by_all_without_a_time_out(tmp_path: Path) -> None:
    """Its own time-outs are 60 s each, so a rank that waited for one would be late."""
    broken = {name: (break_it, case) for name, (break_it, case, _) in BROKEN.items()}
    seen = results(start_ranks(failing, WORLD, tmp_path / "store", WORLD, broken, 60.0), 50.0)
    for rank, (failures, goes_on) in enumerate(seen):
        for name, (_, _, culprit) in BROKEN.items():
            error, versions = failures[name]
            assert isinstance(
                error, OSError if rank == culprit else SyncError
            ) and "cosmic ray" in str(error), name
            if isinstance(error, SyncError):
                reason = f"rank {culprit}: OSError: cosmic ray"
                assert (error.stage, error.reason) == ("write", reason)
            assert set(versions) <= {None}
        assert goes_on, "the ranks are out of step"


def test_a_rank_that_dies_does_not_keep_the_others(tmp_path: Path) -> None:
    broken = {"dies": (die, CASES["far"])}
    ranks = start_ranks(failing, WORLD, tmp_path / "store", WORLD, broken, 2.0, seconds=6.0)
    try:
        for rank in (0, 2):
            failures, _ = ranks[rank].hear(40)
            error, versions = failures["dies"]
            assert isinstance(error, SyncError) and error.stage == "write"
            assert "broke off" in error.reason
            assert set(versions) <= {None}
    finally:
        for each in ranks:
            each.kill()
