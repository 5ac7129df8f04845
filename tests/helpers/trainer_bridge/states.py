"""Copies of the state of a trainer or an engine, for bitwise comparison."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import memsaver
from rollout import Engine
from tests.helpers.memsaver.savers import driver_calls
from tests.helpers.trainer_bridge.models import make_batch
from trainer_bridge import Trainer
from trainer_bridge.sync.shards import local_shard

MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW


def bits(side: Any, whole: bool = False) -> dict[str, Tensor]:
    """Copy trained parameters (or adapters) and moments of a trainer's policy, or of a model of it.

    The copies are this rank's shards, or whole tensors if `whole`.
    """
    state, model = {}, getattr(side, "policy", side)
    for name, param in model.module.named_parameters():
        if param.requires_grad:
            state[name] = param
            moments = model.optimizer.state[param]
            state |= {f"{name}.{moment}": moments[moment] for moment in MOMENTS}
    return {
        name: (tensor.detach().full_tensor() if whole else local_shard(tensor)).clone()
        for name, tensor in state.items()
    }


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def copied(trainer: Trainer) -> int:
    return driver_calls(trainer.saver)["copy"].nbytes


def weights(engine: Engine) -> dict[str, Tensor]:
    with memsaver.attach(engine.saver.share("weights")) as lease:
        dtype = {piece.name: getattr(torch, piece.dtype) for piece in engine.manifest.slices}
        return {
            p.name: lease.tensor(p.shape, dtype[p.name], p.offset).clone()
            for p in engine.manifest.slices
        }


def whole_params(trainer: Trainer) -> dict[str, Tensor]:
    named: Any = trainer.model.named_parameters()
    return {name: param.detach().full_tensor() for name, param in named}


def arrives_in_parts(
    trainer: Trainer,
    path: str,
    whole: dict[str, Tensor] | None = None,
    apart: float = 0.0,
    experts: int = 1,
) -> bool:
    """Return whether a sync writes the right bits into each rank of a tensor-parallel engine.

    The ranks of the trainer are the engine's ranks.

    Args:
        trainer: The trainer.
        path: Directory of the model.
        whole: Expected whole parameters; None for the trainer's own.
        apart: Allowed difference.
        experts: `EngineConfig.expert_parallel`.
    """
    size = dist.get_world_size()
    sizes = {"tensor_parallel_size": size, "expert_parallel": experts}
    engine = Engine.from_pretrained(path, kv_tokens=64, group=dist.group.WORLD, **sizes)
    trainer.connect([engine])
    trainer.sync_weights(2)
    whole, same = whole or whole_params(trainer), []
    for piece in engine.manifest.slices:
        box = [slice(at, at + n) for at, n in zip(piece.start, piece.shape, strict=True)]
        stored, expected = engine.store.box(piece), whole[piece.name][tuple(box)]
        same.append(stored.numel() == 0 or float((stored - expected).abs().max()) <= apart)
    return all(same)


def arrives(trainer: Trainer, path: str) -> bool:
    """Return whether an engine in rank 0's process gets all bits of all ranks.

    Before the sync, the trainer runs an update with a single sequence, which rank 0 gets.
    """
    trainer.update_actor(make_batch(1))
    engines = [Engine.from_pretrained(path, kv_tokens=64)] if trainer.rank == 0 else []
    trainer.connect(engines)
    receipt, whole = trainer.sync_weights(1), whole_params(trainer)
    assert receipt.nbytes == sum(value.numel() * 4 for value in whole.values())
    stored = [weights(engine) for engine in engines]
    assert all(params.keys() >= whole.keys() for params in stored)
    return all(torch.equal(params[name], whole[name]) for params in stored for name in whole)
