"""The cycle over two actors, one of which may die."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from memsaver import StateError
from rollout import SamplingParams
from tests.helpers.dying_actors import dying_trainer, killing_trainer, wait_gone
from tests.helpers.exports import contents
from tests.helpers.memory import family_bytes, memfd_bytes
from tests.helpers.ray_cluster import CPUS, RayCluster, until
from tests.helpers.trainer_bridge.models import config, make_batch
from trainer_bridge import (
    ActorDied,
    ActorTimeout,
    Cycle,
    CycleError,
    SequenceBatch,
    TrainerConfig,
    open_ray,
)
from trainer_bridge.models import export_checkpoint
from trainer_bridge.remote.actor import RemoteRollout, RemoteTrainer
from trainer_bridge.remote.group import reserved
from trainer_bridge.remote.placement import Placement

pytestmark = pytest.mark.ray

ENGINE = {"kv_tokens": 256, "page_size": 16}
PROMPTS = [[5, 6, 7], [8]]
SAMPLED = SamplingParams(max_tokens=8, temperature=0.8, n=2, seed=3, ignore_eos=True)
# Log-probabilities have magnitude 8 in fp32, an ulp of 5e-7, and dozens of roundings in two layers
# and the head.
MISMATCH = 5e-5


def on(device: str, path: str) -> TrainerConfig:
    return config(path, device=device, leaving=("params", "optim"))


def test_rounds_by_copies_and_alias_until_trainer_is_killed_in_a_sync(
    device: str, model_path: str, ray_cluster: RayCluster, tmp_path: Path
) -> None:
    dying = dying_trainer(first=5)
    with open_ray(on(device, model_path), ENGINE, alias=True, trainer_actor=dying) as (
        trainer,
        rollout,
    ):
        pids = [trainer.call("pid"), rollout.call("pid")]
        assert len({os.getpid(), *pids}) == 3
        copy(trainer, rollout)
        keep(trainer, model_path, tmp_path)
        alias(trainer, rollout, pids, device)
        time_out(trainer)
        die(trainer, rollout)
    wait_gone(pids)
    ray_cluster.wait_free()


def copy(trainer: RemoteTrainer, rollout: RemoteRollout) -> None:
    """Run two rounds with updates and handed-over memory, at sleep level 1."""
    stages: list[str] = []
    full = trainer.report().committed_bytes
    assert full > 0 and rollout.report().committed_bytes == 0
    note = lambda name, start, end: stages.append(name)  # noqa: E731
    cycle = Cycle(trainer, rollout, on_stage=note, hand_over=True, sleep_level=1)
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
        scores = trainer.compute_log_prob(batch)
        for row, (_, sample) in zip(scores, pairs, strict=True):
            assert row == pytest.approx(sample.logprobs, abs=MISMATCH)
        cycle.to_train()
        assert trainer.report().committed_bytes == full
        trainer.update_actor(
            dataclasses.replace(batch, old_logprobs=scores, advantages=[1.0, -1.0, 1.0, -1.0])
        )
    assert len(stages) == 16


def keep(trainer: RemoteTrainer, path: str, folder: Path) -> None:
    trainer.save_checkpoint(str(folder / "step"), {"n": 2})
    assert trainer.load_checkpoint(str(folder / "step")) == {"n": 2}
    trainer.save_pretrained(str(folder / "there"))
    export_checkpoint(str(folder / "step"), str(folder / "here"), config(path))
    there, here = (contents(folder / name) for name in ("there", "here"))
    assert there == here
    assert {event.op for event in trainer.drain_events()} >= {"pause", "resume"}
    with pytest.raises(ValueError, match="unknown tag 'weights'"):
        trainer.offload("weights")


def alias(trainer: RemoteTrainer, rollout: RemoteRollout, pids: list[int], device: str) -> None:
    """Run two rounds in which the rollout serves the trainer's pages, with an update in between."""
    full, tokens = trainer.report().tags["params"].committed_bytes, []
    cycle = Cycle(trainer, rollout, alias=True)
    for version in (3, 4):
        assert cycle.to_rollout(version).nbytes == 0 and rollout.weights_version == version
        assert trainer.report().committed_bytes == full
        assert device != "cpu" or memfd_bytes(pids) == full + rollout.report().committed_bytes
        tokens.append(
            [sample.token_ids for group in rollout.generate(PROMPTS, SAMPLED) for sample in group]
        )
        cycle.to_train()
        assert (
            rollout.report().committed_bytes == rollout.report().tags["weights"].aliased_bytes == 0
        )
        trainer.update_actor(make_batch(4))
    assert tokens[0] != tokens[1]


def time_out(trainer: RemoteTrainer) -> None:
    trainer.timeout = 0.2
    with pytest.raises(
        ActorTimeout, match=r"the trainer actor gave no answer for 0\.2 s in nap\(\)"
    ):
        trainer.call("nap")
    trainer.timeout = 600.0


def die(trainer: RemoteTrainer, rollout: RemoteRollout) -> None:
    cycle = Cycle(trainer, rollout)
    with pytest.raises(
        CycleError, match="stage 'sync_weights' failed: ActorDied: the trainer actor died"
    ) as caught:
        cycle.to_rollout(5)
    cause: Any = caught.value.cause
    assert isinstance(cause, ActorDied)
    assert (cause.actor, cause.method) == ("trainer", "sync_weights")
    assert not getattr(caught.value, "__notes__", []), "the rollout was not poisoned"
    rollout.wake_up(["kv_cache"])
    with pytest.raises(StateError, match="sync_weights.*trainer actor died"):
        rollout.generate(PROMPTS, SAMPLED)
    assert rollout.report().tags["weights"].leases == 0, "the dead trainer still holds a lease"
    rollout.sleep(level=2)
    with pytest.raises(StateError, match="legal now: nothing"):
        cycle.to_rollout(6)


def test_rollout_killed_during_write_fails_the_cycle_and_keeps_the_trainer(
    device: str, model_path: str, ray_cluster: RayCluster
) -> None:
    batch, before = make_batch(4), family_bytes("cpu")
    with open_ray(on(device, model_path), ENGINE, trainer_actor=killing_trainer()) as (
        trainer,
        rollout,
    ):
        pids = [trainer.call("pid"), rollout.call("pid")]
        scores = trainer.compute_log_prob(batch)
        trainer.call("kill_in_sync", pids[1])
        cycle = Cycle(trainer, rollout)
        with pytest.raises(
            CycleError, match="stage 'sync_weights' failed: .*the rollout actor died"
        ) as caught:
            cycle.to_rollout(1)
        assert isinstance(caught.value.cause, ActorDied)
        assert "could not poison the rollout" in caught.value.__notes__[-1]
        trainer.reload()
        assert trainer.compute_log_prob(batch) == scores, "the trainer's state has changed"
    wait_gone(pids)
    until(lambda: family_bytes("cpu") <= before)  # ended processes hold no GPU memory


def test_engine_that_cannot_start_is_explained_and_releases_the_cluster(
    device: str, model_path: str, ray_cluster: RayCluster
) -> None:
    with pytest.raises(ValueError, match="page_size=7"):
        with open_ray(on(device, model_path), {**ENGINE, "page_size": 7}):
            pass
    ray_cluster.wait_free()


def test_reservation_of_busy_devices_fails_in_time(
    ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reserved(
        Placement(devices=CPUS // 2), on_gpu=False
    ):  # may wait for resources of the previous test
        monkeypatch.setattr("trainer_bridge.remote.group.START_SECONDS", 0.2)
        with pytest.raises(ValueError, match=r"no room for 1 x \{'CPU': 2\} .*; stop other jobs"):
            with reserved(Placement(), on_gpu=False):
                pass
    ray_cluster.wait_free()


def test_second_machine_needs_another_node(
    ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_bridge.remote.group.START_SECONDS", 2.0)
    with pytest.raises(ValueError, match=r"no room for 1 x .* on machine 2 of 2 .*, nodes: 1\)"):
        with reserved(Placement(nodes=2), on_gpu=False):
            pass
    ray_cluster.wait_free()
