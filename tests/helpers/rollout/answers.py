"""Prompts, and what engines answer to them: against transformers, and against each other."""

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
"""How far two fp32 computations of one log-probability of these models may be apart. Each goes
through about 15 products, one behind the other, of sums of at most 80 terms, in an order of its
own: 2 * 15 * 80 roundings of up to 2**-24 of logits of about 5, which walk to sqrt(2400) * 2**-24 *
5 = 1.5e-5 in the mean square; of a few thousand such gaps none is beyond 3.5 of these.
"""
STATES_GAP = 2e-4
"""The same where gated delta nets pass a state on from token to token, in which roundings pile up:
with five layers one fp32 forward of transformers is up to 9e-5 from its own fp64 one (mean 3.5e-6),
and two may be twice as far apart. A state that is not carried on, or another request's, shows as
1e-2 and more.
"""
MEAN_GAP = 1e-5
"""The mean of |gap| of such a walk is 0.8 of 1.5e-5, and less where logits are smaller."""

CLOSE = 3e-6
"""Of attention's outputs, below 5, in fp32: a product of up to 64 terms for a score, whose error
the softmax passes on, and a mean of up to 4097 values whose weights add up to 1: the roundings walk
to about sqrt(2 * 64) * 2**-24 * 4.
"""


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, SIZES["vocab_size"], (n,), generator=generator).tolist() for n in lengths
    ]


def random_groups(
    rng: random.Random, roots: Sequence[list[int]]
) -> tuple[list[list[int]], SamplingParams]:
    """Up to six prompts over a few beginnings, with up to three greedy answers each."""
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
    """Log-probabilities are those of one forward over prompt and answer, as a trainer computes
    them. At temperature 0 each token is the likeliest after those before it, which makes the answer
    the greedy one.
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


def assert_same(mine: Sequence[Completion], its: Sequence[Completion], atol: float = GAP) -> None:
    """The same tokens, log-probabilities equal but for the order of sums."""
    assert [each.token_ids for each in mine] == [each.token_ids for each in its]
    for one, other in zip(mine, its, strict=True):
        torch.testing.assert_close(
            torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=atol, rtol=0
        )


def run(
    engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY
) -> list[Completion]:
    """The first answer to each prompt; everything adds up after every step."""
    out = engine.generate(prompts, params, on_progress=lambda *_: engine.check_integrity())
    engine.check_integrity()
    return firsts(out)


def spent(
    engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY
) -> tuple[int, int]:
    """(computed, hit) tokens of one call."""
    before = engine.stats
    run(engine, prompts, params)
    after = engine.stats
    return (
        after.computed_tokens - before.computed_tokens,
        after.prefix_hit_tokens - before.prefix_hit_tokens,
    )
