"""Prompts over replicas."""

from __future__ import annotations

import random

from rollout import SamplingParams
from trainer_bridge.dealing import deal_prompts


def test_every_prompt_is_dealt_once_and_nobody_has_much_more_to_do() -> None:
    rng = random.Random(0)
    prompts = [[0] * rng.randint(1, 200) for _ in range(41)]
    params = [SamplingParams(max_tokens=rng.randint(1, 50), n=rng.randint(1, 4)) for _ in prompts]
    work = [len(prompt) + each.n * each.max_tokens for prompt, each in zip(prompts, params, strict=True)]
    dealt = deal_prompts(prompts, params, 3)
    assert sorted(number for numbers in dealt for number in numbers) == list(range(41))
    assert dealt == [sorted(numbers) for numbers in dealt] == deal_prompts(prompts, params, 3)
    loads = [sum(work[number] for number in numbers) for numbers in dealt]
    assert max(loads) - min(loads) <= min(work) + max(work) // 10


def test_what_answers_take_counts_and_beams_too() -> None:
    prompts = [[0], [0], [0] * 8, [0] * 8]
    params = [SamplingParams(max_tokens=50, n=2), SamplingParams(max_tokens=10, beam_width=10)]
    params += [SamplingParams(max_tokens=2)] * 2
    assert deal_prompts(prompts, params, 2) == [[0, 2], [1, 3]]


def test_more_replicas_than_prompts() -> None:
    assert deal_prompts([[1]], [SamplingParams()], 3) == [[0], [], []]
    assert deal_prompts([], [], 2) == [[], []]
