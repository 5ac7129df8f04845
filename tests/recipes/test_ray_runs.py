"""Runs through Ray against the same runs in this process: on two devices, and as a Ray job."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.cli import main
from tests.helpers.dying_actors import dying_engine, dying_trainer, wait_gone, waiting_engine
from tests.helpers.exports import contents
from tests.helpers.ray_cluster import RayCluster, until
from tests.helpers.recipes.tiny_runs import (
    SMALL,
    SMALL_PPO,
    MakeRun,
    Row,
    has_pictures,
    rows,
    same_rows,
    trace,
    without_pictures,
)
from trainer_bridge import open_ray

ray = pytest.importorskip("ray")

# Up to four processes import torch, perhaps on a busy machine.
pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
TWO = ["tiny", *SMALL, "driver=ray", "cluster.n_gpus_per_node=2"]


def owners(folder: Path) -> set[str]:
    """Return the owners of the events in a trace."""
    return {entry["args"]["name"] for entry in trace(folder) if entry["ph"] == "M"}


def assert_same(row: Row, alone: Row) -> None:
    """Check that samples and rewards are equal, and other figures up to the order of sums."""
    if row["kind"] == "eval":
        assert row == alone
        return
    same = ("kind", "step", "reward", "correct", "response_length", "tokens", "cut_off")
    assert {key: row[key] for key in same} == {key: alone[key] for key in same}
    # Means over some 80 tokens in fp32 of values up to 8: in the worst order, sums of up to 640
    # round by 6e-5 and means by 1e-6. Gradients of 1e4 summands round by 1e-4 of their norm of
    # about 1.
    for key in ("loss", "grad_norm", "entropy", "approx_kl"):
        assert row[key] == pytest.approx(alone[key], abs=1e-4), key
    assert row["mismatch_max"] <= 5e-5  # see test_run


# tests/trainer_bridge covers two ranks, tensor parallelism and dying ranks one by one.
@pytest.mark.extended
@pytest.mark.parametrize("size", [2, 1], ids=["tensor parallel", "replicas"])
def test_run_on_two_devices_equals_one_device_until_a_rank_dies(
    size: int,
    ray_cluster: RayCluster,
    make_run: MakeRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Kill a rank in the third sync: one line names rank and stage, and no actor is left."""
    dying = dying_trainer(rank=1, first=3)
    monkeypatch.setattr(
        "recipes.arguments.open_ray", functools.partial(open_ray, trainer_actor=dying)
    )
    words = [*TWO, f"engine.tensor_parallel_size={size}", "steps=3", "checkpoint.every=2"]
    words.append("checkpoint.export_every=2")
    assert main(["run", *words, "--run-dir", str(tmp_path)]) == 1
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith(
        "memsaver: sync_weights failed: ActorDied: the trainer[1] actor died in sync_weights()"
    )
    ray_cluster.wait_free()
    alone = rows(make_run("tiny", *SMALL, "steps=5"))
    shared = rows(tmp_path)
    kinds = [(row["kind"], row["step"]) for row in shared]
    assert kinds == [("eval", 0), ("train", 1), ("train", 2)]
    for row, single in zip(shared, alone, strict=False):
        assert_same(row, single)
        if row["kind"] == "train":
            assert 0 < row["memory"]["train"]["params"] < 0.7 * single["memory"]["train"]["params"]
    assert owners(tmp_path) == {"stages", "trainer[0]", "trainer[1]", "rollout[0]", "rollout[1]"}
    assert has_pictures(tmp_path)
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "step_2"
    assert main(["export", str(tmp_path), "--to", str(tmp_path / "out")]) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "exports" / "step_2")


def test_exact_run_of_a_tensor_parallel_engine_has_the_bits_of_its_trainer_of_two_ranks(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    """Train a mixture of experts, half of which each rank of the engine holds."""
    words = [*TWO, "engine.tensor_parallel_size=2", "exact=true", "steps=2", "eval.every=0"]
    words += ["trainer.learning_rate=0.01", "task.workers=0", "engine.expert_parallel=2"]
    words += ["model.config.model_type=qwen3_moe", "model.config.num_experts=8"]
    words += ["model.config.num_experts_per_tok=2", "model.config.moe_intermediate_size=32"]
    words.append("task.rewards=[tests.helpers.recipes.reward_functions:kept]")
    with without_pictures():
        assert main(["run", *words, "--run-dir", str(tmp_path)]) == 0
    steps = rows(tmp_path, "train")
    assert len(steps) == 2
    for row in steps:
        assert row["unequal_tokens"] == row["mismatch_max"] == 0 < row["grad_norm"]
    assert owners(tmp_path) == {"stages", "trainer[0]", "trainer[1]", "rollout[0]", "rollout[1]"}
    ray_cluster.wait_free()


@pytest.mark.extended  # the restart itself: test_restarts.py
def test_ray_job_restarts_after_losing_its_rollout_and_stops_cleanly(
    ray_cluster: RayCluster, make_run: MakeRun, tmp_path: Path
) -> None:
    """Expect the rows of an undisturbed run, and a clean end with status 143 when stopped.

    PPO is used because its trainer does all that GRPO's does, and more.
    """
    folder = tmp_path / "run"
    overrides = [*SMALL_PPO, "driver=ray", "steps=100000"]
    overrides += ["checkpoint.every=2", "checkpoint.max_restarts=1"]
    overrides.append("cluster.max_engine_restarts=0")
    overrides.append(f"cluster.address={ray.get_runtime_context().gcs_address}")
    overrides.append("cluster.object_store_gib=0.125")
    words = [sys.executable, "-m", "tests.helpers.recipes.dying_job", "run", "tiny-ppo", *overrides]
    command = shlex.join([*words, "--run-dir", str(folder)])
    environment = {"PYTHONPATH": str(ROOT), "RAY_JOB_STOP_WAIT_TIME_S": "300"}
    jobs, job = ray_cluster.submit(f"trap : TERM; {command}; echo exit status $?", environment)

    def log() -> list[str]:
        return jobs.get_job_logs(job).splitlines()

    def trained() -> bool:
        assert not jobs.get_job_status(job).is_terminal(), log()
        return (folder / "metrics.jsonl").exists() and len(rows(folder, "train")) >= 5

    until(trained, lambda: str(log()), seconds=400)
    pids = ray_cluster.actors()
    assert len(pids) == 2
    jobs.stop_job(job)
    until(lambda: jobs.get_job_status(job).is_terminal())
    assert str(jobs.get_job_status(job)) == "STOPPED"
    line, status = log()[-2:]
    assert line.startswith("memsaver: interrupted in step ") and status == "exit status 143"
    done = rows(folder, "train")[-1]["step"]
    assert f"; checkpoint of step {done} saved; continue with: " in line
    wait_gone(pids)

    loss = "generate_sequences failed: ActorDied: the rollout actor died in generate()"
    assert f"restart 1 of 1 from step 2: {loss}" in log()
    (restart,) = map(json.loads, (folder / "restarts.jsonl").read_text().splitlines())
    assert (restart["restart"], restart["after_step"], restart["cause"]) == (1, 2, loss)
    assert same_rows(folder, make_run("tiny-ppo", *SMALL_PPO, "steps=5"), until=4)
    assert owners(folder) == {"rollout", "trainer", "stages"}
    lost = json.loads((folder / "trace-until-step-2-1.json").read_text())["traceEvents"]
    assert "step 2" in {entry["name"] for entry in lost}
    assert {entry["ph"] for entry in trace(folder)} >= {"X", "C"} and has_pictures(folder)


# test_ray_apart of trainer_bridge has the numbers, test_preparation the arguments.
@pytest.mark.extended
def test_run_with_its_engine_apart_resumes_on_one_device_with_the_same_numbers(
    ray_cluster: RayCluster, make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    apart = ["driver=ray", "cluster.rollout_gpus=1", "cluster.colocate=false", "checkpoint.every=2"]
    apart.append("cycle.resident=auto")
    with without_pictures():
        assert main(["run", "tiny", *SMALL, *apart, "steps=2", "--run-dir", str(folder)]) == 0
        assert "; no engine shares a device with the trainer" in capsys.readouterr().out
        assert owners(folder) == {"stages", "trainer[0]", "rollout[1]"}
        (peak,) = [row["peaks"]["update_actor"] for row in rows(folder, "train")[1:]]
        assert set(peak["processes"]) == {"trainer[0]", "rollout[1]"}
        ray_cluster.wait_free()
        one = ["driver=inprocess", "cluster.rollout_gpus=0", "cluster.colocate=true", "steps=4"]
        assert main(["run", "--resume", str(folder), *one]) == 0
    alone = make_run("tiny", *SMALL, "steps=4", "checkpoint.every=2")
    assert rows(folder, "train") and same_rows(folder, alone)


def test_run_goes_on_after_losing_its_engine_and_resumes_in_process_with_the_same_numbers(
    ray_cluster: RayCluster,
    make_run: MakeRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, flag = tmp_path / "run", tmp_path / "flag"
    flag.touch()
    monkeypatch.setattr("trainer_bridge.coordinator.RolloutRankActor", dying_engine(flag))
    words = ["run", "tiny", *SMALL, "driver=ray", "steps=2", "--run-dir", str(folder)]
    cause = "the rollout actor died in generate()"
    with without_pictures():
        assert main(words) == 0
        assert not flag.exists()
        assert f"replacement 1 of a lost engine: {cause}\n" in capsys.readouterr().out
        ray_cluster.wait_free()
        assert main(["run", "--resume", str(folder), "driver=inprocess", "steps=3"]) == 0
    (line,) = (folder / "restarts.jsonl").read_text().splitlines()
    entry = json.loads(line)
    assert (entry["replacement"], entry["after_step"], entry["cause"]) == (1, 0, cause)
    assert same_rows(folder, make_run("tiny", *SMALL, "steps=3"))


def test_engine_apart_samples_while_the_trainer_learns(
    ray_cluster: RayCluster,
    make_run: MakeRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The prompts are those of a run in turn, versions at most one older; a lost engine ends it."""
    folder, flag = tmp_path / "run", tmp_path / "flag"
    engine = waiting_engine(first=8, version=2)  # the requests of step 2 wait for its sync
    monkeypatch.setattr("trainer_bridge.coordinator.RolloutRankActor", engine)
    words = [*SMALL, "driver=ray", "cluster.rollout_gpus=1", "cluster.colocate=false", "steps=3"]
    words += ["loop.max_staleness=1", "checkpoint.every=1", "eval.every=0"]
    with without_pictures():
        assert main(["run", "tiny", *words, "--run-dir", str(folder)]) == 0
        ray_cluster.wait_free()
        flag.touch()
        monkeypatch.setattr("trainer_bridge.coordinator.RolloutRankActor", dying_engine(flag))
        assert main(["run", "--resume", str(folder), "steps=9"]) == 1
    assert "ActorDied: the rollout[1] actor died in " in capsys.readouterr().err
    stale = [row["staleness"] for row in rows(folder, "train", until=3)]
    assert stale[0] == 0 and all(0 < age <= 1 for age in stale[1:])
    lines = map(json.loads, (folder / "samples.jsonl").read_text().splitlines())
    ours = [line for line in lines if line["kind"] == "train" and line["step"] <= 3]
    alone = make_run("tiny", *SMALL, "steps=3", "eval.every=0")
    lines = map(json.loads, (alone / "samples.jsonl").read_text().splitlines())
    theirs = [line for line in lines if line["kind"] == "train"]
    assert [line["prompt"] for line in ours] == [line["prompt"] for line in theirs]
    pairs = [(line["step"], {version for version, _ in line["weight_versions"]}) for line in ours]
    assert all(versions <= {step - 1, step} for step, versions in pairs)
    assert (2, {1, 2}) in pairs  # new weights came in the middle of an answer


def test_agents_go_on_while_the_trainer_learns(ray_cluster: RayCluster, tmp_path: Path) -> None:
    """Turns begin during updates, and beside those of evaluations; each answer is learned once."""
    words = ["driver=ray", "cluster.rollout_gpus=1", "cluster.colocate=false", "steps=3"]
    words += ["loop.max_staleness=1", "loop.prompts_per_step=4", "loop.samples_per_prompt=4"]
    words += ["eval.every=1", "eval.problems=4", "checkpoint.every=0", "task.timeout=60"]
    words += ["task.agent=tests.helpers.recipes.agents:forking", "loop.parallel_environments=3"]
    with without_pictures():
        assert main(["run", "guess", *words, "--run-dir", str(tmp_path)]) == 0
    ray_cluster.wait_free()
    trained = rows(tmp_path, "train")
    assert [row["staleness"] > 0 for row in trained] == [False, True, True]
    for row in trained:
        assert row["faults"] == 0 and (row["turns"], row["forks"]) == (6.0, 4 * 16)
    assert len(rows(tmp_path, "eval")) == 4


def marked(mark: str) -> list[str]:
    """Return the command lines of processes with this word in their initial environment."""
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes():
                commands.append((process / "cmdline").read_text().replace("\0", " "))
    return commands


@pytest.mark.extended
def test_interrupt_during_cluster_start_leaves_no_process(tmp_path: Path) -> None:
    """Interrupt while Ray's agents start; an agent that misses its parent's end never ends."""
    mark = f"MEMSAVER_TEST={tmp_path}"
    command = [sys.executable, "-m", "recipes.cli", "run", "tiny", "driver=ray", "device=cpu"]
    command += ["--run-dir", str(tmp_path)]
    environment = {**os.environ, "MEMSAVER_TEST": str(tmp_path)}
    environment.pop("RAY_ADDRESS", None)
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        # The agent has just started.
        until(lambda: any("runtime_env/agent" in line for line in marked(mark)))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=100)
    finally:
        process.kill()
    text = "interrupted during setup; start again: there is no checkpoint yet"
    assert (process.returncode, errors) == (130, f"memsaver: {text}\n")
    until(lambda: not marked(mark))
