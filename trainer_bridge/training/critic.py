"""The critic: a decoder with one output, which predicts the future return at each token."""

from torch import Tensor

from memsaver import MemorySaver
from trainer_bridge.config import TrainerConfig
from trainer_bridge.tags import CRITIC, CRITIC_OPTIM
from trainer_bridge.training.batch import MicroBatch, SequenceBatch, check_learning
from trainer_bridge.training.device import Runtime
from trainer_bridge.training.losses import add_gradients, score_tokens, token_logits, value_clip
from trainer_bridge.training.model import build_model
from trainer_bridge.training.optimizer import Schedule, build_optimizer, optimizer_step


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
        self.step, self.schedule = 0, Schedule.of(self.config)

    def compute_values(self, batch: SequenceBatch) -> list[list[float]]:
        """Compute fp32 values, one per response token of each sequence."""
        size = self.config.micro_batch_size
        return score_tokens(self.model, batch, self._values, size, self._runtime)

    def update(self, batch: SequenceBatch) -> dict[str, float]:
        """Run one AdamW step on the clipped squared error to `returns`.

        The loss is averaged over all response tokens of the batch. The result has value_loss,
        value_clip_fraction, critic_grad_norm (before clipping) and critic_learning_rate.

        Raises:
            ValueError: The batch lacks `values` or `returns`.
            FloatingPointError: A gradient is not finite. Nothing has changed.
        """
        check_learning("update_critic", batch, self.model.config, ["values", "returns"])
        self.optimizer.zero_grad(set_to_none=True)
        size = self.config.micro_batch_size
        sums = add_gradients(
            self.model, batch, lambda micro: self._backward(batch, micro), size, self._runtime
        )
        loss, clipped = (total / batch.num_tokens for total in sums)
        rate = self.schedule.after(self.step)
        grad_norm = optimizer_step(self.optimizer, self.config, rate, self.step)
        self.step += 1
        figures = {"value_loss": loss, "value_clip_fraction": clipped}
        return figures | {"critic_grad_norm": grad_norm, "critic_learning_rate": rate}

    def _values(self, micro: MicroBatch) -> Tensor:
        return token_logits(self.model, micro).squeeze(-1).float()

    def _backward(self, batch: SequenceBatch, micro: MicroBatch) -> list[Tensor]:
        """Add the micro batch's gradient, and return its sums of loss and clipped tokens."""
        old, returns = batch.of_tokens("values", micro), batch.of_tokens("returns", micro)
        loss, clipped = value_clip(self._values(micro), old, returns, self._limit)
        # FSDP divides the gradients by the number of ranks.
        (loss * (self._runtime.world / batch.num_tokens)).backward()
        return [loss.detach(), clipped]
