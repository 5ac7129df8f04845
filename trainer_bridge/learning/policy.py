"""The policy: a language model that scores response tokens, and learns from its loss on them."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainer_bridge.fsdp_internals import run_backward
from trainer_bridge.learning.batch import MicroBatch, SequenceBatch, check_learning
from trainer_bridge.learning.correction import figures_of_first_update
from trainer_bridge.learning.policy_loss import k3, kl_terms, policy_terms, token_factors
from trainer_bridge.learning.tokens import Tokens
from trainer_bridge.learning.trainer_model import Model, TokenValues, token_logits
from trainer_bridge.models.moe import load_balance, replay
from trainer_bridge.ops.token_scores import ScoringHead, logit_scores


class Policy(Model):
    """A language model; the policy that a trainer trains, or its frozen reference."""

    def scores(self, batch: SequenceBatch, micro: MicroBatch) -> Tensor:
        """Compute log-probabilities of a micro batch."""
        with replay(self.module, micro.routed):
            return micro_logprobs(self.module, micro, batch.temperature)[0]

    def update(
        self, batch: SequenceBatch, check: Callable[[Tokens], dict[str, float]]
    ) -> dict[str, float]:
        """Run one step on `config.loss`; see `Trainer.update_actor`.

        `check` gets the log-probabilities of a batch with those of the rollout before the
        parameters change. It returns further figures, or raises to end the update.
        """
        first = batch.rollout_logprobs is not None
        needed = ["rollout_logprobs" if first else "old_logprobs", "advantages"]
        needed += ["ref_logprobs"] if self.config.loss.kl_coef else []
        check_learning("update_actor", batch, self.module.config, needed)
        own, logprobs, checked = TokenValues(), batch.tokens("response_ids"), dict[str, float]()

        def backward(scale: float) -> list[float]:
            nonlocal logprobs
            sums = self.add_gradients(batch, partial(self.gradient, batch, scale, own))
            if first:
                logprobs = own.gather(batch, self._runtime)
                checked.update(check(logprobs))
            return sums

        (loss, *sums), figures = self.take_step(backward)
        low, high, kl, entropy = (total / batch.num_tokens for total in sums)
        if first:
            figures |= figures_of_first_update(batch, logprobs)
        return {
            "loss": loss,
            "clip_fraction": low + high,
            "clip_fraction_low": low,
            "clip_fraction_high": high,
            "approx_kl": kl,
            "entropy": entropy,
            "tokens": float(batch.num_tokens),
            **figures,
            **checked,
        }

    def gradient(
        self, batch: SequenceBatch, scale: float, own: TokenValues, micro: MicroBatch
    ) -> list[Tensor]:
        """Add `scale` times the gradient of a micro batch of `batch`.

        A token's loss is the term of `config.loss` (`policy_terms`), times its weight if the batch
        has weights, plus the KL divergence from the reference, minus the entropy. `token_factors`
        adds the tokens up. In a batch without `old_logprobs`, they are the policy's, without their
        gradient; `own` gets them.

        Returns:
            Sums over the micro batch's tokens: loss, with its factors; tokens clipped at the low
            side and at the high side; the estimate r - 1 - log(r) of the KL divergence from the
            policy of the old log-probabilities; entropy.
        """
        config, loss = self.config, self.config.loss
        real = micro.real if config.router_aux_loss_coef else None
        with replay(self.module, micro.routed), load_balance(self.module, real) as balance:
            logprobs, entropy = micro_logprobs(
                self.module, micro, batch.temperature, entropy_grad=loss.entropy_coef != 0
            )
            old = logprobs.detach()
            if batch.old_logprobs is None:
                own.add(micro, old)
            else:
                old = batch.of_tokens("old_logprobs", micro)
            log_ratio = logprobs - old
            advantages = batch.of_tokens("advantages", micro)
            terms, low, high = policy_terms(loss, log_ratio, logprobs, advantages, micro)
            if batch.weights is not None:
                terms = terms * batch.of_tokens("weights", micro)
            if loss.kl_coef:
                reference = batch.of_tokens("ref_logprobs", micro)
                terms = terms + loss.kl_coef * kl_terms(loss.kl_estimator, logprobs, reference)
            if loss.entropy_coef:
                terms = terms - loss.entropy_coef * entropy
            total = (terms * token_factors(loss, batch, micro)).sum()
            if balance is not None and len(logprobs):
                share = len(logprobs) / batch.num_tokens
                total = total + share * (config.router_aux_loss_coef * balance.loss)
            # FSDP divides the sum of the ranks' gradients by their number.
            run_backward(self.module, total * (scale * self._runtime.world))
        with torch.no_grad():
            kl = k3(log_ratio).sum()
        return [total.detach(), low.sum().float(), high.sum().float(), kl, entropy.detach().sum()]


def micro_logprobs(
    model: Any, micro: MicroBatch, temperature: float, *, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities and entropies, fp32 [N], of a micro batch's response tokens.

    The entropies have a gradient if `entropy_grad` is true.
    """
    head = model.get_output_embeddings()
    if isinstance(head, ScoringHead):
        at = micro.row * micro.input_ids.shape[1] + micro.kept[micro.column]
        scoring = head.scoring(at, micro.target, temperature, entropy_grad)
        with scoring, getattr(model, "forward_products", nullcontext)():  # see `make_exact`
            logprobs, entropy = model(**micro.inputs()).logits
    else:
        logprobs, entropy = logit_scores(token_logits(model, micro), micro.target, temperature)
    return logprobs, entropy if entropy_grad else entropy.detach()
