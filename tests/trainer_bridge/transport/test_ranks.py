"""One plan over mapped pages, relayed messages and handles: the same bytes and digests."""

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
OWN = ["a", "a", "c"]  # hosts of the ranks that own the targets
CASES = {
    "pages": Case(),
    "far": Case(ranks=FAR, targets=OWN),
    "unmapped": Case(ranks=FAR, targets=["x", "x", "x"]),
    "mixed": Case(ranks=["a", "a", "c"], targets=["a", "x", "c"]),
    "large": Case(ranks=FAR, targets=OWN, message_bytes=MESSAGE_BYTES),
    "some": Case(ranks=["a", "a", "c"], targets=["a", "x", "c"], only=("norm", "proj")),
    "low-rank pages": Case(low_rank=True),
    "low-rank mixed": Case(low_rank=True, ranks=["a", "a", "c"], targets=["a", "x", "c"]),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    store = tmp_path_factory.mktemp("ranks") / "store"
    return results(start_ranks(sync_cases, WORLD, store, WORLD, "cpu", "bfloat16", CASES))


@pytest.mark.parametrize("name", CASES)
def test_all_routes_write_the_same_bytes(name: str, outcomes: list[dict]) -> None:
    for results_of_rank in outcomes:
        assert results_of_rank[name].right
        if CASES[name].only is None:
            alike = outcomes[0]["low-rank pages" if CASES[name].low_rank else "pages"]
            assert results_of_rank[name].digests == alike.digests
    assert outcomes[0][name].own + outcomes[-1][name].own == outcomes[0][name].digests


def test_messages_to_handles_are_bounded(outcomes: list[dict]) -> None:
    for results_of_rank in outcomes:
        for sent in results_of_rank["unmapped"].messages:
            assert sent and max(sent) <= SMALL
    assert not any(outcomes[0]["far"].messages)
    assert not outcomes[0]["mixed"].messages[0] and outcomes[0]["mixed"].messages[1]


TWO_GPUS = pytest.mark.gpus(2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "gpus"),
    [("gloo", 1), pytest.param("gloo", 2, marks=TWO_GPUS), pytest.param("nccl", 2, marks=TWO_GPUS)],
)
def test_all_routes_write_the_same_bytes_between_gpus(
    backend: str, gpus: int, tmp_path: Path
) -> None:
    hosts = {"relay": "aab", "handle": "xxx"}  # of the targets; the ranks are on a and b
    cases = {name: Case(ranks="ab", targets=targets) for name, targets in hosts.items()}
    cases["large"] = Case(ranks="ab", targets="aab", message_bytes=MESSAGE_BYTES)
    cases["pages"] = Case()
    outcomes = results(start_ranks(on_gpus, 2, tmp_path / "store", gpus, cases, backend=backend))
    for results_of_rank in outcomes:
        for name in cases:
            result = results_of_rank[name]
            assert result.right and result.digests == outcomes[0]["pages"].digests, name


def on_gpus(rank: int, gpus: int, cases: dict[str, Case]) -> dict:
    torch.cuda.set_device(rank % gpus)
    return sync_cases(rank, 2, f"cuda:{rank % gpus}", "bfloat16", cases)


# ---------------------------------------------------------------- failures


def second_message(rank: int, patch: pytest.MonkeyPatch) -> None:
    """Fail when rank 1 packs its second message."""
    _at_second_message(rank, patch, _raise)


def die(rank: int, patch: pytest.MonkeyPatch) -> None:
    _at_second_message(rank, patch, lambda: os._exit(1))


def refusing_handle(rank: int, patch: pytest.MonkeyPatch) -> None:
    """Fail when rank 0's targets receive a message."""
    if rank == 0:
        patch.setattr(PageTarget, "write_update", lambda self, boxes, data: _raise())


def _at_second_message(rank: int, patch: pytest.MonkeyPatch, fail: Callable[[], None]) -> None:
    packed, packing = [0], Message.packing

    def broken(message: Message, *args: Any) -> Writer:
        writer = packing(message, *args)
        start = writer.start

        def started(*args: Any) -> None:
            packed[0] += 1
            if rank == 1 and packed[0] == 2:
                fail()
            start(*args)

        patch.setattr(writer, "start", started)
        return writer

    patch.setattr(Message, "packing", broken)


def _raise() -> None:
    raise OSError("cosmic ray")


BROKEN = {
    "relay": (second_message, CASES["far"], 1),
    "to a handle": (second_message, CASES["unmapped"], 1),
    "handle": (refusing_handle, CASES["unmapped"], 0),
}


def test_failed_rank_is_reported_to_all_ranks_without_a_timeout(tmp_path: Path) -> None:
    """Set the ranks' timeouts to 60 s, so that a rank that waits for one is too late."""
    broken = {name: (break_it, case) for name, (break_it, case, _) in BROKEN.items()}
    outcomes = results(start_ranks(failing, WORLD, tmp_path / "store", WORLD, broken, 60.0), 50.0)
    for rank, (failures, usable) in enumerate(outcomes):
        for name, (_, _, culprit) in BROKEN.items():
            error, versions = failures[name]
            assert isinstance(
                error, OSError if rank == culprit else SyncError
            ) and "cosmic ray" in str(error), name
            if isinstance(error, SyncError):
                reason = f"rank {culprit}: OSError: cosmic ray"
                assert (error.stage, error.reason) == ("write", reason)
            assert set(versions) <= {None}
        assert usable, "the ranks are out of step"


def test_dead_rank_ends_the_sync_of_the_others(tmp_path: Path) -> None:
    broken = {"dies": (die, CASES["far"])}
    ranks = start_ranks(failing, WORLD, tmp_path / "store", WORLD, broken, 2.0, seconds=3.0)
    try:
        for rank in (0, 2):
            failures, _ = ranks[rank].hear(40)
            error, versions = failures["dies"]
            assert isinstance(error, SyncError) and error.stage == "write"
            assert "the exchange with ranks" in error.reason
            assert set(versions) <= {None}
    finally:
        for process in ranks:
            process.kill()
