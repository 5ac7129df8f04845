"""Log-probabilities and entropies of tokens from hidden states and the output embedding, without
the logits of the whole vocabulary: they exist for one slice of the words at a time.

Slices of words, not of tokens: the gradient of a slice's embeddings is one product over all tokens,
rounded once, and what is summed over the slices is only as large as the hidden states.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from memsaver.common.machine import Impl, use_triton

SLICE_BYTES = 128 << 20  # of logits: 16,384 words of 4,096 tokens in bf16, a large product
_MIN_WORDS = 2048  # of a slice, which beside the layers' activations of as many tokens is little
_ALIGNED = 128  # words: rows of logits begin where tensor cores can load them


def token_scores(
    hidden: Tensor, weight: Tensor, target: Tensor, temperature: float, impl: Impl = "auto"
) -> tuple[Tensor, Tensor]:
    """Returns log_softmax(hidden @ weight.T / temperature)[target] and the entropy of that
    distribution (without gradient), both fp32 [N].

    hidden: [N, H], weight: [V, H], of one dtype, in which the logits are rounded as a linear layer
    does; all else is fp32. target: int64 [N].
    """
    chosen, entropy = _TokenScores.apply(hidden, weight, target, temperature, impl)
    return chosen, entropy


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, temperature: float, impl: Impl
    ) -> tuple[Tensor, Tensor]:
        parts = [
            reduce_logits(hidden @ weight[start:stop].T, target, start, temperature, impl)
            for start, stop in _slices(hidden, weight)
        ]
        peak, mass, fall, chosen = torch.stack(parts, 1).unbind()
        top = peak.amax(0)
        share = (peak - top).exp()
        fall = ((fall + (top - peak) * mass) * share).sum(0)
        mass = (mass * share).sum(0)
        ctx.save_for_backward(hidden, weight, target, top + mass.log())
        ctx.temperature, ctx.impl = temperature, impl
        entropy = mass.log() + fall / mass
        ctx.mark_non_differentiable(entropy)
        return chosen.amax(0) - top - mass.log(), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, target, norm = ctx.saved_tensors
        grad = grad.contiguous()
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for start, stop in _slices(hidden, weight):
            words = weight[start:stop]
            logits = hidden @ words.T
            logits_to_gradient(logits, target, norm, grad, start, ctx.temperature, ctx.impl)
            grad_hidden += logits @ words
            if grad_weight is not None:
                torch.mm(logits.T, hidden, out=grad_weight[start:stop])
            del logits  # before the next slice's
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None


def _slices(hidden: Tensor, weight: Tensor) -> Iterator[tuple[int, int]]:
    """Yields first word and end of each slice."""
    words, row = len(weight), max(1, len(hidden)) * weight.element_size()
    width = max(_MIN_WORDS, SLICE_BYTES // row // _ALIGNED * _ALIGNED)
    yield from ((start, min(start + width, words)) for start in range(0, words, width))


# Operations of torch's own registry, so that tensors without memory (the planner's) pass them as
# one operation that makes what it returns, like a kernel; the loops of the reference would make
# more.


@torch.library.custom_op("trainer_bridge::reduce_logits", mutates_args=())
def reduce_logits(
    logits: Tensor, target: Tensor, start: int, temperature: float, impl: str = "auto"
) -> Tensor:
    """Returns fp32 [4, N] of z = logits / temperature, [N, words]: in each row the maximum m, the
    sum of exp(z - m), the sum of exp(z - m) * (m - z), and z of the target, -inf where it is not
    among the words, which are numbered from `start`.
    """
    if use_triton(impl, logits.device):  # type: ignore[arg-type]
        from trainer_bridge.ops.token_scores_triton import reduce_logits_triton

        return reduce_logits_triton(logits, target, start, temperature)
    z = logits.float() / temperature
    peak = z.amax(-1)
    fall = peak[:, None] - z
    power = (-fall).exp()
    at = (target - start)[:, None]
    inside = (at >= 0) & (at < z.shape[1])
    chosen = z.gather(1, at.where(inside, 0)).where(inside, -torch.inf)[:, 0]
    return torch.stack([peak, power.sum(-1), (power * fall).sum(-1), chosen])


@reduce_logits.register_fake
def _(logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty((4, len(logits)), dtype=torch.float32)


@torch.library.custom_op("trainer_bridge::logits_to_gradient", mutates_args=("logits",))
def logits_to_gradient(
    logits: Tensor,
    target: Tensor,
    norm: Tensor,
    grad: Tensor,
    start: int,
    temperature: float,
    impl: str = "auto",
) -> None:
    """Puts in the place of logits, [N, words], what `grad`, that of the targets' log-probabilities,
    fp32 [N], makes their gradient. norm: fp32 [N], the logarithm of the sum of exp(z) over all
    words, z = logits / temperature.
    """
    if use_triton(impl, logits.device):  # type: ignore[arg-type]
        from trainer_bridge.ops.token_scores_triton import logits_to_gradient_triton

        logits_to_gradient_triton(logits, target, norm, grad, start, temperature)
        return
    hit = torch.arange(start, start + logits.shape[1], device=logits.device) == target[:, None]
    likely = (logits.float() / temperature - norm[:, None]).exp()
    logits.copy_((hit.float() - likely) * (grad / temperature)[:, None])


@logits_to_gradient.register_fake
def _(*_: Any) -> None:
    """It makes nothing."""
