"""Trainer ranks killed at every moment of a sync.

Each engine must serve a whole version, or refuse with a reason. Two replicas must never end with
different versions: if one has committed and the other's rank is lost, the surviving rank poisons
its own engine. The versions may differ for a moment, but only after all ranks have agreed to
commit.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from rollout.tag_names import WEIGHTS, WEIGHTS_SHADOW
from tests.helpers.case_selection import rounds
from tests.helpers.memory import settled_fds
from tests.helpers.peers import Gone
from tests.helpers.trainer_bridge.sync_hooks import MOMENTS, STAGES
from tests.helpers.trainer_bridge.sync_pair import Pair
from tests.helpers.trainer_bridge.trainers import PATIENCE, Death
from trainer_bridge.errors import SyncError
from trainer_bridge.sync.weight_sync import SyncReceipt

SLACK_FDS = 2  # for the test runner; a leak would add one per round
KILL_PATIENCE = 0.4  # seconds that the survivor waits at least in every round


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    engines = Pair(tmp_path_factory.mktemp("model"))
    yield engines
    engines.end()


@dataclass(frozen=True, kw_only=True)
class Round:
    """One death.

    Attributes:
        death: Stage and moment of the death.
        victim: Rank that dies.
        shadow: Whether the sync is a shadow update.
        shadow_before: Whether the previous sync was a shadow update.
        told: Whether the driver aborts the update of the victim's engine.
    """

    death: Death
    victim: int
    shadow: bool
    shadow_before: bool
    told: bool

    @property
    def stage(self) -> int:
        return STAGES.index(self.death.stage)

    @property
    def fails_in(self) -> str | None:
        """Return the stage in which the survivor misses the victim; None after the sync."""
        passed = self.stage + (self.death.moment == "decided")
        if self.death.stage == "open" and passed > self.stage:
            return "map"  # the next stage, in which no rank is killed here
        return STAGES[passed] if passed < len(STAGES) else None

    @property
    def begun(self) -> bool:
        """Return whether the update of the victim's engine had been opened."""
        return self.stage > 1 or (self.stage == 1 and self.death.moment != "before")

    @property
    def committed(self) -> bool:
        """Return whether the victim's engine had been told to commit."""
        return self.death.stage == "commit" and self.death.moment != "before"

    def victims_version(self, old: int) -> int | None:
        """Return the version that the victim's engine serves before its update is aborted."""
        if self.committed:
            return old + 1
        return old if self.shadow or not self.begun else None

    def survivors_version(self, old: int) -> int | None:
        if self.fails_in is None:
            return old + 1
        if self.fails_in == "commit":
            return None  # it has committed, but does not know whether the other engine has
        return old if self.shadow or self.fails_in == "prepare" else None


def drawn(count: int) -> list[Round]:
    """Draw rounds, stage by stage; a hundred cover all stages, moments, victims and page kinds."""
    rng = random.Random(8)
    kinds = {stage: list(itertools.product(MOMENTS, (0, 1), (False, True))) for stage in STAGES}
    for cases in kinds.values():
        rng.shuffle(cases)
    drawn_rounds = []
    for number in range(count):
        stage = STAGES[number % len(STAGES)]
        moment, victim, shadow = kinds[stage][number // len(STAGES) % len(kinds[stage])]
        death = Death(stage=stage, moment=moment)
        before, told = rng.random() < 0.5, rng.random() < 0.5
        drawn_rounds.append(
            Round(death=death, victim=victim, shadow=shadow, shadow_before=before, told=told)
        )
    return drawn_rounds


def synced(pair: Pair, version: int, **how: Any) -> float:
    """Sync a version successfully, and return the seconds it took."""
    started = time.monotonic()
    pair.order(version, **how)
    results = pair.results()
    assert all(
        isinstance(result, SyncReceipt) and result.version == version for result in results
    ), results
    return time.monotonic() - started


class Killing:
    """Rounds in which a new pair of trainers syncs a version, and loses a rank in the next sync."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.version = max(engine.weights_version for engine in pair.engines)
        pair.start()
        for shadow in (False, True, False):
            self.version += 1
            synced(pair, self.version, shadow=shadow)
            self.check_both(self.version)
        pair.stop()
        self.floor = pair.held()

    def check_both(self, version: int) -> None:
        assert [self.pair.serves(number) for number in (0, 1)] == [version] * 2

    def round(self, case: Round) -> None:
        pair, old = self.pair, self.version + 1
        pair.start()
        # Many times the duration of a whole sync on this machine, however busy it is.
        patience = max(KILL_PATIENCE, round(8 * synced(pair, old, shadow=case.shadow_before), 1))
        self.check_both(old)
        assert pair.held() == self.floor, "the previous death leaked memory"
        self.version = old + 1
        pair.order(
            self.version, dies=case.victim, death=case.death, shadow=case.shadow, timeout=patience
        )
        self.watch(case, old, PATIENCE + patience)
        self.check_results(case, pair.results())
        pair.stop()
        pair.wait_unleased()
        self.check_engines(case, old)
        self.check_memory(case, old)

    def watch(self, case: Round, old: int, seconds: float) -> None:
        """Query the engines all the time until both ranks have ended."""
        verified, deadline = case.fails_in in ("commit", None), time.monotonic() + seconds
        while self.pair.busy():
            assert time.monotonic() < deadline, "the survivor waits forever"
            for number in (0, 1):
                version = self.pair.serves(number)
                assert version in (None, old) or (version == self.version and verified)
                assert version is not None or not case.shadow or case.fails_in == "commit"
                time.sleep(0.005)  # leave the engine to the ranks

    def check_results(self, case: Round, results: list[Any]) -> None:
        assert isinstance(results[case.victim], Gone)
        result = results[1 - case.victim]
        if case.fails_in is None:
            assert isinstance(result, SyncReceipt) and result.version == self.version
            return
        assert isinstance(result, SyncError) and result.stage == case.fails_in, result
        assert f"rank {case.victim} did not arrive" in str(result) or "the exchange" in str(result)
        if case.survivors_version(0) is None:
            assert str(result) in str(self.pair.engines[1 - case.victim].unavailable_reason())

    def check_engines(self, case: Round, old: int) -> None:
        victims, survivors = self.pair.serves(case.victim), self.pair.serves(1 - case.victim)
        assert (victims, survivors) == (case.victims_version(old), case.survivors_version(old))
        assert len({victims, survivors} - {None}) <= 1, "two replicas serve different versions"

    def check_memory(self, case: Round, old: int) -> None:
        pair, victim = self.pair, case.victim
        left_open = case.shadow and case.begun and not case.committed
        if case.told and case.fails_in is not None:
            with pair.locks[victim]:
                pair.engines[victim].abort_update("its trainer has died")
            assert pair.serves(victim) == (old if left_open else None)
            assert left_open or "its trainer has died" in str(
                pair.engines[victim].unavailable_reason()
            )
            left_open = False
        held = pair.held()
        if left_open:  # until the update is aborted, or the next one begins
            assert held.pop(f"{WEIGHTS_SHADOW} {victim}") == held[f"{WEIGHTS} {victim}"]
        else:
            assert held == self.floor


@pytest.mark.soak
def test_rank_killed_at_any_stage_leaves_engines_consistent(pair: Pair) -> None:
    killing = Killing(pair)
    fds, threads = settled_fds(), _threads()
    for case in drawn(rounds(len(STAGES), 200)):
        killing.round(case)
    pair.start()
    killing.version += 1
    synced(pair, killing.version)
    killing.check_both(killing.version)
    pair.stop()
    assert pair.held() == killing.floor
    deadline = time.monotonic() + 5
    while settled_fds() > fds + SLACK_FDS or _threads() - threads:
        left = _threads() - threads
        assert time.monotonic() < deadline, (
            f"{settled_fds()} fds, {fds} before; threads {left} in addition to {threads}"
        )
        time.sleep(0.05)


def _threads() -> Counter[str]:
    """Count threads by name, except the finalizer of leases and aliases, started once."""
    return Counter(
        thread.name
        for thread in threading.enumerate()
        if not thread.name.startswith("memsaver-loans")
    )
