"""Engines with a small pool and tiers below it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvcache.pools.token import TokenPool
from rollout import Engine, KVTiers
from rollout.tiered_blocks import TieredBlocks

PAGE = 4


def tiered(
    path: Path, kv_tokens: int = 128, device: str = "cpu", engine: dict[str, Any] | None = None, **tiers: Any
) -> Engine:
    """An engine with a small pool and a host that has room for all, unless told otherwise."""
    fields = {"host_ratio": 8.0} | tiers if "host_bytes" not in tiers else tiers
    return Engine.from_pretrained(
        path, kv_tokens=kv_tokens, page_size=PAGE, device=device, tiers=KVTiers(**fields), **(engine or {})
    )


def blocks_of(engine: Engine) -> TieredBlocks:
    assert isinstance(engine.prefixes, TieredBlocks)
    return engine.prefixes


def poison(engine: Engine) -> None:
    """What a pause and a resume may leave, but for page 0."""
    assert isinstance(engine.kv_pool, TokenPool)
    for part in engine.kv_pool.stored.values():
        part[:, PAGE:].view(torch.uint8).fill_(255)
