"""Pools for models whose layers differ: a layer id leads to a pool and an index in it."""

from collections.abc import Mapping, Sequence

import torch

from kvcache.config import KVCacheConfig
from kvcache.pools.base import KVPool, check_loc, check_pairs
from kvcache.pools.token_pools import MHATokenToKVPool
from memsaver import MemorySaver


class RoutedKVPool(KVPool):
    """Layers spread over `pools`; `routes` maps layer id -> (pool, index in it).

    A subclass says how a slot of the first pool translates to one of another.
    """

    def __init__(
        self, pools: Sequence[MHATokenToKVPool], routes: Mapping[int, tuple[MHATokenToKVPool, int]]
    ) -> None:
        self.pools = tuple(pools)
        self._routes = dict(routes)
        first = self.pools[0]
        self.size = first.size
        self.page_size = first.page_size
        self.device = first.device
        self.dtype = first.dtype

    def _slots(self, pool: MHATokenToKVPool, loc: torch.Tensor) -> torch.Tensor:
        """Slots `loc` as slots of `pool`."""
        return loc

    def _no_such_layer(self, layer_id: int, layers: str) -> str:
        """Returns what to say of a layer that is none of those that have keys and values here."""
        return f"layer {layer_id} is not in this pool; it holds layers {layers}"

    def route(self, layer_id: int) -> tuple[MHATokenToKVPool, int]:
        """The pool that holds a layer, and the layer's index in it; ValueError if none does."""
        if layer_id not in self._routes:
            layers = ", ".join(map(str, sorted(self._routes)))
            raise ValueError(self._no_such_layer(layer_id, layers))
        return self._routes[layer_id]

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token that every pool holds."""
        return sum(pool.bytes_per_token for pool in self.pools)

    def scales(self, layer_id: int) -> tuple[float, ...]:
        pool, index = self.route(layer_id)
        return pool.scales(index)

    def device_scales(self, layer_id: int) -> torch.Tensor | None:
        pool, index = self.route(layer_id)
        return pool.device_scales(index)

    def set_scales(self, layer_id: int, *scales: float) -> None:
        pool, index = self.route(layer_id)
        pool.set_scales(index, *scales)

    def set_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        pool, index = self.route(layer_id)
        check_loc("loc", loc, self.device)
        pool.set_kv_buffer(index, self._slots(pool, loc), k, v)

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        pool, index = self.route(layer_id)
        return pool.get_kv_buffer(index)

    def get_rows(self, layer_id: int, loc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pool, index = self.route(layer_id)
        check_loc("loc", loc, self.device)
        return pool.get_rows(index, self._slots(pool, loc))

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        check_pairs(tgt_loc, src_loc, self.device)
        for pool in self.pools:
            pool.move_kv_cache(self._slots(pool, tgt_loc), self._slots(pool, src_loc))

    def on_resume(self) -> None:
        for pool in self.pools:
            pool.on_resume()


class SWAKVPool(RoutedKVPool):
    """Full-attention layers in `full_pool`, sliding-window layers in a smaller `window_pool`.

    Callers name slots of the full pool everywhere. Those of the window pool come from
    `full_to_swa_index_mapping` (int64, slot -> slot, 0: unmapped), which the allocator owns and
    changes in place: an unmapped slot leads to the padding page. Two blocks on the tag, one a pool.

    pool_class: `MHATokenToKVPool`, or `MHATokenToKVPoolFP4`.
    """

    def __init__(
        self,
        full: KVCacheConfig,
        window: KVCacheConfig,
        full_layers: Sequence[int],
        window_layers: Sequence[int],
        saver: MemorySaver | None = None,
        tag: str = "kv_cache",
        pool_class: type[MHATokenToKVPool] = MHATokenToKVPool,
    ) -> None:
        _check_layers("full", full, full_layers)
        _check_layers("window", window, window_layers)
        if both := set(full_layers) & set(window_layers):
            raise ValueError(
                f"layers {sorted(both)} are named as full and as window layers; "
                "a layer is one of them"
            )
        if window.size > full.size:
            raise ValueError(
                f"the window pool of {window.size} tokens is larger than the "
                f"full pool of {full.size}"
            )
        self.full_pool = pool_class(full, saver, tag)
        self.window_pool = pool_class(window, saver, tag)
        self._mapping: torch.Tensor | None = None
        routes = {layer: (self.full_pool, i) for i, layer in enumerate(full_layers)}
        routes |= {layer: (self.window_pool, i) for i, layer in enumerate(window_layers)}
        super().__init__((self.full_pool, self.window_pool), routes)

    def register_mapping(self, full_to_swa_index_mapping: torch.Tensor) -> None:
        """Takes the allocator's mapping, int64 `[>= full.size + page_size]`; not copied."""
        slots = self.full_pool.size + self.page_size
        check_loc("full_to_swa_index_mapping", full_to_swa_index_mapping, self.device)
        if len(full_to_swa_index_mapping) < slots:
            raise ValueError(
                f"full_to_swa_index_mapping has {len(full_to_swa_index_mapping)} entries, "
                f"needed {slots}"
            )
        self._mapping = full_to_swa_index_mapping

    def translate(self, loc: torch.Tensor) -> torch.Tensor:
        """Slots of the window pool for slots `loc` of the full pool; 0 where there is none."""
        if self._mapping is None:
            raise ValueError(
                "the window pool has no slots without a mapping; call register_mapping() first"
            )
        return self._mapping[loc]

    def _slots(self, pool: MHATokenToKVPool, loc: torch.Tensor) -> torch.Tensor:
        return loc if pool is self.full_pool else self.translate(loc)


class HybridLinearKVPool(RoutedKVPool):
    """Keys and values of the full-attention layers, where others keep states (`MambaPool`)."""

    def __init__(
        self,
        config: KVCacheConfig,
        full_layers: Sequence[int],
        saver: MemorySaver | None = None,
        tag: str = "kv_cache",
        pool_class: type[MHATokenToKVPool] = MHATokenToKVPool,
    ) -> None:
        _check_layers("full", config, full_layers)
        self.full_pool = pool_class(config, saver, tag)
        super().__init__(
            (self.full_pool,), {layer: (self.full_pool, i) for i, layer in enumerate(full_layers)}
        )

    def _no_such_layer(self, layer_id: int, layers: str) -> str:
        why = "(a linear layer, or none of the model)"
        return f"layer {layer_id} keeps no keys and values {why}; layers {layers} do"


def _check_layers(kind: str, config: KVCacheConfig, layers: Sequence[int]) -> None:
    wrong = len(set(layers)) != len(layers) or any(layer < 0 for layer in layers)
    if len(layers) != config.num_layers or wrong:
        raise ValueError(
            f"the {kind} pool is for {config.num_layers} layers, got the layer ids {list(layers)}"
        )
