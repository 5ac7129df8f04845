"""Signals end a run, and handlers are replaced only in the main thread and for a while."""

from __future__ import annotations

import os
import queue
import signal
import threading

import pytest

from memsaver import StateError
from recipes.cli import interrupts, main
from recipes.errors import LostWorker
from recipes.loops.loop import Stopping

BAD = ["run", "tiny", "stepz=3"]
BOTH = (signal.SIGINT, signal.SIGTERM)


def test_main_works_outside_the_main_thread(capsys: pytest.CaptureFixture[str]) -> None:
    status: list[int] = []
    thread = threading.Thread(target=lambda: status.append(main(BAD)))
    thread.start()
    thread.join()
    assert status == [2]
    assert "stepz" in capsys.readouterr().err


@pytest.mark.parametrize("number", BOTH)
def test_interrupt_is_reported_even_if_another_error_replaces_it(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        try:
            os.kill(os.getpid(), number)
            signal.sigtimedwait([], 5)
        finally:
            raise StateError("the interrupted object cannot be closed")

    monkeypatch.setattr("recipes.run.start_run", interrupted)
    assert main(["run", "tiny"]) == 128 + number
    assert capsys.readouterr().err == "memsaver: interrupted\n"


def own(number: int, frame: object) -> None:
    """Handle a signal for the caller of `main`."""


@pytest.mark.parametrize("number", BOTH)
def test_signal_raises_and_is_recorded_and_handlers_are_restored(number: int) -> None:
    before = signal.signal(number, own)
    try:
        with pytest.raises(KeyboardInterrupt), interrupts() as received:
            os.kill(os.getpid(), number)
            signal.sigtimedwait([], 5)  # The handler runs here at the latest.
        assert received == [number] and signal.getsignal(number) is own
        assert main(BAD) == 2 and signal.getsignal(number) is own
    finally:
        signal.signal(number, before)


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    signal.sigtimedwait([], 0)  # The handler runs here at the latest.


@pytest.mark.parametrize("number", BOTH)
def test_first_signal_waits_for_end_of_step_and_second_does_not(number: int) -> None:
    notes: queue.Queue[str] = queue.Queue()
    before = signal.getsignal(number)
    with (
        pytest.raises(KeyboardInterrupt),
        interrupts() as received,
        Stopping(notes.put) as stopping,
    ):
        stopping.leave()
        send(number)
        assert stopping.asked and not received
        assert "a second signal ends it immediately" in notes.get(timeout=10)
        stopping.leave()
    assert received == [number] and signal.getsignal(number) is before
    with pytest.raises(KeyboardInterrupt), interrupts() as received, Stopping(notes.put):
        send(number)
        send(number)
    assert received == [number]


@pytest.mark.parametrize("number", BOTH)
@pytest.mark.parametrize("error", [None, LostWorker("update_actor", "died")])
def test_deferred_signal_is_not_lost_with_a_worker_or_after_the_last_step(
    error: Exception | None, number: int
) -> None:
    """A run restarts after the loss of a worker, unless it was asked to stop before."""
    with pytest.raises(KeyboardInterrupt), interrupts() as received, Stopping(lambda _: None):
        send(number)
        if error is not None:
            raise error
    assert received == [number]


def test_signal_interrupts_immediately_without_checkpoints() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts(), Stopping(None):
        send(signal.SIGINT)


def test_interrupt_lost_in_a_finalizer_is_sent_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Dying:
        def __del__(self) -> None:
            send(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), interrupts() as received:
        Dying()
        signal.sigtimedwait([], 10)
    assert received == 2 * [signal.SIGINT] and not capsys.readouterr().err
