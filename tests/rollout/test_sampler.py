"""Sampling: distribution, filters, and independence of the batch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.sampler import SamplingBatch, keep_top, sample, uniform

CPU = torch.device("cpu")


def batch(rows: list[tuple[float, int, float, tuple[int, int, int]]]) -> SamplingBatch:
    temperature, top_k, top_p, counters = zip(*rows, strict=True)
    return SamplingBatch.build(temperature=temperature, top_k=top_k, top_p=top_p, counters=counters, device=CPU)


def logits(rows: int, vocab: int = 50) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)) * 3


def test_uniform_is_uniform_and_every_counter_matters() -> None:
    grid = torch.cartesian_prod(torch.arange(20), torch.arange(10), torch.arange(100))
    u = uniform(grid)
    assert u.dtype == torch.float64 and u.min() >= 0 and u.max() < 1
    assert len(u.unique()) == len(u)
    counts = torch.histc(u.float(), bins=50, min=0, max=1)
    assert ((counts - 400) ** 2 / 400).sum() < 110  # chi-square, 49 degrees of freedom, p = 1e-6
    by_seed = u.view(20, 10, 100)
    for other in (by_seed.roll(1, 0), by_seed.roll(1, 1), by_seed.roll(1, 2)):
        assert abs(torch.corrcoef(torch.stack([by_seed.flatten(), other.flatten()]))[0, 1]) < 0.04


def test_draws_follow_the_distribution() -> None:
    n, row = 20_000, torch.tensor([2.0, 1.0, 0.0, -1.0])
    tokens, _ = sample(row.expand(n, -1).contiguous(), batch([(0.7, 0, 1.0, (5, 0, i)) for i in range(n)]))
    seen = torch.bincount(tokens, minlength=4) / n
    assert (seen - torch.softmax(row / 0.7, 0)).abs().max() < 4 * math.sqrt(0.25 / n)


def test_logprob_is_before_the_filters_and_of_the_scaled_logits() -> None:
    x = logits(4)
    rows = [(0.5, 3, 0.9, (1, 0, 0)), (2.0, 0, 1.0, (1, 1, 0)), (0.0, 0, 1.0, (1, 2, 0)), (1.0, 1, 1.0, (1, 3, 0))]
    tokens, logprobs = sample(x, batch(rows))
    temperature = torch.tensor([[0.5], [2.0], [1.0], [1.0]])
    expected = torch.log_softmax(x / temperature, -1).gather(1, tokens[:, None]).squeeze(1)
    assert torch.equal(logprobs, expected) and logprobs.dtype == torch.float32
    assert tokens[2] == x[2].argmax() and tokens[3] == x[3].argmax()


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.3, 1.0, 5.0]),
            st.sampled_from([0, 1, 3, 49, 50, 1000]),
            st.sampled_from([0.01, 0.5, 0.99, 1.0]),
            st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 9), st.integers(0, 999)),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_a_row_does_not_depend_on_its_batch(rows: list) -> None:
    x = logits(8)[: len(rows)]
    together, logprobs = sample(x, batch(rows))
    for i, row in enumerate(rows):
        alone, logprob = sample(x[i : i + 1], batch([row]))
        assert alone.item() == together[i].item() and logprob.item() == logprobs[i].item()


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    weights=st.lists(st.integers(0, 5), min_size=1, max_size=12).filter(any),
    top_k=st.integers(0, 13),
    top_p=st.floats(0.01, 1.0),
)
def test_keep_top_is_the_smallest_sufficient_set(weights: list[int], top_k: int, top_p: float) -> None:
    """Integer weights: ties are common, and sums are exact."""
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
def test_filtered_tokens_are_never_drawn(top_k: int, top_p: float) -> None:
    x = logits(1).expand(500, -1).contiguous()
    probs = torch.softmax(x[:1], -1)
    allowed = keep_top(probs, torch.tensor([top_k]), torch.tensor([top_p], dtype=torch.float64))[0].nonzero().flatten()
    tokens, _ = sample(x, batch([(1.0, top_k, top_p, (9, 0, i)) for i in range(500)]))
    assert set(tokens.tolist()) <= set(allowed.tolist()) and len(set(tokens.tolist())) > 1


def test_impossible_tokens_are_never_drawn() -> None:
    x = torch.full((1000, 8), float("-inf"))
    x[:, [2, 5]] = 0.0
    tokens, logprobs = sample(x, batch([(1.0, 0, 1.0, (3, 0, i)) for i in range(1000)]))
    assert set(tokens.tolist()) == {2, 5}
    torch.testing.assert_close(logprobs, torch.full((1000,), math.log(0.5)))
