"""All layers of a pool as one tensor each for keys and values, as the staging kernels take them."""

from collections.abc import Sequence

import torch

from kvcache.pools.mha import MHATokenToKVPool


def pool_layers(pool: MHATokenToKVPool) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys `[L, N, H, D]` and values `[L, N, H, Dv]` as stored (fp8: unscaled), views of the pool's
    memory.

    Valid as long as the pool, either memory order. ValueError for FP4, whose elements have no
    views.
    """
    layers = [pool.get_kv_buffer(layer) for layer in range(pool.config.num_layers)]
    return stack_layers([k for k, _ in layers]), stack_layers([v for _, v in layers])


def stack_layers(layers: Sequence[torch.Tensor]) -> torch.Tensor:
    """A view `[L, ...]` of tensors that lie at even distances in one block; ValueError if they do
    not.
    """
    first = layers[0]
    addresses = [layer.data_ptr() for layer in layers]
    step = addresses[1] - addresses[0] if len(layers) > 1 else 0
    alike = all(
        layer.shape == first.shape
        and layer.stride() == first.stride()
        and layer.dtype == first.dtype
        and layer.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        for layer in layers
    )
    if not alike or addresses != [addresses[0] + i * step for i in range(len(layers))] or step < 0:
        raise ValueError(
            "these layers do not lie at even distances in one block of memory; "
            "stage them one by one"
        )
    return first.as_strided(
        (len(layers), *first.shape), (step // first.element_size(), *first.stride())
    )
