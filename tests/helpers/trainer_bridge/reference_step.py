"""A training step of plain transformers and torch.optim, as a reference for the trainer's."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.trainer_bridge.models import reference_logprobs
from tests.helpers.trainer_bridge.states import MOMENTS
from tests.helpers.trainer_bridge.tolerance import LEARNING_RATE, STABLE
from trainer_bridge import SequenceBatch


def plain_bits(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return trained parameters and moments, named as in `states.bits`."""
    params = {
        name: param.detach() for name, param in model.named_parameters() if param.requires_grad
    }
    moments = {
        f"{name}.{m}": optimizer.state[model.get_parameter(name)][m]
        for name in params
        for m in MOMENTS
    }
    return params | moments


def plain_adamw(
    model: torch.nn.Module, weight_decay: float, lr: float = LEARNING_RATE, **options: Any
) -> torch.optim.Optimizer:
    """Build torch's AdamW with the options of STABLE trainers, two groups told apart by name."""
    groups: dict[float, list[torch.nn.Parameter]] = {weight_decay: [], 0.0: []}
    for name, param in model.named_parameters():
        if param.requires_grad:
            apart = "norm" in name or name.endswith("bias")
            groups[0.0 if apart else weight_decay].append(param)
    parts = [{"params": params, "weight_decay": decay} for decay, params in groups.items()]
    return torch.optim.AdamW(parts, lr=lr, eps=STABLE["adam_eps"], **options)


def plain_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batch: SequenceBatch,
    max_norm: float,
    more: torch.Tensor | float = 0.0,
) -> dict[str, float]:
    """Run the update that `update_actor` should, sequence by sequence.

    `more` is added to the policy's loss.
    """
    assert batch.old_logprobs is not None and batch.advantages is not None
    terms, low, high, kl = [], 0, 0, 0.0
    weights = batch.weights or [[1.0] * len(row) for row in batch.response_ids]
    for logp, old, advantage, weight in zip(
        reference_logprobs(model, batch), batch.old_logprobs, batch.advantages, weights, strict=True
    ):
        ratio = (logp - torch.tensor(old)).exp()
        free, held = ratio * advantage, ratio.clamp(0.8, 1.3) * advantage
        terms.append(-torch.minimum(free, held) * torch.tensor(weight))
        low += int((ratio < 0.8).sum()) * (advantage < 0)
        high += int((ratio > 1.3).sum()) * (advantage > 0)
        kl += float((ratio - 1 - ratio.log()).detach().sum())
    loss = torch.cat(terms).mean() + more
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    tokens = batch.num_tokens
    figures = {"loss": float(loss.detach()), "grad_norm": float(norm)}
    sides = {"clip_fraction_low": low / tokens, "clip_fraction_high": high / tokens}
    figures |= sides | {"clip_fraction": (low + high) / tokens}
    return figures | {"approx_kl": kl / tokens}
