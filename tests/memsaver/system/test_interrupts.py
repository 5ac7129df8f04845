"""Handlers that are installed while a gate replaces the previous one, as by trackers."""

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
    """Exception of the first handler."""


class Tracker:
    """Handler that counts signals and then calls the previous handler."""

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
    """Install a handler that raises ``Hit``, and yield its signal."""

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
    """Return whether the signal reaches the first handler."""
    with pytest.raises(Hit):
        signal.raise_signal(number)
    return True


def test_handlers_installed_in_and_around_regions_run_once_each(number: int) -> None:
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
    assert hits(number) and [tracker.calls for tracker in chain] == [1] * 6
    operate(saver)
    assert hits(number) and [tracker.calls for tracker in chain] == [2] * 6
    with saver.region("a"):
        operate_elsewhere = saver.empty(10, tag="d")
        assert hits(number) and [tracker.calls for tracker in chain] == [3] * 6
    del operate_elsewhere


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_removed_handler_is_not_called(number: int, where: str) -> None:
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


def test_handler_reinstalled_over_its_own_gate_runs_once(number: int) -> None:
    """Install a handler unless `getsignal` returns it, while a gate hides the handler."""
    saver, tracker = MemorySaver(), Tracker()
    for _ in range(3):
        with saver.region("a"):
            if signal.getsignal(number) != tracker.handle:
                tracker.install(number)
            saver.empty(10, tag="b")
        operate(saver)
    assert hits(number) and tracker.calls == 1
    with pytest.raises(Hit), held():  # delivered as during a long wait
        signal.raise_signal(number)
        deliver()
    assert tracker.calls == 2


def test_handler_installed_in_a_region_is_delayed_by_operations(number: int) -> None:
    saver, tracker, done = MemorySaver(), Tracker(), []
    with pytest.raises(Hit), saver.region("a"):
        tracker.install(number)
        with held():
            signal.raise_signal(number)
            done.append(tracker.calls)
    assert done == [0] and tracker.calls == 1
    saver.pause("a")  # the region has ended


def test_second_signal_reaches_the_running_handler(number: int) -> None:
    """Use a saver in the handler, and raise on the second signal."""
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


def test_gate_is_removed_after_another_thread_left_the_region(number: int) -> None:
    handler, saver = signal.getsignal(number), MemorySaver()
    region = Unbroken(saver.region("a"))
    region.__enter__()
    assert signal.getsignal(number) is not handler
    thread = threading.Thread(target=region.__exit__, args=[None] * 3)
    thread.start()
    thread.join()
    saver.empty(10, tag="b")
    assert signal.getsignal(number) is handler
