"""Prefill of a GRPO group of 8 on a prompt of 1,000 tokens: computed once and forked, against eight times."""

from __future__ import annotations

import torch

from rollout import Engine, SamplingParams
from tests.benchmarks.common import Figure, Figures, Scale, Times
from tests.benchmarks.kvcache.engines import random_engine

GROUP = 8


def prefill(scale: Scale) -> Figures:
    """Time of `generate` for one token a sample: the prefill, forks, sampling of the first token. All prompt tokens are
    in one step; no prefix cache. Qwen2.5-7B's shape; of smaller ones the host takes longer than the device."""
    length = scale.choose(1000, 40)
    config = {"kv_tokens": 16_384, "max_context_len": 2 * length, "max_prefill_tokens": GROUP * length}
    with random_engine(scale, "7b", prefix_cache=False, **config) as engine:
        (prompt,) = torch.randint(0, engine.model.vocab_size, (1, length)).tolist()
        group = SamplingParams(max_tokens=1, n=GROUP, seed=0)
        alone = SamplingParams(max_tokens=1, seed=0)
        shared, shared_tokens = _timed(engine, [prompt], group)
        apart, apart_tokens = _timed(engine, [prompt] * GROUP, alone)
        assert (shared_tokens, apart_tokens) == (length, GROUP * length)
    return [
        Figure(what=f"group of {GROUP}, {length:,} tokens, computed once", value=shared),
        Figure(what=f"the same as {GROUP} requests", value=apart),
        Figure(what="computed once, of the time as requests", value=shared / apart, unit="x", target="<= 1/6"),
    ]


def _timed(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> tuple[float, int]:
    """Median milliseconds of a call, and the tokens that it computes."""
    before, times = engine.stats.computed_tokens, Times()
    for _ in times.rounds:
        times("ms", lambda: engine.generate(prompts, params))
    return times.medians["ms"], (engine.stats.computed_tokens - before) // len(times.rounds)
