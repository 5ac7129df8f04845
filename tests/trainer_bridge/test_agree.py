"""Ranks that agree: threads with a gloo group of their own stand for processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.trainer_bridge.sync_hooks import joined
from tests.helpers.trainer_bridge.targets import in_threads
from trainer_bridge.errors import SyncError
from trainer_bridge.sync.agree import Agreement, group_agreement


def together(size: int, run: Callable[[Agreement], Any], timeout: float = 20.0) -> list[Any]:
    """What `run` returned or raised in each of `size` ranks."""
    store = dist.HashStore()
    return in_threads(size, lambda rank: run(joined(store, rank, size, timeout)))


def fail(error: BaseException) -> None:
    raise error


def test_every_rank_gets_all_values_and_the_store_does_not_grow() -> None:
    store = dist.HashStore()
    keys: list[int] = []

    def run(ranks: Agreement) -> list[Any]:
        said = []
        for step in range(20):
            said = ranks.agree(f"stage {step}", lambda step=step: (ranks.rank, step))  # type: ignore[misc]
            keys.append(store.num_keys())
        return said

    found = in_threads(3, lambda rank: run(joined(store, rank, 3)))
    assert found == [[(0, 19), (1, 19), (2, 19)]] * 3
    assert keys[-1] == keys[len(keys) // 2]


@settings(max_examples=15)
@given(st.integers(1, 4), st.integers(0, 3), st.sets(st.integers(0, 3)))
def test_a_failure_anywhere_fails_everywhere_and_names_the_rank(
    size: int, at: int, failing: set[int]
) -> None:
    def run(ranks: Agreement) -> int:
        passed = 0
        for step in range(4):
            bad = step == at and ranks.rank in failing
            ranks.agree(f"s{step}", (lambda: fail(ValueError("no room"))) if bad else lambda: None)
            passed += 1
        return passed

    failing = {rank for rank in failing if rank < size}
    for rank, result in enumerate(together(size, run)):
        if not failing:
            assert result == 4
        elif rank in failing:
            assert isinstance(result, ValueError) and str(result) == "no room"
        else:
            text = "; ".join(f"rank {each}: ValueError: no room" for each in sorted(failing))
            assert (
                isinstance(result, SyncError) and result.reason == text and result.stage == f"s{at}"
            )


def test_a_silent_rank_is_named_and_the_late_one_does_not_go_on_alone() -> None:
    given_up = threading.Barrier(3)

    def run(ranks: Agreement) -> Any:
        ranks.agree("open", lambda: None)
        ranks.timeout = 0.5
        if ranks.rank == 1:
            given_up.wait(20)
        errors = []
        for stage in ("write", "commit"):
            with pytest.raises(SyncError) as caught:
                ranks.agree(stage, lambda: None)
            errors.append(str(caught.value))
        if ranks.rank != 1:
            given_up.wait(20)
        return errors

    for rank, (first, second) in enumerate(together(3, run)):
        assert "failed in stage 'write'" in first
        assert ("rank 1 did not come" if rank != 1 else "broke off") in first
        assert "failed in stage 'commit'" in second and "restart all ranks" in second


def test_ranks_that_make_other_calls_are_told() -> None:
    found = together(2, lambda ranks: ranks.agree(f"stage of {ranks.rank}", lambda: None))
    for rank, result in enumerate(found):
        assert isinstance(result, SyncError)
        assert f"other ranks are in stage 'stage of {1 - rank}'" in str(result)


def test_a_rank_alone_asks_nobody() -> None:
    assert group_agreement(None).agree("open", lambda: 3) == [3]
