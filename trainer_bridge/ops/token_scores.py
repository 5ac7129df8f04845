"""Log-probabilities and entropies of tokens without the logits of the whole vocabulary.

Logits exist for one slice of the vocabulary at a time. The vocabulary is divided, not the tokens,
so the gradient of a slice's embeddings is one product over all tokens, rounded once. Sums over the
slices are only as large as the hidden states.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from memsaver.system.devices import Impl, use_triton

SLICE_BYTES = 128 << 20  # of logits; 16,384 words of 4,096 tokens in bf16 are an efficient product
_MIN_WORDS = 2048  # of a slice; its logits are small against the activations of the same tokens
_BLOCK = 4096  # words of a program per iteration
_ALIGNED = 128  # words; aligns rows of logits for loads of tensor cores


def token_scores(
    hidden: Tensor, weight: Tensor, target: Tensor, temperature: float, impl: Impl = "auto"
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities of tokens, and the entropies of their distributions, fp32 [N].

    The log-probabilities are log_softmax(hidden @ weight.T / temperature)[target], of hidden states
    [N, H], the output embedding `weight` [V, H] of the same dtype, and `target` int64 [N]. Logits
    are rounded to the dtype of the inputs, as in a linear layer. All else is fp32.

    Both results have gradients. That of the entropies takes time only where a loss depends on them.
    """
    chosen, entropy = _TokenScores.apply(hidden, weight, target, temperature, impl)
    return chosen, entropy


def logit_scores(
    logits: Tensor, target: Tensor, temperature: float, impl: Impl = "auto"
) -> tuple[Tensor, Tensor]:
    """Compute the results of `token_scores` from logits [N, V] in any float dtype.

    The only temporary as large as the logits is their gradient.
    """
    chosen, entropy = _LogitScores.apply(logits, target, temperature, impl)
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
        return _scores(ctx, (hidden, weight, target), parts, temperature, impl)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, target, *norm = ctx.saved_tensors
        inputs = _inputs(norm, *grads)
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for start, stop in _slices(hidden, weight):
            words = weight[start:stop]
            logits = hidden @ words.T
            logits_to_gradient(logits, target, *inputs, start, ctx.temperature, ctx.impl)
            grad_hidden += logits @ words
            if grad_weight is not None:
                torch.mm(logits.T, hidden, out=grad_weight[start:stop])
            del logits  # before the next slice's
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None


class _LogitScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, temperature: float, impl: Impl
    ) -> tuple[Tensor, Tensor]:
        part = reduce_logits(logits, target, 0, temperature, impl)
        return _scores(ctx, (logits, target), [part], temperature, impl)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, target, *norm = ctx.saved_tensors
        slope, inputs = logits.clone(), _inputs(norm, *grads)
        logits_to_gradient(slope, target, *inputs, 0, ctx.temperature, ctx.impl)
        return slope, None, None, None


def _scores(
    ctx: Any, inputs: tuple[Tensor, ...], parts: list[Tensor], temperature: float, impl: Impl
) -> tuple[Tensor, Tensor]:
    """Combine reduced slices of the vocabulary into log-probabilities and entropies, fp32 [N].

    `ctx` keeps the inputs and the norm for `logits_to_gradient`.
    """
    peak, mass, fall, chosen = torch.stack(parts, 1).unbind()
    top = peak.amax(0)
    share = (peak - top).exp()
    fall = ((fall + (top - peak) * mass) * share).sum(0)
    mass = (mass * share).sum(0)
    # Keep them apart: their sum would be rounded to the precision of the largest logit.
    norm = top, mass.log(), fall / mass
    ctx.save_for_backward(*inputs, *norm)
    ctx.temperature, ctx.impl = temperature, impl
    ctx.set_materialize_grads(False)
    return chosen.amax(0) - top - norm[1], norm[1] + norm[2]


def _inputs(
    norm: list[Tensor], grad: Tensor | None, grad_entropy: Tensor | None
) -> tuple[Any, ...]:
    """Return the inputs of `logits_to_gradient`, from the gradients that a loss gave the scores."""
    grad = torch.zeros_like(norm[0]) if grad is None else grad.contiguous()
    return *norm, grad, None if grad_entropy is None else grad_entropy.contiguous()


def _slices(hidden: Tensor, weight: Tensor) -> Iterator[tuple[int, int]]:
    """Yield (first word, end) of each slice of the vocabulary."""
    words, row = len(weight), max(1, len(hidden)) * weight.element_size()
    width = max(_MIN_WORDS, SLICE_BYTES // row // _ALIGNED * _ALIGNED)
    yield from ((start, min(start + width, words)) for start in range(0, words, width))


# Registered as torch operations, so that the planner's fake tensors see a single kernel that
# allocates its result. The reference allocates more temporaries.


@torch.library.custom_op("trainer_bridge::reduce_logits", mutates_args=())
def reduce_logits(
    logits: Tensor, target: Tensor, start: int, temperature: float, impl: str = "auto"
) -> Tensor:
    """Reduce a slice of logits, [N, words], to four values per token.

    `target` is int64 [N]. The slice begins with word `start` of the vocabulary.

    Returns:
        fp32 [4, N] of z = logits / temperature: the maximum m of each row, the sum of exp(z - m),
        the sum of exp(z - m) * (m - z), and z of the target, -inf if the slice does not contain it.
    """
    if use_triton(impl, logits.device):  # type: ignore[arg-type]
        rows, words = logits.shape
        assert logits.stride(1) == 1 and target.is_contiguous()
        out = torch.empty((4, rows), dtype=torch.float32, device=logits.device)
        numbers = logits.stride(0), rows, words, start, temperature
        with torch.cuda.device_of(logits):
            _reduce[(rows,)](logits, target, out, *numbers, **_cut(words))
        return out
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
    top: Tensor,
    log_mass: Tensor,
    mean_fall: Tensor,
    grad: Tensor,
    grad_entropy: Tensor | None,
    start: int,
    temperature: float,
    impl: str = "auto",
) -> None:
    """Replace a slice of logits by their gradient.

    With p = softmax(z), the gradient of z is grad * (hit - p) - grad_entropy * p * (z - mean of z).

    Args:
        logits: [N, words], overwritten.
        target: int64 [N], the tokens.
        top: fp32 [N], the maximum of z = logits / temperature over the whole vocabulary.
        log_mass: fp32 [N], the logarithm of the sum of exp(z - top) over the whole vocabulary.
        mean_fall: fp32 [N], the mean of top - z over the distribution of each token.
        grad: fp32 [N], gradient of the targets' log-probabilities.
        grad_entropy: fp32 [N], gradient of the entropies; None stands for zeros and takes no time.
        start: Number of the first word in the vocabulary.
        temperature: Divides the logits.
        impl: Implementation to use.
    """
    if use_triton(impl, logits.device):  # type: ignore[arg-type]
        (rows, words), inputs = logits.shape, [target, top, log_mass, mean_fall, grad]
        assert logits.stride(1) == 1 and all(tensor.is_contiguous() for tensor in inputs)
        assert grad_entropy is None or grad_entropy.is_contiguous()
        numbers, how = (logits.stride(0), words, start, temperature), _cut(words)
        grid = rows, triton.cdiv(words, how["BLOCK"])
        with torch.cuda.device_of(logits):
            _to_gradient[grid](logits, *inputs, grad_entropy, *numbers, **how)
        return
    hit = torch.arange(start, start + logits.shape[1], device=logits.device) == target[:, None]
    fall = top[:, None] - logits.float() / temperature
    likely = (-fall - log_mass[:, None]).exp()
    slope = (hit.float() - likely) * (grad / temperature)[:, None]
    if grad_entropy is not None:
        slope += likely * (fall - mean_fall[:, None]) * (grad_entropy / temperature)[:, None]
    logits.copy_(slope)


@logits_to_gradient.register_fake
def _(*_: Any) -> None:
    """Return nothing: the operation works in place."""


def _cut(words: int) -> dict[str, int]:
    """Return the compile-time arguments for rows of `words` words."""
    block = min(_BLOCK, triton.next_power_of_2(words))
    return {"BLOCK": block, "num_warps": max(1, min(8, block // 256))}


@triton.jit(do_not_specialize=["rows", "start", "temperature"])
def _reduce(  # type: ignore[no-untyped-def]
    logits, target, out, stride, rows, words, start, temperature, BLOCK: tl.constexpr
):
    """Reduce one row, as program (row).

    When a block has a larger maximum, the previous sums are rescaled.
    """
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * stride
    # Below every logit, but finite, so that the difference to the first maximum is not NaN.
    peak, mass, fall = -1e38, 0.0, 0.0
    for first in range(0, words, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < words
        z = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
        z = tl.div_rn(z, temperature)
        top = tl.maximum(peak, tl.max(tl.where(inside, z, -1e38), 0))
        share = tl.exp(peak - top)
        fall = share * (fall + (top - peak) * mass)
        mass *= share
        power = tl.where(inside, tl.exp(z - top), 0.0)
        mass += tl.sum(power, 0)
        fall += tl.sum(power * (top - z), 0)
        peak = top
    word = tl.load(target + row) - start
    in_slice = (word >= 0) & (word < words)
    chosen = tl.load(source + word, mask=in_slice, other=float("-inf")).to(tl.float32)
    tl.store(out + row, peak)
    tl.store(out + rows + row, mass)
    tl.store(out + 2 * rows + row, fall)
    tl.store(out + 3 * rows + row, tl.div_rn(chosen, temperature))


@triton.jit(do_not_specialize=["start", "temperature"])
def _to_gradient(  # type: ignore[no-untyped-def]
    logits,
    target,
    top,
    log_mass,
    mean_fall,
    grad,
    grad_entropy,
    stride,
    words,
    start,
    temperature,
    BLOCK: tl.constexpr,
):
    """Compute the gradient of a block of logits, as program (row, block of words)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place, inside = logits + row * stride + at, at < words
    z = tl.div_rn(tl.load(place, mask=inside, other=0.0).to(tl.float32), temperature)
    hit = tl.where(at == tl.load(target + row) - start, 1.0, 0.0)
    below = z - tl.load(top + row)
    likely = tl.exp(below - tl.load(log_mass + row))
    slope = (hit - likely) * tl.div_rn(tl.load(grad + row), temperature)
    if grad_entropy is not None:  # known at compile time
        apart = likely * (below + tl.load(mean_fall + row))
        slope -= apart * tl.div_rn(tl.load(grad_entropy + row), temperature)
    tl.store(place, slope.to(logits.dtype.element_ty), mask=inside)


class ScoringHead(nn.Linear):
    """An output embedding that computes token scores in place of logits inside `scoring`.

    It replaces a linear layer, whose weight it shares. Outside of `scoring` it computes y = W x.
    """

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = layer.weight
        self.register_parameter("bias", None)
        self._asked: tuple[Tensor, Tensor, float, bool] | None = None

    @contextlib.contextmanager
    def scoring(
        self, at: Tensor, target: Tensor, temperature: float, entropy_grad: bool = False
    ) -> Iterator[None]:
        """Compute token scores inside the block, from hidden states [B, L, H].

        The model then returns fp32 [2, N] in place of logits: log-probabilities and entropies of
        tokens `target`, int64 [N]. `at`, int64 [N], has the positions in B * L that predict the
        tokens. The entropies have a gradient if `entropy_grad` is true.
        """
        self._asked = at, target, temperature, entropy_grad
        try:
            yield
        finally:
            self._asked = None

    def forward(self, x: Tensor) -> Tensor:
        if self._asked is None:
            return F.linear(x, self.weight)
        at, target, temperature, entropy_grad = self._asked
        hidden = x.flatten(0, 1).index_select(0, at)
        chosen, entropy = token_scores(hidden, self.weight, target, temperature)
        return torch.stack([chosen, entropy if entropy_grad else entropy.detach()])


def score_in_head(model: Any) -> None:
    """Replace the output embedding of a meta model by a `ScoringHead`, if it is a plain one.

    A plain one has no bias and no adapters, and its output is the model's. Some families cap or
    scale logits.
    """
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.bias is None and _ends_with(model, head):
        model.set_output_embeddings(ScoringHead(head))


def _ends_with(model: Any, head: nn.Linear) -> bool:
    """Return whether the model returns its head's output unchanged as logits.

    The model's forward runs with a stub decoder. If it needs more than the stub offers, the answer
    is False.
    """
    from transformers.modeling_outputs import MoeModelOutputWithPast

    states: Any = torch.empty((1, 1, head.in_features), dtype=head.weight.dtype, device="meta")
    scores = torch.empty((2, 1), device="meta")  # fp32, because some families cast logits to it
    decoder, hook = model.get_decoder(), head.register_forward_hook(lambda *_: scores)
    decoder.forward = lambda *_, **__: MoeModelOutputWithPast(last_hidden_state=states)
    try:
        ids = torch.zeros((1, 1), dtype=torch.int64, device="meta")
        return model(input_ids=ids, use_cache=False).logits is scores
    except (AttributeError, LookupError, TypeError):
        return False
    finally:
        hook.remove()
        del decoder.forward
