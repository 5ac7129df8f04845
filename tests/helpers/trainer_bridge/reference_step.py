"""What the trainer should compute, by plain transformers and torch.optim."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.trainer_bridge.models import reference_logprobs
from tests.helpers.trainer_bridge.states import MOMENTS
from trainer_bridge import SequenceBatch


def plain_bits(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """As `states.bits`, of what is trained."""
    found = {
        name: param.detach() for name, param in model.named_parameters() if param.requires_grad
    }
    moments = {
        f"{name}.{m}": optimizer.state[model.get_parameter(name)][m]
        for name in found
        for m in MOMENTS
    }
    return found | moments


def plain_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batch: SequenceBatch,
    max_norm: float,
    more: torch.Tensor | float = 0.0,
) -> dict[str, float]:
    """What update_actor should do, sequence by sequence. more: of the loss, beside the policy's."""
    assert batch.old_logprobs is not None and batch.advantages is not None
    terms, clipped, kl = [], 0, 0.0
    for logp, old, advantage in zip(
        reference_logprobs(model, batch), batch.old_logprobs, batch.advantages, strict=True
    ):
        ratio = (logp - torch.tensor(old)).exp()
        free, held = ratio * advantage, ratio.clamp(0.8, 1.3) * advantage
        terms.append(-torch.minimum(free, held))
        clipped += int((held < free).sum())
        kl += float((ratio - 1 - ratio.log()).detach().sum())
    loss = torch.cat(terms).mean() + more
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    found = {"loss": float(loss.detach()), "grad_norm": float(norm)}
    return found | {"clip_fraction": clipped / batch.num_tokens, "approx_kl": kl / batch.num_tokens}
