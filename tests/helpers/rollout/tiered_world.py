"""Scheduler, ledgers and tiers with a model whose rows are hashes of (version, tokens).

Every row that a sample reads can be told from all other rows.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from kvcache import BlockManager, ReqHandle, ReqToTokenPool
from kvcache.allocators import PagedTokenToKVPoolAllocator
from kvcache.pools import TokenPool
from rollout import EngineConfig, KVTiers, SamplingParams
from rollout.scheduling.prefix import Swapped
from rollout.scheduling.samples import Sample
from rollout.scheduling.scheduler import Scheduler
from rollout.scheduling.tiers import TieredBlocks
from tests.helpers.kvcache.blocks import make_pool
from tests.helpers.rollout.poison import fill

Rows = dict[str, torch.Tensor]  # of each part of the pool, [layers, tokens, ...]
PS, PAGES, ROWS, CONTEXT, LAYERS = 2, 20, 6, 36, 2
PAGE_BYTES = PS * LAYERS * 2 * 2 * 4


def value(version: int, tokens: Sequence[int], layer: int) -> float:
    """Return the value of the last token's row, which is exact in fp32."""
    return float(hash((version, layer, *tokens)) % (1 << 24))


def queued(number: int, prompt: list[int], params: SamplingParams, *stops: int) -> list[Sample]:
    """Return the samples of a request, without an engine."""
    fields = {"request": number, "prompt": prompt, "params": params, "seed": 0}
    return [Sample(index=i, stop_ids=frozenset(stops), **fields) for i in range(params.n)]


class Recorded(TieredBlocks):
    """Blocks that record the sequences admitted in a step, and swap preempted samples at random.

    Attributes:
        admitted: Handle, computed tokens, and the expected rows of those that were parked.
        parked: The rows of parked samples, by the identity of what they were swapped to.
    """

    def __init__(self, blocks: BlockManager, config: KVTiers, dice: random.Random) -> None:
        super().__init__(blocks, config)
        self.admitted: list[tuple[ReqHandle, list[int], Rows | None]] = []
        self.parked: dict[int, Rows] = {}
        self.dice = dice

    def swap_out(
        self, handle: ReqHandle, tokens: Sequence[int], private: bool = False
    ) -> Swapped | None:
        if self.dice.random() > 0.7:
            return None
        swapped = super().swap_out(handle, tokens, private)
        if swapped is not None and private:
            slots = torch.from_numpy(self.blocks.token_ids(handle, 0, len(tokens)))
            pool = self.blocks.pool
            assert isinstance(pool, TokenPool)
            stored = pool.stored.items()
            self.parked[id(swapped)] = {name: part[:, slots].clone() for name, part in stored}
        return swapped

    def admit(
        self,
        tokens: Sequence[int],
        swapped: Swapped | None = None,
        namespace: int | None = None,
    ) -> tuple[ReqHandle, int] | None:
        admitted = super().admit(tokens, swapped, namespace)
        assert admitted is not None
        handle, computed = admitted
        whole = swapped is not None and swapped.private and computed == swapped.tokens
        rows = self.parked.pop(id(swapped)) if whole else None
        self.admitted.append((handle, list(tokens[:computed]), rows))
        return admitted


class World:
    def __init__(self, device: str, dice: random.Random, host_pages: int, **tiers: Any) -> None:
        self.dice, self.reads = dice, Counter[str]()
        self.pool = make_pool(PAGES * PS, PS, num_layers=LAYERS, device=device)
        self.forget_device()
        self.table = ReqToTokenPool(ROWS, CONTEXT, device)
        ledger = PagedTokenToKVPoolAllocator(PAGES * PS, PS, device)
        fields = KVTiers(host_bytes=host_pages * PAGE_BYTES, **tiers)
        self.blocks = Recorded(BlockManager(self.table, ledger, self.pool), fields, dice)
        sizes = EngineConfig(page_size=PS, max_running=ROWS, max_prefill_tokens=10)
        self.scheduler = Scheduler(self.blocks, sizes)
        self.requests = 0

    @property
    def version(self) -> int:
        return self.blocks.tiers.version

    def forget_device(self) -> None:
        """Fill the pool with NaN, as a pause and a resume may leave it."""
        fill(self.pool, slice(None))

    def submit(self) -> None:
        prompt = [self.dice.randint(0, 1) for _ in range(self.dice.randint(1, 20))]
        params = SamplingParams(
            max_tokens=self.dice.randint(1, CONTEXT - len(prompt) - 2), n=self.dice.randint(1, 3)
        )
        self.scheduler.check_fits("prompt", len(prompt), params)
        number, self.requests = self.requests, self.requests + 1
        self.scheduler.add(queued(number, prompt, params, 9))

    def step(self) -> None:
        """Run a step as the engine does, and check all rows that new samples read."""
        step = self.scheduler.schedule()
        assert step.decode or step.chunks
        admitted, self.blocks.admitted = self.blocks.admitted, []
        for layer in range(LAYERS):
            for load in step.loads:
                load.wait(layer)
            for handle, tokens, parked in admitted:
                self.check(handle, tokens, layer, parked)
        rows = [
            (sample.tokens(0, sample.length), step.decode_slots[i : i + 1])
            for i, sample in enumerate(step.decode)
        ]
        rows += [
            (chunk.sample.tokens(0, chunk.start + chunk.length), chunk.slots)
            for chunk in step.chunks
        ]
        for tokens, slots in rows:
            self.write(tokens, slots)
        self.scheduler.computed(step)
        due = list(step.decode)
        for chunk in step.chunks:
            if chunk.last:
                due += [chunk.sample, *self.scheduler.fork_siblings(chunk.sample)]
        for sample in due:
            self.scheduler.append(sample, self.dice.choices([0, 1, 9], [6, 6, 1])[0], -1.0, 0)

    def check(self, handle: ReqHandle, tokens: list[int], layer: int, parked: Rows | None) -> None:
        """Check the rows that a sample reads: of its own tokens, or those it was parked with."""
        self.reads["parked" if parked is not None else "hit" if tokens else "miss"] += 1
        slots = self.table.req_to_token[handle.row, : len(tokens)].long()
        expected = torch.tensor(
            [value(self.version, tokens[: i + 1], layer) for i in range(len(tokens))]
        )
        for name, part in self.pool.stored.items():
            rows = part[layer, slots].cpu().flatten(1)
            wanted = expected[:, None].expand_as(rows)
            if parked is not None:
                wanted = parked[name][layer].cpu().flatten(1)
            assert torch.equal(rows, wanted), "a stale or foreign slot"

    def write(self, tokens: list[int], slots: torch.Tensor) -> None:
        ends = range(len(tokens) - len(slots) + 1, len(tokens) + 1)
        for layer in range(LAYERS):
            made = torch.tensor(
                [value(self.version, tokens[:end], layer) for end in ends], device=slots.device
            )
            for part in self.pool.stored.values():
                part[layer, slots] = made[:, None, None].expand(-1, *part.shape[2:])

    def check_ledgers(self) -> None:
        self.blocks.check_integrity()
        queue = self.scheduler.waiting
        swapped = [sample.swapped for sample in queue if sample.swapped is not None]
        assert all(sample.swapped is None for sample in self.scheduler.running)
        assert self.blocks.swapped_pages() == sum(len(copy.pages) for copy in swapped)
        (ledger,) = self.blocks.ledgers
        if not self.scheduler.running:
            assert ledger.available == ledger.total == PAGES
            assert self.table.available_size() == ROWS

    def disturb(self, event: str) -> None:
        if event == "raise":
            self.blocks.new_weights()
        elif event in ("pause", "park"):
            if event == "pause":
                self.scheduler.preempt_all()
            else:
                self.scheduler.park_all()
                if self.dice.random() < 0.5:
                    self.blocks.new_weights()
            self.blocks.move_below(keep=True)
            assert self.blocks.blocks.available_pages == PAGES
            self.forget_device()
        elif event == "abort" and self.scheduler.unfinished:
            self.scheduler.abort([self.dice.choice(self.scheduler.unfinished)])
        elif event == "fail":  # a step that allocated pages and computed nothing
            if self.scheduler.unfinished and self.scheduler.schedule():
                self.blocks.admitted.clear()
            self.scheduler.preempt_all()
