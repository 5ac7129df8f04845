"""Block tables against lists of tokens: forks, copy-on-write, compaction and sliding windows.

Random walks cover one ledger and two.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import pytest
import torch

from kvcache import ReqHandle
from kvcache.allocators import PagedTokenToKVPoolAllocator
from tests.helpers.case_selection import rounds, some
from tests.helpers.kvcache.blocks import make_blocks

ROWS = 6
LONGEST = 32
STEPS = ("admit", "fork", "release", "slide", "compact", "extend")


class Block:
    """One page of the model, compared by identity."""


@dataclass
class Sequence:
    tokens: list[float] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    behind: int = 0  # leading blocks that have left the window

    def copy(self) -> "Sequence":
        return Sequence(list(self.tokens), list(self.blocks), self.behind)


class Forest:
    """Block tables and a model of lists, to which every operation is applied and compared."""

    def __init__(self, page_size: int, window: int | None, two: bool) -> None:
        self.two, self.ps, self.window = two, page_size, window
        # Fewer pages than ROWS sequences of LONGEST tokens need.
        self.pages = (40 if window and not two else 48) // page_size
        self.window_pages = 40 // page_size if two else self.pages
        self.real = make_blocks(
            self.pages,
            page_size,
            ROWS,
            LONGEST,
            window=window,
            window_pages=self.window_pages if two else None,
        )
        self.model: dict[ReqHandle, Sequence] = {}
        self.next_value = 1
        self.seen: Counter[str] = Counter()

    def step(self, dice: random.Random, weights: list[float]) -> None:
        live = list(self.model)
        step = dice.choices(STEPS, weights)[0]
        if step == "admit" or not live:
            self.admit()
            self.extend(list(self.model)[-1:], [dice.randint(0, 9)])
        elif step == "slide":
            self.slide(dice.sample(live, dice.randint(0, len(live))))
        elif step == "compact":
            self.compact(dice.randint(0, self.pages))
        elif step == "extend":
            batch = dice.sample(live, dice.randint(0, len(live)))
            self.extend(batch, [dice.choice([0, 1, 1, 1, 2, 5]) for _ in batch])
        elif step == "release":
            self.release(dice.choice(live))
        else:
            parent = dice.choice(live)
            for _ in range(dice.randint(1, 3)):
                self.fork(parent)
            family = [
                handle
                for handle in self.model
                if self.model[handle].blocks == self.model[parent].blocks
            ]
            self.extend(family, [dice.randint(0, 1)] * len(family))
        self.check()

    def admit(self) -> None:
        handle = self.real.manager.admit()
        assert (handle is None) == (len(self.model) == ROWS)
        if handle is not None:
            assert handle not in self.model
            self.model[handle] = Sequence()

    def fork(self, parent: ReqHandle) -> None:
        child = self.real.manager.fork(parent)
        assert (child is None) == (len(self.model) == ROWS)
        if child is not None:
            self.model[child] = self.model[parent].copy()

    def release(self, handle: ReqHandle) -> None:
        self.real.manager.release(handle)
        del self.model[handle]
        with pytest.raises(ValueError, match="stale"):
            self.real.manager.extend([handle], [1])

    def slide(self, handles: list[ReqHandle]) -> None:
        self.real.manager.slide(self.real.manager.req_to_token.rows(handles))
        for handle in handles if self.window else ():
            sequence = self.model[handle]
            first = self.first_seen(len(sequence.tokens)) // self.ps
            self.seen["left"] += first - sequence.behind
            sequence.behind = first

    def compact(self, pages: int) -> None:
        """Compact to `pages` pages and overwrite the pages after them with NaN."""
        if self.window or self.two:
            return
        before, allocator = self.real.state(self.model), self.real.allocator
        renamed = self.real.manager.compact(pages)
        if self._held(full=True) > pages:
            assert renamed is None and self.real.state(self.model) == before
            return
        self.seen["compacted"] += 1
        assert renamed is not None
        assert isinstance(allocator, PagedTokenToKVPoolAllocator)
        allocator.limit(pages * self.ps)
        for buffer in chain.from_iterable(map(self.real.pool.get_kv_buffer, range(2))):
            buffer[(pages + 1) * self.ps :] = torch.nan
        self.real.manager.check_integrity()
        allocator.limit(self.pages * self.ps)

    def extend(self, handles: list[ReqHandle], gains: list[int]) -> None:
        gains = [
            min(g, LONGEST - len(self.model[h].tokens)) for h, g in zip(handles, gains, strict=True)
        ]
        lens = [len(self.model[h].tokens) + g for h, g in zip(handles, gains, strict=True)]
        values = [float(self.next_value + i) for i in range(sum(gains))]
        self.next_value += len(values)
        before, moves = self.real.state(self.model), len(self.real.moves)
        kept = {h: s.copy() for h, s in self.model.items()}
        free = min(self.pages - self._held(full=True), self.window_pages - self._held(full=False))
        rest, taken, copied = list(values), 0, []
        for handle, gain in zip(handles, gains, strict=True):
            more, moved = self._grow(self.model[handle], rest[:gain])
            taken, copied = taken + more, copied + moved
            del rest[:gain]

        rows = self.real.manager.req_to_token.rows(handles)
        assert self.real.manager.pages_needed(rows, np.array(lens, dtype=np.int64)) == taken
        loc = self.real.manager.extend(handles, lens)
        self.seen["refused" if loc is None else f"{min(2, len(copied))} copies"] += 1
        if taken > free:
            assert loc is None and len(self.real.moves) == moves
            assert self.real.state(kept) == before
            self.model = kept
            return
        assert loc is not None
        assert self.real.moves[moves:] == ([sum(copied)] if copied else [])  # at most one call
        self.real.write(loc, values)

    def check(self) -> None:
        manager = self.real.manager
        manager.check_integrity()
        assert manager.available_pages == min(ledger.available for ledger in manager.ledgers)
        held = {"kv": self._held(full=True), "window": self._held(full=False)}
        for ledger in manager.ledgers:
            assert ledger.total - ledger.available == held[ledger.name]
        lists = [sequence.tokens for sequence in self.model.values()]
        seen = [self.first_seen(len(tokens)) for tokens in lists]
        firsts = [(0 if self.two else first, first) for first in seen]
        if lists:
            assert self.real.read([*self.model], firsts) == [
                [tokens[first[layer] :] for tokens, first in zip(lists, firsts, strict=True)]
                for layer in range(2)
            ]
        table = self.real.table.req_to_token.tolist()
        for (handle, sequence), first in zip(self.model.items(), seen, strict=True):
            count = len(sequence.tokens)
            assert manager.seq_len(handle) == count
            slots = manager.token_ids(handle, first, count).tolist()
            assert table[handle.row][first:count] == slots
            if sequence.behind and not self.two:
                with pytest.raises(AssertionError, match="asked for"):
                    manager.token_ids(handle, sequence.behind * self.ps - 1, count)

    def first_seen(self, length: int) -> int:
        """Return the first position that the query at `length` sees."""
        return max(0, length - self.window + 1) if self.window else 0

    def _holds(self, sequence: Sequence, full: bool) -> list[Block]:
        return sequence.blocks[0 if full and self.two else sequence.behind :]

    def _held(self, full: bool) -> int:
        return len({id(b) for s in self.model.values() for b in self._holds(s, full)})

    def _grow(self, sequence: Sequence, values: list[float]) -> tuple[int, list[int]]:
        """Append to a model sequence; return the number of new blocks and each copy's tokens."""
        taken, copied = 0, []
        partial = len(sequence.tokens) % self.ps
        if values and partial:
            owners = sum(
                any(b is sequence.blocks[-1] for b in self._holds(s, full=True))
                for s in self.model.values()
            )
            if owners > 1:
                sequence.blocks[-1] = Block()
                taken, copied = 1, [partial]
        sequence.tokens += values
        while len(sequence.blocks) * self.ps < len(sequence.tokens):
            sequence.blocks.append(Block())
            taken += 1
        return taken, copied


WALKS = some(
    *((page_size, None, False) for page_size in (1, 3)),
    *((2, 7, False), (5, 1, False), (1, 1, True), (4, 9, True)),
    whole=[
        *((page_size, None, False) for page_size in (2, 4)),
        *((1, 5, False), (3, 4, False), (4, 9, False), (2, 7, True), (3, 4, True)),
    ],
)


@pytest.mark.soak
@pytest.mark.parametrize(("page_size", "window", "two"), WALKS)
def test_long_random_walk_equals_the_model(page_size: int, window: int | None, two: bool) -> None:
    """Walk through full pools, several copies per batch and pages behind a window."""
    dice = random.Random(page_size)
    forest = Forest(page_size, window, two)
    for _ in range(rounds(400, 20_000)):
        forest.step(dice, [1, 2, 2, 4, 0, 7] if window else [1, 2, 3, 0, 1, 6])
    assert forest.seen["refused"] >= 5, forest.seen
    assert page_size == 1 or forest.seen["1 copies"] + forest.seen["2 copies"] >= 5, forest.seen
    # "2 copies" counts two or more copies in one call.
    assert page_size == 1 or window or forest.seen["2 copies"] >= 5, forest.seen
    assert window or forest.seen["compacted"] >= 5, forest.seen
    assert not window or forest.seen["left"] >= 1, forest.seen


@pytest.mark.soak
@pytest.mark.parametrize("two", [False, True])
def test_short_walks_with_random_weights_equal_the_model(two: bool) -> None:
    """Leave operations out of short walks, and draw page sizes and windows."""
    for seed in range(rounds(20, 3000)):
        dice = random.Random(seed)
        forest = Forest(
            dice.randint(1, 5), dice.randint(1, 12) if two or dice.random() < 0.5 else None, two
        )
        weights = [dice.choice([0, 0.3, 1, 3]) for _ in STEPS[:-1]]
        for _ in range(30):
            forest.step(dice, [*weights, 2])
