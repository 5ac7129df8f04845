"""Real trainer, real engine, real memory, one process: the cycle as a recipe drives it."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from multiprocessing.connection import Connection
from typing import Any

import pytest

from memsaver import StateError
from rollout import SamplingParams
from tests.helpers.peers import Peer
from tests.helpers.trainer_bridge.models import config
from trainer_bridge import Cycle, CycleError, open_inprocess

ENGINE = {"kv_tokens": 512, "page_size": 16}
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, n=2, seed=3, ignore_eos=True)


def committed(side: Any) -> dict[str, int]:
    return {tag: entry.committed_bytes for tag, entry in side.report().tags.items()}


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
