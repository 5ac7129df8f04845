"""Runs through Ray with two devices and with a lost engine, against runs in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.cli import main
from tests.helpers.dying_actors import dying_engine
from tests.helpers.ray_cluster import RayCluster
from tests.helpers.recipes.tiny_runs import (
    SMALL,
    MakeRun,
    rows,
    same_rows,
    trace,
    without_pictures,
)

ray = pytest.importorskip("ray")

# Up to four processes import torch, perhaps on a busy machine.
pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
TWO = ["tiny", *SMALL, "driver=ray", "cluster.n_gpus_per_node=2"]


def owners(folder: Path) -> set[str]:
    """Return the owners of the events in a trace."""
    return {entry["args"]["name"] for entry in trace(folder) if entry["ph"] == "M"}


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
