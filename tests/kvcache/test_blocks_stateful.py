"""The copy-on-write forest against deep-copied token lists and a model of blocks with owners."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcache import ReqHandle
from tests.helpers.effort import rounds
from tests.helpers.kvcache.blocks import make_blocks

ROWS = 6
LONGEST = 24


class Block:
    """One page of the model, told apart by identity."""


@dataclass
class Sequence:
    tokens: list[float] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)

    def copy(self) -> "Sequence":
        return Sequence(list(self.tokens), list(self.blocks))


class Forest:
    """Every operation on the real thing and on plain lists, with the outcome that the lists ask for."""

    def __init__(self, page_size: int) -> None:
        self.ps = page_size
        self.pages = 48 // page_size  # fewer than ROWS sequences of LONGEST tokens take
        self.real = make_blocks(self.pages, page_size, ROWS, LONGEST)
        self.model: dict[ReqHandle, Sequence] = {}
        self.next_value = 1
        self.seen: Counter[str] = Counter()

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

    def truncate(self, handle: ReqHandle, length: int) -> None:
        sequence = self.model[handle]
        length = min(length, len(sequence.tokens))
        self.real.manager.truncate(handle, length)
        del sequence.tokens[length:], sequence.blocks[-(-length // self.ps) :]

    def extend(self, handles: list[ReqHandle], gains: list[int]) -> None:
        gains = [min(g, LONGEST - len(self.model[h].tokens)) for h, g in zip(handles, gains, strict=True)]
        lens = [len(self.model[h].tokens) + g for h, g in zip(handles, gains, strict=True)]
        values = [float(self.next_value + i) for i in range(sum(gains))]
        self.next_value += len(values)
        before, moves = self.real.state(), len(self.real.pool.moves)
        kept = {h: s.copy() for h, s in self.model.items()}
        free = self.pages - self._used()
        rest, taken, copied = list(values), 0, []
        for handle, gain in zip(handles, gains, strict=True):
            more, moved = self._grow(self.model[handle], rest[:gain])
            taken, copied = taken + more, copied + moved
            del rest[:gain]

        assert self.real.manager.pages_needed(handles, lens) == taken
        loc = self.real.manager.extend(handles, lens)
        self.seen["refused" if loc is None else f"{min(2, len(copied))} copies"] += 1
        if taken > free:
            assert loc is None
            assert self.real.state() == before
            assert len(self.real.pool.moves) == moves
            self.model = kept
            return
        assert loc is not None
        assert self.real.pool.moves[moves:] == ([sum(copied)] if copied else [])
        self.real.write(loc, values)

    def check(self) -> None:
        manager = self.real.manager
        manager.check_integrity()
        assert manager.available_pages == self.pages - self._used()
        for handle, sequence in self.model.items():
            assert manager.seq_len(handle) == len(sequence.tokens)
            assert self.real.read(handle) == sequence.tokens

    def _owners(self, block: Block) -> int:
        return sum(any(b is block for b in s.blocks) for s in self.model.values())

    def _used(self) -> int:
        return len({id(b) for s in self.model.values() for b in s.blocks})

    def _grow(self, sequence: Sequence, values: list[float]) -> tuple[int, list[int]]:
        """Appends to the model; returns how many blocks were taken and the tokens of each copied block."""
        taken, copied = 0, []
        partial = len(sequence.tokens) % self.ps
        if values and partial and self._owners(sequence.blocks[-1]) > 1:
            sequence.blocks[-1] = Block()
            taken, copied = 1, [partial]
        sequence.tokens += values
        while len(sequence.blocks) * self.ps < len(sequence.tokens):
            sequence.blocks.append(Block())
            taken += 1
        return taken, copied


class ForestMachine(RuleBasedStateMachine):
    @initialize(page_size=st.sampled_from([3, 4, 2, 5, 1]), forks=st.integers(0, 2))
    def build(self, page_size: int, forks: int) -> None:
        """Starts from two short sequences, the first forked: Hypothesis leaves rules out of many runs."""
        self.forest = Forest(page_size)
        for length in (page_size + 1, 2):
            self.forest.admit()
            self.forest.extend(list(self.forest.model)[-1:], [length])
        for _ in range(forks):
            self.forest.fork(next(iter(self.forest.model)))

    def _pick(self, data: st.DataObject) -> ReqHandle | None:
        return data.draw(st.sampled_from(list(self.forest.model))) if self.forest.model else None

    @rule()
    def admit(self) -> None:
        self.forest.admit()

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        if parent := self._pick(data):
            self.forest.fork(parent)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if handle := self._pick(data):
            self.forest.release(handle)

    @rule(data=st.data(), length=st.integers(0, LONGEST))
    def truncate(self, data: st.DataObject, length: int) -> None:
        if handle := self._pick(data):
            self.forest.truncate(handle, length)

    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        handles = data.draw(st.permutations(list(self.forest.model)))[: data.draw(st.integers(1, ROWS))]
        gains = data.draw(st.lists(st.integers(0, 7), min_size=len(handles), max_size=len(handles)))
        self.forest.extend(handles, gains)

    @invariant()
    def forest_equals_the_lists(self) -> None:
        self.forest.check()


TestForest = pytest.mark.soak(ForestMachine.TestCase)
TestForest.settings = settings(max_examples=rounds(100, 3000), stateful_step_count=30, derandomize=True, deadline=None)


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 5])
def test_a_long_random_walk(page_size: int) -> None:
    """What Hypothesis rarely reaches: full pools and several copies in one batch, here many times each."""
    dice = random.Random(page_size)
    forest = Forest(page_size)
    for _ in range(800):
        live = list(forest.model)
        step = dice.choices(["admit", "fork", "release", "truncate", "extend"], [1, 2, 3, 1, 6])[0]
        if step == "admit" or not live:
            forest.admit()
            forest.extend(list(forest.model)[-1:], [dice.randint(0, 9)])
        elif step == "fork":
            parent = dice.choice(live)
            for _ in range(dice.randint(1, 3)):
                forest.fork(parent)
        elif step == "release":
            forest.release(dice.choice(live))
        elif step == "truncate":
            forest.truncate(dice.choice(live), dice.randint(0, 12))
        else:
            batch = dice.sample(live, dice.randint(1, len(live)))
            forest.extend(batch, [dice.choice([0, 1, 1, 1, 2, 5]) for _ in batch])
        forest.check()
    if page_size > 1:
        assert forest.seen["1 copies"] >= 10
        assert forest.seen["2 copies"] >= 5  # two or more
    assert forest.seen["refused"] >= 10
