"""Prompts, and checks of engines' answers against transformers and against each other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from rollout import Completion, Engine, SamplingParams
from tests.helpers.models import SIZES

GREEDY = SamplingParams(max_tokens=8, temperature=0)
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 128,
}  # fmt: skip
GAP = 5e-5
"""Largest difference of two fp32 computations of one log-prob of these models.

Each computation is a chain of about 15 products with sums of at most 80 terms, in a different
order. That makes 2 * 15 * 80 roundings of up to 2**-24 on logits of about 5, a random walk of
sqrt(2400) * 2**-24 * 5 = 1.5e-5 in the mean square. Of a few thousand differences, none exceeds 3.5
times that.
"""
STATES_GAP = 2e-4
"""The same for gated delta nets, whose states accumulate roundings from token to token.

With five layers, an fp32 forward of transformers differs by up to 9e-5 from its fp64 forward (mean
3.5e-6), and two fp32 forwards may differ by twice as much. A lost state, or the state of another
request, differs by 1e-2 or more.
"""
MEAN_GAP = 1e-5
"""Largest mean of |difference|: 0.8 of 1.5e-5 for such a walk, and less for smaller logits."""

CLOSE = 3e-6
"""Tolerance for attention's outputs in fp32, which are below 5.

A score is a product of up to 64 terms, whose error passes through the softmax, and an output is a
mean of up to 4097 values with weights that sum to 1. The roundings walk to about
sqrt(2 * 64) * 2**-24 * 4.
"""


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, SIZES["vocab_size"], (n,), generator=generator).tolist() for n in lengths
    ]


def random_groups(
    rng: random.Random, roots: Sequence[list[int]]
) -> tuple[list[list[int]], SamplingParams]:
    """Draw up to six prompts over a few beginnings, with up to three greedy answers each."""
    prompts = [
        rng.choice(roots)[: rng.randrange(1, 61)]
        + [rng.randrange(199) for _ in range(rng.randrange(1, 9))]
        for _ in range(rng.randrange(2, 7))
    ]
    tokens = rng.randrange(10, 35)
    return prompts, SamplingParams(max_tokens=tokens, temperature=0, n=rng.randrange(1, 4))


def ids(out: Sequence[Sequence[Completion]]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in samples] for samples in out]


def firsts(out: Sequence[Sequence[Completion]]) -> list[Completion]:
    return [samples[0] for samples in out]


@torch.no_grad()
def check(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    out: Sequence[Sequence[Completion]],
    temperature: float = 0,
) -> None:
    """Check that log-probs equal those of one forward over prompt and answer, as trainers run it.

    At temperature 0, also check that each token is the likeliest one, so that answers are greedy.
    """
    gaps = []
    for prompt, samples in zip(prompts, out, strict=True):
        for sample in samples:
            tokens = torch.tensor([prompt + sample.token_ids], device=model.device)
            logits = model(tokens).logits[0, len(prompt) - 1 : -1].float().cpu()
            if temperature == 0:
                assert sample.token_ids == logits.argmax(-1).tolist(), (
                    f"prompt of {len(prompt)} tokens"
                )
            logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)
            chosen = logprobs.gather(1, torch.tensor(sample.token_ids)[:, None]).squeeze(1)
            gaps.append(torch.tensor(sample.logprobs) - chosen)
    gap = torch.cat(gaps).abs()
    most = STATES_GAP if model.config.model_type == "qwen3_next" else GAP
    assert gap.mean() <= MEAN_GAP and gap.max() <= most, (
        f"mean {gap.mean():.2g}, largest {gap.max():.2g}"
    )


def assert_same(
    actual: Sequence[Completion], expected: Sequence[Completion], atol: float = GAP
) -> None:
    """Check that tokens are equal, and log-probs equal up to the order of sums."""
    assert [sample.token_ids for sample in actual] == [sample.token_ids for sample in expected]
    for left, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(
            torch.tensor(left.logprobs), torch.tensor(right.logprobs), atol=atol, rtol=0
        )


def run(
    engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY
) -> list[Completion]:
    """Return the first answer to each prompt; check the engine's integrity after every step."""
    out = engine.generate(prompts, params, on_progress=lambda *_: engine.check_integrity())
    engine.check_integrity()
    return firsts(out)


def spent(
    engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY
) -> tuple[int, int]:
    """Return the computed tokens and the prefix cache hits of one call."""
    before = engine.stats
    run(engine, prompts, params)
    after = engine.stats
    return (
        after.computed_tokens - before.computed_tokens,
        after.prefix_hit_tokens - before.prefix_hit_tokens,
    )
