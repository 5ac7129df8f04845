"""Ranks that agree: threads on one store stand for processes."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.staging import HeadSlice
from memsaver.system.sealed import Forged, Plain, seal, unseal
from rollout.actor_base import RankAddress
from tests.helpers.memory import uncollected
from tests.helpers.strangers import Bomb
from tests.helpers.trainer_bridge.hooked import KEY
from tests.helpers.trainer_bridge.targets import in_threads
from trainer_bridge.errors import SyncError
from trainer_bridge.sync.agree import StoreConsensus


def together(store: dist.Store, size: int, run: Callable[[StoreConsensus], Any]) -> list[Any]:
    """What `run` returned or raised in each of `size` ranks."""
    return in_threads(
        size, lambda rank: run(StoreConsensus(store, rank, size, key=KEY, timeout=20.0))
    )


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
def test_a_failure_anywhere_fails_everywhere_and_names_the_rank(
    size: int, at: int, failing: set[int]
) -> None:
    def run(consensus: StoreConsensus) -> int:
        passed = 0
        for step in range(4):
            bad = step == at and consensus.rank in failing
            consensus.agree(
                f"s{step}", (lambda: fail(ValueError("no room"))) if bad else lambda: None
            )
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
            assert (
                isinstance(result, SyncError) and result.reason == text and result.stage == f"s{at}"
            )


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
        assert (
            "failed in stage 'write'" in result[0] and "waited 1 s for rank 1, in vain" in result[0]
        )
        assert "failed in stage 'commit'" in result[1] and "start all ranks anew" in result[1]


def test_ranks_that_make_other_calls_are_told() -> None:
    found = together(
        dist.HashStore(), 2, lambda ranks: ranks.agree(f"stage of {ranks.rank}", lambda: None)
    )
    for rank, result in enumerate(found):
        assert isinstance(result, SyncError)
        assert f"other ranks are in stage 'stage of {1 - rank}'" in str(result)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 2 must be in \[0, 2\)"):
        StoreConsensus(dist.HashStore(), 2, 2, key=KEY)
    with pytest.raises(ValueError, match="timeout=0 must be positive"):
        StoreConsensus(dist.HashStore(), 0, 2, key=KEY, timeout=0)


class Poisoned:
    """A store in which a stranger has replaced what lies under one key."""

    def __init__(self, store: dist.Store, key: str, planted: bytes) -> None:
        self._store, self._key, self._planted = store, key, planted

    def get(self, key: str) -> bytes:
        return self._planted if key == self._key else self._store.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        return self._planted if key == self._key else self._store.compare_set(key, expected, wanted)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize("what", ["answer", "decision", "replay"])
def test_a_strangers_words_are_no_ranks_and_run_nothing(what: str, tmp_path: Path) -> None:
    store, marker = dist.HashStore(), tmp_path / "ran"
    planted = {
        "answer": pickle.dumps(("second", True, Bomb(marker))),
        "decision": b"go",
        "replay": seal(KEY, "0/1", Plain().text(("second", True, 1))),
    }

    def run(rank: int) -> Any:
        mine: Any = Poisoned(store, "1/decision" if what == "decision" else "1/1", planted[what])
        consensus = StoreConsensus(store if rank else mine, rank, 2, key=KEY, timeout=20.0)
        consensus.agree("first", lambda: rank)
        return consensus.agree("second", lambda: rank)

    poisoned, other = in_threads(2, run)
    assert isinstance(poisoned, SyncError) and "somebody else writes to the ranks' store" in str(
        poisoned
    )
    assert other == [0, 1] and not marker.exists()


def test_word_of_an_earlier_session_is_no_ranks_word(tmp_path: Path) -> None:
    """A stranger repeats all that rank 1 said in it: its number, and its word."""
    base = dist.HashStore()

    def session(number: int) -> dist.Store:
        return dist.PrefixStore(f"sync/{number}", base)

    assert (
        together(session(0), 2, lambda ranks: ranks.agree("ask", lambda: "old"))
        == [["old"] * 2] * 2
    )
    for key in ("session/1", "0/1"):
        session(1).set(key, session(0).get(key).decode())
    alone = StoreConsensus(session(1), 0, 2, key=KEY, timeout=20.0)
    with pytest.raises(SyncError, match="somebody else writes to the ranks' store"):
        alone.agree("ask", lambda: "new")


def test_plain_values_come_back_as_they_were() -> None:
    plain = Plain(RankAddress, HeadSlice)
    value = [
        *(
            None,
            True,
            -3,
            2**64 - 1,
            0.1,
            float("inf"),
            "é",
            b"\0\xff",
            (1, (2,)),
            {1, 2},
            frozenset(),
            {},
            {(1, 2): "x"},
        ),
        RankAddress(host="h", port=1, rank=0, size=2, seconds=1.5, key=b"k"),
        HeadSlice(1, 2, 3, 4),
    ]
    assert plain.value(plain.text(value)) == value
    assert [type(each) for each in plain.value(plain.text(value))] == [type(each) for each in value]
    with pytest.raises(TypeError, match="Path is not among the plain values"):
        plain.text(Path())
    for text in (
        "{",
        '{"Path": ["/"]}',
        '{"RankAddress": [1]}',
        '{"tuple": [], "list": []}',
    ):
        with pytest.raises(ValueError):
            plain.value(text)
    with uncollected(), pytest.raises(ValueError, match="recursion"):
        plain.value("[" * 100_000)
    sealed = seal(b"key", "here", plain.text(value))
    assert unseal(b"key", "here", sealed) == plain.text(value)
    for key, place, data in (
        (b"other", "here", sealed),
        (b"key", "there", sealed),
        (b"key", "here", sealed + b" "),
    ):
        with pytest.raises(Forged):
            unseal(key, place, data)
    with pytest.raises(Forged):
        unseal(b"key", "here", b"")
