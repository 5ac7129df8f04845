"""An engine of a real shape with random weights, and prefill of a GRPO group of 8 on a prompt of
1,000 tokens by it: computed once and forked, against eight times.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rollout import Engine, SamplingParams
from tests.benchmarks.common import TINY, Figure, Figures, Scale, Times, write_config

GROUP = 8


@contextmanager
def random_engine(scale: Scale, shape: str, **config: Any) -> Iterator[Engine]:
    """A Qwen2.5 shape ("7b") in bf16; tiny: two layers in fp32. The same weights every time, made
    on the device: reading 15 GB takes longer than all the rest. Closed at the end.
    """
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.from_pretrained(
            write_config(Path(folder), shape, **(TINY if scale.tiny else {})),
            device=scale.device,
            dtype=torch.bfloat16 if scale.on_gpu else torch.float32,
            cuda_graphs=False,
            load_weights=False,
            **config,
        )
    try:
        _define_weights(scale, engine)
        yield engine
    finally:
        engine.saver.close()


def _define_weights(scale: Scale, engine: Engine) -> None:
    """Norms of 1, and else what keeps the size of activations."""
    dice = torch.Generator(scale.device).manual_seed(0)
    deviation = 1 / math.sqrt(engine.model.hidden_size)

    def weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if "norm" in name:
            return torch.ones(shape)
        return torch.randn(shape, generator=dice, device=scale.device, dtype=torch.bfloat16).mul_(
            deviation
        )

    shapes = {piece.name: piece.global_shape for piece in engine.manifest.slices}
    engine.store.load(
        ((name, weight(name, shape)) for name, shape in shapes.items()), "random weights"
    )


def prefill(scale: Scale) -> Figures:
    """Time of `generate` for one token a sample: the prefill, forks, sampling of the first token.
    All prompt tokens are in one step; no prefix cache. Qwen2.5-7B's shape; of smaller ones the host
    takes longer than the device.
    """
    length = scale.choose(1000, 40)
    config = {
        "kv_tokens": 16_384,
        "max_context_len": 2 * length,
        "max_prefill_tokens": GROUP * length,
    }
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
        Figure(
            what="computed once, of the time as requests",
            value=shared / apart,
            unit="x",
            target="<= 1/6",
        ),
    ]


def _timed(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> tuple[float, int]:
    """Median milliseconds of a call, and the tokens that it computes."""
    before, times = engine.stats.computed_tokens, Times()
    for _ in times.rounds:
        times("ms", lambda: engine.generate(prompts, params))
    return times.medians["ms"], (engine.stats.computed_tokens - before) // len(times.rounds)
