"""Prefill of a GRPO group of 8 on a prompt of 1,000 tokens: computed once and forked, against eight times."""

from __future__ import annotations

from statistics import median

import torch

from rollout import Engine, SamplingParams
from tests.benchmarks.kvcache.base import REPEATS, Figure, Scale, elapsed_ms
from tests.benchmarks.kvcache.engines import random_engine

GROUP = 8


def prefill(scale: Scale) -> list[Figure]:
    """Time of `generate` for one token a sample: the prefill, forks, sampling of the first token. All prompt tokens are
    in one step; no prefix cache. Qwen2.5-7B's shape; of smaller ones the host takes longer than the device."""
    length = scale.choose(1000, 40)
    config = {"kv_tokens": 16_384, "max_context_len": 2 * length, "max_prefill_tokens": GROUP * length}
    with random_engine(scale, "7b", prefix_cache=False, **config) as engine:
        (prompt,) = torch.randint(0, engine.model.vocab_size, (1, length)).tolist()
        group = SamplingParams(max_tokens=1, n=GROUP, seed=0)
        alone = SamplingParams(max_tokens=1, seed=0)
        shared, shared_tokens = _timed(scale, engine, [prompt], group)
        apart, apart_tokens = _timed(scale, engine, [prompt] * GROUP, alone)
        assert (shared_tokens, apart_tokens) == (length, GROUP * length)
    return [
        Figure(what=f"group of {GROUP}, {length:,} tokens, computed once", value=shared, unit="ms"),
        Figure(what=f"the same as {GROUP} requests", value=apart, unit="ms"),
        Figure(what="computed once, of the time as requests", value=shared / apart, unit="x", target="<= 1/6"),
    ]


def _timed(scale: Scale, engine: Engine, prompts: list[list[int]], params: SamplingParams) -> tuple[float, int]:
    """Median milliseconds of a call, and the tokens that it computes."""
    before = engine.stats.computed_tokens
    times = [elapsed_ms(scale, lambda: engine.generate(prompts, params)) for _ in range(REPEATS + 2)]
    return median(times[2:]), (engine.stats.computed_tokens - before) // (REPEATS + 2)
