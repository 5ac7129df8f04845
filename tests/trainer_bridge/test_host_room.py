"""Host memory for what a trainer offloads: known before it is built, obtained while it is."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from memsaver import MemorySaver
from memsaver.memory import pinned_arena
from memsaver.memory.pinned_arena import HUGE_PAGE
from memsaver.ops.layout import round_up
from tests.helpers.memsaver.savers import until
from tests.helpers.trainer_bridge.models import config, write_model
from trainer_bridge import Cycle, LoraConfig, Trainer, open_inprocess
from trainer_bridge.config import CriticConfig
from trainer_bridge.offload import offloaded_bytes
from trainer_bridge.remote.actor import TrainerActor
from trainer_bridge.tags import TRAINER_TAGS

CASES: dict[str, dict[str, Any]] = {
    "masters": {"param_dtype": "bfloat16"},
    "bf16": {"dtype": "bfloat16"},
    "adapters": {"lora": LoraConfig(rank=4, alpha=8, target_modules=("q_proj", "down_proj"))},
    "ppo": {"critic": CriticConfig(), "reference": True, "param_dtype": "bfloat16"},
    "offload": {"optimizer_offload": True, "param_dtype": "bfloat16"},
}


@pytest.fixture(params=CASES)
def changes(request: pytest.FixtureRequest) -> dict[str, Any]:
    return CASES[request.param]


def test_it_is_what_the_tags_hold(changes: dict[str, Any], model_path: str) -> None:
    """But for the ends of blocks, and where a value head takes the place of the vocabulary."""
    saver = MemorySaver()
    trainer = Trainer(config(model_path, **changes), saver)
    trainer.reload()
    held = {tag: each.live_bytes for tag, each in saver.report().tags.items()}
    assert "adapters" not in held or changes["lora"]
    held["params"] += held.pop("adapters", 0)
    for tag in TRAINER_TAGS:
        found = offloaded_bytes(config(model_path, **changes, leaving=(tag,)), 1)[tag]
        if tag in held:
            slack = 0.3 * found if tag.startswith("critic") else 1024
            assert abs(found - held[tag]) <= slack, tag
    trainer.close()
    saver.close()


def test_each_rank_has_its_rows(tmp_path: Path) -> None:
    leaving = {"leaving": ("params", "optim")}
    path = write_model(tmp_path)
    whole, half = (offloaded_bytes(config(path, **leaving), ranks) for ranks in (1, 2))
    for tag in whole:
        assert whole[tag] / 2 <= half[tag] <= 0.55 * whole[tag]
    assert offloaded_bytes(config(path), 1) == {}


@pytest.fixture
def obtained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every piece of host memory from here on; there is none before."""
    sizes_seen, obtain = list[int](), pinned_arena.obtain

    def spy(sizes: list[int], pinner: Any) -> list[int]:
        sizes_seen.extend(sizes)
        return obtain(sizes, pinner)

    monkeypatch.setattr(pinned_arena, "obtain", spy)
    gc.collect()  # what other tests have saved
    MemorySaver().pinned_arena.trim()
    return sizes_seen


def test_an_actor_begins_before_it_is_built(model_path: str, obtained: list[int]) -> None:
    actor = TrainerActor(config(model_path, leaving=("params", "optim")))
    actor.call("reserve", 1)
    MemorySaver().pinned_arena.give(MemorySaver().pinned_arena.take(1))  # there when this is
    assert obtained == [HUGE_PAGE]
    actor.call("build")
    actor.call("offload")
    assert obtained == [HUGE_PAGE]
    actor.call("close")
    actor.held.saver.close()


@pytest.mark.parametrize("overlap", [(), ("params", "optim")])
def test_what_leaves_finds_its_host_memory_there(
    overlap: tuple[str, ...], model_path: str, obtained: list[int]
) -> None:
    leaving = config(model_path, leaving=("params", "optim"))
    engine = {"kv_tokens": 512, "elastic": bool(overlap)}
    with open_inprocess(leaving, engine) as (trainer, rollout):
        Cycle(trainer, rollout, overlap=overlap).to_rollout(1)
        trainer.reload()
        assert sum(obtained) == round_up(sum(offloaded_bytes(leaving, 1).values()), HUGE_PAGE)
    obtained.clear()
    MemorySaver().pinned_arena.trim()
    keep = ["params", "optim", "weights", "kv_cache"]
    with open_inprocess(config(model_path), engine) as (trainer, rollout):
        Cycle(trainer, rollout, resident=keep).to_rollout(1)
        assert not obtained


@pytest.mark.parametrize("leaving", [(), ("params", "optim")])
def test_what_an_engine_keeps_asleep_has_its_place(
    leaving: tuple[str, ...], model_path: str, obtained: list[int]
) -> None:
    """Beside the trainer's, whose arena it is, too."""
    keep, arena = {"params", "optim", "kv_cache"}.difference(leaving), MemorySaver().pinned_arena
    trained = config(model_path, leaving=leaving)
    with open_inprocess(trained, {"kv_tokens": 512}) as (trainer, rollout):
        cycle = Cycle(trainer, rollout, resident=keep, sleep_level=1)
        weights = rollout.report().tags["weights"].live_bytes
        until(lambda: not arena.coming_bytes)
        offloaded = sum(offloaded_bytes(trained, 1).values())
        assert sum(obtained) == round_up(weights + offloaded, HUGE_PAGE)
        before = len(obtained)
        cycle.to_rollout(1)
        cycle.to_train()
        assert len(obtained) == before and arena.used_bytes >= weights
        rollout.wake_up()
        assert rollout.served_version() == 1
