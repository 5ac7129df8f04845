"""Block tables that give back what left a sliding window, with one ledger and with two, against plain lists."""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcache import PagedTokenToKVPoolAllocator, ReqHandle
from kvcache.windows import WindowShares, pages_across, pages_behind
from tests.helpers.effort import rounds
from tests.helpers.kvcache.blocks import DEVICE, ledger_state, make_windowed

ROWS = 6
LONGEST = 40


class Block:
    """One page of the model, told apart by identity."""


@dataclass
class Sequence:
    tokens: list[float] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    behind: int = 0

    def copy(self) -> "Sequence":
        return Sequence(list(self.tokens), list(self.blocks), self.behind)


class Forest:
    """Every operation on the real thing and on plain lists, with the outcome that the lists ask for."""

    def __init__(self, two: bool, page_size: int, window: int) -> None:
        self.two, self.ps, self.window = two, page_size, window
        self.pages = (48 if two else 30) // page_size
        self.window_pages = 30 // page_size if two else self.pages
        self.real = make_windowed(page_size, window, self.pages, self.window_pages if two else None, ROWS, LONGEST)
        self.model: dict[ReqHandle, Sequence] = {}
        self.next_value = 1
        self.seen: Counter[str] = Counter()

    def admit(self) -> None:
        handle = self.real.admit()
        assert (handle is None) == (len(self.model) == ROWS)
        if handle is not None:
            self.model[handle] = Sequence()

    def fork(self, parent: ReqHandle) -> None:
        child = self.real.fork(parent)
        assert (child is None) == (len(self.model) == ROWS)
        if child is not None:
            self.model[child] = self.model[parent].copy()

    def release(self, handle: ReqHandle) -> None:
        self.real.release(handle)
        del self.model[handle]

    def slide(self, handles: list[ReqHandle]) -> None:
        self.real.slide(handles)
        for handle in handles:
            sequence = self.model[handle]
            first = max(0, len(sequence.tokens) - self.window + 1)  # that the next query sees
            self.seen["left"] += first // self.ps - sequence.behind
            sequence.behind = first // self.ps

    def truncate(self, handle: ReqHandle, length: int) -> None:
        sequence = self.model[handle]
        length = min(length, len(sequence.tokens))
        if length and sequence.behind * self.ps > max(0, length - self.window + 1):
            before = self.state()
            with pytest.raises(ValueError, match="left the window .* compute it anew"):
                self.real.truncate(handle, length)
            assert self.state() == before
            self.seen["no cut"] += 1
            return
        self.real.truncate(handle, length)
        del sequence.tokens[length:], sequence.blocks[-(-length // self.ps) :]
        sequence.behind = sequence.behind if length else 0

    def extend(self, handles: list[ReqHandle], gains: list[int]) -> None:
        gains = [min(g, LONGEST - len(self.model[h].tokens)) for h, g in zip(handles, gains, strict=True)]
        lens = [len(self.model[h].tokens) + g for h, g in zip(handles, gains, strict=True)]
        values = [float(self.next_value + i) for i in range(sum(gains))]
        self.next_value += len(values)
        before, kept = self.state(), {h: s.copy() for h, s in self.model.items()}
        free = min(self.pages - self._held(full=True), self.window_pages - self._held(full=False))
        rest, taken = list(values), 0
        for handle, gain in zip(handles, gains, strict=True):
            taken += self._grow(self.model[handle], rest[:gain])
            del rest[:gain]
        loc = self.real.extend(handles, lens)
        if taken > free:
            self.seen["refused"] += 1
            assert loc is None and self.state() == before
            self.model = kept
            return
        assert loc is not None
        rows = torch.tensor(values, device=DEVICE).view(-1, 1, 1)
        for layer in (0, 1):
            self.real.pool.set_kv_buffer(layer, loc, rows + layer / 4, -rows)

    def check(self) -> None:
        self.real.check_integrity()
        held = {"kv": self._held(full=True), "window": self._held(full=False)}
        for ledger in self.real.ledgers:
            assert ledger.total - ledger.available == held[ledger.name]
        for handle, sequence in self.model.items():
            count = len(sequence.tokens)
            assert self.real.seq_len(handle) == count
            seen = max(0, count - self.window + 1)
            for layer, first in ((0, 0 if self.two else seen), (1, seen)):
                slots = self.real.req_to_token.req_to_token[handle.row, first:count].long()
                assert slots.tolist() == self.real.token_ids(handle, first, count).tolist()
                keys, negative = self.real.pool.get_rows(layer, slots)
                assert (keys - layer / 4).flatten().tolist() == sequence.tokens[first:]
                assert (-negative).flatten().tolist() == sequence.tokens[first:]

    def state(self) -> tuple[Any, ...]:
        real = self.real
        table = real.req_to_token.req_to_token.tolist()
        return (
            ledger_state(real.allocator),
            real._pages.tolist(),
            real._lens.tolist(),
            real._shares.behind.tolist(),
            table,
        )

    def _holds(self, sequence: Sequence, full: bool) -> list[Block]:
        return sequence.blocks[0 if full and self.two else sequence.behind :]

    def _held(self, full: bool) -> int:
        return len({id(b) for s in self.model.values() for b in self._holds(s, full)})

    def _grow(self, sequence: Sequence, values: list[float]) -> int:
        """Appends to the model; returns how many blocks were taken."""
        taken = 0
        if values and len(sequence.tokens) % self.ps:
            owners = sum(any(b is sequence.blocks[-1] for b in self._holds(s, full=True)) for s in self.model.values())
            if owners > 1:
                sequence.blocks[-1] = Block()
                taken = 1
                self.seen["copies"] += 1
        sequence.tokens += values
        while len(sequence.blocks) * self.ps < len(sequence.tokens):
            sequence.blocks.append(Block())
            taken += 1
        return taken


class WindowMachine(RuleBasedStateMachine):
    @initialize(two=st.booleans(), page_size=st.sampled_from([3, 4, 2, 1]), window=st.integers(1, 9))
    def build(self, two: bool, page_size: int, window: int) -> None:
        self.forest = Forest(two, page_size, window)
        self.forest.admit()
        self.forest.extend(list(self.forest.model), [window + page_size])
        self.forest.fork(next(iter(self.forest.model)))

    def _pick(self, data: st.DataObject) -> list[ReqHandle]:
        return data.draw(st.permutations(list(self.forest.model)))[: data.draw(st.integers(1, ROWS))]

    @rule()
    def admit(self) -> None:
        self.forest.admit()

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        for handle in self._pick(data)[:1]:
            self.forest.fork(handle)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        for handle in self._pick(data)[:1]:
            self.forest.release(handle)

    @rule(data=st.data())
    def slide(self, data: st.DataObject) -> None:
        self.forest.slide(self._pick(data))

    @rule(data=st.data(), length=st.integers(0, LONGEST))
    def truncate(self, data: st.DataObject, length: int) -> None:
        for handle in self._pick(data)[:1]:
            self.forest.truncate(handle, length)

    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        handles = self._pick(data)
        gains = data.draw(st.lists(st.integers(0, 7), min_size=len(handles), max_size=len(handles)))
        self.forest.extend(handles, gains)

    @invariant()
    def forest_equals_the_lists(self) -> None:
        self.forest.check()


TestWindows = pytest.mark.soak(WindowMachine.TestCase)
TestWindows.settings = settings(max_examples=rounds(60, 3000), stateful_step_count=25, derandomize=True, deadline=None)


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize(("page_size", "window"), [(1, 1), (1, 5), (2, 7), (3, 4), (4, 9), (5, 1)])
def test_a_long_random_walk(page_size: int, window: int, two: bool) -> None:
    dice = random.Random(page_size)
    forest = Forest(two, page_size, window)
    for _ in range(400):
        live = list(forest.model)
        step = dice.choices(["admit", "fork", "release", "truncate", "slide", "extend"], [1, 2, 2, 1, 5, 6])[0]
        if step == "admit" or not live:
            forest.admit()
            forest.extend(list(forest.model)[-1:], [dice.randint(0, 12)])
        elif step == "fork":
            forest.fork(dice.choice(live))
        elif step == "release":
            forest.release(dice.choice(live))
        elif step == "truncate":
            forest.truncate(dice.choice(live), dice.randint(0, LONGEST))
        elif step == "slide":
            forest.slide(dice.sample(live, dice.randint(1, len(live))))
        else:
            batch = dice.sample(live, dice.randint(1, len(live)))
            forest.extend(batch, [dice.choice([0, 1, 1, 2, 5]) for _ in batch])
        forest.check()
    assert min(forest.seen["left"], forest.seen["no cut"], forest.seen["refused"]) >= 2, forest.seen
    assert page_size == 1 or forest.seen["copies"] >= 5


@pytest.mark.parametrize("window", [1, 2, 5, 9])
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_counts_of_pages(page_size: int, window: int) -> None:
    for length in range(30):
        seen = range(max(0, length - window + 1), length + 1)  # by the query at `length`
        assert pages_behind(length, window, page_size) == seen[0] // page_size
        assert len({each // page_size for each in seen}) <= pages_across(len(seen), page_size)
    most = max(len({each // page_size for each in range(s, s + window)}) for s in range(page_size))
    assert pages_across(window, page_size) == most


def test_slots_that_were_given_back_are_not_named() -> None:
    manager = make_windowed(page_size=4, window=5, pages=8, window_pages=None, rows=1, max_context_len=40)
    handle = manager.admit()
    assert handle is not None and manager.extend([handle], [14]) is not None
    manager.slide([handle])
    assert manager.token_ids(handle, 8, 14).tolist() == [12, 13, 14, 15, 16, 17]
    with pytest.raises(ValueError, match="gave back the slots before position 8"):
        manager.token_ids(handle, 7, 14)


def test_a_window_has_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="window=0 must be at least 1"):
        WindowShares(PagedTokenToKVPoolAllocator(4, 4, "cpu"), 2, 0)
