"""Checkpoints: bit-identical, in place, whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from tests.helpers.trainer_bridge.models import make_batch, write_model
from tests.helpers.trainer_bridge.states import assert_same_bits, bits
from trainer_bridge import Trainer

Make = Callable[..., Trainer]


def test_a_run_goes_on_bit_for_bit(model_path: str, make_trainer: Make, tmp_path: Path) -> None:
    first = make_trainer(model_path, decay_steps=5)
    for seed in range(2):
        first.update_actor(make_batch(4, seed=seed))
    first.save_checkpoint(str(tmp_path / "step"), {"prompts": [1, 2]})
    second = make_trainer(model_path, decay_steps=5)
    addresses = {name: shard.data_ptr() for name, shard in second.shards().items()}
    assert second.load_checkpoint(str(tmp_path / "step")) == {"prompts": [1, 2]}
    assert second.step == 2
    assert_same_bits(bits(second), bits(first))
    assert addresses == {name: shard.data_ptr() for name, shard in second.shards().items()}
    for seed in range(2, 4):
        assert first.update_actor(make_batch(4, seed=seed)) == second.update_actor(make_batch(4, seed=seed))
    assert_same_bits(bits(second), bits(first))


def test_saving_again_replaces_or_leaves_the_one_before(
    model_path: str, make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, place = make_trainer(model_path), tmp_path / "step"
    trainer.save_checkpoint(str(place), {"n": 1})
    with pytest.raises(TypeError, match="not JSON serializable"):
        trainer.save_checkpoint(str(place), {"n": object()})
    assert [path.name for path in tmp_path.iterdir()] == ["step"]

    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(dcp, "save", full_disk)
        with pytest.raises(OSError, match="no space left"):
            trainer.save_checkpoint(str(place), {"n": 2})
    with pytest.raises(ValueError, match="no complete checkpoint"):
        trainer.load_checkpoint(str(place) + ".partial")
    assert trainer.load_checkpoint(str(place)) == {"n": 1}
    trainer.update_actor(make_batch(4))
    trainer.save_checkpoint(str(place), {"n": 3})
    assert [path.name for path in tmp_path.iterdir()] == ["step"]
    fresh = make_trainer(model_path)
    assert fresh.load_checkpoint(str(place)) == {"n": 3}
    assert_same_bits(bits(fresh), bits(trainer))


def test_another_models_checkpoint_changes_nothing(model_path: str, make_trainer: Make, tmp_path: Path) -> None:
    trainer = make_trainer(model_path)
    trainer.save_checkpoint(str(tmp_path / "step"))
    other = make_trainer(write_model(tmp_path / "other", num_hidden_layers=1, intermediate_size=40))
    before = bits(other)
    with pytest.raises(ValueError, match="of another model, nothing was loaded") as caught:
        other.load_checkpoint(str(tmp_path / "step"))
    assert "optim.exp_avg.model.layers.0.mlp.down_proj.weight has shape (32, 48), the model (32, 40)" in str(
        caught.value
    )
    assert_same_bits(bits(other), before)
