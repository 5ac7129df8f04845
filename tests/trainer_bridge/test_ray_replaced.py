"""Engines that die are replaced: the same answers and weights, and nothing left behind."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.dying_actors import dying_engine, killing_trainer, wait_gone
from tests.helpers.ray_cluster import ENGINE, RayCluster, tokens
from tests.helpers.trainer_bridge.models import config, make_batch
from trainer_bridge import Cycle, open_inprocess, open_ray

pytestmark = pytest.mark.ray


class Replaced:
    """Opens pairs whose engines die while `flag` exists, and records their replacements."""

    def __init__(self, flag: Path, patch: pytest.MonkeyPatch) -> None:
        self.flag, self.seen = flag, list[tuple[int, str]]()
        self._patch = patch

    def open(
        self, path: str, engine: Any = ENGINE, rank: int = 0, **where: Any
    ) -> AbstractContextManager[Any]:
        actor = dying_engine(self.flag, rank)
        self._patch.setattr("trainer_bridge.coordinator.RolloutRankActor", actor)
        note = lambda number, error: self.seen.append((number, error.actor))  # noqa: E731
        leaving = ("params", "optim")
        settings = config(path, leaving=leaving)
        return open_ray(settings, engine, max_engine_restarts=2, on_replaced=note, **where)


@pytest.fixture
def replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Replaced:
    return Replaced(tmp_path / "flag", monkeypatch)


@pytest.fixture(scope="module")
def expected(model_path: str) -> list[Any]:
    """Return digest and tokens of two rounds without a loss."""
    seen = []
    with open_inprocess(config(model_path), ENGINE) as (trainer, rollout):
        cycle = Cycle(trainer, rollout)
        for version in (1, 2):
            (digest,) = cycle.to_rollout(version).digests
            seen.append((digest, tokens(rollout)))
            cycle.to_train()
            trainer.update_actor(make_batch(4))
    return seen


def pids(rollout: Any) -> list[int]:
    return [rank.call("pid") for rank in rollout.each()]


@pytest.mark.extended
def test_all_ranks_of_a_tensor_parallel_engine_are_replaced_together(
    expected: list[Any], replaced: Replaced, model_path: str, ray_cluster: RayCluster
) -> None:
    engine = {**ENGINE, "tensor_parallel_size": 2}
    with replaced.open(model_path, engine, rank=1, devices=2) as sides:
        cycle, first = Cycle(*sides), pids(sides[1])
        cycle.to_rollout(1)
        replaced.flag.touch()
        assert tokens(sides[1]) == expected[0][1]
        assert replaced.seen == [(1, "rollout[1]")]
        second = pids(sides[1])
        assert not {*first} & {*second}
        cycle.to_train()
        assert not any(rank.report().committed_bytes for rank in sides[1].each())
    wait_gone([*first, *second])
    ray_cluster.wait_free()


@pytest.mark.extended
def test_engine_killed_while_it_is_written_is_replaced_and_the_sync_repeated(
    expected: list[Any], replaced: Replaced, model_path: str, ray_cluster: RayCluster
) -> None:
    """Kill the engine apart from inside one of two trainer ranks."""
    placed = {"devices": 2, "rollout_devices": 1, "trainer_actor": killing_trainer()}
    with replaced.open(model_path, **placed) as sides:
        first = pids(sides[1])
        sides[0].each()[0].call("kill_in_sync", first[2])
        receipt = Cycle(*sides).to_rollout(1)
        assert receipt.digests == (expected[0][0],) * 3
        assert replaced.seen == [(1, "rollout[2]")] and pids(sides[1])[:2] == first[:2]
        assert tokens(sides[1]) == expected[0][1]
    ray_cluster.wait_free()
