"""Reward functions that hang, wait for turns, or leave processes behind, in real workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from recipes.rewards import Answer, Rewards, RewardSet, Scored
from tests.helpers.ray_cluster import until

MODULE = """
import asyncio, os, subprocess, time
running = most = 0

def odd_hang(completion):
    if completion == "hang":
        time.sleep(1000)
    return 1.0

def hang(completion):
    time.sleep(1000)

async def cleans_up(completion):
    try:
        await asyncio.sleep(1000)
    finally:
        await asyncio.sleep(0.3 if completion == "short" else 1000)

async def counted(completion):
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(0.1)
    running -= 1
    return {"reward": 1.0, "most": most, "process": os.getpid()}

def signals(completion):
    os.kill(os.getppid(), __import__("signal").SIGTERM)
    return 1.0

def leaves_processes(completion):
    inner = "import os, sys; os.setsid(); os.execvp('sleep', ['sleep', '97.%s'])" % completion
    subprocess.Popen(["python3", "-c", inner])
    subprocess.Popen(["sh", "-c", "sleep 97.%s & wait" % completion])
    return 1.0
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "hanging.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path


def timed(rewards: Rewards, texts: list[str]) -> tuple[float, list[Scored]]:
    rewards.score([Answer(prompt="p", text="fine")])  # The workers have loaded.
    start = time.monotonic()
    asked = [Answer(prompt=f"p{number // 4}", text=text) for number, text in enumerate(texts)]
    scores = rewards.submit(asked, required=False)()
    return time.monotonic() - start, scores


def test_hung_answers_cost_one_time_out_and_no_other_answer() -> None:
    """Hang in 8 of 32 answers with one worker, which take 8 s one after the other."""
    texts = ["hang" if number % 4 == 1 else "fine" for number in range(32)]
    group = RewardSet(functions=["hanging:odd_hang"])
    with Rewards(group, workers=1, timeout=1) as rewards:
        seconds, scores = timed(rewards, texts)
    assert [scored.reward for scored in scores] == [None if t == "hang" else 1.0 for t in texts]
    assert all(("took longer than 1 s" in s.fault) == (s.reward is None) for s in scores)
    assert seconds < 7.5


def test_function_that_only_hangs_is_given_up_in_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hang in all of 200 answers, which take 50 s with 2 workers, and check the lines."""
    monkeypatch.setattr("recipes.rewards.rewards.PATIENCE", 0.2)
    notes = list[str]()
    group = RewardSet(functions=["hanging:hang"])
    with Rewards(group, workers=2, timeout=0.5, note=notes.append) as rewards:
        start = time.monotonic()
        asked = [Answer(prompt=str(number), text="x") for number in range(200)]
        scores = rewards.submit(asked, required=False)()
        seconds = time.monotonic() - start
    assert {scored.reward for scored in scores} == {None} and seconds < 25
    faults = [scored.fault.partition(", for")[0] for scored in scores]
    assert "hanging:hang: took longer than 0.5 s" in faults
    assert faults[-1].startswith("hanging:hang: was not called: ")
    assert any(
        "waiting for rewards: " in n and "of task.rewards=hanging:hang, the" in n for n in notes
    )


def test_late_asynchronous_calls_clean_up_together() -> None:
    group = RewardSet(functions=["hanging:cleans_up"])
    with Rewards(group, workers=1, timeout=0.5) as rewards:
        rewards.submit([Answer(prompt="p", text="short")], required=False)()
        for text in ("short", "endless"):
            start = time.monotonic()
            asked = [Answer(prompt=str(number), text=text) for number in range(32)]
            scores = rewards.submit(asked, required=False)()
            assert all("took longer than 0.5 s" in scored.fault for scored in scores)
            assert time.monotonic() - start < 6


def test_calls_wait_for_their_turn_without_losing_time() -> None:
    """Call 24 times for 0.1 s, 2 at a time, so that the last call waits longer than its limit."""
    group = RewardSet(functions=["hanging:counted"])
    with Rewards(group, workers=3, timeout=0.7, concurrency=2) as rewards:
        _, scores = timed(rewards, ["x"] * 24)
    assert [scored.reward for scored in scores] == [1.0] * 24
    assert {scored.figures["counted_most"] for scored in scores} <= {1.0, 2.0}
    assert len({scored.figures["counted_process"] for scored in scores}) == 1


def test_signal_to_the_parent_of_a_function_reaches_the_run() -> None:
    got = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    try:
        with Rewards(RewardSet(functions=["hanging:signals"]), workers=1) as rewards:
            scores = rewards.score([Answer(prompt="p", text="x")])
            until(lambda: got == [signal.SIGTERM])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert scores[0].reward == 1.0


def alive(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if f"97.{mark}" in " ".join(process.info["cmdline"] or []):
            found.append(process.pid)
    return found


RUN = """
import time
from recipes.rewards import Answer, Rewards, RewardSet
rewards = Rewards(RewardSet(functions=["hanging:leaves_processes"]), workers=1)
print(rewards.score([Answer(prompt="p", text="MARK")])[0].reward, flush=True)
time.sleep(90)
"""


def test_processes_of_a_function_end_with_a_killed_run(module: Path) -> None:
    """Kill a run whose function left a daemon and a grandchild, in and outside of its group."""
    mark = str(os.getpid())
    paths = os.pathsep.join([str(module), *sys.path])
    command = [sys.executable, "-c", RUN.replace("MARK", mark)]
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE
    ) as run:
        assert run.stdout is not None and run.stdout.readline() == b"1.0\n"
        until(lambda: len(alive(mark)) >= 3)
        run.send_signal(signal.SIGKILL)
    until(lambda: not alive(mark))


def test_processes_of_a_function_end_with_its_rewards() -> None:
    mark = f"{os.getpid()}5"
    with Rewards(RewardSet(functions=["hanging:leaves_processes"]), workers=1) as rewards:
        rewards.score([Answer(prompt="p", text=mark)])
        until(lambda: len(alive(mark)) >= 3)
    assert not alive(mark)


def test_worker_that_does_not_read_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop an idle worker and send it more than a socket holds."""
    monkeypatch.setattr("recipes.supervised_process.STALLED", 1)
    # A stopped supervisor ends nothing, however long the pool waits for it.
    monkeypatch.setattr("recipes.supervised_process.ENDING", 0.5)
    before = {*psutil.Process().children(recursive=True)}
    with Rewards(RewardSet(functions=["hanging:odd_hang"]), workers=1, timeout=1) as rewards:
        rewards.score([Answer(prompt="p", text="x")])
        for process in {*psutil.Process().children(recursive=True)} - before:
            process.suspend()
        asked = [Answer(prompt=str(n), text="x", columns={"big": "y" * 10**7}) for n in range(2)]
        scores = rewards.score(asked)
    assert [scored.reward for scored in scores] == [None, 1.0]
