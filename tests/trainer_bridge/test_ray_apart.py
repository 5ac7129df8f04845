"""Engines on devices of their own: the same numbers as on the trainer's device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from memsaver import StateError
from rollout import SamplingParams
from rollout.tag_names import TAGS
from tests.helpers.memsaver.savers import until
from tests.helpers.ray_cluster import ENGINE, PROMPTS, SAMPLED, RayCluster
from tests.helpers.rollout.answers import GREEDY
from tests.helpers.trainer_bridge.models import config, make_batch
from trainer_bridge import Cycle, open_inprocess, open_ray
from trainer_bridge.tag_names import TRAINER_TAGS

pytestmark = pytest.mark.ray


def rounds_of(trainer: Any, rollout: Any, resident: Sequence[str] = ()) -> list[Any]:
    """Run two rounds with an update after each; return digests and tokens of each."""
    cycle, seen = Cycle(trainer, rollout, resident=resident), list[Any]()
    for version in (1, 2):
        receipt = cycle.to_rollout(version)
        answers = rollout.generate(PROMPTS, SAMPLED)
        seen.append((receipt.digests, [[s.token_ids for s in group] for group in answers]))
        cycle.to_train()
        trainer.update_actor(make_batch(4))
    return seen


@pytest.fixture(scope="module")
def colocated(model_path: str) -> list[Any]:
    """Return what two rounds give with both sides in this process."""
    with open_inprocess(config(model_path), ENGINE) as sides:
        return rounds_of(*sides)


def awake(rollout: Any) -> list[bool]:
    return [sum(rank.take_usage().tags.values()) > 0 for rank in rollout.each()]


def names(*sides: Any) -> list[str]:
    return [rank.name for side in sides for rank in side.each()]


def test_engine_apart_stays_awake_and_gives_the_numbers_of_a_colocated_one(
    colocated: list[Any], model_path: str, ray_cluster: RayCluster
) -> None:
    stays = [*TRAINER_TAGS, *TAGS]
    apart = {"rollout_devices": 1, "colocate": False}
    with open_ray(config(model_path), ENGINE, **apart) as sides:
        assert names(*sides) == ["trainer[0]", "rollout[1]"]
        assert awake(sides[1]) == [True]
        assert rounds_of(*sides, stays) == colocated
        together = sides[1].generate(PROMPTS, GREEDY)
        futures = [sides[1].submit(prompt, GREEDY, key=n % 2) for n, prompt in enumerate(PROMPTS)]
        alone = [future.result(60)[0].token_ids for future in futures]
        assert alone == [samples[0].token_ids for samples in together]
        long = SamplingParams(max_tokens=60, temperature=0)
        many = [sides[1].submit(PROMPTS[0], long) for _ in range(200)]
        until(lambda: len(sides[1].call("unfinished")) > 100)
        assert not all(future.done() for future in many), "other calls do not wait for requests"
        assert len({tuple(future.result(60)[0].token_ids) for future in many}) == 1
        sides[1].call("sleep")
        waiting = sides[1].submit(PROMPTS[0], GREEDY, asleep="queue")
        with pytest.raises(StateError, match="cannot generate"):
            sides[1].submit(PROMPTS[0], GREEDY).result(60)
        assert not waiting.done()
        sides[1].call("wake_up")
        assert waiting.result(60)[0].token_ids == alone[0]
    ray_cluster.wait_free()


@pytest.mark.extended
def test_engines_on_both_kinds_of_devices_share_the_prompts(
    colocated: list[Any], model_path: str, ray_cluster: RayCluster
) -> None:
    with open_ray(config(model_path), ENGINE, rollout_devices=1) as sides:
        assert names(*sides) == ["trainer[0]", "rollout[0]", "rollout[1]"]
        assert awake(sides[1]) == [False, True]
        seen = rounds_of(*sides)
        assert awake(sides[1]) == [False, True], "only the engine of the trainer's device sleeps"
    for (digests, answers), (digest, same) in zip(seen, colocated, strict=True):
        assert (digests, answers) == (digest * 2, same)


@pytest.mark.extended
def test_tensor_parallel_engine_apart_gets_all_its_weights_from_one_trainer(
    colocated: list[Any], model_path: str, ray_cluster: RayCluster
) -> None:
    apart = {"rollout_devices": 2, "colocate": False}
    engine = {**ENGINE, "tensor_parallel_size": 2}
    with open_ray(config(model_path), engine, **apart) as sides:
        assert names(*sides) == ["trainer[0]", "rollout[1]", "rollout[2]"]
        assert awake(sides[1]) == [True, True]
        halves = rounds_of(*sides, [*TRAINER_TAGS, *TAGS])
    assert [len(digests) for digests, _ in halves] == [2, 2]
    assert [answers for _, answers in halves] == [answers for _, answers in colocated]
