"""Sampling by counter-based random numbers and inverse-CDF selection, one row per sample.

The random number of a token depends only on (seed, sample index, position), and each row is
computed independently. Batch, chunking and preemption therefore do not change a sample's draws.

The Triton path, which has no filters, reads all logits once and then one block of each row again.
The first kernel reduces blocks of the vocabulary to their maximum and their mass. The second kernel
selects a block by the cumulative mass, and a token within the block by the same rule. Masses are
summed in fp64, so that draws resolve unlikely tokens as in the torch path.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from memsaver.ops.hash import GOLDEN, MUL1, MUL2, splitmix64
from memsaver.ops.layout import send_together
from memsaver.system.devices import Impl, use_triton
from rollout.ops.adjustments import Adjustment, Adjustments
from rollout.ops.log_softmax import (
    BLOCK,
    BLOCK_WARPS,
    ROW_WARPS,
    block_sum,
    block_sums,
    exp_under,
    log_prob,
    log_prob_of,
    row_sum,
    row_sums,
    scaled,
)

_UNIFORM_BITS = 48  # fewer than the 53 of a double, so that u * total stays below total
_DELIVERED = 1024  # tokens per program
_SENT = 4096  # elements per program
SLOTS = 3  # steps whose tokens may be unread, with the one that is launched
_GOLDEN, _MUL1, _MUL2 = tl.constexpr(GOLDEN), tl.constexpr(MUL1), tl.constexpr(MUL2)


@dataclass(frozen=True)
class SamplingBatch:
    """Sampling parameters of R rows, on the device."""

    temperature: Tensor  # fp32 [R, 1]; 1 for greedy rows
    greedy: Tensor  # bool [R]
    top_k: Tensor  # int64 [R]; 0 disables the filter
    top_p: Tensor  # fp64 [R]; 1 disables the filter
    counters: Tensor  # int64 [R, 3]: seed, sample index, position
    any_random: bool  # whether any row is not greedy
    # Rows that need more than a temperature, see `are_special`, int64 [F]; None if there are none.
    special_rows: Tensor | None
    forced: Tensor  # int64 [F]: the token of each special row that is not drawn; -1: none
    min_p: Tensor  # fp64 [R]; 0 disables the filter
    adjustments: Adjustments | None = None  # of the special rows

    @classmethod
    def build(
        cls,
        *,
        temperature: npt.ArrayLike,
        top_k: npt.ArrayLike,
        top_p: npt.ArrayLike,
        counters: npt.ArrayLike,
        forced: npt.ArrayLike,
        min_p: npt.ArrayLike,
        adjusted: npt.ArrayLike,
        adjustments: Sequence[Adjustment] = (),
        device: torch.device,
    ) -> "SamplingBatch":
        """Copy parameters of R rows to the device; a temperature of 0 means greedy.

        `counters` are [R, 3], all others [R]. `forced` is -1 where no token is forced.
        `adjustments` are those of the rows that are `adjusted`.
        """
        scale, greedy = divisors(temperature)
        k, p = np.array(top_k, dtype=np.int64), np.array(top_p, dtype=np.float64)
        known = np.array(forced, dtype=np.int64)
        least, other = np.array(min_p, dtype=np.float64), np.array(adjusted, dtype=np.bool_)
        special = np.flatnonzero(are_special(greedy, k, p, known, least, other))
        counts = np.array(counters, dtype=np.int64)
        host = (scale[:, None], greedy, k, p, counts, special, known[special], least)
        sent = send_together([torch.from_numpy(part) for part in host], device)
        heat, is_greedy, top, mass, places, rows, tokens, minimum = sent
        changed = None
        if adjustments:
            at = np.searchsorted(special, np.flatnonzero(other))
            changed = Adjustments.of(dict(zip(at.tolist(), adjustments, strict=True)), device)
        return cls(
            heat, is_greedy, top, mass, places, not greedy.all(), rows if len(special) else None,
            tokens, minimum, changed,
        )  # fmt: skip

    @classmethod
    def plain(cls, temperature: Tensor, greedy: Tensor, counters: Tensor) -> "SamplingBatch":
        """Return a batch without filters or forced tokens, of tensors on the device."""
        none = counters.new_empty(0)
        off = none.double()
        return cls(temperature, greedy, none, off, counters, True, None, none, off)

    def only_special(self, rows: Tensor) -> "SamplingBatch":
        """Return the batch of `rows`, int64 [F], which are all special."""
        names = ("temperature", "greedy", "top_k", "top_p", "counters", "min_p")
        parts = {name: getattr(self, name)[rows] for name in names}
        return replace(self, **parts, special_rows=torch.arange(len(rows), device=rows.device))


def divisors(temperature: npt.ArrayLike) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Return the numbers by which logits are divided, 1 for greedy rows, and which rows these are.

    Rows are greedy if their temperature is 0 in fp32.
    """
    scale = np.array(temperature, dtype=np.float32)
    greedy = scale == 0
    scale[greedy] = 1.0
    return scale, greedy


def are_special(
    greedy: npt.NDArray[np.bool_],
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
    forced: npt.NDArray[np.int64],
    min_p: npt.NDArray[np.float64],
    adjusted: npt.NDArray[np.bool_],
) -> npt.NDArray[np.bool_]:
    """Return which rows have a filter, a forced token or adjusted logits, see `SamplingBatch`."""
    return (forced >= 0) | adjusted | (~greedy & ((top_k > 0) | (top_p < 1) | (min_p > 0)))


def uniform(counters: Tensor) -> Tensor:
    """Hash each row of counters, int64 [R, C], to a number in [0, 1), fp64 [R]."""
    state = splitmix64(counters[:, 0])
    for column in range(1, counters.shape[1]):
        state = splitmix64(state ^ counters[:, column])
    bits = (state >> (64 - _UNIFORM_BITS)) & ((1 << _UNIFORM_BITS) - 1)
    return bits.double() * 2.0**-_UNIFORM_BITS


def sample(
    logits: Tensor, batch: SamplingBatch, impl: Impl = "auto", *, choices: int | None = None
) -> tuple[Tensor, Tensor]:
    """Sample a token from each row of logits [R, vocab].

    The log-probability is log_softmax(logits / temperature)[token] over the whole row, before all
    filters and adjustments, with temperature 1 for greedy rows; `log_softmax` defines its bits. A
    forced token is taken in place of a sampled one, and its log-probability has the same bits.
    Logits are fp32, bf16 or fp16 and converted to fp32 first. Elements of a row are contiguous; the
    row stride is arbitrary. Only the first `choices` tokens are sampled; None: all.

    Returns:
        Tokens int64 [R] and their log-probabilities fp32 [R], on the device.
    """
    sampler = _sample_triton if use_triton(impl, logits.device) else _sample_torch
    return sampler(logits, batch, choices or logits.shape[1])


def _sample_torch(logits: Tensor, batch: SamplingBatch, choices: int) -> tuple[Tensor, Tensor]:
    tokens, z = _choose_torch(logits.float(), batch, choices)
    _, peaks, masses = block_sums(z)
    chosen = z.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return tokens, log_prob(chosen, *row_sums(peaks, masses))


def _choose_torch(logits: Tensor, batch: SamplingBatch, choices: int) -> tuple[Tensor, Tensor]:
    """Return a token of each row of fp32 logits, int64 [R], and logits / temperature.

    Adjustments change which token is chosen, not what is returned of the logits.
    """
    z = logits / batch.temperature
    if batch.adjustments is not None:
        own = batch.adjustments.apply(logits[batch.special_rows])
        logits = logits.index_put((batch.special_rows,), own)
    heated = z if batch.adjustments is None else logits / batch.temperature
    tokens = logits[:, :choices].argmax(dim=-1)
    if batch.any_random:
        drawn = _draw(torch.log_softmax(heated[:, :choices], dim=-1), batch)
        tokens = torch.where(batch.greedy, tokens, drawn)
    if (rows := batch.special_rows) is not None:
        tokens[rows] = torch.where(batch.forced < 0, tokens[rows], batch.forced)
    return tokens, z


def likeliest(logits: Tensor, count: int, choices: int) -> tuple[Tensor, Tensor]:
    """Return the `count` most likely of the first `choices` tokens of each row, best first.

    Tokens and their log-probabilities over the whole row are [R, count], int64 and fp32.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    values, tokens = logprobs[:, :choices].topk(count, dim=-1)
    return tokens, values


def _draw(logprobs: Tensor, batch: SamplingBatch) -> Tensor:
    """Draw tokens by inverse CDF: the first token whose cumulative probability exceeds u * total.

    A row with NaN yields an arbitrary token of the vocabulary.
    """
    probs = logprobs.exp()
    if batch.special_rows is not None:
        rows = batch.special_rows
        own = probs[rows]
        least = batch.min_p[rows].unsqueeze(1) * own.amax(dim=-1, keepdim=True)
        own = own.masked_fill(own < least, 0.0)
        probs[rows] = keep_top(own, batch.top_k[rows], batch.top_p[rows])
    cdf = probs.cumsum(dim=-1, dtype=torch.float64)
    target = uniform(batch.counters).unsqueeze(1) * cdf[:, -1:]
    return torch.searchsorted(cdf, target, right=True).squeeze(1).clamp_(max=cdf.shape[1] - 1)


def keep_top(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set probabilities outside top-k, then outside top-p of the rest, to 0 without renormalizing.

    Top-p keeps the smallest set of most likely tokens whose probability reaches top_p of the sum
    after top-k; the set is never empty. Of equal probabilities, the lower token id comes first.
    `probs` and the result are [R, vocab], top_k int64 [R] (0 disables the filter), and top_p fp64
    [R].
    """
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    limit = torch.where(top_k > 0, top_k, probs.shape[-1]).unsqueeze(1)
    ordered = ordered.masked_fill(rank >= limit, 0.0)
    mass = ordered.cumsum(dim=-1, dtype=torch.float64)
    before = mass - ordered
    ordered = ordered.masked_fill(before >= top_p.unsqueeze(1) * mass[:, -1:], 0.0)
    return torch.zeros_like(probs).scatter_(1, order, ordered)


def _sample_triton(logits: Tensor, batch: SamplingBatch, choices: int) -> tuple[Tensor, Tensor]:
    """Sample by kernels, and choose the tokens of special rows by torch.

    The kernels also choose for special rows, to keep the grid the same. Sampled tokens are below
    `choices` even for a row with NaN; in all other rows their probability is positive.
    """
    rows, vocab = logits.shape
    temperature, greedy, counters = batch.temperature, batch.greedy, batch.counters
    contiguous = (tensor.is_contiguous() for tensor in (temperature, greedy, counters))
    assert logits.stride(1) == 1 and all(contiguous)
    blocks = triton.cdiv(vocab, BLOCK)
    special, power = batch.special_rows, triton.next_power_of_2(blocks)
    peaks, masses = torch.empty((2, rows, blocks), dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):
        _reduce_blocks[(rows, blocks)](
            logits, temperature, peaks, masses, logits.stride(0), vocab, blocks, BLOCK=BLOCK,
            num_warps=BLOCK_WARPS,
        )  # fmt: skip
        _choose[(rows,)](
            logits, temperature, greedy, counters, peaks, masses, tokens, logprobs,
            logits.stride(0), vocab, choices, blocks, COUNTERS=counters.shape[1],
            BLOCK=BLOCK, BLOCKS=power, num_warps=ROW_WARPS,
        )  # fmt: skip
        if special is not None:
            own = batch.only_special(special)
            tokens[special] = _choose_torch(logits[special].float(), own, choices)[0]
            _score[(len(special),)](
                logits, temperature, peaks, masses, special, tokens, logprobs, logits.stride(0),
                vocab, blocks, BLOCKS=power, num_warps=ROW_WARPS,
            )  # fmt: skip
    return tokens, logprobs


class Sent(NamedTuple):
    """Tokens and log-probabilities on their way to host memory, int64 and fp32 of one shape."""

    tokens: Tensor
    logprobs: Tensor
    copied: torch.cuda.Event | None = None  # the end of the copy; None: they have arrived

    def arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Wait for the copy; return both as arrays."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.tokens.numpy(), self.logprobs.numpy()


class HostResults(NamedTuple):
    """Host memory for the tokens of the last steps of a graph, which fills its slots in turn."""

    tokens: Tensor  # int64 [SLOTS, B]
    logprobs: Tensor  # fp32 [SLOTS, B]
    turn: Tensor  # int64 [1] on the device: number of steps so far

    @classmethod
    def of(cls, count: int, device: torch.device) -> Self:
        """Allocate results of `count` rows."""
        pinned = device.type == "cuda"
        tokens = torch.zeros((SLOTS, count), dtype=torch.int64, pin_memory=pinned)
        logprobs = torch.zeros((SLOTS, count), dtype=torch.float32, pin_memory=pinned)
        return cls(tokens, logprobs, torch.zeros(1, dtype=torch.int64, device=device))

    def add(
        self,
        tokens: Tensor,
        logprobs: Tensor,
        rows: Tensor,
        last_tokens: Tensor,
        positions: Tensor,
        counters: Tensor,
        impl: Impl = "auto",
    ) -> None:
        """End a step of B rows: fill the next slot, and go on to the next position.

        Rows 0 are padding, and keep theirs.

        Args:
            tokens: The step's tokens, int64 [B].
            logprobs: Their log-probabilities, fp32 [B].
            rows: Rows of the request table, int64 [B].
            last_tokens: Receives each row's token, int64 [rows of the table].
            positions: Are increased by 1, int64 [B].
            counters: Their last column is increased by 1, int64 [B, C].
            impl: Implementation; "auto" uses Triton on a GPU.
        """
        count, (slots, width) = len(tokens), self.tokens.shape
        if use_triton(impl, tokens.device):
            with torch.cuda.device_of(tokens):
                _end_step[(triton.cdiv(count, _DELIVERED),)](
                    tokens, logprobs, self.tokens, self.logprobs, self.turn, rows, last_tokens,
                    positions, counters, count, width, COUNTERS=counters.shape[1], SLOTS=slots,
                    BLOCK=_DELIVERED,
                )  # fmt: skip
        else:
            slot = int(self.turn) % slots
            self.tokens[slot, :count], self.logprobs[slot, :count] = tokens, logprobs
            last_tokens[rows] = tokens
            positions += rows != 0
            counters[:, -1] += 1
        self.turn.add_(1)


def to_host(tokens: Tensor, logprobs: Tensor) -> Sent:
    """Start to copy both tensors to host memory, on the current stream.

    A kernel writes GPU tensors to pinned memory. A copy of a few bytes would wait behind transfers
    of other streams to the host, and a copy to pageable memory would block other threads' driver
    calls until the step is computed. `tokens` are contiguous int64, and `logprobs` contiguous fp32
    of the same shape.
    """
    if tokens.device.type != "cuda":
        return Sent(tokens, logprobs)
    host_tokens = torch.empty(tokens.shape, dtype=torch.int64, pin_memory=True)
    host_logprobs = torch.empty(tokens.shape, dtype=torch.float32, pin_memory=True)
    count = tokens.numel()
    with torch.cuda.device_of(tokens):
        _deliver[(triton.cdiv(count, _DELIVERED),)](
            tokens, logprobs, host_tokens, host_logprobs, count, BLOCK=_DELIVERED
        )
        copied = torch.cuda.Event(blocking=True)  # a thread that sleeps gets a busy core sooner
        copied.record()
        return Sent(host_tokens, host_logprobs, copied)


def send(tensor: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Copy a contiguous GPU tensor to pinned host memory by a kernel on the current stream.

    Return the pinned memory, and the end of the copy. See `to_host` for why a kernel copies.
    """
    sent = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    count = tensor.numel()
    if count:
        with torch.cuda.device_of(tensor):
            _send[(triton.cdiv(count, _SENT),)](tensor, sent, count, BLOCK=_SENT)
    return sent, torch.cuda.current_stream(tensor.device).record_event()


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


@triton.jit(do_not_specialize=["count", "width"])
def _end_step(  # type: ignore[no-untyped-def]
    tokens, logprobs, host_tokens, host_logprobs, turn, rows, last_tokens, positions, counters,
    count, width, COUNTERS: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute `HostResults.add`, except for the turn. Programs: (block of rows)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    to = tl.load(turn) % SLOTS * width + at
    token = tl.load(tokens + at, mask=inside)
    tl.store(host_tokens + to, token, mask=inside)
    tl.store(host_logprobs + to, tl.load(logprobs + at, mask=inside), mask=inside)
    row = tl.load(rows + at, mask=inside)
    tl.store(last_tokens + row, token, mask=inside)
    position = tl.load(positions + at, mask=inside)
    tl.store(positions + at, tl.where(row == 0, position, position + 1), mask=inside)
    counter = counters + at * COUNTERS + COUNTERS - 1
    tl.store(counter, tl.load(counter, mask=inside) + 1, mask=inside)


@triton.jit
def uniform_at(counters, COUNTERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Hash the row of counters at a pointer, bitwise as `uniform`: fp64 in [0, 1) of 48 bits."""
    state = _splitmix64(tl.load(counters).to(tl.uint64, bitcast=True))
    for column in tl.static_range(1, COUNTERS):
        state = _splitmix64(state ^ tl.load(counters + column).to(tl.uint64, bitcast=True))
    return (state >> 16).to(tl.int64).to(tl.float64) * 2.0**-48


@triton.jit
def _splitmix64(x):  # type: ignore[no-untyped-def]
    """Compute `memsaver.ops.hash.splitmix64` of a uint64."""
    x = (x + 1) * _GOLDEN
    x = (x ^ (x >> 30)) * _MUL1
    x = (x ^ (x >> 27)) * _MUL2
    return x ^ (x >> 31)


@triton.jit(
    do_not_specialize=["stride", "vocab"],
    do_not_specialize_on_alignment=["logits", "peaks", "masses"],
)
def _reduce_blocks(  # type: ignore[no-untyped-def]
    logits, temperature, peaks, masses, stride, vocab, blocks, BLOCK: tl.constexpr
):
    """Reduce z = logits / temperature to max(z) and sum(exp(z - max)). Programs: (row, block)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source, heat = logits + row * stride, tl.load(temperature + row)
    _, peak, _, mass = block_sum(source, heat, block, vocab, BLOCK)
    tl.store(peaks + row * blocks + block, peak)
    tl.store(masses + row * blocks + block, mass)


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["peaks", "masses"])
def _choose(  # type: ignore[no-untyped-def]
    logits, temperature, greedy, counters, peaks, masses, tokens, logprobs, stride, vocab, choices,
    blocks, COUNTERS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Choose one of the first `choices` tokens of each row. Programs: (row).

    A greedy row takes the first maximum, other rows the first token with cumulative mass > u *
    total. A parallel scan may not be monotonic in its last bit, hence the test for positive mass
    and the fallback to the last entry with positive mass.
    """
    row = tl.program_id(0).to(tl.int64)
    is_greedy = tl.load(greedy + row) != 0
    source, heat = logits + row * stride, tl.load(temperature + row)
    block = tl.arange(0, BLOCKS)
    block_peak, mass, peak, total = row_sum(peaks, masses, row, blocks, BLOCKS)
    own_peak, own_total = peak, total  # of the tokens to choose from
    if choices < vocab:
        last = (choices - 1) // BLOCK
        _, last_peak, _, last_mass = block_sum(source, heat, last, choices, BLOCK)
        block_peak = tl.where(block < last, block_peak, float("-inf"))
        block_peak = tl.where(block == last, last_peak, block_peak)
        mass = tl.load(masses + row * blocks + block, mask=block < last, other=0.0)
        mass = tl.where(block == last, last_mass, mass)
        own_peak = tl.max(block_peak, 0)
        mass = (mass * exp_under(block_peak, own_peak)).to(tl.float64)
        own_total = tl.sum(mass, 0)
    target = uniform_at(counters + row * COUNTERS, COUNTERS) * own_total
    hit = tl.where(is_greedy, block_peak == own_peak, (tl.cumsum(mass, 0) > target) & (mass > 0))
    chosen = tl.min(tl.where(hit, block, BLOCKS), 0)
    chosen = tl.where(chosen < blocks, chosen, tl.max(tl.where(mass > 0, block, 0), 0))
    before = tl.sum(tl.where(block < chosen, mass, 0.0), 0)
    share = (target - before) / tl.sum(tl.where(block == chosen, mass, 0.0), 0)

    at = chosen * BLOCK + tl.arange(0, BLOCK)
    z = scaled(source, heat, at, choices)
    weight = exp_under(z, tl.max(z, 0)).to(tl.float64)
    hit = tl.where(
        is_greedy, z == own_peak, (tl.cumsum(weight, 0) > share * tl.sum(weight, 0)) & (weight > 0)
    )
    token = tl.min(tl.where(hit, at, choices), 0)
    token = tl.where(token < choices, token, tl.max(tl.where(weight > 0, at, chosen * BLOCK), 0))
    logit = tl.sum(tl.where(at == token, z, 0.0), 0)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, log_prob_of(logit, peak, total).to(tl.float32))


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["peaks", "masses"])
def _score(  # type: ignore[no-untyped-def]
    logits, temperature, peaks, masses, rows, tokens, logprobs, stride, vocab, blocks,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Compute the log-probability of the token of a row of `rows`. Programs: (entry of `rows`)."""
    row = tl.load(rows + tl.program_id(0))
    _, _, peak, total = row_sum(peaks, masses, row, blocks, BLOCKS)
    z = scaled(logits + row * stride, tl.load(temperature + row), tl.load(tokens + row), vocab)
    tl.store(logprobs + row, log_prob_of(z, peak, total).to(tl.float32))
