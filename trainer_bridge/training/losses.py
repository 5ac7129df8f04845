"""Log-probabilities of given tokens, and the losses of policy and critic, in fp32."""

from dataclasses import dataclass

import torch
from torch import Tensor

_ENTROPY_CHUNK = 512  # tokens: bounds the temporaries over the vocabulary


def token_logprobs(logits: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Returns log_softmax(logits / temperature)[target] and the entropy of that distribution
    (without gradient).

    logits: [N, V], any float dtype. target: int64 [N]. Both answers are fp32 [N].
    """
    logp = torch.log_softmax(logits.float() / temperature, dim=-1)
    chosen = logp.gather(-1, target[:, None]).squeeze(-1)
    with torch.no_grad():
        chunks = logp.detach().split(_ENTROPY_CHUNK)
        entropy = torch.cat([-(chunk.exp() * chunk).sum(-1) for chunk in chunks])
    return chosen, entropy


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """Sums over the tokens given, fp32 scalars; the caller divides by the batch's tokens."""

    loss: Tensor
    clipped: Tensor
    kl: Tensor


def ppo_clip(
    logprobs: Tensor, old: Tensor, advantages: Tensor, eps_low: float, eps_high: float
) -> PolicyLoss:
    """Returns -sum of min(ratio * A, clip(ratio, 1 - eps_low, 1 + eps_high) * A), ratio =
    exp(logprobs - old). All are fp32 [N].

    clipped: number of tokens where the clip was the smaller. kl: sum of ratio - 1 - log(ratio),
    never negative.
    """
    log_ratio = logprobs - old
    ratio = log_ratio.exp()
    free = ratio * advantages
    held = ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    with torch.no_grad():
        clipped = (held < free).sum().float()
        kl = (ratio - 1 - log_ratio).sum()
    return PolicyLoss(loss=-torch.minimum(free, held).sum(), clipped=clipped, kl=kl)


def kl_k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Sums r - 1 - log(r), r = exp(reference - logprobs), over tokens drawn from the policy, which
    estimates their KL divergence from the reference without bias, never negative. Both are fp32
    [N]; with gradient.
    """
    log_ratio = reference - logprobs
    return (log_ratio.exp() - 1 - log_ratio).sum()


@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """Sums over the tokens given, as `PolicyLoss`."""

    loss: Tensor
    clipped: Tensor


def value_clip(values: Tensor, old: Tensor, returns: Tensor, limit: float) -> ValueLoss:
    """Sums max((v - R)^2, (clip(v, old - limit, old + limit) - R)^2) / 2. All are fp32 [N].

    clipped: number of tokens where the clipped value was the worse, so that no gradient is left.
    """
    free, moved = (values - returns).square(), values - old
    held = (old + moved.clamp(-limit, limit) - returns).square()
    with torch.no_grad():
        # Within the limit they differ by a rounding.
        clipped = ((held > free) & (moved.abs() > limit)).sum().float()
    return ValueLoss(loss=torch.maximum(free, held).sum() / 2, clipped=clipped)
