"""The host's bookkeeping of a decode step."""

from __future__ import annotations

import statistics

import torch

from kvcache import BlockManager, ReqToTokenPool
from kvcache.allocators import PagedTokenToKVPoolAllocator
from tests.benchmarks.common import Figure, Figures, Scale, host_us, settle
from tests.benchmarks.kvcache.pools import PAGE_SIZE, make_pool
from tests.helpers.no_wait import check_no_wait

CONTEXT = 4096


class LedgerOnly(BlockManager):
    """Leaves out everything that is for the device: token ids and the write of the table."""

    def _fill_device(self, growth: object) -> torch.Tensor:
        return torch.empty(0, dtype=torch.int64)


class DecodeBatch:
    """Sequences of about 700 tokens that grow by one a step; every sixteenth of them takes a page
    in each step.
    """

    def __init__(self, kind: type[BlockManager], batch: int, device: torch.device) -> None:
        size = batch * CONTEXT
        pool = make_pool(device, size, num_layers=1, num_kv_heads=1, head_dim=1)
        allocator = PagedTokenToKVPoolAllocator(size, PAGE_SIZE, device)
        self.manager = kind(ReqToTokenPool(batch, CONTEXT, device), allocator, pool)
        self.handles = [
            handle for _ in range(batch) if (handle := self.manager.admit()) is not None
        ]
        self.lens = [700 + 7 * i % PAGE_SIZE for i in range(batch)]
        self.loc = self.manager.extend(self.handles, self.lens)

    def next_lens(self) -> None:
        self.lens = [length + 1 for length in self.lens]

    def step(self) -> None:
        self.loc = self.manager.extend(self.handles, self.lens)


def decode_bookkeeping(scale: Scale) -> Figures:
    """BlockManager.extend of 256 sequences by a token each, in turn with and without the device's
    part.
    """
    batch, repeats, rounds = scale.choose(256, 6), scale.choose(200, 3), scale.choose(7, 1)
    whole, ledger = (DecodeBatch(kind, batch, scale.device) for kind in (BlockManager, LedgerOnly))
    times: dict[DecodeBatch, list[float]] = {whole: [], ledger: []}
    for _ in range(rounds):
        for state, medians in times.items():
            medians.append(host_us(state.step, before=state.next_lens, repeats=repeats))
            settle()
    assert ledger.loc is not None and not len(ledger.loc), (
        "the ledger's part alone fills the device's, too"
    )
    figures = [
        Figure(what="extend", value=statistics.median(times[whole]), unit="us", target="< 200"),
        Figure(
            what="extend, nothing for the device", value=statistics.median(times[ledger]), unit="us"
        ),
    ]
    whole.next_lens()
    check_no_wait(whole.step)
    assert whole.loc is not None
    newest = [
        whole.manager.token_ids(h, n - 1, n)[0]
        for h, n in zip(whole.handles, whole.lens, strict=True)
    ]
    assert whole.loc.tolist() == newest
    whole.manager.check_integrity()
    return figures
