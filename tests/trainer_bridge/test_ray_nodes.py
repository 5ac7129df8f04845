"""Two Ray nodes that cannot map each other's memory: weights and answers.

The functions run in a process on the first node (`two_nodes`). Expected values come from both sides
in one process.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from rollout.tag_names import TAGS
from tests.helpers import two_nodes
from tests.helpers.ray_cluster import ENGINE, tokens
from tests.helpers.trainer_bridge.models import config, make_batch
from tests.helpers.two_nodes import ADDRESSES, Driver, Nodes
from trainer_bridge import Cycle, open_inprocess, open_ray
from trainer_bridge.remote.receiver import RolloutRankActor
from trainer_bridge.tag_names import TRAINER_TAGS

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
BOTH = {"nodes": 2}  # trainer and engine on each node
FAR = {"colocate": False, "rollout_nodes": 1}  # the trainer on one node, the engine on the other


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    with two_nodes.opened() as driver:
        yield driver


def sha(engine: Any) -> str:
    """Return a hash of the bytes of an engine's parameters."""
    parts = (engine.store.box(piece) for piece in engine.store.manifest.slices)
    words = [
        part.contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes() for part in parts
    ]
    return hashlib.sha256(b"".join(words)).hexdigest()


def hashing_engine() -> type[RolloutRankActor]:
    """Return an actor class that hashes its weights; local, so that it is pickled by value."""

    class RolloutHashing(RolloutRankActor):
        def sha(self) -> str:
            return sha(self.held)

    return RolloutHashing


@pytest.fixture(scope="module")
def expected(model_path: str) -> list[Any]:
    """Return digests and tokens of two versions, with an update in between, in one process."""
    seen = []
    with open_inprocess(config(model_path), ENGINE) as (trainer, rollout):
        cycle = Cycle(trainer, rollout)
        for version in (1, 2):
            (digest,) = cycle.to_rollout(version).digests
            seen.append((digest, sha(rollout), tokens(rollout)))
            cycle.to_train()
            if version == 1:
                trainer.update_actor(make_batch(4))
    return seen


def placed(trainer: Any, rollout: Any) -> dict[str, str]:
    return {rank.name: rank.node for side in (trainer, rollout) for rank in side.ranks}


def rounds(nodes: Nodes, path: str, where: dict[str, Any], device: str = "cpu") -> Any:
    """Run two versions; return places, and receipt, hashes and answers of each version."""
    seen = []
    with (
        mock.patch("trainer_bridge.coordinator.RolloutRankActor", hashing_engine()),
        open_ray(config(path, device=device), ENGINE, **where) as (trainer, rollout),
    ):
        cycle = Cycle(trainer, rollout, resident=stays(where))
        for version in (1, 2):
            receipt = cycle.to_rollout(version)
            seen.append((receipt, rollout.call_all("sha"), tokens(rollout)))
            cycle.to_train()
            if version == 1:
                trainer.update_actor(make_batch(4))
        return placed(trainer, rollout), seen


def stays(where: dict[str, Any]) -> list[str]:
    """Return the tags that need not leave a device."""
    return [] if where.get("colocate", True) else [*TRAINER_TAGS, *TAGS]


def test_engine_on_a_node_without_a_trainer_serves_the_same_weights(
    driver: Driver, model_path: str, expected: list[Any]
) -> None:
    places, seen = driver.run(rounds, model_path, FAR)
    assert list(places) == ["trainer[0]", "rollout[1]"]
    assert sorted(places.values()) == [*ADDRESSES]
    for (receipt, hashes, answers), (digest, same, answered) in zip(seen, expected, strict=True):
        assert (receipt.digests, hashes, answers) == ((digest,), [same], answered)
        assert 0 < receipt.nbytes <= receipt.node_bytes < 1.01 * receipt.nbytes + 4096


@pytest.mark.gpu
@pytest.mark.gpus(2)
@pytest.mark.skipif(shutil.which("ip") is None, reason="iproute2 is not installed")
@pytest.mark.parametrize("where", [BOTH, FAR], ids=["both", "far"])
def test_nodes_with_a_gpu_each_sync_over_sockets(where: dict[str, Any], model_path: str) -> None:
    with two_nodes.opened(gpus=1) as driver:
        places, seen = driver.run(rounds, model_path, where, "cuda:0")
    with open_inprocess(config(model_path, device="cuda:0"), ENGINE) as (trainer, rollout):
        receipt = Cycle(trainer, rollout).to_rollout(1)
        first = sha(rollout)
    assert {*places.values()} == {*ADDRESSES}
    for received, hashes, _ in seen:
        assert len({*received.digests}) == len({*hashes}) == 1 and received.node_bytes > 0
    assert seen[0][0].digests[0] == receipt.digests[0]
    assert seen[0][1][0] == first != seen[1][1][0]


# ---------------------------------------------------------------- a node is lost
