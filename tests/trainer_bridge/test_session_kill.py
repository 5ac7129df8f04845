"""Trainer ranks killed at every moment of a sync: engines go on with a whole version, or refuse and
say why.

Two replicas never end with different versions: where one has committed and the other has not been
heard of, the rank that is left poisons its own. For a moment they may differ, but only once both
are verified, for then all ranks have agreed to commit.
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

SLACK_FDS = 2  # for the test runner's own; what a round leaves would be one each
KILL_PATIENCE = 0.6  # seconds at least; the survivor waits so long in every round


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("model"))
    yield made
    made.end()


@dataclass(frozen=True, kw_only=True)
class Round:
    """told: a driver that finds the victim dead tells its engine.

    before: how the version before was synced.
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
        """The stage in which the survivor misses the victim; None: the sync was over."""
        passed = self.stage + (self.death.moment == "decided")
        if self.death.stage == "open" and passed > self.stage:
            return "map"  # which follows, and in which nobody is killed here
        return STAGES[passed] if passed < len(STAGES) else None

    @property
    def begun(self) -> bool:
        """Was the victim's engine's update open, or past that?"""
        return self.stage > 1 or (self.stage == 1 and self.death.moment != "before")

    @property
    def committed(self) -> bool:
        """Was the victim's engine told to commit?"""
        return self.death.stage == "commit" and self.death.moment != "before"

    def victims_version(self, old: int) -> int | None:
        """What the victim's engine serves, before anybody tells it anything."""
        if self.committed:
            return old + 1
        return old if self.shadow or not self.begun else None

    def survivors_version(self, old: int) -> int | None:
        if self.fails_in is None:
            return old + 1
        if self.fails_in == "commit":
            return None  # it had committed, and does not know whether the other one has
        return old if self.shadow or self.fails_in == "prepare" else None


def drawn(count: int) -> list[Round]:
    """Stage after stage; a hundred are all stages, moments, victims and kinds of pages."""
    rng = random.Random(8)
    kinds = {stage: list(itertools.product(MOMENTS, (0, 1), (False, True))) for stage in STAGES}
    for each in kinds.values():
        rng.shuffle(each)
    found = []
    for number in range(count):
        stage = STAGES[number % len(STAGES)]
        moment, victim, shadow = kinds[stage][number // len(STAGES) % len(kinds[stage])]
        death = Death(stage=stage, moment=moment)
        before, told = rng.random() < 0.5, rng.random() < 0.5
        found.append(
            Round(death=death, victim=victim, shadow=shadow, shadow_before=before, told=told)
        )
    return found


def synced(pair: Pair, version: int, **how: Any) -> float:
    """How many seconds that took."""
    started = time.monotonic()
    pair.order(version, **how)
    results = pair.results()
    assert all(
        isinstance(result, SyncReceipt) and result.version == version for result in results
    ), results
    return time.monotonic() - started


class Killing:
    """Rounds of: a new pair of trainers syncs a version, and loses one of them in the next."""

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
        # many times what all stages take together on a machine as busy as this one
        patience = max(KILL_PATIENCE, round(8 * synced(pair, old, shadow=case.shadow_before), 1))
        self.check_both(old)
        assert pair.held() == self.floor, "the death before has left memory behind"
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
        """Engines are asked all the time."""
        verified, deadline = case.fails_in in ("commit", None), time.monotonic() + seconds
        while self.pair.busy():
            assert time.monotonic() < deadline, "the survivor waits for ever"
            for number in (0, 1):
                version = self.pair.serves(number)
                assert version in (None, old) or (version == self.version and verified)
                assert version is not None or not case.shadow or case.fails_in == "commit"
                time.sleep(0.005)  # the ranks want the engine, too

    def check_results(self, case: Round, results: list[Any]) -> None:
        assert isinstance(results[case.victim], Gone)
        result = results[1 - case.victim]
        if case.fails_in is None:
            assert isinstance(result, SyncReceipt) and result.version == self.version
            return
        assert isinstance(result, SyncError) and result.stage == case.fails_in, result
        assert f"rank {case.victim} did not come" in str(result) or "broke off" in str(result)
        if case.survivors_version(0) is None:
            assert str(result) in str(self.pair.engines[1 - case.victim].unavailable_reason())

    def check_engines(self, case: Round, old: int) -> None:
        victims, survivors = self.pair.serves(case.victim), self.pair.serves(1 - case.victim)
        assert (victims, survivors) == (case.victims_version(old), case.survivors_version(old))
        assert len({victims, survivors} - {None}) <= 1, "two replicas go on with different versions"

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
        if left_open:  # until it is told, or the next update begins
            assert held.pop(f"{WEIGHTS_SHADOW} {victim}") == held[f"{WEIGHTS} {victim}"]
        else:
            assert held == self.floor


@pytest.mark.soak
def test_a_rank_killed_at_every_stage(pair: Pair) -> None:
    killing = Killing(pair)
    fds, threads = settled_fds(), _threads()
    for case in drawn(rounds(10, 200)):
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
            f"{settled_fds()} fds, {fds} before; threads {left} beside {threads}"
        )
        time.sleep(0.05)


def _threads() -> Counter[str]:
    """By name, but for the one that a process starts once, with its first kept lease or loan."""
    return Counter(
        thread.name
        for thread in threading.enumerate()
        if not thread.name.startswith("memsaver-loans")
    )
