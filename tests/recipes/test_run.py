"""Whole runs of the tiny recipe: what they learn, what they leave behind, how they go on, how they fail."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from recipes.cli import main
from recipes.errors import RunError
from recipes.loading import load
from recipes.report.reading import read_run
from recipes.run import continue_run, start_run
from tests.helpers.faults import dying_trainer, wait_gone
from trainer_bridge import open_ray
from trainer_bridge.trainer import Trainer

ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG\r\n\x1a\n"
SMALL = ["grpo.prompts_per_step=8", "grpo.samples_per_prompt=4", "eval.every=2"]
SMALL_PPO = ["ppo.prompts_per_step=8", "ppo.samples_per_prompt=4", "eval.every=2"]
OF_THE_CLOCK = ("step_seconds", "tokens_per_second", "stages", "sync", "memory", "peaks")
STAGES = [
    "park_optim",
    "wake_weights",
    "sync_weights",
    "park_params",
    "wake_kv_cache",
    "generate_sequences",
    "sleep",
    "restore_params",
    "compute_log_prob",
    "compute_reward",
    "restore_optim",
    "compute_advantages",
    "update_actor",
]


def rows(folder, kind=None):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if kind in (None, row["kind"])]


def without_clock(found):
    return [{key: value for key, value in row.items() if key not in OF_THE_CLOCK} for row in found]


def command(*words):
    return [sys.executable, "-m", "recipes.cli", *map(str, words)]


LEARNT = ["steps=25"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The packaged recipe; it has learnt its task after 20 of its 50 steps."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    start_run("tiny", LEARNT, folder)
    return folder


def test_the_reward_rises(tiny):
    rewards = [row["reward"] for row in rows(tiny, "train")]
    assert len(rewards) == 25
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert first < 0.2
    assert last > 0.6


def test_held_out_problems_are_learnt_too(tiny):
    found = rows(tiny, "eval")
    assert [row["step"] for row in found] == [0, 10, 20, 25]
    assert found[0]["exact_match"] < 0.2
    assert found[-1]["exact_match"] > 0.5


def test_rollout_and_trainer_agree_on_every_token(tiny):
    train = rows(tiny, "train")
    tokens = sum(row["tokens"] for row in train)
    assert sum(row["gap_mean"] * row["tokens"] for row in train) / tokens <= 1e-5
    assert max(row["gap_max"] for row in train) <= 5e-5
    assert max(row["gap_max"] for row in train) > 0  # two implementations: a gap of zero would mean one was not asked


def test_memory_changes_hands_in_every_step(tiny):
    for row in rows(tiny, "train"):
        rollout, train = row["memory"]["rollout"], row["memory"]["train"]
        assert rollout["weights"] > 0 and rollout["kv_cache"] > 0
        assert rollout["params"] == rollout["optim"] == 0
        assert train["params"] > 0 and train["optim"] > 0
        assert train["weights"] == train["kv_cache"] == 0


def test_every_stage_is_in_the_metrics_and_the_trace(tiny):
    for row in rows(tiny, "train"):
        assert [name for name in row["stages"] if name not in ("evaluate", "save_checkpoint")] == STAGES
        assert 0 < row["sync"]["nbytes"] <= row["memory"]["rollout"]["weights"]
        assert 0 < row["sync"]["copy_seconds"] < row["sync"]["seconds"] < row["stages"]["sync_weights"]
    events = json.loads((tiny / "trace.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {*STAGES, "evaluate", "save_checkpoint", "step 1", "pause params", "resume weights"} <= names
    counted = {event["name"] for event in events if event["ph"] == "C"}
    assert {"weights", "kv_cache", "params", "optim"} <= counted


def test_the_run_folder_is_complete(tiny):
    assert load(tiny / "recipe.yaml") == load("tiny", LEARNT)
    for name in ("reward.png", "memory.png"):
        data = (tiny / name).read_bytes()
        assert data.startswith(PNG) and len(data) > 20_000
    assert (tiny / "checkpoints" / "latest").read_text().strip() == "step_25"
    assert [path.name for path in (tiny / "checkpoints").glob("step_*")] == ["step_25"]
    record = read_run(tiny)
    assert record.gaps == [] and record.rows == rows(tiny) and len(record.environments) == 1
    assert max(event.backup_bytes for event in record.events["trainer"]) > 0


@pytest.mark.ray
def test_ray_actors_give_the_numbers_of_one_process(tmp_path):
    """PPO asks for all that GRPO does, and more."""
    start_run("tiny-ppo", [*SMALL_PPO, "steps=2"], tmp_path / "inprocess")
    start_run("tiny-ppo", [*SMALL_PPO, "steps=2", "driver=ray"], tmp_path / "ray")
    assert without_clock(rows(tmp_path / "ray")) == without_clock(rows(tmp_path / "inprocess"))
    names = json.loads((tmp_path / "ray" / "trace.json").read_text())["traceEvents"]
    assert {"rollout", "trainer", "stages"} == {entry["args"]["name"] for entry in names if entry["ph"] == "M"}


def test_kept_tags_stay_and_change_no_number(tmp_path):
    """Also in a run that goes on with other tags kept."""
    plain, kept = tmp_path / "plain", tmp_path / "kept"
    start_run("tiny", [*SMALL, "steps=3"], plain)
    start_run("tiny", [*SMALL, "steps=2", "cycle.keep=[optim,weights]"], kept)
    for row in rows(kept, "train"):
        rollout, train = row["memory"]["rollout"], row["memory"]["train"]
        assert rollout["optim"] == train["optim"] > 0 and rollout["weights"] == train["weights"] > 0
        assert rollout["params"] == train["kv_cache"] == 0
    continue_run(kept, None, ["steps=3", "cycle.keep=[params,optim,weights,kv_cache,cuda_graph]"])
    last = rows(kept, "train")[-1]["memory"]
    assert last["rollout"] == last["train"] and min(last["train"][tag] for tag in ("params", "optim", "kv_cache")) > 0
    assert without_clock(rows(kept)) == without_clock(rows(plain))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Five steps in one go."""
    folder = tmp_path_factory.mktemp("runs") / "straight"
    start_run("tiny", [*SMALL, "steps=5"], folder)
    return folder


@pytest.mark.parametrize("stop", [2, 3])
def test_a_resumed_run_gives_the_numbers_of_an_uninterrupted_one(stop, straight, tmp_path):
    """Stopped where an evaluation is due after the checkpoint (2), and where none is (3)."""
    halves = tmp_path / "halves"
    start_run("tiny", [*SMALL, f"steps={stop}"], halves)
    continue_run(halves, None, ["steps=5"])
    assert without_clock(rows(halves)) == without_clock(rows(straight))
    assert load(halves / "recipe.yaml") == load(straight / "recipe.yaml")


def test_a_killed_run_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    """Rows after the checkpoint are computed anew: one line a step, the same numbers."""
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    start_run("tiny", [*SMALL, "steps=4"], straight)
    update = Trainer.update_actor

    def fail_in_the_fourth(self, batch):
        if self.step == 3:
            raise MemoryError("no memory left")
        return update(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update_actor", fail_in_the_fourth)
        with pytest.raises(RunError, match="update_actor failed: MemoryError: no memory left"):
            start_run("tiny", [*SMALL, "steps=4", "checkpoint.every=2"], broken)
    assert [row["step"] for row in rows(broken, "train")] == [1, 2, 3]
    assert (broken / "trace.json").exists() and (broken / "memory.png").exists() and (broken / "reward.png").exists()
    continue_run(broken)
    assert without_clock(rows(broken)) == without_clock(rows(straight))


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "two"
    start_run("tiny", [*SMALL, "steps=2"], folder)
    return folder


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--resume", "FOLDER"], ["steps=2", "set steps=12"]),
        (["--resume", "FOLDER", "steps=4", "seed=5"], ["seed=5", "differs"]),
        (["--resume", "FOLDER", "steps=4", "sampling.top_k=5"], ["sampling.top_k=5", "differs"]),
        (["tiny", "steps=4", "--resume", "FOLDER"], ["grpo.prompts_per_step=48", "differs"]),
        (["--resume", "/nowhere"], ["/nowhere", "holds no run"]),
        (["--resume", "FOLDER", "--run-dir", "x"], ["--run-dir"]),
        (["tiny", "--run-dir", "FOLDER"], ["already holds a run", "--resume"]),
        (["steps=3"], ["names no recipe", "memsaver run tiny"]),
    ],
)
def test_what_cannot_go_on_says_why_and_exits_2(words, expected, two_steps, capsys):
    before = (two_steps / "metrics.jsonl").read_bytes()
    assert main(["run", *[str(two_steps) if word == "FOLDER" else word for word in words]]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    for word in expected:
        assert word in message
    assert (two_steps / "metrics.jsonl").read_bytes() == before


def test_a_run_without_checkpoints_cannot_be_resumed(tmp_path, capsys):
    folder = tmp_path / "run"
    start_run("tiny", [*SMALL, "steps=1", "checkpoint.every=0", "eval.every=0"], folder)
    assert rows(folder, "eval") == []
    assert main(["run", "--resume", str(folder), "steps=2"]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("owner", "method", "stage"),
    [("trainer_bridge.trainer.Trainer", "sync_weights", "sync_weights"), ("rollout.Engine", "generate", "evaluate")],
)
def test_a_failure_is_one_line_that_names_stage_and_cause(owner, method, stage, tmp_path, capsys, monkeypatch):
    def fail(*_, **__):
        raise OSError("the cable\nwas pulled")

    monkeypatch.setattr(f"{owner}.{method}", fail)
    folder = tmp_path / "run"
    assert main(["run", "tiny", *SMALL, "steps=2", "--run-dir", str(folder)]) == 1
    message = capsys.readouterr().err
    assert message == f"memsaver: {stage} failed: OSError: the cable was pulled\n"
    assert (folder / "trace.json").exists() and (folder / "memory.png").exists()


def test_verbose_shows_the_traceback(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Trainer, "update_actor", lambda *_: 1 / 0)
    assert main(["run", "tiny", *SMALL, "steps=1", "--run-dir", str(tmp_path / "run"), "--verbose"]) == 1
    message = capsys.readouterr().err
    assert "Traceback" in message and message.endswith("update_actor failed: ZeroDivisionError: division by zero\n")


@pytest.mark.ray
def test_a_trainer_killed_in_the_middle_of_a_sync_ends_the_run(tmp_path, monkeypatch, capsys):
    """One line that names the stage, exit status 1, the pictures on disk, no process left."""
    monkeypatch.setattr("recipes.run.open_ray", functools.partial(open_ray, trainer_actor=dying_trainer()))
    assert main(["run", "tiny", *SMALL, "driver=ray", "--run-dir", str(tmp_path / "run")]) == 1
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("memsaver: sync_weights failed: ActorDied: the trainer actor died")
    assert (tmp_path / "run" / "trace.json").exists() and (tmp_path / "run" / "memory.png").exists()
    wait_gone([child.pid for child in psutil.Process().children(recursive=True) if "ray" in child.name()])


def test_help_and_usage_from_the_command_line():
    for words, status, text in [
        (["--help"], 0, "memsaver run tiny"),
        (["run", "--help"], 0, "--resume"),
        ([], 2, "usage"),
        (["run", "tiny", "--frobnicate"], 2, "--frobnicate"),
    ]:
        done = subprocess.run(command(*words), cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == status
        assert text in done.stdout + done.stderr


def test_a_bad_recipe_in_a_process_of_its_own(tmp_path):
    done = subprocess.run(command("run", "tiny", "stepz=3"), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "memsaver: command line: stepz: unknown key; did you mean steps?\n"
    assert done.stdout == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_run_cleanly(tmp_path, number):
    """Exit status 128 + signal, no traceback, and what was done is on disk."""
    folder = tmp_path / "run"
    words = command("run", "tiny", *SMALL, "steps=100000", "--run-dir", folder)
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not ((folder / "metrics.jsonl").exists() and len(rows(folder, "train")) >= 3):
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        os.kill(process.pid, number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, errors) == (128 + number, "memsaver: interrupted\n")
    assert len(rows(folder, "train")) >= 3
    assert (folder / "trace.json").exists() and (folder / "memory.png").exists()
