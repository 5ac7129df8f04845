"""Sampling of tokens: distribution, filters, batch invariance, and fused kernels against torch."""

from collections.abc import Sequence
from itertools import product

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.ops.token_sampling import (
    SLOTS,
    HostResults,
    SamplingBatch,
    keep_top,
    sample,
    uniform,
    uniform_at,
)
from tests.helpers.case_selection import some

Row = tuple[float, int, float, tuple[int, int, int]]


def batch(
    rows: list[Row], device: str = "cpu", forced: Sequence[int] | None = None
) -> SamplingBatch:
    keys = ("temperature", "top_k", "top_p", "counters")
    columns = dict(zip(keys, zip(*rows, strict=True), strict=True))
    forced = forced or [-1] * len(rows)
    off = {"min_p": [0.0] * len(rows), "adjusted": [False] * len(rows)}
    return SamplingBatch.build(**columns, **off, forced=forced, device=torch.device(device))


def plain(temperatures: list[float], device: str, seed: int = 7) -> SamplingBatch:
    """Build a batch without filters."""
    return batch([(t, 0, 1.0, (seed, i, 3 * i)) for i, t in enumerate(temperatures)], device)


def logits(rows: int, vocab: int = 50) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)) * 3


def test_uniform_has_uniform_distribution_and_depends_on_every_counter() -> None:
    grid = torch.cartesian_prod(torch.arange(20), torch.arange(10), torch.arange(100))
    u = uniform(grid)
    assert u.dtype == torch.float64 and u.min() >= 0 and u.max() < 1
    assert len(u.unique()) == len(u)
    counts = torch.histc(u.float(), bins=50, min=0, max=1)
    assert ((counts - 400) ** 2 / 400).sum() < 110  # chi-square, 49 degrees of freedom, p = 1e-6
    by_seed = u.view(20, 10, 100)
    for moved in (by_seed.roll(1, 0), by_seed.roll(1, 1), by_seed.roll(1, 2)):
        assert abs(torch.corrcoef(torch.stack([by_seed.flatten(), moved.flatten()]))[0, 1]) < 0.04


@triton.jit
def _uniform_of_rows(counters, out):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    tl.store(out + row, uniform_at(counters + 3 * row, 3))


# NumPy warns about integer overflow of scalars
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_uniform_in_kernel_has_same_bits_as_in_torch(triton_device: str) -> None:
    extremes = torch.tensor([[0, 0, 0], [-1, -1, -1], [2**63 - 1, 1, 2**40], [-(2**63), 5, 0]])
    random = torch.randint(-(2**62), 2**62, (30, 3), generator=torch.Generator().manual_seed(1))
    counters = torch.cat([extremes, random]).to(triton_device)
    out = torch.empty(len(counters), dtype=torch.float64, device=triton_device)
    _uniform_of_rows[(len(counters),)](counters, out)
    assert torch.equal(out, uniform(counters))


def test_logprob_is_of_scaled_logits_before_filters(impl: str, device: str) -> None:
    x = logits(4).to(device)
    filters = [(0.5, 3, 0.9), (2.0, 0, 1.0), (0.0, 0, 1.0), (1.0, 1, 1.0)]
    rows: list[Row] = [(*options, (1, i, 0)) for i, options in enumerate(filters)]
    tokens, logprobs = sample(x, batch(rows, device), impl)  # type: ignore[arg-type]
    temperature = torch.tensor([[0.5], [2.0], [1.0], [1.0]], device=device)
    expected = torch.log_softmax(x / temperature, -1).gather(1, tokens[:, None]).squeeze(1)
    assert logprobs.dtype == torch.float32 and tokens.dtype == torch.int64
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-6)
    assert tokens[2] == x[2].argmax() and tokens[3] == x[3].argmax()


def test_row_has_same_bits_alone_and_in_batch(impl: str, device: str) -> None:
    if impl == "torch" and device != "cpu":
        pytest.skip("torch's sums on a GPU depend on the number of rows; kernels sample there")
    # some rows have filters, which must not change the path of the other rows
    filters = [
        (1, 0, 1.0), (0.7, 9, 1.0), (0, 0, 1.0), (2, 0, 1.0),
        (5, 1000, 0.5), (0.3, 3, 0.99), (0, 1, 0.01),
    ]  # fmt: skip
    x = logits(len(filters), 3000).to(device)
    rows: list[Row] = [(*options, (3, i, 0)) for i, options in enumerate(filters)]
    together, logprobs = sample(x, batch(rows, device), impl)  # type: ignore[arg-type]
    for i, row in enumerate(rows):
        alone, logprob = sample(x[i : i + 1], batch([row], device), impl)  # type: ignore[arg-type]
        assert alone.item() == together[i].item() and logprob.item() == logprobs[i].item()


@settings(max_examples=100)
@given(
    weights=st.lists(st.integers(0, 5), min_size=1, max_size=12).filter(any),
    top_k=st.integers(0, 13),
    top_p=st.floats(0.01, 1.0),
)
def test_keep_top_is_the_smallest_sufficient_set(
    weights: list[int], top_k: int, top_p: float
) -> None:
    # with integer weights, ties are common and sums are exact
    probs = torch.tensor([weights], dtype=torch.float32)
    kept = keep_top(probs, torch.tensor([top_k]), torch.tensor([top_p], dtype=torch.float64))[0]
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    order = order[: top_k or len(weights)]
    total, mass, expected = sum(weights[i] for i in order), 0, set()
    for i in order:
        if mass >= top_p * total:
            break
        expected.add(i)
        mass += weights[i]
    expected = {i for i in expected if weights[i]}
    assert {i for i in range(len(weights)) if kept[i] > 0} == expected
    assert all(kept[i] == weights[i] for i in expected)


@pytest.mark.parametrize(("top_k", "top_p"), [(4, 1.0), (0, 0.6), (6, 0.5)])
def test_filtered_tokens_are_never_drawn(top_k: int, top_p: float, impl: str, device: str) -> None:
    n = 500 if impl == "torch" or device != "cpu" else 20
    x = logits(1).to(device).expand(n, -1)
    probs = torch.softmax(x[:1].cpu(), -1)
    allowed = (
        keep_top(probs, torch.tensor([top_k]), torch.tensor([top_p], dtype=torch.float64))[0]
        .nonzero()
        .flatten()
    )
    tokens, _ = sample(x, batch([(1.0, top_k, top_p, (9, 0, i)) for i in range(n)], device), impl)  # type: ignore[arg-type]
    assert set(tokens.tolist()) <= set(allowed.tolist()) and len(set(tokens.tolist())) > 1


def assert_drawn_by_the_inverse_cdf(
    x: torch.Tensor, made: SamplingBatch, tokens: torch.Tensor
) -> None:
    """Check that u is between the cumulative probabilities before and after the token.

    The tolerance is the rounding of fp32 masses.
    """
    cdf = torch.softmax((x.float() / made.temperature).double(), -1).cumsum(-1)
    u = uniform(made.counters)
    after = cdf.gather(1, tokens[:, None]).squeeze(1)
    before = torch.where(
        tokens > 0, cdf.gather(1, (tokens[:, None] - 1).clamp(min=0)).squeeze(1), 0.0
    )
    drawn = ~made.greedy
    assert ((before - 2e-6 <= u) & (u < after + 2e-6))[drawn].all()


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
EVERY = list(product([1, 199, 2048, 5000], [FP32, BF16, FP16]))
FUSED = some((1, FP32), (199, BF16), (2048, FP16), (5000, FP32), whole=EVERY)


@pytest.mark.parametrize(("vocab", "dtype"), FUSED)
def test_unfiltered_sampling_equals_torch(
    vocab: int, dtype: torch.dtype, impl: str, device: str
) -> None:
    x = logits(12, vocab + 8).to(device, dtype)[:, :vocab]  # rows with a stride
    made = plain([0.0, 0.3, 1.0, 3.0] * 3, device)
    tokens, logprobs = sample(x, made, impl)  # type: ignore[arg-type]
    exact = (
        torch.log_softmax((x.float() / made.temperature).double(), -1)
        .gather(1, tokens[:, None])
        .squeeze(1)
    )
    # Masses are tree sums of positive terms with at most 13 roundings, and exponentials have an
    # error of 2 ulp: a relative error of 2**-20 of a mass is an absolute one of its logarithm.
    torch.testing.assert_close(logprobs.double(), exact, rtol=1e-6, atol=1e-6)
    assert torch.equal(tokens[::4], x[::4].float().argmax(-1))
    assert_drawn_by_the_inverse_cdf(x, made, tokens)
    reference, _ = sample(x, made, "torch")
    assert (tokens != reference).sum() <= 1  # a draw at the border of two tokens may select either


@pytest.mark.parametrize("vocab", [199, 5000])
def test_forced_tokens_replace_drawn_ones_with_log_probs_of_the_same_bits(
    vocab: int, impl: str, device: str
) -> None:
    x = logits(12, vocab + 8).to(device, BF16)[:, :vocab]
    options = [(0.3 * (row % 3), row % 2 * 9, 0.9, (1, row, 0)) for row in range(12)]
    tokens, logprobs = sample(x, batch(options, device), impl)  # type: ignore[arg-type]
    others = [(*option[:3], (2, row, 0)) for row, option in enumerate(options)]
    known = [-1 if row % 5 else token for row, token in enumerate(tokens.tolist())]
    forced = sample(x, batch(others, device, forced=known), impl)  # type: ignore[arg-type]
    drawn = sample(x, batch(others, device), impl)  # type: ignore[arg-type]
    for mine, first, second in zip(forced, (tokens, logprobs), drawn, strict=True):
        second[::5] = first[::5]
        assert torch.equal(mine, second)


@pytest.mark.parametrize("vocab", [199, 5000])
def test_greedy_selects_lowest_token_of_a_tie(vocab: int, impl: str, device: str) -> None:
    x = torch.zeros(4, vocab, device=device)
    x[1, [50, 120, vocab - 1]] = 2.0
    x[2, [120, vocab - 1]] = 2.0
    x[3, vocab - 1] = 2.0
    tokens, _ = sample(x, plain([0.0] * 4, device), impl)  # type: ignore[arg-type]
    assert tokens.tolist() == [0, 50, 120, vocab - 1]


@pytest.mark.parametrize("vocab", some(199, 5000, whole=[2048]))
def test_token_with_all_mass_is_drawn_with_log_prob_zero(
    vocab: int, impl: str, device: str
) -> None:
    ends = [0, vocab - 1, vocab // 2, min(2047, vocab - 1)]
    for low in (float("-inf"), -1e4):
        x = torch.full((8, vocab), low, device=device)
        for row in range(8):
            x[row, ends[row % 4]] = 5.0
        tokens, logprobs = sample(x, plain([1.0, 0.1, 0.0, 2.0] * 2, device), impl)  # type: ignore[arg-type]
        assert tokens.tolist() == ends * 2 and (logprobs == 0).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rows_with_nan_or_infinity_stay_in_vocabulary_and_do_not_change_other_rows(
    value: float, impl: str, device: str
) -> None:
    clean = logits(8, 4096).to(device)
    made = plain([0.0, 1.0] * 4, device)
    x = clean.clone()
    x[:2, 7] = value
    x[2:4] = value
    x[4:6, 2048:] = value
    tokens, logprobs = sample(x, made, impl)  # type: ignore[arg-type]
    assert ((tokens >= 0) & (tokens < 4096)).all()
    expected, expected_logprobs = sample(clean, made, impl)  # type: ignore[arg-type]
    assert torch.equal(tokens[6:], expected[6:])
    assert torch.equal(logprobs[6:], expected_logprobs[6:])


@pytest.mark.parametrize("choices", some(2048, 2049, whole=[1, 199, 4097, 4999]))
def test_only_the_first_choices_are_sampled_with_log_probs_over_all(
    choices: int, impl: str, device: str
) -> None:
    x = logits(12, 5000).to(device)
    x[4:, choices:] += 30.0
    x[8:, choices:] += 300.0  # masses of the choices round to 0 beside theirs
    made = plain([0.0, 0.3, 1.0, 3.0] * 3, device)
    tokens, logprobs = sample(x, made, impl, choices=choices)  # type: ignore[arg-type]
    few = x[:, :choices]
    assert torch.equal(tokens[::4], few[::4].argmax(-1))
    assert_drawn_by_the_inverse_cdf(few, made, tokens)
    z = (x / made.temperature).double()
    exact = torch.log_softmax(z, -1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs.double(), exact, rtol=1e-6, atol=1e-6)
    filtered = batch([(1.0, 5, 0.9, (1, i, 0)) for i in range(12)], device)
    drawn, _ = sample(x, filtered, impl, choices=choices)  # type: ignore[arg-type]
    ranked = few.gather(1, drawn[:, None]) <= few
    assert (drawn < choices).all() and (ranked.sum(1) <= 5).all()


def test_steps_of_a_graph_fill_the_slots_of_their_results_in_turn(triton_device: str) -> None:
    """Both implementations tell the host the last steps' tokens, and go on to the next position."""
    generator, count, seen = torch.Generator().manual_seed(0), 5, []
    for impl in ("torch", "triton"):
        device, state = torch.device(triton_device), dict[str, torch.Tensor]()
        results = HostResults.of(count + 3, device)
        state["rows"] = torch.tensor([3, 1, 0, 0, 2], device=device)  # two rows are padding
        state["last_tokens"] = torch.zeros(6, dtype=torch.int64, device=device)
        state["positions"] = torch.arange(count, device=device)
        state["counters"] = torch.arange(3 * count, device=device).view(count, 3)
        generator.manual_seed(0)
        for step in range(SLOTS + 2):
            tokens = torch.randint(99, (count,), generator=generator).to(device)
            tokens[3] = tokens[2]
            logprobs = torch.rand(count, generator=generator).to(device)
            results.add(tokens, logprobs, **state, impl=impl)  # type: ignore[arg-type]
            if device.type == "cuda":
                torch.cuda.synchronize()
            slot = step % SLOTS
            assert torch.equal(results.tokens[slot, :count], tokens.cpu())
            assert torch.equal(results.logprobs[slot, :count], logprobs.cpu())
            assert torch.equal(state["last_tokens"][state["rows"]], tokens)
        assert int(results.turn) == SLOTS + 2
        assert state["positions"].tolist() == [5, 6, 2, 3, 9]
        seen.append([*(tensor.cpu() for tensor in (*results[:2], *state.values()))])
    assert all(torch.equal(*pair) for pair in zip(*seen, strict=True))
