"""A dynamic loss scale for float16, and checks for numbers that exceed its range."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from trainer_bridge.config import TrainerConfig
from trainer_bridge.sync.shards import local_shard

FIRST = 2.0**16
LARGEST = 2.0**24
GOOD = 2_000  # updates in a row after which the scale doubles
FAILED = 20  # updates in a row of which the last one raises


@dataclass
class LossScale:
    """The factor of an update's loss in the backward pass; it is 1 unless the model is in float16.

    Gradients of activations below 6e-8 vanish in float16, and those above 65,504 are infinite. The
    scale lifts them above the lower end. It doubles after 2,000 good updates and halves if the norm
    of the gradients is not finite, which skips the update. Its values are powers of two, so scaling
    does not round. The policy and the critic have one each, which their checkpoints contain.

    Source: Micikevicius et al., "Mixed Precision Training" (2018), with the numbers of
    `torch.amp.GradScaler`, which has no largest scale. A largest scale keeps many updates without
    any gradient from raising it until the next gradients overflow in 20 updates. GradScaler itself
    would read all gradients and wait for the device a second time; here the norm decides.
    """

    dynamic: bool  # whether the model is in float16
    value: float
    good: int = 0  # good updates since the scale changed
    failed: int = 0  # skipped updates since the last good one
    skipped: int = 0  # all skipped updates

    @classmethod
    def of(cls, config: TrainerConfig) -> LossScale:
        dynamic = config.torch_param_dtype == torch.float16
        return cls(dynamic=dynamic, value=FIRST if dynamic else 1.0)

    def continuing(self, stored: Mapping[str, Any] | None) -> LossScale:
        """Return the scale of a run that continues from a checkpoint.

        `stored` has the fields of the checkpoint's scale; None if it has none. If one scale is
        dynamic and the other is not, only the number of skipped updates is taken.
        """
        if stored is None:
            return self
        before = LossScale(**stored)
        return before if before.dynamic == self.dynamic else replace(self, skipped=before.skipped)

    @torch.no_grad()
    def unscale(self, params: Iterable[nn.Parameter]) -> None:
        """Divide the fp32 gradients of the parameters by the scale, in place."""
        grads = [local_shard(param.grad) for param in params if param.grad is not None]
        if self.dynamic and grads:
            torch._foreach_mul_(grads, 1 / self.value)

    def accept(self, norm: float, loss: float, update: int) -> bool:
        """Adapt the scale, and return whether to run update number `update`; if not, skip it.

        `norm` is that of the unscaled gradients of all ranks, and `loss` the loss of all ranks, so
        every rank decides alike.

        Raises:
            FloatingPointError: The norm is not finite, and a lower scale is no remedy: the scale is
                not dynamic, the loss is not finite either, or 19 updates in a row were skipped.
                Nothing has changed.
        """
        if math.isfinite(norm):
            self.failed, self.good = 0, self.good + 1
            if self.dynamic and self.good == GOOD:
                self.good, self.value = 0, min(2 * self.value, LARGEST)
            return True
        if not self.dynamic or not math.isfinite(loss):
            remedy = "look for NaN in the batch's float fields, or lower the learning rate"
            if self.dynamic:
                remedy += f", or {_WIDER}"
            rule = f"the gradient's norm is {norm} in step {update}, parameters are unchanged"
            raise FloatingPointError(f"{rule}; {remedy}")
        if self.failed + 1 == FAILED:
            rule = f"the gradient's norm was not finite in {FAILED} updates in a row, up to step"
            state = f"{update} with loss scale {self.value:g}; parameters are unchanged"
            raise FloatingPointError(f"{rule} {state}; {_WIDER}")
        self.good, self.value = 0, self.value / 2
        self.failed += 1
        self.skipped += 1
        return False


_WIDER = 'set param_dtype="bfloat16" (in a recipe, model.dtype=bfloat16)'


def check_scores(method: str, scores: list[list[float]], config: TrainerConfig) -> None:
    """Raise a FloatingPointError if a score of `method` is not finite; every rank has all scores.

    Some models exceed float16 in their activations or logits.
    """
    finite = [math.isfinite(sum(row)) for row in scores]  # the sum keeps infinities and NaN
    if all(finite):
        return
    dtype, remedy = config.torch_param_dtype, "restore weights without NaN and infinities"
    if dtype == torch.float16:
        remedy = f"activations or logits exceed float16's 65,504: {_WIDER}"
    rule = f"{finite.count(False)} of {len(scores)} sequences have scores that are not finite"
    first = f"the first of them is sequence {finite.index(False)}"
    raise FloatingPointError(f"{method}(): {rule}, {first}; {remedy}; nothing has changed")
