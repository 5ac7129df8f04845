"""The critic: a decoder with one output, which predicts the future return at each token."""

from functools import partial

from torch import Tensor

from memsaver import MemorySaver
from trainer_bridge.config import TrainerConfig
from trainer_bridge.fsdp_internals import run_backward
from trainer_bridge.learning.batch import MicroBatch, SequenceBatch, check_learning
from trainer_bridge.learning.loss_scale import LossScale, check_scores
from trainer_bridge.learning.losses import add_gradients, score_tokens, token_logits, value_clip
from trainer_bridge.learning.optimizer import LearningRate, build_optimizer, optimizer_step
from trainer_bridge.learning.tokens import Tokens
from trainer_bridge.models.runtime import Runtime
from trainer_bridge.models.sharded_model import build_model
from trainer_bridge.tag_names import CRITIC, CRITIC_OPTIM


class Critic:
    """An FSDP2 model on tag `critic`, with its moments on tag `critic_optim`; owned by a trainer.

    It starts with the policy's weights and a zero value head. The value of a token comes from the
    position that predicts the token, which sees the prompt and the response before it, but not the
    token itself. `config` is the critic's own, derived from the policy's. `step` counts updates.
    """

    def __init__(self, config: TrainerConfig, runtime: Runtime, saver: MemorySaver) -> None:
        assert config.critic is not None
        self.config, self._runtime = config.of_critic(), runtime
        self._limit = config.critic.value_clip
        self.model = build_model(self.config, runtime, saver, tag=CRITIC)
        params = list(self.model.parameters())
        self.optimizer = build_optimizer(params, self.config, runtime, saver, CRITIC_OPTIM)
        self.step, self.rate = 0, LearningRate.of(self.config)
        self.loss_scale = LossScale.of(self.config)

    def compute_values(self, batch: SequenceBatch) -> Tokens:
        """Compute fp32 values, one per response token of each sequence.

        Raises:
            FloatingPointError: A value is not finite.
        """
        size = self.config.micro_batch_size
        values = score_tokens(self.model, batch, self._values, size, self._runtime)
        check_scores("compute_values", values, self.config)
        return values

    def update(self, batch: SequenceBatch) -> dict[str, float]:
        """Run one AdamW step on the clipped squared error to `returns`.

        The loss is averaged over all response tokens of the batch. The result has value_loss,
        value_clip_fraction, and the figures of `optimizer_step`, whose names begin with critic_.

        Raises:
            ValueError: The batch lacks `values` or `returns`.
            FloatingPointError: A gradient is not finite, in float16 at no loss scale, or the loss
                is not finite either. Nothing has changed.
        """
        check_learning("update_critic", batch, self.model.config, ["values", "returns"])
        size, rate = self.config.micro_batch_size, self.rate.after(self.step)

        def backward(scale: float) -> list[float]:
            learn = partial(self._backward, batch, scale)
            return add_gradients(self.model, batch, learn, size, self._runtime)

        sums, taken = optimizer_step(
            self.optimizer, self.config, self.loss_scale, rate, self.step + 1, backward
        )
        self.step += 1
        loss, clipped = (total / batch.num_tokens for total in sums)
        figures = {"value_loss": loss, "value_clip_fraction": clipped}
        return figures | {f"critic_{name}": value for name, value in taken.items()}

    def _values(self, micro: MicroBatch) -> Tensor:
        return token_logits(self.model, micro).squeeze(-1).float()

    def _backward(self, batch: SequenceBatch, scale: float, micro: MicroBatch) -> list[Tensor]:
        """Add `scale` times the micro batch's gradient; return its sums of loss and clips."""
        old, returns = batch.of_tokens("values", micro), batch.of_tokens("returns", micro)
        loss, clipped = value_clip(self._values(micro), old, returns, self._limit)
        # FSDP divides the gradients by the number of ranks.
        factor = scale * self._runtime.world / batch.num_tokens
        run_backward(self.model, loss * factor)
        return [loss.detach(), clipped]
