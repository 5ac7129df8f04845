"""NaN in every slot of an engine's pools that no query may read."""

from __future__ import annotations

from typing import Any

import torch

from kvcache import SWAKVPool
from kvcache.pools.token import TokenPool
from rollout import Engine


def fill(pool: TokenPool, slots: Any, value: float = float("nan")) -> None:
    """`value` into `slots` of all that the pool stores; what is stored as bytes is filled with 0xFF: NaN as fp8, the
    largest scales of FP4."""
    for part in pool.stored.values():
        part[:, slots] = value if part.is_floating_point() else 0xFF


def poison(engine: Engine, *_: int, value: float = float("nan")) -> dict[str, int]:
    """Fill all slots, page 0 too, but those of the prefix cache and those of computed tokens that a later query sees.
    How many running samples keep, by pool: "kv", and "window" where sliding layers have one of their own."""
    cache, table = engine.cache, engine.cache.table.req_to_token
    pool = cache.pool
    views: list[tuple[str, Any, int | None, Any]] = [("kv", pool, cache.window, None)]
    if isinstance(pool, SWAKVPool):
        assert cache.sliding is not None
        views = [("kv", pool.full_pool, cache.window, None), ("window", pool.window_pool, *cache.sliding)]
    kept = {}
    for name, each, window, mapping in views:
        keep = torch.zeros(next(iter(each.stored.values())).shape[1], dtype=torch.bool, device=table.device)
        for sample in engine.scheduler.running:
            assert sample.handle is not None
            known = len(sample.computed_tokens())
            slots = table[sample.handle.row, max(0, known - window + 1) if window else 0 : known].long()
            keep[slots if mapping is None else mapping[slots]] = True
        if mapping is not None:
            assert not keep[0], "a token in the window has no slot"
        kept[name] = int(keep.sum())
        if engine.prefixes.cache is not None:
            pages = torch.from_numpy(engine.prefixes.cache.pages()).to(keep.device)
            keep.view(-1, engine.config.page_size)[pages] = True
        fill(each, (~keep).nonzero().squeeze(1), value)
    return kept


def page_bytes(engine: Engine) -> int:
    """What the engine's saver commits for a tag of one byte."""
    one = engine.saver.empty((1,), torch.uint8, tag="a byte")
    assert one.numel() == 1
    return engine.report().tags["a byte"].committed_bytes
