"""Handlers that others put in place while a gate stands in for the one before, as trackers do."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch

from memsaver import MemorySaver
from memsaver.system.interrupts import Unbroken, deliver, held


class Hit(BaseException):
    """What the first handler raises."""


class Tracker:
    """Counts signals, then calls the handler that it found."""

    def __init__(self) -> None:
        self.calls = 0
        self.before: Any = None

    def install(self, number: int) -> Tracker:
        self.before = signal.signal(number, self.handle)
        return self

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.calls += 1
        self.before(number, frame)


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "term"])
def number(request: pytest.FixtureRequest) -> Iterator[int]:
    """A signal whose handler raises ``Hit``."""

    def first(number: int, frame: FrameType | None) -> None:
        raise Hit

    before = signal.signal(request.param, first)
    yield request.param
    signal.signal(request.param, before)


def operate(saver: MemorySaver) -> None:
    for _ in range(3):
        saver.pause("a")
        saver.resume("a")


def hits(number: int) -> bool:
    """Whether the signal comes to the first handler, once."""
    with pytest.raises(Hit):
        signal.raise_signal(number)
    return True


def test_each_handler_of_a_chain_built_in_and_around_regions_runs_once(number: int) -> None:
    saver, chain = MemorySaver(), [Tracker().install(number)]
    with saver.region("a"):
        torch.ones(10)
        chain.append(Tracker().install(number))
        with saver.region("b"):
            chain.append(Tracker().install(number))
            saver.empty(10, tag="c")
            chain.append(Tracker().install(number))
    chain.append(Tracker().install(number))
    operate(saver)
    with saver.region("a"):
        chain.append(Tracker().install(number))
    assert hits(number) and [each.calls for each in chain] == [1] * 6
    operate(saver)
    assert hits(number) and [each.calls for each in chain] == [2] * 6
    with saver.region("a"):
        operate_elsewhere = saver.empty(10, tag="d")
        assert hits(number) and [each.calls for each in chain] == [3] * 6
    del operate_elsewhere


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_handler_taken_out_again_is_called_no_more(number: int, where: str) -> None:
    saver, tracker = MemorySaver(), Tracker()
    with saver.region("a"):
        torch.ones(10)
        tracker.install(number)
        saver.empty(10, tag="b")
        if where == "inside":
            signal.signal(number, tracker.before)
    operate(saver)
    if where == "outside":
        signal.signal(number, tracker.before)
    assert hits(number) and tracker.calls == 0
    operate(saver)
    assert hits(number) and tracker.calls == 0


def test_a_handler_that_takes_the_gate_for_another_ones_comes_before_what_was_there(
    number: int,
) -> None:
    """Installed unless it is there, by a look at what is there."""
    saver, tracker = MemorySaver(), Tracker()
    for _ in range(3):
        with saver.region("a"):
            if signal.getsignal(number) != tracker.handle:
                tracker.install(number)
            saver.empty(10, tag="b")
        operate(saver)
    assert hits(number) and tracker.calls == 1
    with pytest.raises(Hit), held():  # as a long wait delivers it
        signal.raise_signal(number)
        deliver()
    assert tracker.calls == 2


def test_a_handler_of_a_region_is_held_back_by_the_operations_in_it(number: int) -> None:
    saver, tracker, done = MemorySaver(), Tracker(), []
    with pytest.raises(Hit), saver.region("a"):
        tracker.install(number)
        with held():
            signal.raise_signal(number)
            done.append(tracker.calls)
    assert done == [0] and tracker.calls == 1
    saver.pause("a")  # the region has ended


def test_a_second_signal_comes_to_the_handler_that_is_at_work(number: int) -> None:
    """Which saves by operations of its own, and ends at once when asked twice."""
    saver, calls = MemorySaver(), list[int]()

    def handler(number: int, frame: FrameType | None) -> None:
        calls.append(number)
        if len(calls) == 2:
            raise Hit
        saver.empty(10, tag="b")
        with held():
            signal.raise_signal(number)

    signal.signal(number, handler)
    with saver.region("a"):
        assert hits(number) and len(calls) == 2
    saver.pause("a")


def test_a_region_that_another_thread_leaves_takes_the_gate_along(number: int) -> None:
    handler, saver = signal.getsignal(number), MemorySaver()
    region = Unbroken(saver.region("a"))
    region.__enter__()
    assert signal.getsignal(number) is not handler
    thread = threading.Thread(target=region.__exit__, args=[None] * 3)
    thread.start()
    thread.join()
    saver.empty(10, tag="b")
    assert signal.getsignal(number) is handler
