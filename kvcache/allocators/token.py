"""Single tokens: the page ledger with pages of one token."""

import torch

from kvcache.allocators.paged import PagedTokenToKVPoolAllocator


class TokenToKVPoolAllocator(PagedTokenToKVPoolAllocator):
    """Token ids 1 .. size, each a page of its own: `alloc(n)` gives any n free ones, `free` takes
    any of them back.
    """

    def __init__(self, size: int, device: torch.device | str) -> None:
        super().__init__(size, 1, device)
