"""The critic: a decoder with one output, which predicts the future return at each token."""

from functools import partial

import torch
from torch import Tensor

from trainer_bridge.fsdp_internals import run_backward
from trainer_bridge.learning.batch import MicroBatch, SequenceBatch, check_learning
from trainer_bridge.learning.trainer_model import Model, token_logits


class Critic(Model):
    """A model with a value head, which starts at zero, on the policy's first weights.

    The value of a token comes from the position that predicts the token, which sees the prompt and
    the response before it, but not the token itself.
    """

    def scores(self, batch: SequenceBatch, micro: MicroBatch) -> Tensor:
        """Compute values of a micro batch."""
        return token_logits(self.module, micro).squeeze(-1).float()

    def update(self, batch: SequenceBatch) -> dict[str, float]:
        """Run one AdamW step on the clipped squared error to `returns`.

        The loss is averaged over all response tokens of the batch. The result has value_loss,
        value_clip_fraction, and the figures of `take_step`, whose names begin with critic_.

        Raises:
            ValueError: The batch lacks `values` or `returns`.
            FloatingPointError: A gradient is not finite, in float16 at no loss scale, or the loss
                is not finite either. Nothing has changed.
        """
        check_learning("update_critic", batch, self.module.config, ["values", "returns"])
        sums, taken = self.take_step(
            lambda scale: self.add_gradients(batch, partial(self._gradient, batch, scale))
        )
        loss, clipped = (total / batch.num_tokens for total in sums)
        figures = {"value_loss": loss, "value_clip_fraction": clipped}
        return figures | {f"critic_{name}": value for name, value in taken.items()}

    def _gradient(self, batch: SequenceBatch, scale: float, micro: MicroBatch) -> list[Tensor]:
        """Add `scale` times the micro batch's gradient; return its sums of loss and clips."""
        assert self.config.critic is not None
        old, returns = batch.of_tokens("values", micro), batch.of_tokens("returns", micro)
        limit = self.config.critic.value_clip
        loss, clipped = value_clip(self.scores(batch, micro), old, returns, limit)
        # FSDP divides the gradients by the number of ranks.
        factor = scale * self._runtime.world / batch.num_tokens
        run_backward(self.module, loss * factor)
        return [loss.detach(), clipped]


def value_clip(values: Tensor, old: Tensor, returns: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Compute PPO's clipped value loss.

    The loss is sum(max((v - R)^2, (clip(v, old - limit, old + limit) - R)^2)) / 2. All tensors are
    fp32 [N]. `old` has the values before the update.

    Returns:
        fp32 sums over the tokens: the loss, and the number of tokens whose clipped term is the
        larger, so that they have no gradient.
    """
    free, moved = (values - returns).square(), values - old
    held = (old + moved.clamp(-limit, limit) - returns).square()
    with torch.no_grad():
        # Within the limit the terms may still differ by rounding.
        clipped = ((held > free) & (moved.abs() > limit)).sum().float()
    return torch.maximum(free, held).sum() / 2, clipped
