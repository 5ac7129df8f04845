"""Random weights that never lie on the disk: what transformers would initialise, made in the trainer's own memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from memsaver import StateError
from rollout import Engine, SamplingParams
from tests.helpers.ranks import results, start_ranks
from tests.helpers.trainer_bridge.models import config, make_batch, write_model
from tests.helpers.trainer_bridge.states import assert_same_bits
from trainer_bridge import Cycle, Trainer, open_inprocess
from trainer_bridge import model as model_module
from trainer_bridge.model import randomise_weights

Make = Callable[..., Trainer]
PAD = 5
BLOCK = 5 * 32 + 7  # elements, not a whole number of rows
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("qwen2", {"tie_word_embeddings": False, "initializer_range": 0.3}),
    ("llama", {"attention_bias": True}),
]


def describe(path: Path, family: str = "qwen3", **changes: Any) -> str:
    """A model directory without weights."""
    write_model(path, family, pad_token_id=PAD, **changes)
    (path / "model.safetensors").unlink()
    return str(path)


def clones(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: shard.clone() for name, shard in trainer.shards().items()}


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
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
    path = describe(tmp_path)
    one = make_trainer(path, random_init=True, seed=1, device=device)
    torch.rand(7)  # whatever else draws random numbers
    same = make_trainer(path, saver=False, random_init=True, seed=1, device=device)
    other = make_trainer(path, random_init=True, seed=2, device=device)
    assert_same_bits(clones(one), clones(same))
    for name, shard in one.shards().items():
        assert torch.equal(shard, other.shards()[name]) == (shard.ndim == 1), name


def test_weights_on_the_disk_are_not_read(tmp_path: Path, make_trainer: Make) -> None:
    described = make_trainer(describe(tmp_path / "described"), random_init=True)
    path = write_model(tmp_path / "whole", pad_token_id=PAD)
    assert_same_bits(clones(make_trainer(path, random_init=True)), clones(described))


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


def test_a_directory_without_config_is_refused(tmp_path: Path, make_trainer: Make) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        make_trainer(str(tmp_path), random_init=True)


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
        engine.generate([[7, 8]], SamplingParams(max_tokens=4))
        cycle.to_train()
        before = clones(trainer)
        trainer.update_actor(make_batch(4))
        assert any(not torch.equal(shard, before[name]) for name, shard in trainer.shards().items())
        for param in trainer.model.parameters():
            moments = trainer.optimizer.state[param]
            assert {param.dtype, moments["exp_avg"].dtype, moments["exp_avg_sq"].dtype} == {getattr(torch, dtype)}


def test_an_engine_without_weights_says_so_until_a_sync(model_path: str, tmp_path: Path, make_trainer: Make) -> None:
    path = describe(tmp_path)
    with pytest.raises(ValueError, match=r"lacks model\.safetensors"):
        Engine.from_pretrained(path, kv_tokens=64)
    engine = Engine.from_pretrained(path, kv_tokens=64, load_weights=False)
    with pytest.raises(StateError, match="weights undefined: the weights were never loaded; commit a weight update"):
        engine.generate([[1]], SamplingParams(max_tokens=1))
    trainer = make_trainer(path, random_init=True)
    trainer.connect([engine])
    trainer.sync_weights(1)
    assert engine.unavailable_reason() is None
    engine.generate([[1]], SamplingParams(max_tokens=1))


def worker(rank: int, path: str) -> tuple[dict[str, torch.Tensor], dict[str, tuple[tuple[int, ...], tuple[int, ...]]]]:
    """This rank's shards and their (start, shape) in the whole."""
    model_module.BLOCK_ELEMENTS = BLOCK
    columns = {"model.layers.1.mlp.down_proj.weight": 1}
    once, again = (Trainer(config(path, random_init=True), shard_dims=columns) for _ in range(2))
    assert_same_bits(clones(once), clones(again))
    boxes = {name: model_module.shard_box(param) for name, param in named(once)}
    return clones(once), {name: (box.start, box.shape) for name, box in boxes.items()}


def named(trainer: Trainer) -> list[tuple[str, torch.Tensor]]:
    return list(trainer.model.named_parameters())


def test_two_ranks_draw_the_model_of_one(tmp_path: Path, make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """97 words over two ranks: shards of 49 and 48 rows; the padding row is the second rank's. Blocks of 5 rows of 32
    are shared where shards meet; one parameter is sharded by columns."""
    path = describe(tmp_path / "model", vocab_size=97)
    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(settings | {"pad_token_id": 60}))
    monkeypatch.setattr(model_module, "BLOCK_ELEMENTS", BLOCK)
    alone = clones(make_trainer(path, random_init=True))
    seen = dict.fromkeys(alone, 0)
    for shards, boxes in results(start_ranks(worker, 2, tmp_path / "store", path)):
        for name, shard in shards.items():
            box = tuple(slice(at, at + size) for at, size in zip(*boxes[name], strict=True))
            assert torch.equal(shard, alone[name][box]), name
            seen[name] += shard.numel()
    assert seen == {name: whole.numel() for name, whole in alone.items()}
    assert (alone["model.embed_tokens.weight"] == 0).all(1).nonzero().flatten().tolist() == [60]
    rows = alone["model.embed_tokens.weight"]
    assert len({tuple(row.tolist()) for row in rows}) == 97, "blocks repeat each other"
