"""The tiny recipe over two devices, as replicas and as one tensor-parallel engine, beside the run of one device; and a
rank that dies. On the CPU a device is two processes."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from recipes.cli import main
from recipes.run import start_run
from tests.helpers.faults import dying_trainer
from trainer_bridge import open_ray

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray")

WORDS = ["grpo.prompts_per_step=8", "grpo.samples_per_prompt=4", "eval.every=2"]
TWO = [*WORDS, "driver=ray", "cluster.n_gpus_per_node=2"]
LEARNED = ("loss", "grad_norm", "entropy", "approx_kl")


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def actors() -> list[str]:
    titles = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    return [title for title in titles if "Rollout" in title or "Dying" in title]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=128 << 20)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One device, in this process."""
    folder = tmp_path_factory.mktemp("one") / "run"
    start_run("tiny", [*WORDS, "steps=2"], folder)
    return rows(folder)


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The same samples, hence the same rewards; what is computed of them as far as the order of sums allows."""
    assert [(row["kind"], row["step"]) for row in found] == [(row["kind"], row["step"]) for row in expected]
    for row, wanted in zip(found, expected, strict=True):
        if row["kind"] == "eval":
            assert row == wanted
            continue
        same = ("reward", "exact_match", "response_length", "tokens", "ended")
        assert {key: row[key] for key in same} == {key: wanted[key] for key in same}
        assert {key: row[key] for key in LEARNED} == pytest.approx({key: wanted[key] for key in LEARNED}, abs=1e-4)
        assert row["gap_max"] <= 5e-5


def assert_shared(row: dict[str, Any], single: dict[str, Any]) -> None:
    """The memory of a step on one of two devices, against one device alone."""
    assert row["memory"]["train"].keys() == single["memory"]["train"].keys()
    held, whole = row["memory"]["train"], single["memory"]["train"]
    assert 0 < held["params"] < 0.7 * whole["params"] and held["weights"] == held["kv_cache"] == 0
    held = row["memory"]["rollout"]
    assert held["params"] == held["optim"] == 0 < min(held["weights"], held["kv_cache"])


def assert_all_are_shown(folder: Path) -> None:
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    owners = {entry["args"]["name"] for entry in events if entry["ph"] == "M"}
    assert owners == {"stages", "trainer[0]", "trainer[1]", "rollout[0]", "rollout[1]"}
    assert (folder / "memory.png").exists()


def test_two_tensor_parallel_devices_give_the_numbers_of_one(
    cluster: None, alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    start_run("tiny", [*TWO, "steps=2", "engine.tensor_parallel_size=2"], tmp_path)
    found = rows(tmp_path)
    assert_same(found, alone)
    for row, single in zip(found, alone, strict=True):
        if row["kind"] == "train":
            assert_shared(row, single)
            assert row["memory"]["rollout"]["weights"] < 0.7 * single["memory"]["rollout"]["weights"]
    assert_all_are_shown(tmp_path)
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "step_2"


def test_two_replicas_give_the_numbers_of_one_until_a_rank_dies(
    cluster: None,
    alone: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the sync of the third step: one line that names rank and stage, and no actor is left."""
    dying = dying_trainer(rank=1, first=3)
    monkeypatch.setattr("recipes.run.open_ray", functools.partial(open_ray, trainer_actor=dying))
    assert main(["run", "tiny", *TWO, "steps=3", "--run-dir", str(tmp_path)]) == 1
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("memsaver: sync_weights failed: ActorDied: the trainer[1] actor died in sync_weights()")
    found = rows(tmp_path)
    assert_same(found, alone[:3])
    assert_shared(found[1], alone[1])
    assert_all_are_shown(tmp_path)
    deadline = time.monotonic() + 20
    while ray.available_resources().get("CPU") != 4 or actors():
        assert time.monotonic() < deadline, f"left behind: {actors()}, {ray.available_resources()}"
        time.sleep(0.1)
