"""A dynamic loss scale for float16, and checks for numbers that exceed its range."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch

from trainer_bridge.config import TrainerConfig
from trainer_bridge.learning.tokens import Tokens

FIRST = 2.0**16
LARGEST = 2.0**24
GOOD = 2_000  # updates without an overflow after which the scale doubles
TRIES = 20  # scales at which an update is computed before it raises
_WIDER = 'set param_dtype="bfloat16" (in a recipe, model.dtype=bfloat16)'


@dataclass
class LossScale:
    """The factor of an update's loss in the backward pass; it is 1 unless the model is in float16.

    Gradients of activations below 6e-8 vanish in float16, and those above 65,504 are infinite. The
    scale lifts them above the lower end. If the norm of the gradients is not finite, the update is
    computed again at half the scale (`Model.take_step`). The scale doubles after 2,000 updates
    without an overflow. Its values are powers of two, so scaling does not round. The policy and the
    critic have one each, which their checkpoints contain.

    Source: Micikevicius et al., "Mixed Precision Training" (2018), with the numbers of
    `torch.amp.GradScaler`, which skips an update that overflows and has no largest scale. A largest
    scale keeps many updates without any gradient from raising it beyond what 20 halvings repair.
    """

    dynamic: bool  # whether the model is in float16
    value: float
    good: int = 0  # updates since the scale changed

    @classmethod
    def of(cls, config: TrainerConfig) -> Self:
        dynamic = config.torch_param_dtype == torch.float16
        return cls(dynamic=dynamic, value=FIRST if dynamic else 1.0)

    def continuing(self, stored: Mapping[str, Any] | None) -> Self:
        """Return the scale of a run that continues from a checkpoint with the fields `stored`.

        This scale continues unchanged if the checkpoint has none, or if only one of the two scales
        is dynamic: then the run continues with another dtype of the parameters.
        """
        if stored is None or stored["dynamic"] != self.dynamic:
            return self
        return replace(self, value=stored["value"], good=stored["good"])

    def check_repeat(self, norm: float, loss: float, overflows: int, update: int) -> None:
        """Raise unless a lower scale may help an update whose gradients overflowed.

        Args:
            norm: Norm of the gradients of all ranks. Every rank has the same numbers, so all ranks
                decide alike.
            loss: Loss of all ranks.
            overflows: How many times the update has overflowed.
            update: Number of the update, for the message.

        Raises:
            FloatingPointError: The scale is not dynamic, the loss is not finite either, or 20
                scales were tried. Nothing has changed.
        """
        if self.dynamic and math.isfinite(loss) and overflows < TRIES:
            return
        rule = f"the gradient's norm is {norm} in step {update}, parameters are unchanged"
        remedy = "look for NaN in the batch's float fields, or lower the learning rate"
        if self.dynamic:
            rule += f", loss scales tried: {overflows} from {self.value:g} downwards"
            remedy += f", or {_WIDER}"
        raise FloatingPointError(f"{rule}; {remedy}")

    def keep(self, value: float) -> None:
        """Set the scale to that of a good update, and double it after `GOOD` updates."""
        self.good = self.good + 1 if value == self.value else 1
        self.value = value
        if self.dynamic and self.good == GOOD:
            self.good, self.value = 0, min(2 * value, LARGEST)


def check_scores(method: str, scores: Tokens, config: TrainerConfig) -> None:
    """Raise a FloatingPointError if a score of `method` is not finite; every rank has all scores.

    Some models exceed float16 in their activations or logits.
    """
    wrong = np.unique(scores.answers_at(~np.isfinite(scores.values)))
    if not len(wrong):
        return
    dtype, remedy = config.torch_param_dtype, "restore weights without NaN and infinities"
    if dtype == torch.float16:
        remedy = f"activations or logits exceed float16's 65,504: {_WIDER}"
    rule = f"{len(wrong)} of {len(scores)} sequences have scores that are not finite"
    first = f"the first of them is sequence {wrong[0]}"
    raise FloatingPointError(f"{method}(): {rule}, {first}; {remedy}; nothing has changed")
