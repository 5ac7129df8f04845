"""An engine of a real shape with random weights, for cases of `bench_kvcache.py`."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rollout import Engine
from tests.benchmarks.common import TINY, Scale, write_config


@contextmanager
def random_engine(scale: Scale, shape: str, **config: Any) -> Iterator[Engine]:
    """A Qwen2.5 shape ("7b") in bf16; tiny: two layers in fp32. The same weights every time, made on the device:
    reading 15 GB takes longer than all the rest. Closed at the end."""
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
        return torch.randn(shape, generator=dice, device=scale.device, dtype=torch.bfloat16).mul_(deviation)

    shapes = {piece.name: piece.global_shape for piece in engine.manifest.slices}
    engine.store.load(((name, weight(name, shape)) for name, shape in shapes.items()), "random weights")
