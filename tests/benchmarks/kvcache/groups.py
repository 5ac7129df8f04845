"""Prefill of a GRPO group of 8 on a prompt of 1,000 tokens: computed once and forked, against eight times."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

import torch

from rollout import Engine, SamplingParams
from tests.benchmarks.kvcache.base import REPEATS, Figure, Scale, elapsed_ms

GROUP = 8


def prefill(scale: Scale) -> list[Figure]:
    """Time of `generate` for one token a sample: the prefill, forks, sampling of the first token. All prompt tokens are
    in one step; no prefix cache. Qwen2.5-0.5B's shape in bf16, random weights; tiny: a tiny model."""
    length = scale.choose(1000, 40)
    with tempfile.TemporaryDirectory() as directory:
        engine = Engine.from_pretrained(
            _model(scale, Path(directory)),
            device=scale.device,
            dtype=torch.bfloat16 if scale.on_gpu else torch.float32,
            kv_tokens=16_384,
            max_context_len=2 * length,
            max_prefill_tokens=GROUP * length,
            cuda_graphs=False,
            prefix_cache=False,
        )
        (prompt,) = torch.randint(0, engine.model.vocab_size, (1, length)).tolist()
        group = SamplingParams(max_tokens=1, n=GROUP, seed=0)
        alone = SamplingParams(max_tokens=1, seed=0)
        shared, shared_tokens = _timed(scale, engine, [prompt], group)
        apart, apart_tokens = _timed(scale, engine, [prompt] * GROUP, alone)
        assert (shared_tokens, apart_tokens) == (length, GROUP * length)
        engine.saver.close()
    return [
        Figure(what=f"group of {GROUP}, {length:,} tokens, computed once", value=shared, unit="ms"),
        Figure(what=f"the same as {GROUP} requests", value=apart, unit="ms"),
        Figure(what="computed once, of the time as requests", value=shared / apart, unit="x", target="<= 1/6"),
    ]


def _model(scale: Scale, directory: Path) -> Path:
    if scale.tiny:
        from tests.helpers.models import save_tiny

        save_tiny(directory, "qwen3", head_dim=16)
    else:
        from tests.benchmarks.common import random_model

        random_model(directory, "0.5b", torch.bfloat16)
    return directory


def _timed(scale: Scale, engine: Engine, prompts: list[list[int]], params: SamplingParams) -> tuple[float, int]:
    """Median milliseconds of a call, and the tokens that it computes."""
    before = engine.stats.computed_tokens
    times = [elapsed_ms(scale, lambda: engine.generate(prompts, params)) for _ in range(REPEATS + 2)]
    return median(times[2:]), (engine.stats.computed_tokens - before) // (REPEATS + 2)
