"""Real trainer, real engine, real memory, one process: the cycle as a recipe drives it."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from memsaver import StateError
from rollout import SamplingParams
from tests.helpers.peers import Peer
from tests.helpers.trainer_bridge.models import config, write_model
from tests.helpers.trainer_bridge.tolerance import assert_scores
from trainer_bridge import Cycle, CycleError, SequenceBatch, open_inprocess

ENGINE = {"kv_tokens": 512, "page_size": 16}
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, n=2, seed=3, ignore_eos=True)


def committed(side: Any) -> dict[str, int]:
    return {tag: entry.committed_bytes for tag, entry in side.report().tags.items()}


def as_batch(outputs: list[list[Any]], temperature: float) -> tuple[SequenceBatch, list[list[float]]]:
    samples = [(prompt, sample) for prompt, group in zip(PROMPTS, outputs, strict=True) for sample in group]
    batch = SequenceBatch(
        prompt_ids=[prompt for prompt, _ in samples],
        response_ids=[sample.token_ids for _, sample in samples],
        temperature=temperature,
    )
    return batch, [sample.logprobs for _, sample in samples]


@pytest.mark.parametrize("tied", [True, False])
def test_rounds_of_generating_and_learning(tied: bool, device: str, tmp_path: Path) -> None:
    path = write_model(tmp_path, tie_word_embeddings=tied)
    stages: list[str] = []
    with open_inprocess(config(path, device=device), ENGINE) as (trainer, engine):
        tags = {"weights", "kv_cache"} | ({"cuda_graph"} if device.startswith("cuda") else set())
        asleep = dict.fromkeys(tags, 0)
        assert committed(engine) == asleep
        full = committed(trainer)
        cycle = Cycle(trainer, engine, on_stage=lambda name, start, end: stages.append(name))
        seen: list[list[int]] = []
        for version in range(1, 4):
            receipt = cycle.to_rollout(version)
            assert committed(trainer) == {"params": 0, "optim": 0}
            assert trainer.report().backup_bytes == sum(tag.live_bytes for tag in trainer.report().tags.values())
            assert min(committed(engine).values()) > 0
            assert receipt.version == engine.weights_version == version
            outputs = engine.generate(PROMPTS, SAMPLED)
            assert {v for group in outputs for s in group for v in s.weight_versions} == {version}
            seen.append([token for group in outputs for s in group for token in s.token_ids])
            cycle.to_score()
            assert committed(engine) == asleep
            batch, theirs = as_batch(outputs, SAMPLED.temperature)
            ours = trainer.compute_log_prob(batch)
            assert_scores(ours, theirs)
            with pytest.raises(StateError, match="kv_cache"):
                engine.generate(PROMPTS, SAMPLED)
            cycle.to_train()
            assert committed(trainer) == full and trainer.report().backup_bytes == 0
            advantages = [1.0 if i % 2 else -1.0 for i in range(len(batch))]
            trainer.update_actor(dataclasses.replace(batch, old_logprobs=ours, advantages=advantages))
        assert seen[0] != seen[1] != seen[2], "the rollout did not notice the updates"
        assert len(stages) == 3 * 8


def test_a_sync_that_breaks_poisons_the_engine(model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_inprocess(config(model_path), ENGINE) as (trainer, engine):
        write = trainer.sync_weights

        def broken(version: int) -> Any:
            def stop(done: int, total: int) -> None:
                if done == total // 2:
                    raise RuntimeError("cosmic ray")

            return write(version, on_part=stop)

        monkeypatch.setattr(trainer, "sync_weights", broken)
        with pytest.raises(CycleError, match="stage 'sync_weights' failed: RuntimeError: cosmic ray"):
            Cycle(trainer, engine).to_rollout(1)
        engine.wake_up()
        with pytest.raises(StateError, match="sync_weights.*cosmic ray"):
            engine.generate(PROMPTS, SAMPLED)
        monkeypatch.undo()
        engine.sleep(level=2)
        trainer.restore()
        Cycle(trainer, engine).to_rollout(2)
        assert engine.unavailable_reason() is None, "a sync that commits heals"


def test_a_receipt_that_lies_poisons_the_engine(model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_inprocess(config(model_path), ENGINE) as (trainer, engine):
        verify = engine.verify_update
        monkeypatch.setattr(engine, "verify_update", lambda receipt: verify(dataclasses.replace(receipt, digest=0)))
        with pytest.raises(CycleError, match="stage 'sync_weights' failed.*digest"):
            Cycle(trainer, engine).to_rollout(1)
        assert "digest" in (engine.unavailable_reason() or "")
        assert min(committed(trainer)["params"], 1) == 1, "the trainer gave its weights up"


def test_sleep_level_one_keeps_the_weights(model_path: str) -> None:
    with open_inprocess(config(model_path), ENGINE) as (trainer, engine):
        cycle = Cycle(trainer, engine, sleep_level=1)
        cycle.to_rollout(1)
        before = engine.generate(PROMPTS, SAMPLED)
        cycle.to_train()
        assert engine.report().tags["weights"].backup_bytes > 0
        trainer.park()
        engine.wake_up()
        assert engine.generate(PROMPTS, SAMPLED) == before


def test_two_devices_are_refused(model_path: str) -> None:
    with pytest.raises(ValueError, match="engine device cuda:0 and trainer device cpu differ"):
        with open_inprocess(config(model_path), {**ENGINE, "device": "cuda:0"}):
            pass


def modules(pipe: Connection) -> None:
    importlib.import_module("trainer_bridge.coordinator")
    importlib.import_module("trainer_bridge.trainer")
    pipe.send(set(sys.modules))


def test_importing_the_package_brings_no_ray() -> None:
    peer = Peer(modules)
    assert "ray" not in peer.hear()
    peer.bury()
