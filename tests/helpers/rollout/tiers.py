"""Engines with a prefix cache, a small pool, and host and disk tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache.pools import TokenPool
from rollout import Engine, KVTiers
from rollout.scheduling.tiers import TieredBlocks
from tests.helpers.rollout.answers import random_prompts
from tests.helpers.rollout.poison import fill

PAGE = 4


def make(path: Path, **fields: Any) -> Engine:
    """Build an engine without tiers."""
    return Engine.from_pretrained(path, **{"kv_tokens": 512, "page_size": PAGE, **fields})


def tiered(
    path: Path,
    kv_tokens: int = 128,
    device: str = "cpu",
    engine: dict[str, Any] | None = None,
    **tiers: Any,
) -> Engine:
    """Build an engine with a small pool and, by default, a host tier with room for all pages."""
    fields = {"host_ratio": 8.0} | tiers if "host_bytes" not in tiers else tiers
    return make(path, kv_tokens=kv_tokens, device=device, tiers=KVTiers(**fields), **(engine or {}))


def blocks_of(engine: Engine) -> TieredBlocks:
    assert isinstance(engine.prefixes, TieredBlocks)
    return engine.prefixes


def swap_if(engine: Engine, chosen: Callable[[], bool]) -> None:
    """Swap out the preempted samples for which `chosen()` is true; recompute the others."""
    blocks = blocks_of(engine)
    swap_out = blocks.swap_out
    blocks.swap_out = lambda *args: swap_out(*args) if chosen() else None  # type: ignore[method-assign]


def lose_device(engine: Engine) -> None:
    """Fill the pool with NaN, except page 0, as a pause and a resume may leave it."""
    assert isinstance(engine.kv_pool, TokenPool)
    fill(engine.kv_pool, slice(PAGE, None))


def conversations() -> list[list[int]]:
    """Return prompts that share beginnings of 0, 30, 61 and 64 tokens, one of them twice."""
    (base,) = random_prompts((64,), seed=1)
    tails = random_prompts((5, 9, 3, 20), seed=2)
    return [base[:n] + tail for n, tail in zip((0, 30, 61, 64), tails, strict=True)] + [base, base]


@contextmanager
def failing(owner: Any, method: str, at: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace a method so that its call number `at` fails, which must happen in the block."""
    steps, original = iter(range(at)), getattr(owner, method)

    def fail(*args: Any) -> Any:
        if next(steps, None) is None:
            raise ZeroDivisionError
        return original(*args)

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(owner, method, fail)
        yield


def out_of_memory(*arguments: object) -> Any:
    raise torch.OutOfMemoryError("no room")
