"""Host memory for offloaded tags, computed and obtained before the trainer is built."""

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
from trainer_bridge.tag_names import TRAINER_TAGS

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


def test_offloaded_bytes_match_the_tags(changes: dict[str, Any], model_path: str) -> None:
    """Allow for the ends of blocks, and for the value head of a critic."""
    saver = MemorySaver()
    trainer = Trainer(config(model_path, **changes), saver)
    trainer.reload()
    held = {tag: usage.live_bytes for tag, usage in saver.report().tags.items()}
    assert "adapters" not in held or changes["lora"]
    held["params"] += held.pop("adapters", 0)
    for tag in TRAINER_TAGS:
        size = offloaded_bytes(config(model_path, **changes, leaving=(tag,)), 1)[tag]
        if tag in held:
            slack = 0.3 * size if tag.startswith("critic") else 1024
            assert abs(size - held[tag]) <= slack, tag
    trainer.close()
    saver.close()


def test_offloaded_bytes_are_divided_among_ranks(tmp_path: Path) -> None:
    leaving = {"leaving": ("params", "optim")}
    path = write_model(tmp_path)
    whole, half = (offloaded_bytes(config(path, **leaving), ranks) for ranks in (1, 2))
    for tag in whole:
        assert whole[tag] / 2 <= half[tag] <= 0.55 * whole[tag]
    assert offloaded_bytes(config(path), 1) == {}


@pytest.fixture
def obtained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the bytes of every piece of host memory obtained by the test; it starts with none."""
    sizes_seen, obtain = list[int](), pinned_arena.obtain

    def spy(sizes: list[int], pinner: Any) -> list[int]:
        sizes_seen.extend(sizes)
        return obtain(sizes, pinner)

    monkeypatch.setattr(pinned_arena, "obtain", spy)
    gc.collect()  # release memory of earlier tests
    MemorySaver().pinned_arena.trim()
    return sizes_seen


def test_actor_reserves_host_memory_before_trainer_is_built(
    model_path: str, obtained: list[int]
) -> None:
    actor = TrainerActor(config(model_path, leaving=("params", "optim")))
    actor.call("reserve", 1)
    MemorySaver().pinned_arena.give(MemorySaver().pinned_arena.take(1))  # waits for the reservation
    assert obtained == [HUGE_PAGE]
    actor.call("build")
    actor.call("offload")
    assert obtained == [HUGE_PAGE]
    actor.call("close")
    actor.held.saver.close()


@pytest.mark.parametrize("overlap", [(), ("params", "optim")])
def test_offload_uses_reserved_host_memory(
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
def test_sleep_at_level_1_uses_reserved_host_memory(
    leaving: tuple[str, ...], model_path: str, obtained: list[int]
) -> None:
    """Use one arena for the host memory of trainer and engine."""
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
