"""Passes of a model over a batch, shared by the ranks: a number a token, or a loss's gradient; and
the losses of policy and critic, in fp32.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from memsaver.system.plain import all_gather_plain
from trainer_bridge.config import TrainerConfig
from trainer_bridge.ops.token_scores import ScoringHead
from trainer_bridge.training.batch import MicroBatch, SequenceBatch, check_tokens, dispatch, lay_out
from trainer_bridge.training.device import Runtime
from trainer_bridge.training.model import reshard
from trainer_bridge.training.moe import load_balance, replay
from trainer_bridge.training.packing import packs

_ENTROPY_CHUNK = 512  # tokens: bounds the temporaries over the vocabulary


def token_logprobs(logits: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log_softmax(logits / temperature)[target] and the entropy of that distribution
    (without gradient).

    logits: [N, V], any float dtype. target: int64 [N]. Both answers are fp32 [N].
    """
    logp = torch.log_softmax(logits.float() / temperature, dim=-1)
    chosen = logp.gather(-1, target[:, None]).squeeze(-1)
    with torch.no_grad():
        chunks = logp.detach().split(_ENTROPY_CHUNK)
        entropy = torch.cat([-(chunk.exp() * chunk).sum(-1) for chunk in chunks])
    return chosen, entropy


def ppo_clip(
    logprobs: Tensor, old: Tensor, advantages: Tensor, eps_low: float, eps_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the clipped policy loss, the number of clipped tokens, and the KL estimate.

    All are fp32 sums over the tokens given: the loss is -sum of min(ratio * A, clip(ratio, 1 -
    eps_low, 1 + eps_high) * A), ratio = exp(logprobs - old); a token is clipped where the clip was
    the smaller; KL is the sum of ratio - 1 - log(ratio), never negative.

    Args:
        logprobs: fp32 [N], with gradient.
        old: fp32 [N].
        advantages: fp32 [N].
        eps_low: See above.
        eps_high: See above.
    """
    log_ratio = logprobs - old
    ratio = log_ratio.exp()
    free = ratio * advantages
    held = ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    with torch.no_grad():
        clipped = (held < free).sum().float()
        kl = (ratio - 1 - log_ratio).sum()
    return -torch.minimum(free, held).sum(), clipped, kl


def kl_k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Sum r - 1 - log(r), r = exp(reference - logprobs), over tokens drawn from the policy, which
    estimates their KL divergence from the reference without bias, never negative. Both are fp32
    [N]; with gradient.
    """
    log_ratio = reference - logprobs
    return (log_ratio.exp() - 1 - log_ratio).sum()


def value_clip(values: Tensor, old: Tensor, returns: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Return the clipped value loss and the number of clipped tokens, fp32 sums over the tokens.

    The loss is the sum of max((v - R)^2, (clip(v, old - limit, old + limit) - R)^2) / 2, all fp32
    [N]. A token is clipped where the clipped value was the worse, so that no gradient is left.
    """
    free, moved = (values - returns).square(), values - old
    held = (old + moved.clamp(-limit, limit) - returns).square()
    with torch.no_grad():
        # Within the limit they differ by a rounding.
        clipped = ((held > free) & (moved.abs() > limit)).sum().float()
    return torch.maximum(free, held).sum() / 2, clipped


def token_logits(model: nn.Module, micro: MicroBatch) -> Tensor:
    """Return the logits [N, V], in the model's dtype, that predict `micro`'s N response tokens."""
    logits = model(**micro.inputs(), logits_to_keep=micro.kept).logits
    return logits[micro.row, micro.column]


def micro_logprobs(model: Any, micro: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Return fp32 [N] log-probabilities and entropies of a micro batch's response tokens."""
    head = model.get_output_embeddings()
    if not isinstance(head, ScoringHead):
        return token_logprobs(token_logits(model, micro), micro.target, temperature)
    at = micro.row * micro.input_ids.shape[1] + micro.kept[micro.column]
    with head.scoring(at, micro.target, temperature):
        logprobs, entropy = model(**micro.inputs()).logits
    return logprobs, entropy.detach()


def score_tokens(
    model: nn.Module,
    batch: SequenceBatch,
    score: Callable[[MicroBatch], Tensor],
    micro_batch_size: int,
    runtime: Runtime,
) -> list[list[float]]:
    """Return what `score` makes of each micro batch, [N] by the model in eval mode, as one list a
    sequence.

    Every rank calls it with the same batch. The model is left sharded. Raises a ValueError as
    `check_tokens` does.
    """
    check_tokens(batch, model.config)
    model.eval()
    mine: dict[int, list[float]] = {}
    with torch.no_grad():
        for micro in _micro_batches(model, batch, micro_batch_size, runtime):
            mine |= micro.split(runtime.numbers(score(micro)))
    reshard(model)
    together = dict[int, list[float]]()
    for share in all_gather_plain(mine) if runtime.world > 1 else [mine]:
        together |= share
    return [together[row] for row in range(len(batch))]


def add_gradients(
    model: nn.Module,
    batch: SequenceBatch,
    backward: Callable[[MicroBatch], list[float]],
    micro_batch_size: int,
    runtime: Runtime,
) -> list[float]:
    """Have `backward` add the gradient of each micro batch, by the model in training mode.

    Every rank calls it with the same batch. Returns the sums that `backward` returns, of all ranks,
    divided by the number of the batch's response tokens.
    """
    model.train()
    parts = [*map(backward, _micro_batches(model, batch, micro_batch_size, runtime))]
    sums = runtime.sum_ranks([sum(column) for column in zip(*parts, strict=True)])
    return [total / batch.num_tokens for total in sums]


def policy_gradient(
    model: nn.Module, config: TrainerConfig, batch: SequenceBatch, world: int, micro: MicroBatch
) -> list[float]:
    """Add the gradient of one of `world` ranks' micro batches to the policy's.

    Returns its sums of loss, clipped tokens, kl, entropy.
    """
    coefficient = config.router_aux_loss_coef
    real = micro.real if coefficient else None
    with replay(model, micro.routed), load_balance(model, real) as balance:
        logprobs, entropy = micro_logprobs(model, micro, batch.temperature)
        old = batch.of_tokens("old_logprobs", micro)
        advantages = batch.of_tokens("advantages", micro)
        loss, clipped, kl = ppo_clip(
            logprobs, old, advantages, config.clip_eps_low, config.clip_eps_high
        )
        if config.kl_loss_coef:
            reference = batch.of_tokens("ref_logprobs", micro)
            loss = loss + config.kl_loss_coef * kl_k3(logprobs, reference)
        if balance is not None and len(logprobs):
            loss = loss + len(logprobs) * (coefficient * balance.loss)
        # FSDP divides the sum of the ranks' gradients by their number.
        (loss * (world / batch.num_tokens)).backward()
    return [float(loss.detach()), float(clipped), float(kl), float(entropy.sum())]


def _micro_batches(
    model: nn.Module, batch: SequenceBatch, size: int, runtime: Runtime
) -> Iterator[MicroBatch]:
    packed = packs(model)
    for rows in dispatch(batch, runtime.rank, runtime.world, size, packed=packed):
        yield lay_out(batch, rows, runtime.device, size, packed=packed)
