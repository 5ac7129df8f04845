"""Copies of what a trainer or an engine holds, to compare bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

import memsaver
from rollout import Engine
from trainer_bridge import Trainer


def bits(trainer: Trainer) -> dict[str, torch.Tensor]:
    """A copy of all that training changes."""
    state = {name: shard.clone() for name, shard in trainer.shards().items()}
    for name, param in trainer.model.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            state[f"{name}.{moment}"] = trainer.optimizer.state[param][moment].to_local().clone()
    return state


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def adapters(trainer: Trainer) -> dict[str, Tensor]:
    """A copy of what is trained, with its moments."""
    found = {}
    for name, param in trainer.model.named_parameters():
        if param.requires_grad:
            found[name] = param.detach().to_local().clone()
            for moment in ("exp_avg", "exp_avg_sq"):
                found[f"{name}.{moment}"] = trainer.optimizer.state[param][moment].to_local().clone()
    return found


def copied(trainer: Trainer) -> int:
    assert trainer.saver is not None
    stats = trainer.saver.statistics().get("copy")
    return 0 if stats is None else stats.nbytes


def weights(engine: Engine) -> dict[str, Tensor]:
    with memsaver.attach(engine.saver.share("weights")) as lease:
        dtype = {piece.name: getattr(torch, piece.dtype) for piece in engine.manifest.slices}
        return {p.name: lease.tensor(p.shape, dtype[p.name], p.offset).clone() for p in engine.manifest.slices}
