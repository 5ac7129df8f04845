"""The same cycle over two actors, and what is left when one of them dies."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memsaver import StateError
from rollout import SamplingParams
from tests.helpers.faults import dying_trainer, wait_gone
from tests.helpers.memory import memfd_bytes
from tests.helpers.trainer_bridge.models import config, make_batch
from trainer_bridge import ActorDied, ActorTimeout, Cycle, CycleError, SequenceBatch, TrainerConfig, open_ray
from trainer_bridge.actor import RemoteRollout, RemoteTrainer

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray")

ENGINE = {"kv_tokens": 256, "page_size": 16}
PROMPTS = [[5, 6, 7], [8]]
SAMPLED = SamplingParams(max_tokens=8, temperature=0.8, n=2, seed=3, ignore_eos=True)


def on(device: str, path: str, **changes: Any) -> TrainerConfig:
    return config(path, device=device, **changes)


def test_two_rounds_over_actors(device: str, model_path: str, tmp_path: Path) -> None:
    assert not ray.is_initialized()
    stages: list[str] = []
    with open_ray(on(device, model_path), ENGINE) as (trainer, rollout):
        pids = [trainer.call("pid"), rollout.call("pid")]
        assert len({os.getpid(), *pids}) == 3
        full = trainer.report().committed_bytes
        assert full > 0 and rollout.report().committed_bytes == 0
        cycle = Cycle(trainer, rollout, on_stage=lambda name, start, end: stages.append(name))
        for version in (1, 2):
            receipt = cycle.to_rollout(version)
            assert receipt.version == rollout.weights_version == version
            assert rollout.unavailable_reason() is None
            assert trainer.report().committed_bytes == 0 and rollout.report().committed_bytes > 0
            outputs = rollout.generate(PROMPTS, SAMPLED)
            cycle.to_score()
            pairs = [(prompt, s) for prompt, group in zip(PROMPTS, outputs, strict=True) for s in group]
            batch = SequenceBatch(
                prompt_ids=[prompt for prompt, _ in pairs],
                response_ids=[s.token_ids for _, s in pairs],
                temperature=SAMPLED.temperature,
            )
            ours = trainer.compute_log_prob(batch)
            for row, (_, sample) in zip(ours, pairs, strict=True):
                assert row == pytest.approx(sample.logprobs, abs=5e-5)
            cycle.to_train()
            assert trainer.report().committed_bytes == full
            trainer.update_actor(dataclasses.replace(batch, old_logprobs=ours, advantages=[1.0, -1.0, 1.0, -1.0]))
        assert len(stages) == 16
        trainer.save_checkpoint(str(tmp_path / "step"), {"n": 2})
        assert trainer.load_checkpoint(str(tmp_path / "step")) == {"n": 2}
        assert {event.op for event in trainer.drain_events()} >= {"pause", "resume"}
        with pytest.raises(ValueError, match="unknown tag 'weights'"):
            trainer.park("weights")
    assert not ray.is_initialized(), "a cluster that was started here was left running"
    wait_gone(pids)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster that belongs to somebody else."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=128 << 20)
    yield
    ray.shutdown()


def lend(trainer: RemoteTrainer, rollout: RemoteRollout, pids: list[int], device: str) -> None:
    """Two rounds in which the rollout serves the trainer's own pages, with an update between."""
    full, seen = trainer.report().tags["params"].committed_bytes, []
    cycle = Cycle(trainer, rollout, alias=True)
    for version in (1, 2):
        assert cycle.to_rollout(version).nbytes == 0 and rollout.weights_version == version
        assert trainer.report().committed_bytes == full
        assert device != "cpu" or memfd_bytes(pids) == full + rollout.report().committed_bytes
        seen.append([sample.token_ids for group in rollout.generate(PROMPTS, SAMPLED) for sample in group])
        cycle.to_train()
        assert rollout.report().committed_bytes == rollout.report().tags["weights"].borrowed_bytes == 0
        trainer.update_actor(make_batch(4))
    assert seen[0] != seen[1]


def test_pages_that_are_lent_and_a_trainer_killed_in_the_middle_of_a_sync(
    device: str, model_path: str, cluster: None
) -> None:
    with open_ray(on(device, model_path), ENGINE, alias=True, trainer_actor=dying_trainer()) as (trainer, rollout):
        pids = [trainer.call("pid"), rollout.call("pid")]
        lend(trainer, rollout, pids, device)
        trainer.timeout = 0.5
        with pytest.raises(ActorTimeout, match=r"the trainer actor gave no answer for 0\.5 s in nap\(\)"):
            trainer.call("nap")
        trainer.timeout = 60.0
        cycle = Cycle(trainer, rollout)
        started = time.monotonic()
        with pytest.raises(
            CycleError, match="stage 'sync_weights' failed: ActorDied: the trainer actor died"
        ) as caught:
            cycle.to_rollout(3)
        assert time.monotonic() - started < 30
        assert isinstance(caught.value.cause, ActorDied)
        assert (caught.value.cause.actor, caught.value.cause.method) == ("trainer", "sync_weights")
        assert not getattr(caught.value, "__notes__", []), "the rollout could not be told"
        rollout.wake_up(["kv_cache"])
        with pytest.raises(StateError, match="sync_weights.*trainer actor died"):
            rollout.generate(PROMPTS, SAMPLED)
        assert rollout.report().tags["weights"].leases == 0, "the dead trainer still holds a lease"
        rollout.sleep(level=2)
        with pytest.raises(StateError, match="legal now: nothing"):
            cycle.to_rollout(4)
    assert ray.is_initialized(), "somebody else's cluster was ended"
    wait_gone(pids)


def test_an_engine_that_cannot_be_made_is_explained_and_nothing_stays(
    device: str, model_path: str, cluster: None
) -> None:
    with pytest.raises(ValueError, match="page_size=7"):
        with open_ray(on(device, model_path), {**ENGINE, "page_size": 7}):
            pass
    deadline = time.monotonic() + 20
    while ray.available_resources().get("CPU") != 2:
        assert time.monotonic() < deadline, "actors or their reservation were left behind"
        time.sleep(0.1)
