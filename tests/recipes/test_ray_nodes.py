"""A recipe on a cluster of two Ray nodes, one of which dies: the numbers of an undisturbed run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import two_nodes
from tests.helpers.ray_cluster import until
from tests.helpers.recipes.tiny_runs import SMALL, MakeRun, rows, same_rows
from tests.helpers.two_nodes import ADDRESSES, HEAD, Nodes

pytestmark = [pytest.mark.ray, pytest.mark.extended, pytest.mark.timeout(600)]
STEPS = ["steps=4", "checkpoint.every=1"]
FAR = ["cluster.colocate=false", "cluster.rollout_nodes=1"]


def run_and_lose_a_node(nodes: Nodes, folder: str) -> tuple[int, str]:
    """Run through the command line, and kill the second node after the first step."""
    import ray

    ray.shutdown()  # the command connects by itself
    words = ["run", "tiny", *SMALL, *STEPS, *FAR, "driver=ray", f"cluster.address={HEAD}"]
    words += ["checkpoint.max_restarts=1", "cluster.ports=20000-20063"]
    words += ["cluster.object_store_gib=0.125", "--run-dir", folder]
    command = [sys.executable, "-m", "recipes.cli", *words]
    with Path(folder).with_suffix(".log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        metrics = Path(folder) / "metrics.jsonl"

        def trained() -> bool:
            assert process.poll() is None, Path(log.name).read_text()
            return metrics.exists() and '"kind": "train", "step": 1,' in metrics.read_text()

        try:
            until(trained)
            nodes.kill_far()
            ray.init(address=HEAD, log_to_driver=False, logging_level="ERROR")
            nodes.restart_far()
            return process.wait(300), Path(log.name).read_text()
        finally:
            process.kill()


def test_run_goes_on_from_its_checkpoint_when_its_node_is_started_again(
    tmp_path: Path, make_run: MakeRun
) -> None:
    folder = tmp_path / "two"
    with two_nodes.opened() as driver:
        status, log = driver.run(run_and_lose_a_node, str(folder))
    assert status == 0, log
    # Ray may report the death of an actor before that of its node.
    *_, restart = map(json.loads, (folder / "restarts.jsonl").read_text().splitlines())
    assert restart["restart"] == 1 and "ActorDied: the" in restart["cause"]
    alone = make_run("tiny", *SMALL, *STEPS)
    assert same_rows(folder, alone)
    assert all(row["sync"]["node_bytes"] > 0 for row in rows(folder) if row["kind"] == "train")
    placed = json.loads((folder / "environment.json").read_text())["nodes"]
    assert sorted(placed) == [*ADDRESSES] and sorted(placed.values()) == [
        "rollout[1]",
        "trainer[0]",
    ]
    assert f"node {ADDRESSES[0]}: " in log
