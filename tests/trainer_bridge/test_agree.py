"""Agreement of ranks, which are threads with a gloo group in place of processes."""

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
    """Call `run` on `size` ranks; return each rank's result or exception."""
    store = dist.HashStore()
    return in_threads(size, lambda rank: run(joined(store, rank, size, timeout)))


def fail(error: BaseException) -> None:
    raise error


def test_agree_returns_values_of_all_ranks_and_store_does_not_grow() -> None:
    store = dist.HashStore()
    keys: list[int] = []

    def run(ranks: Agreement) -> list[Any]:
        values = []
        for step in range(20):
            values = ranks.agree(f"stage {step}", lambda step=step: (ranks.rank, step))  # type: ignore[misc]
            keys.append(store.num_keys())
        return values

    results = in_threads(3, lambda rank: run(joined(store, rank, 3)))
    assert results == [[(0, 19), (1, 19), (2, 19)]] * 3
    assert keys[-1] == keys[len(keys) // 2]


@settings(max_examples=15)
@given(st.integers(1, 4), st.integers(0, 3), st.sets(st.integers(0, 3)))
def test_failed_step_fails_on_all_ranks_and_names_failed_ranks(
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
            text = "; ".join(f"rank {failed}: ValueError: no room" for failed in sorted(failing))
            assert (
                isinstance(result, SyncError) and result.reason == text and result.stage == f"s{at}"
            )


def test_silent_rank_is_named_and_cannot_continue_later() -> None:
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
        assert ("rank 1 did not arrive" if rank != 1 else "the exchange failed") in first
        assert "failed in stage 'commit'" in second and "restart all ranks" in second


def test_ranks_in_different_stages_fail_with_sync_error() -> None:
    results = together(2, lambda ranks: ranks.agree(f"stage of {ranks.rank}", lambda: None))
    for rank, result in enumerate(results):
        assert isinstance(result, SyncError)
        assert f"other ranks are in stage 'stage of {1 - rank}'" in str(result)


def test_single_rank_agrees_without_a_group() -> None:
    assert group_agreement(None).agree("open", lambda: 3) == [3]
