"""Which replica of an engine answers which prompts. Plain data."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.types import SamplingParams


def deal_prompts(
    prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], replicas: int
) -> list[list[int]]:
    """Numbers of the prompts of every replica, ascending; the same for the same requests.

    The longest go first, each to the replica that has the least to do: so much at most as the
    tokens of the prompt and of all its answers.
    """
    work = [
        len(prompt) + max(each.n, each.beam_width) * each.max_tokens
        for prompt, each in zip(prompts, params, strict=True)
    ]
    dealt: list[list[int]] = [[] for _ in range(replicas)]
    load = [0] * replicas
    for number in sorted(range(len(work)), key=lambda number: (-work[number], number)):
        least = load.index(min(load))
        dealt[least].append(number)
        load[least] += work[number]
    return [sorted(numbers) for numbers in dealt]
