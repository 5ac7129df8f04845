"""Ranks that agree: threads on one store stand for processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.trainer_bridge.targets import in_threads
from trainer_bridge.consensus import StoreConsensus
from trainer_bridge.errors import SyncError


def together(store: dist.Store, size: int, run: Callable[[StoreConsensus], Any]) -> list[Any]:
    """What `run` returned or raised in each of `size` ranks."""
    return in_threads(size, lambda rank: run(StoreConsensus(store, rank, size, timeout=20.0)))


def fail(error: BaseException) -> None:
    raise error


def test_all_get_all_values_and_the_store_does_not_grow() -> None:
    store = dist.HashStore()
    keys: list[int] = []

    def run(consensus: StoreConsensus) -> list[Any]:
        said = []
        for step in range(100):
            said = consensus.agree(f"stage {step}", lambda step=step: (consensus.rank, step))  # type: ignore[misc]
            if consensus.rank == 0:
                keys.append(store.num_keys())
        return said

    assert together(store, 3, run) == [[(0, 99), (1, 99), (2, 99)]] * 3
    assert max(keys) <= 3 * 4, "keys of rounds long past are still there"


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(0, 3), st.sets(st.integers(0, 3)))
def test_a_failure_anywhere_fails_everywhere_and_names_the_rank(size: int, at: int, failing: set[int]) -> None:
    def run(consensus: StoreConsensus) -> int:
        passed = 0
        for step in range(4):
            bad = step == at and consensus.rank in failing
            consensus.agree(f"s{step}", (lambda: fail(ValueError("no room"))) if bad else lambda: None)
            passed += 1
        return passed

    failing = {rank for rank in failing if rank < size}
    for rank, result in enumerate(together(dist.HashStore(), size, run)):
        if not failing:
            assert result == 4
        elif rank in failing:
            assert isinstance(result, ValueError) and str(result) == "no room"
        else:
            text = "; ".join(f"rank {each}: ValueError: no room" for each in sorted(failing))
            assert isinstance(result, SyncError) and result.reason == text and result.stage == f"s{at}"


def test_a_silent_rank_is_named_and_the_late_one_does_not_go_on_alone() -> None:
    given_up = threading.Event()

    def run(consensus: StoreConsensus) -> Any:
        consensus.agree("open", lambda: None)
        consensus.timeout = 1.0  # the two that wait must not miss each other
        if consensus.rank == 1:
            assert given_up.wait(20)
        errors = []
        for stage in ("write", "commit"):
            with pytest.raises(SyncError) as caught:
                consensus.agree(stage, lambda: None)
            errors.append(str(caught.value))
            given_up.set()
        return errors

    for result in together(dist.HashStore(), 3, run):
        assert "failed in stage 'write'" in result[0] and "waited 1 s for rank 1, in vain" in result[0]
        assert "failed in stage 'commit'" in result[1] and "start all ranks anew" in result[1]


def test_ranks_that_make_other_calls_are_told() -> None:
    found = together(dist.HashStore(), 2, lambda ranks: ranks.agree(f"stage of {ranks.rank}", lambda: None))
    for rank, result in enumerate(found):
        assert isinstance(result, SyncError)
        assert f"other ranks are in stage 'stage of {1 - rank}'" in str(result)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 2 must be in \[0, 2\)"):
        StoreConsensus(dist.HashStore(), 2, 2)
    with pytest.raises(ValueError, match="timeout=0 must be positive"):
        StoreConsensus(dist.HashStore(), 0, 2, timeout=0)
