"""Pages to tokens: the kernel against torch operations and a plain fill, and the allocator's calls
around it.
"""

from __future__ import annotations

import numpy as np
import torch

from kvcache.allocators import PagedTokenToKVPoolAllocator
from kvcache.allocators.paged import Int64Array
from kvcache.ops.expand import expand_pages
from tests.benchmarks.common import Figure, Figures, Scale, device_us
from tests.helpers.no_wait import check_no_wait

PAGE_SIZES = (1, 16, 64)


class Growth:
    """n requests of random length that grow by `gains`, and the slots that they must get."""

    def __init__(self, scale: Scale, gains: Int64Array, page_size: int) -> None:
        n, dice = len(gains), np.random.default_rng(0)
        self.gains, self.ps = gains, page_size
        self.prefix = dice.integers(1, scale.choose(1000, 20), n)
        self.seq = self.prefix + gains
        self.held = -(-self.prefix // page_size)  # pages before, which come first in the pool
        self.counts = -(-self.seq // page_size) - self.held
        pages = int(self.held.sum() + self.counts.sum())
        self.allocator = PagedTokenToKVPoolAllocator(
            (pages + 1) * page_size, page_size, scale.device
        )
        taken = self.allocator.alloc_pages(int(self.held.sum()))
        assert taken is not None
        self.last = taken[np.cumsum(self.held) - 1] * page_size + (self.prefix - 1) % page_size
        self.pages = self._next()

    def _next(self) -> Int64Array:
        pages = self.allocator.next_pages(int(self.counts.sum()))
        assert pages is not None
        return pages

    def expected(self) -> Int64Array:
        """By a loop over the requests."""
        out, first = [], 0
        for prefix, seq, last, count in zip(
            self.prefix, self.seq, self.last, self.counts, strict=True
        ):
            table = np.concatenate([[last // self.ps], self.pages[first : first + count]])
            first += count
            at = np.arange(prefix, seq)
            out.append(table[at // self.ps - (prefix - 1) // self.ps] * self.ps + at % self.ps)
        return np.concatenate(out)

    def arguments(self, scale: Scale) -> tuple[torch.Tensor, torch.Tensor, int, int, int]:
        starts = np.cumsum(self.gains) - self.gains, np.cumsum(self.counts) - self.counts
        meta = np.stack([self.prefix, self.seq, self.last, *starts])
        sent = (torch.from_numpy(array).to(scale.device) for array in (meta, self.pages))
        return (*sent, self.ps, int(self.gains.sum()), int(self.gains.max()))  # type: ignore[return-value]

    def alloc(self) -> torch.Tensor:
        if (self.gains == 1).all():
            loc = self.allocator.alloc_decode(self.seq, self.last)
        else:
            loc = self.allocator.alloc_extend(
                self.prefix, self.seq, self.last, int(self.gains.sum())
            )
        assert loc is not None
        return loc


def _measure(scale: Scale, growth: Growth, target: str) -> Figures:
    arguments = growth.arguments(scale)
    expected = torch.from_numpy(growth.expected()).to(scale.device)
    for impl in ("triton", "torch"):
        assert torch.equal(expand_pages(*arguments, impl=impl), expected), impl  # type: ignore[arg-type]
    assert torch.equal(growth.alloc(), expected), "alloc"
    growth.allocator.free_pages(growth.pages)  # so that the next call takes the same ones
    check_no_wait(growth.alloc)
    out, name = torch.empty_like(expected), f"page size {growth.ps}"
    runs = {
        "kernel": lambda: expand_pages(*arguments, impl="triton"),
        "torch operations": lambda: expand_pages(*arguments, impl="torch"),
        "floor: fill of the ids": lambda: out.fill_(1),
    }
    return [
        Figure(
            what=f"{name}, {way}",
            value=device_us(scale, run),
            unit="us",
            target=target if way == "kernel" else "",
        )
        for way, run in runs.items()
    ]


def extend(scale: Scale) -> Figures:
    """256 requests of uneven lengths gain 65,536 tokens."""
    n, tokens = scale.choose(256, 5), scale.choose(65536, 200)
    cuts = np.sort(np.random.default_rng(1).choice(np.arange(1, tokens), n - 1, replace=False))
    gains = np.diff(np.concatenate([[0], cuts, [tokens]]))
    return [
        figure for ps in PAGE_SIZES for figure in _measure(scale, Growth(scale, gains, ps), "<= 15")
    ]


def decode(scale: Scale) -> Figures:
    """1,024 requests gain a token each."""
    gains = np.ones(scale.choose(1024, 6), dtype=np.int64)
    return [
        figure for ps in PAGE_SIZES for figure in _measure(scale, Growth(scale, gains, ps), "<= 10")
    ]
