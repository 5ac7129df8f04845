"""NaN in all parts of an engine's cache that no query may read."""

from __future__ import annotations

from typing import Any

import torch

from kvcache.pools import SWAKVPool, TokenPool
from kvcache.radix import MambaRadixCache
from kvcache.request_tables import HybridReqToTokenPool
from rollout import Engine


def fill(pool: TokenPool, slots: Any) -> None:
    """Write NaN into slots of all tensors of a pool.

    Tensors of bytes are filled with 0xFF: NaN as fp8, and the largest scales of FP4.
    """
    for part in pool.stored.values():
        part[:, slots] = float("nan") if part.is_floating_point() else 0xFF


def poison(engine: Engine, *_: int) -> None:
    """Fill all slots and states that no later query may read, including page 0.

    Spared are the slots of the prefix cache, the slots of computed tokens that a later query reads,
    and the states of requests and of the prefix cache.
    """
    cache, table = engine.cache, engine.cache.table.req_to_token
    pool: Any = getattr(cache.pool, "full_pool", cache.pool)
    views: list[tuple[Any, int | None, Any]] = [(pool, cache.window, None)]
    if isinstance(cache.pool, SWAKVPool):
        assert cache.sliding is not None
        views.append((cache.pool.window_pool, *cache.sliding))
    for view, window, mapping in views:
        keep = torch.zeros(
            next(iter(view.stored.values())).shape[1], dtype=torch.bool, device=table.device
        )
        for sample in engine.scheduler.running:
            assert sample.handle is not None
            known = sample.length - 1 if sample.prefilled else sample.computed
            slots = table[
                sample.handle.row, max(0, known - window + 1) if window else 0 : known
            ].long()
            keep[slots if mapping is None else mapping[slots]] = True
        if mapping is not None:
            assert not keep[0], "a token in the window has no slot"
        pages = torch.from_numpy(engine.prefixes.cache.pages()).to(keep.device)
        keep.view(-1, engine.config.page_size)[pages] = True
        fill(view, (~keep).nonzero().squeeze(1))
    if cache.states is not None:
        assert isinstance(cache.table, HybridReqToTokenPool)
        held = {*cache.table.req_to_mamba.tolist(), *kept_states(engine)} - {0}
        free = sorted(set(range(cache.states.size + 1)) - held)
        for state in (*cache.states.conv, cache.states.temporal):
            state[:, free] = float("nan")


def kept_states(engine: Engine) -> list[int]:
    kept = engine.prefixes.cache
    return kept.state_slots() if isinstance(kept, MambaRadixCache) else []


def check_idle(engine: Engine) -> None:
    """Check the engine's integrity, and that no request holds pages or states."""
    engine.check_integrity()
    assert all(ledger.available == ledger.total for ledger in engine.prefixes.ledgers)
    assert (
        engine.cache.states is None
        or engine.cache.states.available_size() + len(kept_states(engine))
        == engine.config.state_slots
    )
