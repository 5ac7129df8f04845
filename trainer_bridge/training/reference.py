"""The policy as it was before the first update: frozen, to measure how far the policy has gone."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from trainer_bridge.config import TrainerConfig
from trainer_bridge.tags import REFERENCE
from trainer_bridge.training.batch import SequenceBatch, check_tokens
from trainer_bridge.training.losses import token_logprobs
from trainer_bridge.training.model import build_model
from trainer_bridge.training.runtime import Runtime
from trainer_bridge.training.scoring import score_tokens, token_logits

if TYPE_CHECKING:
    from memsaver import MemorySaver


class Reference:
    """An FSDP2 model on tag `reference`, in the dtype that the policy computes in, with the weights
    it begins with.
    """

    def __init__(self, config: TrainerConfig, runtime: Runtime, saver: MemorySaver | None) -> None:
        """config: the policy's; masters of more precision are not needed by what never changes."""
        stored = dataclasses.replace(config, dtype=config.param_dtype or config.dtype, lora=None)
        self._micro_batch_size = config.micro_batch_size
        self._runtime = runtime
        self.model = build_model(stored, runtime, saver, tag=REFERENCE, drawn_as=config.torch_dtype)
        self.model.requires_grad_(False)

    def compute_log_prob(self, batch: SequenceBatch, temperature: float) -> list[list[float]]:
        """Computes as `Trainer.compute_log_prob` does, by the first weights."""
        check_tokens(batch, self.model.config)
        return score_tokens(
            self.model,
            batch,
            lambda micro: token_logprobs(
                token_logits(self.model, micro), micro.target, temperature
            )[0],
            self._micro_batch_size,
            self._runtime,
        )
