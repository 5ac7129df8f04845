"""Log-probabilities of tokens, with the same bits in a sampler and in a trainer.

The logits of a row are reduced in blocks of `BLOCK` words, which begin at multiples of `BLOCK`, to
a maximum and a sum of exponentials in fp32. The sums of the blocks are added in fp64. A trainer can
compute the logits in slices of whole blocks.

A kernel whose reductions must agree with those of another kernel has the same number of warps, and
does not specialize on the alignment of what is reduced: the layout of a reduction, and with it the
order of additions, follows from both.
"""

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # words
BLOCK_WARPS = 4  # of a program that reduces a block
ROW_WARPS = 8  # of a program that adds the blocks of a row


def block_sums(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return z by block, [R, blocks, BLOCK], its maxima, and sums of exp(z - maximum), [R, blocks].

    z is fp32 [R, words], from a multiple of `BLOCK` on.
    """
    blocks = F.pad(z, (0, -z.shape[1] % BLOCK), value=float("-inf")).unflatten(1, (-1, BLOCK))
    peaks = blocks.amax(-1)
    return blocks, peaks, exp_below(blocks, peaks[..., None]).sum(-1)


def exp_below(z: Tensor, peak: Tensor) -> Tensor:
    """Return exp(z - peak), or 0 where the peak is -inf."""
    return (z - peak.masked_fill(peak == float("-inf"), 0.0)).exp()


def row_sums(peaks: Tensor, masses: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maximum of each row, fp32 [R], and the sum of its exponentials, fp64 [R]."""
    top = peaks.amax(1)
    return top, (masses * exp_below(peaks, top[:, None])).double().sum(1)


def log_prob(z: Tensor, top: Tensor, total: Tensor) -> Tensor:
    """Return the log-probabilities, fp32 [R], of words with logits `z`."""
    return (z.double() - top.double() - total.log()).float()


@triton.jit
def scaled(logits, temperature, at, vocab):  # type: ignore[no-untyped-def]
    """Return logits / temperature in fp32; -inf past the vocabulary."""
    z = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    if temperature != 1.0:
        z = tl.div_rn(z, temperature)
    return z


@triton.jit
def exp_under(z, peak):  # type: ignore[no-untyped-def]
    """Compute `exp_below`."""
    return tl.exp(z - tl.where(peak == float("-inf"), 0.0, peak))


@triton.jit
def block_sum(logits, temperature, block, vocab, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scale a block of a row's logits to z; return z, max(z), exp(z - max(z)) and its sum."""
    z = scaled(logits, temperature, block * BLOCK + tl.arange(0, BLOCK), vocab)
    peak = tl.max(z, 0)
    power = exp_under(z, peak)
    return z, peak, power, tl.sum(power, 0)


@triton.jit
def row_sum(peaks, masses, row, blocks, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the blocks' maxima and masses below the row's maximum, that maximum, and the sum.

    Masses and their sum are fp64. BLOCKS is the next power of two of the number of blocks.
    """
    block = tl.arange(0, BLOCKS)
    inside = block < blocks
    block_peak = tl.load(peaks + row * blocks + block, mask=inside, other=float("-inf"))
    mass = tl.load(masses + row * blocks + block, mask=inside, other=0.0)
    peak = tl.max(block_peak, 0)
    mass = (mass * exp_under(block_peak, peak)).to(tl.float64)
    return block_peak, mass, peak, tl.sum(mass, 0)


@triton.jit
def log_prob_of(z, peak, total):  # type: ignore[no-untyped-def]
    """Compute `log_prob` in fp64."""
    return z.to(tl.float64) - peak.to(tl.float64) - tl.log(total)
