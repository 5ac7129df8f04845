"""Runs in one process that lose an actor: restarts, and the message of the last loss."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from recipes.cli import main
from recipes.config.decisions import Decisions
from recipes.logs.checkpoints import Checkpoints
from recipes.run import start_run
from recipes.setup.model_decisions import unplanned
from recipes.setup.preparation import Setup
from tests.helpers.recipes.tiny_runs import SMALL, MakeRun, same_rows
from trainer_bridge import ActorDied
from trainer_bridge.trainer import Trainer

pytestmark = pytest.mark.usefixtures("no_pictures")
LOSS = "update_actor failed: ActorDied: the trainer actor died in update_actor()"


def lose_trainer(monkeypatch: pytest.MonkeyPatch, *updates: int) -> None:
    """Simulate a death of the trainer's actor in these calls of `update_actor`, counted from 1."""
    update, calls = Trainer.update_actor, itertools.count(1)

    def lose(trainer: Trainer, batch: Any) -> Any:
        if next(calls) in updates:
            raise ActorDied("trainer", "update_actor", "died")
        return update(trainer, batch)

    monkeypatch.setattr(Trainer, "update_actor", lose)


def test_run_restarts_after_lost_workers_up_to_the_limit(
    make_run: MakeRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Restart from the start, then from a checkpoint, with the rows of an undisturbed run."""
    straight = make_run("tiny", *SMALL, "steps=5")
    lose_trainer(monkeypatch, 2, 5)  # attempts: 1, lost; 1, 2, lost; 3, 4, 5
    words = [*SMALL, "steps=5", "checkpoint.every=2", "checkpoint.max_restarts=2"]
    start_run("tiny", words, tmp_path / "run")
    assert same_rows(tmp_path / "run", straight)
    out = capsys.readouterr().out.splitlines()
    assert f"restart 1 of 2 from the start: {LOSS}" in out
    assert f"restart 2 of 2 from step 2: {LOSS}" in out
    restarts = [
        json.loads(line) for line in (tmp_path / "run" / "restarts.jsonl").read_text().splitlines()
    ]
    recorded = [(row["restart"], row["after_step"], row["cause"]) for row in restarts]
    assert recorded == [(1, 0, LOSS), (2, 2, LOSS)]
    traces = {"trace.json", "trace-until-step-0-1.json", "trace-until-step-2-1.json"}
    assert {path.name for path in (tmp_path / "run").glob("trace*.json")} == traces


@pytest.mark.parametrize(
    ("lost_in", "remedy"),
    [
        (2, "start again: there is no checkpoint yet"),
        (3, "continue with: memsaver run --resume {folder}"),
    ],
)
def test_lost_worker_is_reported_in_one_line_with_the_resume_command(
    lost_in: int,
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lose_trainer(monkeypatch, lost_in)
    folder = tmp_path / "run"
    words = ["run", "tiny", *SMALL, "steps=3", "checkpoint.every=2", "--run-dir", str(folder)]
    assert main(words) == 1
    assert capsys.readouterr().err == f"memsaver: {LOSS}; {remedy.format(folder=folder)}\n"
    assert not (folder / "restarts.jsonl").exists()


def test_actor_that_cannot_be_created_is_not_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> None:
        raise ActorDied("rollout", "__init__", "could not be made (ValueError: page_size)")

    monkeypatch.setattr("recipes.run.open_pair", fail)
    words = ["run", "tiny", *SMALL, "checkpoint.max_restarts=3", "--run-dir", str(tmp_path / "run")]
    assert main(words) == 1
    assert capsys.readouterr().err.startswith(
        "memsaver: build failed: ActorDied: the rollout actor could not be made"
    )
    assert not (tmp_path / "run" / "restarts.jsonl").exists()


def test_restarted_run_keeps_the_micro_batch_of_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the plan of the restart choose another size."""
    sizes = iter([8, 16])

    def decide(setup: Setup, *_: Any) -> tuple[Decisions, None]:
        return unplanned(setup.decisions.decided(micro_batch_size=next(sizes))), None

    monkeypatch.setattr("recipes.run.decide", decide)
    lose_trainer(monkeypatch, 3)
    words = [*SMALL, "steps=4", "eval.every=0", "checkpoint.every=2", "checkpoint.max_restarts=1"]
    folder = start_run("tiny", [*words, "trainer.micro_batch_size=auto"], tmp_path / "run")
    assert (folder / "restarts.jsonl").exists() and next(sizes, None) is None
    values = Checkpoints(folder).values()
    assert (values["step"], values["decisions"]["micro_batch_size"]) == (4, 8)
