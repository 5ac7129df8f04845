"""Random weights that never lie on the disk: what transformers would initialise, made in the trainer's own memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollout import SamplingParams
from tests.helpers.trainer_bridge.models import config, describe, make_batch, write_model
from tests.helpers.trainer_bridge.states import assert_same_bits
from trainer_bridge import Cycle, Trainer, open_inprocess
from trainer_bridge.model import randomise_weights

Make = Callable[..., Trainer]
PAD = 5


def clones(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: shard.clone() for name, shard in trainer.shards().items()}


@pytest.mark.parametrize(
    ("family", "changes", "dtype"),
    [
        ("qwen3", {}, "float32"),
        ("qwen2", {"tie_word_embeddings": False, "initializer_range": 0.3}, "bfloat16"),
        ("llama", {"attention_bias": True}, "float32"),
    ],
)
def test_weights_are_distributed_as_transformers_makes_them(
    family: str, changes: dict[str, Any], dtype: str, device: str, tmp_path: Path, make_trainer: Make
) -> None:
    path = describe(tmp_path, family, **changes)
    trainer = make_trainer(path, random_init=True, dtype=dtype, device=device)
    plain = dict(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).named_parameters())
    shards = trainer.shards()
    assert shards.keys() == plain.keys()
    deviation = json.loads((tmp_path / "config.json").read_text())["initializer_range"]
    normal = []
    for name, theirs in plain.items():
        ours = shards[name].cpu().float()
        assert (ours.shape, shards[name].dtype) == (theirs.shape, getattr(torch, dtype))
        if theirs.ndim == 1:
            assert torch.equal(ours, theirs.detach()), f"{name}: constant"
            continue
        assert torch.equal(ours == 0, theirs == 0), f"{name}: the same row is zero, or none"
        normal.append(ours[ours != 0] / deviation)
        assert abs(float(normal[-1].mean())) < 5 / normal[-1].numel() ** 0.5
        assert float(normal[-1].std()) == pytest.approx(1, abs=0.1)
    assert not shards["model.embed_tokens.weight"][PAD].any()
    together = torch.cat(normal)
    assert float(together.std()) == pytest.approx(1, abs=0.02)
    assert float((together.abs() < 1).float().mean()) == pytest.approx(0.6827, abs=0.02), "not normal"
    assert len({tuple(values[:4].tolist()) for values in normal}) == len(normal), "two parameters begin alike"


def test_the_same_seed_gives_the_same_bits(device: str, tmp_path: Path, make_trainer: Make) -> None:
    path = describe(tmp_path / "described")
    one = make_trainer(path, random_init=True, seed=1, device=device)
    torch.rand(7)  # whatever else draws random numbers
    path = write_model(tmp_path / "whole", pad_token_id=PAD)  # what lies on the disk is not read
    same = make_trainer(path, saver=False, random_init=True, seed=1, device=device)
    other = make_trainer(path, random_init=True, seed=2, device=device)
    assert_same_bits(clones(one), clones(same))
    for name, shard in one.shards().items():
        assert torch.equal(shard, other.shards()[name]) == (shard.ndim == 1), name


def test_filling_the_shards_takes_no_other_memory(device: str, tmp_path: Path, make_trainer: Make) -> None:
    model = make_trainer(describe(tmp_path, hidden_size=256), random_init=True, device=device).model
    if device == "cpu":
        with torch.profiler.profile(profile_memory=True) as profile:
            randomise_weights(model, seed=1)
        used = sum(max(0, event.cpu_memory_usage) for event in profile.events())
    else:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        randomise_weights(model, seed=1)
        used = torch.cuda.max_memory_allocated() - before
    assert used < 4096 < 4 * min(param.numel() for param in model.parameters() if param.ndim > 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_described_model_generates_and_learns(dtype: str, device: str, tmp_path: Path) -> None:
    """Neither side reads a weight; masters of either dtype are what the optimizer keeps."""
    path = describe(tmp_path)
    settings = config(path, random_init=True, dtype=dtype, param_dtype="bfloat16", device=device)
    engine_arguments = {"kv_tokens": 256, "page_size": 16, "dtype": "bfloat16"}
    with open_inprocess(settings, engine_arguments) as (trainer, engine):
        assert "discarded" in (engine.unavailable_reason() or "")
        cycle = Cycle(trainer, engine)
        cycle.to_rollout(1)
        assert engine.unavailable_reason() is None
        engine.generate([[7, 8]], SamplingParams(max_tokens=4))
        cycle.to_train()
        before = clones(trainer)
        trainer.update_actor(make_batch(4))
        assert any(not torch.equal(shard, before[name]) for name, shard in trainer.shards().items())
        for param in trainer.model.parameters():
            moments = trainer.optimizer.state[param]
            assert {param.dtype, moments["exp_avg"].dtype, moments["exp_avg_sq"].dtype} == {getattr(torch, dtype)}
