"""The engine in another process, called through Ray."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout import AsyncEngine, Completion, Engine, Output, SamplingParams
from rollout.actor import RolloutActor
from tests.helpers.models import greedy, save_tiny
from tests.helpers.ray_cluster import RayCluster
from tests.helpers.rollout.answers import GREEDY, random_prompts
from tests.helpers.rollout.updates import PROMPTS, TINY, expected, tiny, write
from trainer_bridge.remote.actor import RemoteRollout
from trainer_bridge.remote.group import RemoteActor

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory, ray_cluster: RayCluster) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("model")
    save_tiny(path, "qwen3", **TINY)
    create = ray.remote(RolloutActor).options(num_cpus=1, max_concurrency=8).remote
    made = create(str(path), threads=1, engine={"kv_tokens": 512, "max_prefill_tokens": 16})
    ray.get(made.build.remote())
    yield made
    ray.kill(made)


@pytest.fixture
def rollout(actor: Any) -> RemoteRollout:
    """Return a rollout that is awake, for any state left by the previous test."""
    made = RemoteRollout([RemoteActor(actor, "rollout")], 120.0)
    made.wake_up()
    return made


def answers(rollout: RemoteRollout) -> list[list[int]]:
    return [samples[0].token_ids for samples in rollout.generate(PROMPTS, GREEDY)]


def test_weights_are_updated_from_another_process(rollout: RemoteRollout) -> None:
    version = rollout.weights_version + 1
    assert rollout.call("pid") != os.getpid()
    rollout.sleep(2)
    assert rollout.report().committed_bytes == 0
    rollout.wake_up(["weights"])
    assert rollout.verify_update(write(rollout.begin_update(version), seed=1)).version == version
    assert rollout.commit_update(version).version == version
    assert rollout.unavailable_reason() == "paused: kv_cache (call wake_up)"
    with pytest.raises(Exception, match="cannot generate: paused: kv_cache"):
        rollout.generate(PROMPTS, GREEDY)
    rollout.wake_up()
    assert answers(rollout) == expected(1)
    assert {event.op for event in rollout.drain_events()} >= {"pause", "resume"}
    offer = rollout.begin_update(version + 1, shadow=True, names=["model.norm.weight"])
    assert offer.shadow and offer.names == ("model.norm.weight",)
    rollout.verify_update(write(offer, seed=2))
    assert rollout.unavailable_reason() is None and rollout.weights_version == version
    assert rollout.commit_update(version + 1).version == version + 1
    rollout.abort_update("the trainer is gone")
    with pytest.raises(Exception, match="the trainer is gone"):
        rollout.generate(PROMPTS, SamplingParams())


def test_several_calls_are_answered_together(rollout: RemoteRollout) -> None:
    version = rollout.weights_version + 1
    rollout.verify_update(write(rollout.begin_update(version), seed=1))
    rollout.commit_update(version)
    long = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
    waiting = rollout.submit([5, 6], long, key="talk")
    futures = [rollout.submit(prompt, GREEDY) for prompt in PROMPTS]
    assert [future.result(60)[0].token_ids for future in futures] == expected(1)
    assert answers(rollout) == expected(1)
    assert rollout.report().committed_bytes and not waiting.done()
    with pytest.raises(Exception, match="cannot sleep with unfinished requests"):
        rollout.sleep()
    rollout.sleep(unfinished="abort")
    assert waiting.result(60)[0].finish_reason == "abort"


def test_staggered_requests_of_threads_are_answered_beside_updates(rollout: RemoteRollout) -> None:
    """Answer 40 requests; three updates to the same weights come between the steps."""
    version = rollout.weights_version + 1
    rollout.verify_update(write(rollout.begin_update(version), seed=1))
    rollout.commit_update(version)
    prompts, answers = random_prompts(tuple(range(3, 43))), dict[int, list[int]]()

    def ask(first: int) -> None:
        for number in range(first, len(prompts), 4):
            time.sleep(random.Random(number).uniform(0, 0.02))
            answers[number] = rollout.submit(prompts[number], GREEDY).result(60)[0].token_ids

    threads = [threading.Thread(target=ask, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for later in range(version + 1, version + 4):
        offer = rollout.begin_update(later, shadow=True, in_flight="recompute")
        rollout.verify_update(write(offer, seed=1))
        rollout.commit_update(later)
    for thread in threads:
        thread.join()
    assert answers == {
        number: greedy(tiny(1), prompt, GREEDY.max_tokens) for number, prompt in enumerate(prompts)
    }


class Generator:
    """An engine that the coroutines of an asynchronous actor share."""

    def __init__(self, path: str) -> None:
        self.shared = AsyncEngine(Engine.from_pretrained(path, kv_tokens=512))

    async def answer(self, prompt: list[int], params: SamplingParams) -> AsyncIterator[Output]:
        async for output in self.shared.submit(prompt, params):
            yield output


@pytest.fixture
def generator(tmp_path: Path, ray_cluster: RayCluster) -> Iterator[Any]:
    tiny(0).save_pretrained(tmp_path)
    actor = ray.remote(Generator).options(num_cpus=1).remote(str(tmp_path))
    yield actor
    ray.kill(actor)


def test_asynchronous_actor_streams_until_it_is_killed(generator: Any) -> None:
    actor = generator
    streams = [actor.answer.remote(prompt, GREEDY) for prompt in PROMPTS]
    told = [[ray.get(piece) for piece in stream] for stream in streams]
    assert [Completion.joined(pieces).token_ids for pieces in told] == expected(0)
    long = actor.answer.remote(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True))
    assert ray.get(next(long)).finish_reason is None
    ray.kill(actor)
    with pytest.raises(ray.exceptions.RayActorError):
        for piece in long:
            ray.get(piece)
