"""Sampling without filters in Triton: two reads of the logits in all, one of them of a single block
a row.

The first kernel reduces blocks of the vocabulary to their maximum and their mass; the second
chooses a block by the masses before it, and a token inside by the same rule. Masses and their sums
are added in fp64, so that the draw resolves unlikely tokens as the torch path does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from memsaver.common.hash import GOLDEN, MUL1, MUL2

_BLOCK = 2048  # vocabulary entries of a program
_DELIVERED = 1024  # tokens of a program
_SENT = 4096  # elements of a program
_GOLDEN, _MUL1, _MUL2 = tl.constexpr(GOLDEN), tl.constexpr(MUL1), tl.constexpr(MUL2)


def sample_triton(
    logits: Tensor, temperature: Tensor, greedy: Tensor, counters: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens int64 [R] and log-probabilities fp32 [R] from floating-point logits [R, vocab] of any
    row stride.

    temperature fp32 [R, 1], greedy bool [R], counters int64 [R, C], all contiguous. Tokens are
    below vocab even for a row with NaN, and have a positive probability in any other row.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1 and all(
        each.is_contiguous() for each in (temperature, greedy, counters)
    )
    blocks = triton.cdiv(vocab, _BLOCK)
    peaks, masses = torch.empty((2, rows, blocks), dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):
        _reduce_blocks[(rows, blocks)](
            logits, temperature, peaks, masses, logits.stride(0), vocab, blocks, BLOCK=_BLOCK
        )
        _choose[(rows,)](
            logits, temperature, greedy, counters, peaks, masses, tokens, logprobs,
            logits.stride(0), vocab, blocks, COUNTERS=counters.shape[1],
            BLOCK=_BLOCK, BLOCKS=triton.next_power_of_2(blocks), num_warps=8,
        )  # fmt: skip
    return tokens, logprobs


def deliver(tokens: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of both in pinned host memory, once the current stream has made them.

    tokens int64, logprobs fp32, of one shape and contiguous, on a GPU. A kernel writes them: a copy
    of a few bytes waits behind what other streams move to the host, and one to pageable memory
    keeps every other thread from the driver until the step has been computed.
    """
    host_tokens = torch.empty(tokens.shape, dtype=torch.int64, pin_memory=True)
    host_logprobs = torch.empty(tokens.shape, dtype=torch.float32, pin_memory=True)
    count = tokens.numel()
    with torch.cuda.device_of(tokens):
        _deliver[(triton.cdiv(count, _DELIVERED),)](
            tokens, logprobs, host_tokens, host_logprobs, count, BLOCK=_DELIVERED
        )
        torch.cuda.current_stream().synchronize()
    return host_tokens, host_logprobs


def send(tensor: Tensor) -> Tensor:
    """A copy in pinned host memory, which is there when the current stream has come so far; made as
    by `deliver`. tensor: contiguous, on a GPU.
    """
    sent = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    count = tensor.numel()
    if count:
        with torch.cuda.device_of(tensor):
            _send[(triton.cdiv(count, _SENT),)](tensor, sent, count, BLOCK=_SENT)
    return sent


@triton.jit
def _send(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


@triton.jit
def _deliver(  # type: ignore[no-untyped-def]
    tokens, logprobs, host_tokens, host_logprobs, count, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(host_tokens + at, tl.load(tokens + at, mask=at < count), mask=at < count)
    tl.store(host_logprobs + at, tl.load(logprobs + at, mask=at < count), mask=at < count)


@triton.jit
def uniform(counters, COUNTERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """`rollout.serving.sampler.uniform` of the row of counters at a pointer, bit for bit: fp64 in
    [0, 1) of 48 bits.
    """
    state = _splitmix64(tl.load(counters).to(tl.uint64, bitcast=True))
    for column in tl.static_range(1, COUNTERS):
        state = _splitmix64(state ^ tl.load(counters + column).to(tl.uint64, bitcast=True))
    return (state >> 16).to(tl.int64).to(tl.float64) * 2.0**-48


@triton.jit
def _splitmix64(x):  # type: ignore[no-untyped-def]
    """`memsaver.common.hash.splitmix64` of a uint64."""
    x = (x + 1) * _GOLDEN
    x = (x ^ (x >> 30)) * _MUL1
    x = (x ^ (x >> 27)) * _MUL2
    return x ^ (x >> 31)


@triton.jit
def _scaled(logits, temperature, at, vocab):  # type: ignore[no-untyped-def]
    """fp32 logits / temperature, the quotient that a trainer computes; -inf past the vocabulary."""
    z = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    if temperature != 1.0:
        z = tl.div_rn(z, temperature)
    return z


@triton.jit
def _exp_below(z, peak):  # type: ignore[no-untyped-def]
    """exp(z - peak); 0 where all is -inf."""
    return tl.exp(z - tl.where(peak == float("-inf"), 0.0, peak))


@triton.jit
def _reduce_blocks(  # type: ignore[no-untyped-def]
    logits, temperature, peaks, masses, stride, vocab, blocks, BLOCK: tl.constexpr
):
    """Program (row, block): max of z = logits / temperature, and the sum of exp(z - max)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    z = _scaled(logits + row * stride, tl.load(temperature + row), at, vocab)
    peak = tl.max(z, 0)
    tl.store(peaks + row * blocks + block, peak)
    tl.store(masses + row * blocks + block, tl.sum(_exp_below(z, peak), 0))


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    logits, temperature, greedy, counters, peaks, masses, tokens, logprobs, stride, vocab, blocks,
    COUNTERS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Program (row): a greedy row takes the first maximum, others the first token with cumulative
    mass > u * total.

    A parallel scan need not be monotonic in its last bit, hence the test for mass and the fallback
    to the last entry that has any.
    """
    row = tl.program_id(0).to(tl.int64)
    is_greedy = tl.load(greedy + row) != 0
    block = tl.arange(0, BLOCKS)
    inside = block < blocks
    block_peak = tl.load(peaks + row * blocks + block, mask=inside, other=float("-inf"))
    mass = tl.load(masses + row * blocks + block, mask=inside, other=0.0)
    peak = tl.max(block_peak, 0)
    mass = (mass * _exp_below(block_peak, peak)).to(tl.float64)
    total = tl.sum(mass, 0)
    target = uniform(counters + row * COUNTERS, COUNTERS) * total
    hit = tl.where(is_greedy, block_peak == peak, (tl.cumsum(mass, 0) > target) & (mass > 0))
    chosen = tl.min(tl.where(hit, block, BLOCKS), 0)
    chosen = tl.where(chosen < blocks, chosen, tl.max(tl.where(mass > 0, block, 0), 0))
    before = tl.sum(tl.where(block < chosen, mass, 0.0), 0)
    share = (target - before) / tl.sum(tl.where(block == chosen, mass, 0.0), 0)

    at = chosen * BLOCK + tl.arange(0, BLOCK)
    z = _scaled(logits + row * stride, tl.load(temperature + row), at, vocab)
    weight = _exp_below(z, tl.max(z, 0)).to(tl.float64)
    hit = tl.where(
        is_greedy, z == peak, (tl.cumsum(weight, 0) > share * tl.sum(weight, 0)) & (weight > 0)
    )
    token = tl.min(tl.where(hit, at, vocab), 0)
    token = tl.where(token < vocab, token, tl.max(tl.where(weight > 0, at, chosen * BLOCK), 0))
    logit = tl.sum(tl.where(at == token, z, 0.0), 0)
    logprob = logit.to(tl.float64) - peak.to(tl.float64) - tl.log(total)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, logprob.to(tl.float32))
