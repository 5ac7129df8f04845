"""Passes of a model over a batch on all ranks: scores, and gradients of the losses."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer_bridge.config import TrainerConfig
from trainer_bridge.fsdp_internals import keep_unsharded, run_backward, whole_pass
from trainer_bridge.learning.batch import MicroBatch, SequenceBatch, check_tokens, dispatch, lay_out
from trainer_bridge.learning.policy_loss import k3, kl_terms, policy_terms, token_factors
from trainer_bridge.learning.tokens import Tokens
from trainer_bridge.models.moe import load_balance, replay
from trainer_bridge.models.packing import packs
from trainer_bridge.models.runtime import Runtime
from trainer_bridge.ops.token_scores import ScoringHead, logit_scores


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


def token_logits(model: nn.Module, micro: MicroBatch) -> Tensor:
    """Compute the logits [N, V], in the model's dtype, that predict `micro`'s response tokens."""
    logits = model(**micro.inputs(), logits_to_keep=micro.kept).logits
    return logits[micro.row, micro.column]


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
        logits = token_logits(model, micro)
        logprobs, entropy = logit_scores(logits, micro.target, temperature)
    return logprobs, entropy if entropy_grad else entropy.detach()


@dataclass(frozen=True)
class TokenValues:
    """Values of the response tokens of a batch, from the micro batches of this rank."""

    _rows: list[int] = field(default_factory=list)
    _counts: list[int] = field(default_factory=list)
    _parts: list[Tensor] = field(default_factory=list)

    def add(self, micro: MicroBatch, values: Tensor) -> None:
        """Add the values [N] of a micro batch; they replace earlier ones of its sequences."""
        self._rows.extend(micro.rows)
        self._counts.extend(micro.counts)
        self._parts.append(values)

    def gather(self, batch: SequenceBatch, runtime: Runtime) -> Tokens:
        """Return the value of each response token, 0 if it is not learned; a collective call."""
        learned = batch.tokens("response_ids")
        values = learned.with_values(np.zeros(len(learned.values)))
        numbers = runtime.numbers(torch.cat(self._parts)) if self._parts else values.values
        for row, count, end in zip(self._rows, self._counts, accumulate(self._counts), strict=True):
            if row >= 0:
                values.array(row)[:] = numbers[end - count : end]
        return batch.whole(values.with_values(runtime.sum_ranks(values.values)))


def score_tokens(
    model: nn.Module,
    batch: SequenceBatch,
    score: Callable[[MicroBatch], Tensor],
    micro_batch_size: int,
    runtime: Runtime,
) -> Tokens:
    """Score a batch with a model in eval mode; a collective call.

    Every rank passes the whole batch, and gets the values of all sequences. `score` computes [N]
    values for a micro batch. `micro_batch_size` counts sequences, as for `dispatch`. The model is
    left sharded. A batch that the model does not support raises a ValueError (`check_tokens`).
    """
    check_tokens(batch, model.config)
    model.eval()
    values = TokenValues()
    with torch.no_grad(), whole_pass(model):
        for micro in _micro_batches(model, batch, micro_batch_size, runtime):
            values.add(micro, score(micro))
    # Read last, so that the host prepares a micro batch while the device scores the one before.
    return values.gather(batch, runtime)


def add_gradients(
    model: nn.Module,
    batch: SequenceBatch,
    backward: Callable[[MicroBatch], list[Tensor]],
    micro_batch_size: int,
    runtime: Runtime,
) -> list[float]:
    """Accumulate the gradients of a batch with a model in training mode; a collective call.

    Every rank passes the whole batch. `backward` adds the gradient of a micro batch, and returns
    fp32 sums over its tokens. `micro_batch_size` counts sequences, as for `dispatch`. The result
    has the sums over all micro batches of all ranks.
    """
    model.train()
    with whole_pass(model):
        micros = _micro_batches(model, batch, micro_batch_size, runtime)
        parts = [torch.stack(backward(micro)) for micro in micros]
    # One transfer and one wait for the sums of all micro batches.
    sums = torch.stack(parts).double().sum(0)
    return runtime.sum_ranks(runtime.numbers(sums)).tolist()


def policy_gradient(
    model: nn.Module,
    config: TrainerConfig,
    batch: SequenceBatch,
    world: int,
    scale: float,
    own: TokenValues,
    micro: MicroBatch,
) -> list[Tensor]:
    """Add `scale` times the gradient of a micro batch of `batch`, which `world` ranks share.

    In a batch without `old_logprobs`, they are the policy's, without their gradient; `own` gets
    them.

    The loss of a token is the term of `config.loss` (`policy_terms`), times its weight if the batch
    has weights, plus the KL divergence from the reference, minus the entropy. `token_factors` adds
    the tokens up.

    Returns:
        Sums over the micro batch's tokens: loss, with its factors; tokens clipped at the low side
        and at the high side; the estimate r - 1 - log(r) of the KL divergence from the policy of
        the old log-probabilities; entropy.
    """
    loss, coefficient = config.loss, config.router_aux_loss_coef
    real = micro.real if coefficient else None
    with replay(model, micro.routed), load_balance(model, real) as balance:
        logprobs, entropy = micro_logprobs(
            model, micro, batch.temperature, entropy_grad=loss.entropy_coef != 0
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
            total = total + len(logprobs) / batch.num_tokens * (coefficient * balance.loss)
        # FSDP divides the sum of the ranks' gradients by their number.
        run_backward(model, total * (scale * world))
    with torch.no_grad():
        kl = k3(log_ratio).sum()
    return [total.detach(), low.sum().float(), high.sum().float(), kl, entropy.detach().sum()]


def _micro_batches(
    model: nn.Module, batch: SequenceBatch, size: int, runtime: Runtime
) -> Iterator[MicroBatch]:
    packed = packs(model)
    shares = dispatch(batch, runtime.rank, runtime.world, size, packed=packed)
    for left, rows in zip(reversed(range(len(shares))), shares, strict=True):
        keep_unsharded(model, runtime.keep_unsharded, last=not left)
        yield lay_out(batch, rows, runtime.device, size, packed=packed)
