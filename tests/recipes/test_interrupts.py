"""Signals end a run; handlers are only replaced for a while, and only where Python lets a thread
have them.
"""

from __future__ import annotations

import os
import queue
import signal
import threading

import pytest

from memsaver import StateError
from recipes.cli import interrupts, main
from recipes.loop import Stopping

BAD = ["run", "tiny", "stepz=3"]
BOTH = (signal.SIGINT, signal.SIGTERM)


def test_main_may_be_called_off_the_main_thread(capsys: pytest.CaptureFixture[str]) -> None:
    status: list[int] = []
    thread = threading.Thread(target=lambda: status.append(main(BAD)))
    thread.start()
    thread.join()
    assert status == [2]
    assert "stepz" in capsys.readouterr().err


@pytest.mark.parametrize("number", BOTH)
def test_an_interrupt_is_said_whatever_it_became_on_its_way_out(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken_into(*_: object) -> None:
        try:
            os.kill(os.getpid(), number)
            signal.sigtimedwait([], 5)
        finally:
            raise StateError("what it broke into cannot be closed")

    monkeypatch.setattr("recipes.run.start_run", broken_into)
    assert main(["run", "tiny"]) == 128 + number
    assert capsys.readouterr().err == "memsaver: interrupted\n"


def own(number: int, frame: object) -> None:
    """A handler of who calls `main`."""


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_raises_and_is_remembered_and_handlers_are_given_back(number: int) -> None:
    before = signal.signal(number, own)
    try:
        with pytest.raises(KeyboardInterrupt), interrupts() as seen:
            os.kill(os.getpid(), number)
            signal.sigtimedwait([], 5)  # the handler runs here at the latest
        assert seen == [number] and signal.getsignal(number) is own
        assert main(BAD) == 2 and signal.getsignal(number) is own
    finally:
        signal.signal(number, before)


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    signal.sigtimedwait([], 0)  # the handler runs here at the latest


@pytest.mark.parametrize("number", BOTH)
def test_the_first_signal_waits_for_the_steps_end_and_the_second_does_not(number: int) -> None:
    told: queue.Queue[str] = queue.Queue()
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), interrupts() as seen, Stopping(told.put) as stopping:
        stopping.leave()
        send(number)
        assert stopping.asked and not seen
        assert "asked again, it ends immediately" in told.get(timeout=10)
        stopping.leave()
    assert seen == [number] and signal.getsignal(number) is before
    with pytest.raises(KeyboardInterrupt), interrupts() as seen, Stopping(told.put):
        send(number)
        send(number)
    assert seen == [number]


def test_a_run_without_checkpoints_is_not_asked_but_interrupted() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts(), Stopping(None):
        send(signal.SIGINT)


def test_an_interrupt_that_a_finalizer_drops_comes_once_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Dying:
        def __del__(self) -> None:
            send(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), interrupts() as seen:
        Dying()
        signal.sigtimedwait([], 10)
    assert seen == 2 * [signal.SIGINT] and not capsys.readouterr().err
