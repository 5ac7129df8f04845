"""Pools for models with several kinds of layers, which route a layer to one of their pools."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from kvcache.config import KVCacheConfig
from kvcache.pools.token_pools import KVPool, MHATokenToKVPool, check_loc
from memsaver import MemorySaver


class RoutedKVPool(KVPool):
    """A pool whose layers are spread over several pools, addressed by slots of the first.

    Subclasses translate slots of the first pool to slots of the others. Size, page size, device and
    dtype are those of the first pool. `routes` maps a layer id to the pool and the layer's index in
    it.
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
        """Translate slots of the first pool to slots of `pool`."""
        return loc

    def route(self, layer_id: int) -> tuple[MHATokenToKVPool, int]:
        """Return the pool of a layer and the layer's index in it.

        Raises:
            ValueError: No pool stores the layer.
        """
        if layer_id not in self._routes:
            raise ValueError(f"layer {layer_id} is not in this pool of {sorted(self._routes)}")
        return self._routes[layer_id]

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools)

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of a token that is stored in every pool."""
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
    """Pool with full-attention layers in `full_pool`, sliding layers in a smaller `window_pool`.

    All methods take slots of the full pool. The pool translates them to slots of the window pool by
    `full_to_swa_index_mapping` (int64, slot -> slot, 0 if unmapped), which the allocator owns and
    changes in place. An unmapped slot is translated to the padding page. Views of a sliding layer
    (`get_kv_buffer`) are those of the window pool, indexed by its slots. Each of the two pools has
    its own block on the saver's `tag`, or in plain torch memory without a saver. `full_layers` and
    `window_layers` are the layer ids of the two pools.

    Raises:
        ValueError: A layer id is listed twice, or their number is not `num_layers` of its config.
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
            raise ValueError(f"layers {sorted(both)} are listed as full and as window layers")
        super().__init__((self.full_pool, self.window_pool), full_routes | window_routes)

    def register_mapping(self, full_to_swa_index_mapping: Tensor) -> None:
        """Set the mapping to the slots of the window pool, int64 `[full_pool.size + page_size]`.

        The pool keeps a reference, not a copy.

        Raises:
            ValueError: Shape, dtype or device do not fit.
        """
        slots = self.full_pool.size + self.page_size
        check_loc("full_to_swa_index_mapping", full_to_swa_index_mapping, self.device, slots)
        self._mapping = full_to_swa_index_mapping

    def _slots(self, pool: MHATokenToKVPool, loc: Tensor) -> Tensor:
        if pool is self.full_pool:
            return loc
        check_loc("loc", loc, self.device)
        assert self._mapping is not None, "call register_mapping() first"
        return self._mapping[loc]


class HybridLinearKVPool(RoutedKVPool):
    """Pool of the full-attention layers of a model whose other layers keep states (`MambaPool`).

    `full_layers` are the layer ids of the full-attention layers. Without a saver, the pool is in
    plain torch memory.

    Raises:
        ValueError: A layer id is listed twice, or their number is not `config.num_layers`.
    """

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
        raise ValueError(f"a pool of {count} layers got the ids {layers}; list each layer once")
    return {layer: (pool, i) for i, layer in enumerate(layers)}
