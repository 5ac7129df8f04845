"""The loss of the policy: a term for each response token in fp32, and how the terms add up.

Notation, for token t of answer i: A its advantage; r = exp(logprobs - old) the importance ratio of
the trained policy to the policy of `old`; sg(x) the value of x without its gradient.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memsaver.ops.layout import send_together
from trainer_bridge.config import PolicyLoss
from trainer_bridge.learning.batch import MicroBatch, SequenceBatch

# In fp32, exp of a log-ratio above 88 is infinite, and NaN if it is multiplied by 0 later.
_LARGEST = 80.0


class PolicyTerms(NamedTuple):
    """Terms of the policy's loss, each [N]."""

    loss: Tensor  # fp32
    low: Tensor  # bool: the loss clips a ratio below 1 - clip_low
    high: Tensor  # bool: the loss clips a ratio above 1 + clip_high


def policy_terms(
    loss: PolicyLoss, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, micro: MicroBatch
) -> PolicyTerms:
    """Compute the terms of `loss.kind` for the tokens of a micro batch.

    A function of the user has the same arguments, and returns PolicyTerms, or the loss alone if it
    clips nothing.

    Args:
        loss: The loss.
        log_ratio: fp32 [N], logprobs - old.
        logprobs: fp32 [N].
        advantages: fp32 [N].
        micro: The micro batch.

    Returns:
        The terms; the loss has a gradient through `log_ratio` and `logprobs`.

    Raises:
        ValueError: The user's function returned another shape.
    """
    if callable(loss.kind):
        made = loss.kind(loss, log_ratio, logprobs, advantages, micro)
        return _checked_terms(made, loss.kind, log_ratio)
    if loss.kind == "cispo":
        return cispo(loss, log_ratio, logprobs, advantages)
    if loss.kind == "gspo":
        log_ratio = sequence_log_ratio(log_ratio, micro)
    return ppo_clip(loss, log_ratio, advantages)


def _checked_terms(made: Any, function: Callable[..., Any], log_ratio: Tensor) -> PolicyTerms:
    if not isinstance(made, PolicyTerms):
        none = torch.zeros_like(log_ratio, dtype=torch.bool)
        made = PolicyTerms(made, none, none)
    for name, part in made._asdict().items():
        if not isinstance(part, Tensor) or part.shape != log_ratio.shape:
            got = list(part.shape) if isinstance(part, Tensor) else type(part).__name__
            rule = f"returned {got} as {name}, and there are {len(log_ratio)} tokens"
            raise ValueError(f"{function} {rule}; return a tensor with a term for each token")
    return made._replace(low=made.low.bool(), high=made.high.bool())


def ppo_clip(loss: PolicyLoss, log_ratio: Tensor, advantages: Tensor) -> PolicyTerms:
    """Compute PPO's clipped terms -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    With `dual_clip` = c, a term with A < 0 is at most -c A. A token counts as clipped, and has no
    gradient, if the clipped product is the smaller one. `clip_high` above `clip_low` is the
    clip-higher of DAPO.

    Sources: Schulman et al., "Proximal Policy Optimization Algorithms" (2017); dual clip: Ye et
    al., "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning" (2020);
    clip-higher: Yu et al., "DAPO" (2025).
    """
    ratio = log_ratio.clamp(max=_LARGEST).exp()
    free = ratio * advantages
    held = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high) * advantages
    gain = torch.minimum(free, held)
    with torch.no_grad():
        clipped = held < free
        low, high = clipped & (advantages < 0), clipped & (advantages > 0)
    if loss.dual_clip is not None:
        floor = loss.dual_clip * advantages
        with torch.no_grad():
            # Such a ratio is far above 1.
            high = high | ((advantages < 0) & (gain < floor))
        gain = torch.where(advantages < 0, torch.maximum(gain, floor), gain)
    return PolicyTerms(-gain, low, high)


def sequence_log_ratio(log_ratio: Tensor, micro: MicroBatch) -> Tensor:
    """Replace each token's log-ratio by the mean over its answer, as GSPO does.

    The value is the mean over the answer's tokens. The gradient is that of the token's own
    log-ratio, so that with equal advantages the gradients of an answer's tokens add up to GSPO's.

    Source: Zheng et al., "Group Sequence Policy Optimization" (2025), the form GSPO-token.
    """
    counts = micro.token_counts()
    with torch.no_grad():
        # unsafe: checks of the lengths would wait for the device
        means = torch.segment_reduce(log_ratio, "mean", lengths=counts, initial=0.0, unsafe=True)
        shared = means.repeat_interleave(counts, output_size=len(log_ratio))
    return shared + (log_ratio - log_ratio.detach())


def cispo(loss: PolicyLoss, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> PolicyTerms:
    """Compute CISPO's terms -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprobs.

    Every token keeps a gradient. A token counts as clipped if its ratio is outside of the limits.

    Source: MiniMax, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention"
    (2025), which has no lower limit (`clip_low` = 1).
    """
    with torch.no_grad():
        ratio = log_ratio.clamp(max=_LARGEST).exp()
        weight = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
        low, high = ratio < 1 - loss.clip_low, ratio > 1 + loss.clip_high
    return PolicyTerms(-weight * advantages * logprobs, low, high)


def kl_terms(estimator: str, logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate the KL divergence from the reference at each token, fp32 [N], with a gradient.

    With d = logprobs - reference, k2 is d^2 / 2 and k3 is exp(-d) - 1 + d; neither is negative. For
    tokens drawn from the policy, the gradient of k2 is that of the KL divergence in expectation,
    and k3 is an unbiased estimate of its value. k1 = d is for rewards: as a loss, its expected
    gradient is 0.

    Sources: Schulman, "Approximating KL Divergence" (2020); Tang and Munos, "On a few pitfalls in
    KL divergence gradient estimation for RL" (2025).
    """
    log_ratio = reference - logprobs
    return log_ratio.square() / 2 if estimator == "k2" else k3(log_ratio)


def k3(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio) - 1 - log_ratio of log(other / own probability) of each token.

    Above `_LARGEST` the exponential continues as a line, so that the gradient keeps its direction.
    """
    limited = log_ratio.clamp(max=_LARGEST)
    return limited.exp() * (1 + log_ratio - limited) - 1 - log_ratio


def token_factors(loss: PolicyLoss, batch: SequenceBatch, micro: MicroBatch) -> Tensor | float:
    """Return the factor of each term of a micro batch in the loss of `batch`.

    With S answers of n_i tokens in all of their parts, N in all, the loss is

    - token: the mean over all tokens, sum(terms) / N, as in DAPO;
    - sequence: the mean over answers of their means, sum(terms / n_i) / S, as in the original GRPO;
    - constant: sum(terms) / (S max_tokens), in which an answer's length does not scale its
      gradient, as in Dr. GRPO.

    Sources: Shao et al., "DeepSeekMath" (2024); Yu et al., "DAPO" (2025); Liu et al.,
    "Understanding R1-Zero-Like Training" (2025).

    Returns:
        A number for all tokens, or fp32 [N].
    """
    if loss.aggregation == "token":
        return 1 / batch.num_tokens
    if loss.aggregation == "constant":
        assert loss.max_tokens is not None
        return 1 / (batch.num_answers * loss.max_tokens)
    sizes = torch.tensor([batch.answer_sizes[row] if row >= 0 else 1 for row in micro.rows])
    factors = 1 / (batch.num_answers * send_together([sizes], micro.target.device)[0].float())
    return factors.repeat_interleave(micro.token_counts(), output_size=len(micro.target))
