"""Runs that are killed, interrupted or out of disk space at any moment end as an undisturbed run.

A disturbance happens at an access to the run's folder, which Python's audit events report, or when
a side works. Sessions are forked processes with a trainer and a rollout without tensors, so a whole
run takes a moment.
"""

from __future__ import annotations

import errno
import functools
import gc
import json
import os
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recipes.cli import main
from recipes.logs.checkpoints import Checkpoints
from tests.helpers.case_selection import rounds
from tests.helpers.recipes.fake_sides import fake_runs
from tests.helpers.recipes.tiny_runs import rows, same_rows

pytestmark = pytest.mark.usefixtures("fakes", "no_pictures")
WORDS = ["steps=12", "loop.prompts_per_step=16", "loop.samples_per_prompt=2"]
WORDS += ["eval.every=2", "eval.samples=2", "eval.temperature=1.0", "checkpoint.every=5"]
PATIENT, IMPATIENT = "eval.patience=0", "eval.patience=2"
# Steps of these runs have several generations, so that the prompts depend on the rewards.
MORE = {PATIENT: [], IMPATIENT: ["grpo.sampling_rounds=3"]}
ACCESSES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir")
DISTURBANCES = ("kill", "interrupt", "full disk")


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with fake_runs(tmp_path_factory.mktemp("model")):
        yield


class Disturbance:
    """Audit hook that disturbs this process at the given event, counted from 1.

    Attributes:
        count: Accesses to the folder and work of the sides so far.
    """

    def __init__(self, folder: Path, kind: str = "", moment: int = 0) -> None:
        self._folder, self._kind, self._moment = f"{folder}/", kind, moment
        self.count = 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        inside = event in ACCESSES and str(arguments[0]).startswith(self._folder)
        if not inside and event != "tests.fake_side":
            return
        self.count += 1
        if self._kind == "full disk":
            reads = event == "open" and not (arguments[2] & (os.O_WRONLY | os.O_RDWR))
            # Files can still be renamed and removed.
            if self.count >= self._moment and not reads and event in ("open", "os.mkdir"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))
        elif self.count == self._moment:
            os.kill(os.getpid(), signal.SIGKILL if self._kind == "kill" else signal.SIGINT)


def session(
    words: list[str], folder: Path, kind: str = "", moment: int = 0
) -> tuple[int, list[str]]:
    """Run the command in a child; return its exit status (negative: signal) and its lines.

    The last line of a child that was not killed is the number of events.
    """
    log = folder.parent / "log"
    if not (child := os.fork()):
        status = 70
        gc.disable()  # Garbage of other tests may wait for threads that the child does not have.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        try:
            with log.open("w", buffering=1) as file:
                sys.stdout = sys.stderr = file
                disturbance = Disturbance(folder, kind, moment)
                sys.addaudithook(disturbance)
                status = main(words)
                print(disturbance.count)
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(ended), log.read_text().splitlines()


Straight = Callable[[str], tuple[Path, int]]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """Return a function that runs undisturbed: the folder, and the number of events."""

    @functools.cache
    def run(patience: str) -> tuple[Path, int]:
        folder = tmp_path_factory.mktemp("straight") / "run"
        words = ["run", "tiny", *WORDS, patience, *MORE[patience], "--run-dir", str(folder)]
        status, lines = session(words, folder)
        assert status == 0, lines
        return folder, int(lines[-1])

    return run


def disturbed(folder: Path, patience: str, kind: str, moments: list[int]) -> None:
    """Start sessions that are disturbed at these events, and one that ends the run.

    Every session starts as its predecessor's last line says.
    """
    statuses = {"kill": {-signal.SIGKILL}, "interrupt": {130}, "full disk": {1, 2}}
    for moment in [*moments, 0]:
        words = ["run", "--resume", str(folder)]
        if not (saved := Checkpoints(folder).exist):
            shutil.rmtree(folder, ignore_errors=True)
            words = ["run", "tiny", *WORDS, patience, *MORE[patience], "--run-dir", str(folder)]
        status, lines = session(words, folder, kind if moment else "", moment)
        if status == 0 or (status == 2 and ended(lines[-2])):
            return
        assert moment and status in statuses[kind], (moment, status, lines)
        if status == 130 and saved and moment > 2:  # Two events lock the folder.
            assert lines[-2].endswith(f"continue with: memsaver run --resume {folder}"), lines
    raise AssertionError("the last session did not end the run")


def ended(line: str) -> bool:
    """Return whether a resume was refused because the run had ended."""
    return "the run is done after" in line or "was better than that after" in line


def outcome(folder: Path) -> dict[str, Any]:
    """Return the checkpoints that a run keeps, by name with their content."""
    names = {name: (folder / "checkpoints" / name).read_text() for name in ("best", "latest")}
    saved = {name: state(folder / "checkpoints" / name.strip()) for name in names.values()}
    return {**saved, **names}


def state(checkpoint: Path) -> dict[str, Any]:
    values = json.loads((checkpoint / "values.json").read_text())
    return {key: values[key] for key in ("weights", "seen")} | values["extra"]


@pytest.mark.soak
@pytest.mark.parametrize("kind", DISTURBANCES)
@pytest.mark.parametrize("patience", [PATIENT, IMPATIENT])
def test_run_disturbed_at_any_moments_ends_as_an_undisturbed_run(
    patience: str, kind: str, straight: Straight, tmp_path: Path
) -> None:
    """Expect the same rows, prompts, checkpoints and best checkpoint.

    The short form tries a few moments of each kind; the soak tries each event first.
    """
    alone, events = straight(patience)
    assert len(rows(alone, "train")) == (12 if patience == PATIENT else 6)
    expected = outcome(alone)
    assert expected["best"] == ("step_8\n" if patience == PATIENT else "step_2\n")
    first, draw = range(1, events + 1), random.Random(f"{patience}/{kind}")
    for number, moment in enumerate(draw.sample(first, rounds(1, events))):
        folder = tmp_path / str(number)
        moments = [moment, *(draw.choice(first) for _ in range(draw.randrange(3)))]
        disturbed(folder, patience, kind, moments)
        assert same_rows(folder, alone), moments
        assert outcome(folder) == expected, moments


def test_every_prompt_is_learned_once_in_a_pass(straight: Straight, tmp_path: Path) -> None:
    """Kill a run in each of its steps: 48 training problems, 16 in a step."""
    folder, (_, events) = tmp_path / "run", straight(PATIENT)
    disturbed(folder, PATIENT, "kill", list(range(events // 12, events, events // 12)))
    prompts = [tuple(prompt) for prompt in state(folder / "checkpoints" / "step_12")["seen"]]
    assert len(prompts) == 12 * 32
    for start in range(0, len(prompts), 96):
        assert list(Counter(prompts[start : start + 96]).values()) == [2] * 48
