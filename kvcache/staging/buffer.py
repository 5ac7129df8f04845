"""The bytes that a staging ring hands out, and pools as the staging kernels take them."""

import contextlib
from collections.abc import Sequence

import torch

from kvcache.pools.mha import MHATokenToKVPool


class StagingBuffer:
    """`size_bytes` of contiguous uint8 on `device`, contents undefined.

    custom_mem_pool: where the memory comes from, for instance `saver.mem_pool(tag)`, which a peer
    GPU can read once it is exported; CUDA only. On the CPU open `saver.region(tag)` around the call
    instead. The pool is kept as long as the buffer. A buffer on a paused tag must not be touched,
    and its ring has to be empty before the pause.
    """

    def __init__(
        self,
        size_bytes: int,
        device: torch.device | str,
        custom_mem_pool: torch.cuda.MemPool | None = None,
    ) -> None:
        device = torch.device(device)
        if size_bytes <= 0:
            raise ValueError(f"size_bytes must be positive, got {size_bytes}")
        if custom_mem_pool is not None and device.type != "cuda":
            raise ValueError(f"custom_mem_pool needs a CUDA device, got {device}")
        self._pool = custom_mem_pool
        with contextlib.ExitStack() as placed:
            if custom_mem_pool is not None:
                placed.enter_context(torch.cuda.use_mem_pool(custom_mem_pool, device))
            self.tensor = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self.device = self.tensor.device

    @property
    def size_bytes(self) -> int:
        return self.tensor.numel()

    @property
    def address(self) -> int:
        """Returns the address of the first byte, in this process."""
        return self.tensor.data_ptr()

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes `offset` to `offset + nbytes`, uint8; ValueError past the end."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size_bytes:
            raise ValueError(
                f"bytes {offset} to {offset + nbytes} are outside this buffer of {self.size_bytes}"
            )
        return self.tensor[offset : offset + nbytes]


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
