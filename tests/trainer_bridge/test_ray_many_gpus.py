"""On two GPUs: `open_ray` with a replica on each, and with one tensor-parallel engine over both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollout import Engine, SamplingParams
from tests.helpers.ray_cluster import RayCluster
from tests.helpers.trainer_bridge.models import config, make_batch, write_model
from trainer_bridge import Cycle, Trainer, open_ray
from trainer_bridge.actor import RemoteRollout, RemoteTrainer
from trainer_bridge.remote import RemoteGroup

pytestmark = [pytest.mark.gpu, pytest.mark.gpus(2), pytest.mark.ray]

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
BATCH = make_batch(6)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(Path(tmp_path_factory.mktemp("model")))


def tokens(rollout: Any) -> list[list[int]]:
    return [request[0].token_ids for request in rollout.generate(PROMPTS, GREEDY)]


def held(side: RemoteGroup) -> list[dict[str, int]]:
    """Bytes on the tags of each rank."""
    return [{name: tag.committed_bytes for name, tag in each.report().tags.items()} for each in side.each()]


def rounds(trainer: RemoteTrainer, rollout: RemoteRollout, size: int) -> list[list[list[int]]]:
    """What the engines answer before and after an update; weights are verified in every sync, memory changes hands."""
    cycle, seen, full = Cycle(trainer, rollout), [], held(trainer)
    for version in (1, 2):
        receipt = cycle.to_rollout(version)
        assert len(receipt.digests) == 2 and receipt.version == version
        if size == 1:
            assert 2 * receipt.link_bytes == receipt.nbytes, "each rank has half of what both replicas take"
        else:
            assert 5 * receipt.link_bytes < receipt.nbytes, "trainer and engine ranks of one device are not aligned"
        assert [each.weights_version for each in rollout.each()] == [version, version]
        assert all(not any(tags.values()) for tags in held(trainer))
        assert all(tags["weights"] and tags["kv_cache"] for tags in held(rollout))
        seen.append(tokens(rollout))
        cycle.to_train()
        assert all(not any(tags.values()) for tags in held(rollout)) and held(trainer) == full
        if version == 1:
            trainer.update_actor(BATCH)
    return seen


@pytest.mark.parametrize("size", [1, 2])
def test_two_gpus_serve_what_one_trainer_holds(size: int, path: str, ray_cluster: RayCluster, tmp_path: Path) -> None:
    settings = config(path, device="cuda:0")
    engine = {"kv_tokens": 256, "page_size": 16, "tensor_parallel_size": size}
    with open_ray(settings, engine, devices=2) as (trainer, rollout):
        assert len({each.weight_layout().place for each in rollout.each()}) == 2, "not two GPUs"
        seen = rounds(trainer, rollout, size)
        trainer.save_checkpoint(str(tmp_path / "step"))
    alone = Engine.from_pretrained(path, device="cuda:0", kv_tokens=256)
    assert seen[0] == tokens(alone)
    restored = Trainer(settings)
    restored.load_checkpoint(str(tmp_path / "step"))
    restored.connect([alone])
    restored.sync_weights(1)
    assert seen[1] == tokens(alone)
    restored.close()
