"""Pools for models whose layers differ: a layer id leads to a pool and an index in it."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from kvcache.config import KVCacheConfig
from kvcache.pools.token_pools import KVPool, MHATokenToKVPool, check_loc
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

    def _slots(self, pool: MHATokenToKVPool, loc: Tensor) -> Tensor:
        """Return slots `loc` as slots of `pool`."""
        return loc

    def route(self, layer_id: int) -> tuple[MHATokenToKVPool, int]:
        """Return the pool that holds a layer, and its index there; ValueError if none does."""
        if layer_id not in self._routes:
            raise ValueError(f"layer {layer_id} is not in this pool of {sorted(self._routes)}")
        return self._routes[layer_id]

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools)

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of a token that every pool holds."""
        return sum(pool.bytes_per_token for pool in self.pools)

    def scales(self, layer_id: int) -> tuple[float, ...]:
        pool, index = self.route(layer_id)
        return pool.scales(index)

    def device_scales(self, layer_id: int) -> Tensor | None:
        pool, index = self.route(layer_id)
        return pool.device_scales(index)

    def set_scales(self, layer_id: int, *scales: float) -> None:
        pool, index = self.route(layer_id)
        pool.set_scales(index, *scales)

    def set_kv_buffer(self, layer_id: int, loc: Tensor, k: Tensor, v: Tensor) -> None:
        pool, index = self.route(layer_id)
        pool.set_kv_buffer(index, self._slots(pool, loc), k, v)

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        pool, index = self.route(layer_id)
        return pool.get_kv_buffer(index)

    def get_rows(self, layer_id: int, loc: Tensor) -> tuple[Tensor, Tensor]:
        pool, index = self.route(layer_id)
        return pool.get_rows(index, self._slots(pool, loc))

    def move_kv_cache(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
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
    """

    def __init__(
        self,
        full: KVCacheConfig,
        window: KVCacheConfig,
        full_layers: Sequence[int],
        window_layers: Sequence[int],
        saver: MemorySaver | None = None,
        tag: str = "kv_cache",
    ) -> None:
        self.full_pool = MHATokenToKVPool(full, saver, tag)
        self.window_pool = MHATokenToKVPool(window, saver, tag)
        self._mapping: Tensor | None = None
        full_routes = _routes(self.full_pool, full_layers)
        window_routes = _routes(self.window_pool, window_layers)
        if both := full_routes.keys() & window_routes.keys():
            raise ValueError(f"layers {sorted(both)} are named as full and as window layers")
        super().__init__((self.full_pool, self.window_pool), full_routes | window_routes)

    def register_mapping(self, full_to_swa_index_mapping: Tensor) -> None:
        """Take the allocator's mapping, int64 `[full.size + page_size]`; not copied."""
        slots = self.full_pool.size + self.page_size
        name = "full_to_swa_index_mapping"
        check_loc(name, full_to_swa_index_mapping, self.device, slots)
        self._mapping = full_to_swa_index_mapping

    def _slots(self, pool: MHATokenToKVPool, loc: Tensor) -> Tensor:
        if pool is self.full_pool:
            return loc
        check_loc("loc", loc, self.device)
        assert self._mapping is not None, "call register_mapping() first"
        return self._mapping[loc]


class HybridLinearKVPool(RoutedKVPool):
    """Keys and values of the full-attention layers, where others keep states (`MambaPool`)."""

    def __init__(
        self,
        config: KVCacheConfig,
        full_layers: Sequence[int],
        saver: MemorySaver | None = None,
        tag: str = "kv_cache",
    ) -> None:
        self.full_pool = MHATokenToKVPool(config, saver, tag)
        super().__init__((self.full_pool,), _routes(self.full_pool, full_layers))


def _routes(
    pool: MHATokenToKVPool, layers: Sequence[int]
) -> dict[int, tuple[MHATokenToKVPool, int]]:
    count = pool.config.num_layers
    if len(set(layers)) != count or len(layers) != count:
        raise ValueError(f"a pool of {count} layers got the ids {layers}; name each layer once")
    return {layer: (pool, i) for i, layer in enumerate(layers)}
