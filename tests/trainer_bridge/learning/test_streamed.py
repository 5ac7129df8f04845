"""Updates with optimizer state on the host, bit-identical to updates with state on the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import memsaver
from memsaver import HostMemoryError, StateError
from memsaver.memory import pinned_arena
from tests.helpers.case_selection import some
from tests.helpers.trainer_bridge.models import (
    config,
    describe,
    make_batch,
    value_batch,
    write_model,
)
from tests.helpers.trainer_bridge.states import assert_same_bits, bits
from trainer_bridge import CriticConfig, Schedule, Trainer, TrainerConfig
from trainer_bridge.learning import optimizer as optimizers
from trainer_bridge.sync.shards import local_shard

Make = Callable[..., Trainer]
ADAM: dict[str, Any] = {"betas": (0.8, 0.9), "weight_decay": 0.1, "learning_rate": 1e-2}
FALL = Schedule(kind="linear", updates=4)
OFFLOAD: dict[str, Any] = {"optimizer_offload": True}
ODD = {"vocab_size": 97, "intermediate_size": 45, "hidden_size": 33, "head_dim": 10}
ODD |= {"num_attention_heads": 3, "num_key_value_heads": 1}
CHUNKS = (64 * 7, 1 << 20)  # elements; splits some parameters, or holds all of them


def masters(trainer: Trainer) -> dict[str, Tensor]:
    """Return masters and moments, named as in `bits`."""
    state = bits(trainer)
    for name, param in trainer.model.named_parameters():
        state[name] = local_shard(trainer.optimizer.state[param]["master"]).clone()
    return {name: tensor.cpu() for name, tensor in state.items()}


def on_device(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in bits(trainer).items()}


def assert_alike(streams: Trainer, plain: Trainer) -> None:
    """Check that masters and moments equal those of `plain`, and parameters the rounded masters."""
    held = masters(streams)
    assert_same_bits(held, on_device(plain))
    for name, shard in streams.shards().items():
        assert shard.dtype == plain.config.torch_param_dtype
        assert torch.equal(shard.cpu(), held[name].to(shard.dtype)), name


@pytest.mark.parametrize(
    ("param_dtype", "chunk"),
    some(
        ("float16", CHUNKS[0]),
        ("float32", CHUNKS[1]),
        whole=[("float16", CHUNKS[1]), ("float32", CHUNKS[0])],
    ),
)
def test_streamed_updates_and_checkpoints_match_masters_on_device(
    chunk: int,
    param_dtype: str,
    device: str,
    tmp_path: Path,
    make_trainer: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clip, decay to 0 and use micro batches; resume each side from the other's checkpoint."""
    monkeypatch.setattr(optimizers, "CHUNK", chunk)
    path = write_model(tmp_path / "model", **ODD)
    settings = ADAM | {"param_dtype": param_dtype, "schedule": FALL, "max_grad_norm": 0.3}
    plain = make_trainer(path, device=device, **settings)
    streams = make_trainer(path, device=device, **settings, **OFFLOAD)
    assert_alike(streams, plain)
    for step in range(2):
        batch = make_batch(7, seed=step)
        assert streams.compute_log_prob(batch) == plain.compute_log_prob(batch)
        assert streams.update_actor(batch) == plain.update_actor(batch)
    assert_alike(streams, plain)
    places = [(plain, str(tmp_path / "plain")), (streams, str(tmp_path / "streams"))]
    for side, place in places:
        side.save_checkpoint(place)
    plain.update_actor(make_batch(3, seed=9))
    streams.update_actor(make_batch(3, seed=8))
    for (side, _), (_, place) in zip(places, reversed(places), strict=True):
        side.load_checkpoint(place)
    assert_alike(streams, plain)
    for step in range(2, 5):
        assert streams.update_actor(make_batch(7, seed=step)) == plain.update_actor(
            make_batch(7, seed=step)
        )
    assert_alike(streams, plain)


def test_random_masters_are_drawn_in_fp32_and_rounded(
    device: str, tmp_path: Path, make_trainer: Make
) -> None:
    path = describe(tmp_path)
    settings = {"random_init": True, "param_dtype": "bfloat16", "device": device}
    assert_alike(make_trainer(path, **settings, **OFFLOAD), make_trainer(path, **settings))


def test_interrupted_update_is_refused_until_a_checkpoint_is_loaded(
    model_path: str, make_trainer: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(optimizers, "CHUNK", 1024)
    trainer, batch = make_trainer(model_path, **OFFLOAD), make_batch(3)
    trainer.update_actor(batch)
    trainer.save_checkpoint(str(tmp_path / "step"))
    before, scores = masters(trainer), trainer.compute_log_prob(batch)
    update, calls = torch._fused_adamw_, []

    def interrupted(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        update(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch, "_fused_adamw_", interrupted)
        trainer.update_actor(batch)
    for call in (
        lambda: trainer.update_actor(batch),
        lambda: trainer.compute_log_prob(batch),
        lambda: trainer.sync_weights(1),
        lambda: trainer.save_checkpoint(str(tmp_path / "mixed")),
    ):
        with pytest.raises(StateError, match=r"interrupted; .* to two steps; call load_check"):
            call()
    trainer.load_checkpoint(str(tmp_path / "step"))
    assert_same_bits(masters(trainer), before)
    assert trainer.compute_log_prob(batch) == scores
    trainer.update_actor(batch)


def test_streamed_optimizer_is_on_no_tag_and_critic_optimizer_is(
    model_path: str, make_trainer: Make
) -> None:
    critic = CriticConfig(learning_rate=5e-3)
    settings: dict[str, Any] = {"critic": critic, "reference": True, "param_dtype": "bfloat16"}
    trainer = make_trainer(model_path, **settings, **OFFLOAD)
    twin = make_trainer(model_path, **settings)
    assert trainer.critic is not None
    elements = sum(param.numel() for param in trainer.model.parameters())
    tags = trainer.saver.report().tags
    assert "optim" not in tags and 2 * elements <= tags["params"].live_bytes < 2.1 * elements
    assert tags["critic"].live_bytes >= 4 * (elements - 96 * 32)
    trainer.offload()
    tags = trainer.saver.report().tags
    assert {tag.state for tag in tags.values()} == {"paused"}
    with pytest.raises(StateError, match=r"update_actor\(\) needs tag 'params'"):
        trainer.update_actor(make_batch(2))
    trainer.reload("params", "critic", "critic_optim")
    with pytest.raises(StateError, match="needs tag 'optim', which is offloaded"):
        trainer.update_actor(make_batch(2))
    trainer.reload("optim")
    batch = value_batch(4)
    assert trainer.update_critic(batch) == twin.update_critic(batch)
    assert trainer.update_actor(batch) == twin.update_actor(batch)
    assert_alike(trainer, twin)


def test_too_little_host_memory_is_refused(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned_arena, "available_memory", lambda: 0)
    with pytest.raises(HostMemoryError, match="optimizer's state of .* optimizer_offload=False"):
        Trainer(config(model_path, **OFFLOAD), memsaver.MemorySaver())


@pytest.mark.parametrize("changes", [{"dtype": "bfloat16"}, {"lora": "any"}])
def test_optimizer_offload_refuses_bf16_masters_and_adapters(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="optimizer_offload=True: needs dtype='float32', and lora"):
        TrainerConfig(model_path="any", **OFFLOAD, **changes)
