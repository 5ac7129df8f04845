"""FSDP2 over two GPUs, each with an engine or a tensor-parallel rank; memory over many syncs."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rollout import Engine, SamplingParams
from rollout.tag_names import TAGS
from tests.helpers.case_selection import rounds
from tests.helpers.exports import contents
from tests.helpers.memory import open_fds
from tests.helpers.ranks import results, start_ranks
from tests.helpers.ray_cluster import RayCluster
from tests.helpers.trainer_bridge.models import config, make_batch, write_model
from trainer_bridge import Cycle, Trainer, open_ray
from trainer_bridge.models import export_checkpoint
from trainer_bridge.remote.actor import RemoteRollout, RemoteTrainer
from trainer_bridge.remote.group import RemoteGroup
from trainer_bridge.tag_names import TRAINER_TAGS

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.gpus(2)
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]


def tokens(engine: Any) -> list[list[int]]:
    return [request[0].token_ids for request in engine.generate(PROMPTS, GREEDY)]


def committed(side: RemoteGroup) -> list[dict[str, int]]:
    """Return the committed bytes of each rank's tags."""
    return [
        {name: tag.committed_bytes for name, tag in rank.report().tags.items()}
        for rank in side.each()
    ]


def rounds_of(trainer: RemoteTrainer, rollout: RemoteRollout, size: int) -> list[list[list[int]]]:
    """Run two rounds with an update in between, and return the engines' tokens in each."""
    cycle, answers, full = Cycle(trainer, rollout), [], committed(trainer)
    for version in (1, 2):
        receipt = cycle.to_rollout(version)
        assert len(receipt.digests) == 2 and receipt.version == version
        if size == 1:
            assert 2 * receipt.link_bytes == receipt.nbytes, (
                "each rank has half of the bytes of both replicas"
            )
        else:
            assert 5 * receipt.link_bytes < receipt.nbytes, (
                "trainer and engine ranks of one device are not aligned"
            )
        assert [rank.weights_version for rank in rollout.each()] == [version, version]
        assert all(not any(tags.values()) for tags in committed(trainer))
        assert all(tags["weights"] and tags["kv_cache"] for tags in committed(rollout))
        answers.append(tokens(rollout))
        cycle.to_train()
        assert all(not any(tags.values()) for tags in committed(rollout))
        assert committed(trainer) == full
        if version == 1:
            trainer.update_actor(make_batch(6))
    return answers


@pytest.mark.ray
@two_gpus
@pytest.mark.parametrize("size", [1, 2])
def test_engines_on_two_gpus_serve_the_weights_of_one_trainer(
    size: int, model_path: str, ray_cluster: RayCluster, tmp_path: Path
) -> None:
    settings = config(model_path, device="cuda:0")
    engine = {"kv_tokens": 256, "page_size": 16, "tensor_parallel_size": size}
    with open_ray(settings, engine, devices=2) as (trainer, rollout):
        assert len({rank.weight_layout().place for rank in rollout.each()}) == 2, "not two GPUs"
        answers = rounds_of(trainer, rollout, size)
        trainer.save_checkpoint(str(tmp_path / "step"))
        trainer.save_pretrained(str(tmp_path / "there"))
    export_checkpoint(str(tmp_path / "step"), str(tmp_path / "here"), settings)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    exported = Engine.from_pretrained(str(tmp_path / "there"), device="cuda:0", kv_tokens=256)
    assert answers[1] == tokens(exported)
    alone = Engine.from_pretrained(model_path, device="cuda:0", kv_tokens=256)
    assert answers[0] == tokens(alone)
    reloaded = Trainer(settings)
    reloaded.load_checkpoint(str(tmp_path / "step"))
    reloaded.connect([alone])
    reloaded.sync_weights(1)
    assert answers[1] == tokens(alone)
    reloaded.close()


@pytest.mark.ray
@two_gpus
def test_one_gpu_trains_and_another_one_generates(
    model_path: str, ray_cluster: RayCluster, tmp_path: Path
) -> None:
    """Sync over the link between both GPUs, and compare with engines that load the weights."""
    settings = config(model_path, device="cuda:0")
    engine = {"kv_tokens": 256, "page_size": 16}
    alone = Engine.from_pretrained(model_path, device="cuda:0", kv_tokens=256)
    with open_ray(settings, engine, rollout_devices=1, colocate=False) as (trainer, rollout):
        full, cycle = committed(trainer), Cycle(trainer, rollout, resident=[*TRAINER_TAGS, *TAGS])
        for version in (1, 2):
            receipt = cycle.to_rollout(version)
            assert receipt.link_bytes == receipt.nbytes > 0 and receipt.version == version
            assert committed(trainer) == full, "a tag left the trainer's device for nothing"
            answers = tokens(rollout)
            cycle.to_train()
            if version == 1:
                assert answers == tokens(alone)
                trainer.update_actor(make_batch(6))
        trainer.save_pretrained(str(tmp_path / "there"))
    exported = Engine.from_pretrained(str(tmp_path / "there"), device="cuda:0", kv_tokens=256)
    assert answers == tokens(exported)


@pytest.mark.ray
@pytest.mark.alone
def test_engine_lost_beside_its_trainer_is_replaced_and_leaves_no_memory(
    model_path: str, ray_cluster: RayCluster
) -> None:
    settings = config(model_path, device="cuda:0", leaving=("params", "optim"))
    engine = {"kv_tokens": 256, "page_size": 16}
    with open_ray(settings, engine, max_engine_restarts=2) as (trainer, rollout):
        cycle = Cycle(trainer, rollout)
        cycle.to_rollout(1)
        answers, used = tokens(rollout), rollout.take_usage().device_used_bytes
        os.kill(rollout.call("pid"), signal.SIGKILL)
        assert tokens(rollout) == answers
        assert rollout.take_usage().device_used_bytes <= used + (64 << 20)
        assert all(not any(tags.values()) for tags in committed(trainer))
        cycle.to_train()
        os.kill(rollout.call("pid"), signal.SIGKILL)
        cycle.to_rollout(2)
        assert tokens(rollout) == answers, "no update lies between both versions"


def syncs(rank: int, path: str, count: int) -> dict[str, int]:
    """Return the growth of GPU memory, descriptors and resident memory over `count` syncs."""
    engine = Engine.from_pretrained(path, device=f"cuda:{rank}", kv_tokens=256, load_weights=False)
    trainer = Trainer(config(path, device=f"cuda:{rank}"))
    trainer.connect([engine])
    for version in range(5):
        trainer.sync_weights(version)
    before = held()
    for version in range(5, 5 + count):
        trainer.sync_weights(version)
    dist.barrier()
    grown = {name: value - before[name] for name, value in held().items()}
    trainer.close()
    return grown


def held() -> dict[str, int]:
    torch.cuda.synchronize()
    dist.barrier()
    free, total = torch.cuda.mem_get_info()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    return {"device": total - free, "descriptors": open_fds(), "resident": resident}


@pytest.mark.soak
@pytest.mark.alone
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=two_gpus)])
def test_memory_and_descriptors_do_not_grow_over_syncs(world: int, tmp_path: Path) -> None:
    count = rounds(50, 1000)
    for grown in results(
        start_ranks(
            syncs, world, tmp_path / "store", write_model(tmp_path / "model"), count, backend="nccl"
        )
    ):
        assert grown["device"] == grown["descriptors"] == 0, grown
        assert grown["resident"] < 4 << 20, f"{grown}: host memory of {count} syncs"
