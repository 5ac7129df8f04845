"""Log-probabilities and entropies of tokens without the logits of the whole vocabulary.

Logits exist for one slice of the vocabulary at a time. The vocabulary is divided, not the tokens,
so the gradient of a slice's embeddings is one product over all tokens, rounded once. Sums over the
slices are only as large as the hidden states.

Log-probabilities have the bits of `rollout.ops.log_softmax`, whatever the slices.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from memsaver.system.devices import Impl, use_triton
from memsaver.system.replaced import having
from rollout.ops.log_softmax import (
    BLOCK,
    BLOCK_WARPS,
    ROW_WARPS,
    block_sum,
    block_sums,
    exp_below,
    exp_under,
    log_prob,
    log_prob_of,
    row_sum,
    row_sums,
)
from rollout.ops.row_wise import same_products
from trainer_bridge.ops.exact import linear
from trainer_bridge.ops.operation import operation, warps

SLICE_BYTES = 128 << 20  # of logits; 16,384 words of 4,096 tokens in bf16 are an efficient product
_WIDTHS = tuple(BLOCK << power for power in range(5))  # of slices; few, because each is probed
_GRADIENTS = 4096  # words of a program that computes gradients


def token_scores(
    hidden: Tensor, weight: Tensor, target: Tensor, temperature: float, impl: Impl = "auto"
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities of tokens, and the entropies of their distributions, fp32 [N].

    The log-probabilities are log_softmax(hidden @ weight.T / temperature)[target], of hidden states
    [N, H], the output embedding `weight` [V, H] of the same dtype, and `target` int64 [N]. Logits
    are rounded to the dtype of the inputs, as in a linear layer. All else is fp32.

    Both results have gradients. That of the entropies takes time only where a loss depends on them.
    """
    return _TokenScores.apply(hidden, weight, target, temperature, impl)


def logit_scores(
    logits: Tensor, target: Tensor, temperature: float, impl: Impl = "auto"
) -> tuple[Tensor, Tensor]:
    """Compute the results of `token_scores` from logits [N, V] in any float dtype.

    The only temporary as large as the logits is their gradient.
    """
    return _LogitScores.apply(logits, target, temperature, impl)


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, temperature: float, impl: Impl
    ) -> tuple[Tensor, Tensor]:
        ctx.slices = _slices(hidden, weight)
        ctx.products = same_products(hidden.device)
        parts = [
            reduce_logits(_logits(hidden, weight[start:stop]), target, start, temperature, impl)
            for start, stop in ctx.slices
        ]
        return _scores(ctx, (hidden, weight, target), parts, temperature, impl)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, target, *norm = ctx.saved_tensors
        inputs = _inputs(norm, *grads)
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for start, stop in ctx.slices:
            words = weight[start:stop]
            with ctx.products():
                logits = _logits(hidden, words)
            logits_to_gradient(logits, target, *inputs, start, ctx.temperature, ctx.impl)
            grad_hidden += F.linear(logits, words.t())
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
    # The norm's parts stay apart: their sum would be rounded to the precision of the largest logit.
    logprob, entropy, *norm = combine_blocks(torch.cat(parts, 2), impl).unbind()
    ctx.save_for_backward(*inputs, *norm)
    ctx.temperature, ctx.impl = temperature, impl
    ctx.set_materialize_grads(False)
    return logprob, entropy


def _logits(hidden: Tensor, words: Tensor) -> Tensor:
    """Compute logits with the same bits in forward and backward.

    The gradient divides differences between a logit and the sum of all by the temperature.
    """
    return linear(hidden, words, None)


def _inputs(
    norm: list[Tensor], grad: Tensor | None, grad_entropy: Tensor | None
) -> tuple[Any, ...]:
    """Return the inputs of `logits_to_gradient`, from the gradients that a loss gave the scores."""
    grad = torch.zeros_like(norm[0]) if grad is None else grad.contiguous()
    return *norm, grad, None if grad_entropy is None else grad_entropy.contiguous()


def _slices(hidden: Tensor, weight: Tensor) -> list[tuple[int, int]]:
    """Return (first word, end) of each slice of the vocabulary."""
    words, row = len(weight), max(1, len(hidden)) * weight.element_size()
    width = max(width for width in _WIDTHS if width * row <= SLICE_BYTES or width == BLOCK)
    return [(start, min(start + width, words)) for start in range(0, words, width)]


def slice_widths(words: int) -> set[int]:
    """Return all numbers of words that a slice of a vocabulary of `words` can have."""
    return {min(width, words) for width in _WIDTHS} | {words % width for width in _WIDTHS} - {0}


# The references allocate more temporaries than the kernels, which a plan counts.


def _blocks(logits: Tensor) -> int:
    return triton.cdiv(logits.shape[1], BLOCK)


def _reduced(logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty((4, len(logits), _blocks(logits)), dtype=torch.float32)


@operation(_reduced)
def reduce_logits(
    logits: Tensor, target: Tensor, start: int, temperature: float, impl: str = "auto"
) -> Tensor:
    """Reduce a slice of logits, [N, words], to four values per token and block of words.

    `target` is int64 [N]. The slice begins with word `start` of the vocabulary, a multiple of
    `BLOCK`.

    Returns:
        fp32 [4, N, blocks] of z = logits / temperature: the maximum m of each block, the sum of
        exp(z - m), the sum of exp(z - m) * (m - z), and z of the target, -inf in other blocks.
    """
    (rows, words), blocks = logits.shape, _blocks(logits)
    if use_triton(impl, logits.device):  # type: ignore[arg-type]
        assert logits.stride(1) == 1 and target.is_contiguous()
        out = torch.empty((4, rows, blocks), dtype=torch.float32, device=logits.device)
        numbers = logits.stride(0), rows, words, blocks, start, temperature
        if rows:
            with torch.cuda.device_of(logits):
                _reduce[(rows, blocks)](
                    logits, target, out, *numbers, BLOCK=BLOCK, num_warps=BLOCK_WARPS
                )
        return out
    z, peaks, masses = block_sums(logits.float() / temperature)
    fall = (peaks[..., None] - z).masked_fill(z == -torch.inf, 0.0)
    falls = (exp_below(z, peaks[..., None]) * fall).sum(-1)
    at = (target - start)[:, None]
    hit = torch.arange(z.shape[1] * BLOCK, device=z.device) == at
    chosen = z.masked_fill(~hit.unflatten(1, (-1, BLOCK)), -torch.inf).amax(-1)
    return torch.stack([peaks, masses, falls, chosen])


@operation(lambda parts, *_: parts.new_empty((5, parts.shape[1])))
def combine_blocks(parts: Tensor, impl: str = "auto") -> Tensor:
    """Combine the results of `reduce_logits` for all blocks of the vocabulary, [4, N, blocks].

    Returns:
        fp32 [5, N]: the target's log-probability, the entropy, and of z over the vocabulary the
        maximum, the logarithm of the sum of exp(z - maximum), and the mean of maximum - z.
    """
    _, rows, blocks = parts.shape
    if use_triton(impl, parts.device):  # type: ignore[arg-type]
        assert parts.is_contiguous()
        out = torch.empty((5, rows), dtype=torch.float32, device=parts.device)
        if rows:
            power = triton.next_power_of_2(blocks)
            with torch.cuda.device_of(parts):
                _combine[(rows,)](*parts, out, rows, blocks, BLOCKS=power, num_warps=ROW_WARPS)
        return out
    peaks, masses, falls, chosen = parts
    top, total = row_sums(peaks, masses)
    below = (top[:, None] - peaks).masked_fill(masses == 0, 0.0)
    share = exp_below(peaks, top[:, None])
    mean_fall = ((falls + below * masses) * share).double().sum(1) / total
    log_mass = total.log()
    scores = [log_prob(chosen.amax(1), top, total), log_mass + mean_fall, top, log_mass, mean_fall]
    return torch.stack([score.float() for score in scores])


@operation(lambda *_: None, mutates_args=("logits",))
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


def _cut(words: int) -> dict[str, int]:
    """Return the compile-time arguments for rows of `words` words."""
    block = min(_GRADIENTS, triton.next_power_of_2(words))
    return {"BLOCK": block, "num_warps": warps(block)}


@triton.jit(
    do_not_specialize=["stride", "rows", "words", "start", "temperature"],
    do_not_specialize_on_alignment=["logits"],
)
def _reduce(  # type: ignore[no-untyped-def]
    logits, target, out, stride, rows, words, blocks, start, temperature, BLOCK: tl.constexpr
):
    """Reduce a block of a row, as program (row, block)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    z, peak, power, mass = block_sum(logits + row * stride, temperature, block, words, BLOCK)
    fall = tl.sum(power * (peak - tl.where(power > 0, z, peak)), 0)
    hit = block * BLOCK + tl.arange(0, BLOCK) == tl.load(target + row) - start
    to, apart = out + row * blocks + block, rows.to(tl.int64) * blocks
    tl.store(to, peak)
    tl.store(to + apart, mass)
    tl.store(to + 2 * apart, fall)
    tl.store(to + 3 * apart, tl.max(tl.where(hit, z, float("-inf")), 0))


@triton.jit(
    do_not_specialize=["rows", "blocks"], do_not_specialize_on_alignment=["peaks", "masses"]
)
def _combine(  # type: ignore[no-untyped-def]
    peaks, masses, falls, chosen, out, rows, blocks, BLOCKS: tl.constexpr
):
    """Combine the blocks of a row, as program (row)."""
    row = tl.program_id(0).to(tl.int64)
    block_peak, mass, peak, total = row_sum(peaks, masses, row, blocks, BLOCKS)
    block = tl.arange(0, BLOCKS)
    at, inside = row * blocks + block, block < blocks
    z = tl.max(tl.load(chosen + at, mask=inside, other=float("-inf")), 0)
    fall = tl.load(falls + at, mask=inside, other=0.0) * exp_under(block_peak, peak)
    fall += (peak - tl.where(mass > 0, block_peak, peak)) * mass.to(tl.float32)
    mean_fall = tl.sum(fall.to(tl.float64), 0) / total
    log_mass = tl.log(total)
    tl.store(out + row, log_prob_of(z, peak, total).to(tl.float32))
    tl.store(out + rows + row, (log_mass + mean_fall).to(tl.float32))
    tl.store(out + 2 * rows + row, peak)
    tl.store(out + 3 * rows + row, log_mass.to(tl.float32))
    tl.store(out + 4 * rows + row, mean_fall.to(tl.float32))


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

    def scoring(
        self, at: Tensor, target: Tensor, temperature: float, entropy_grad: bool = False
    ) -> AbstractContextManager[None]:
        """Compute token scores inside the block, from hidden states [B, L, H].

        The model then returns fp32 [2, N] in place of logits: log-probabilities and entropies of
        tokens `target`, int64 [N]. `at`, int64 [N], has the positions in B * L that predict the
        tokens. The entropies have a gradient if `entropy_grad` is true.
        """
        return having(self, _asked=(at, target, temperature, entropy_grad))

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
