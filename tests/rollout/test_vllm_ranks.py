"""vLLM's engines over several ranks: syncs, random numbers and failures of ranks.

The engines have vLLM's layout. Tests with vLLM itself are in test_ray_vllm_gpu.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

from memsaver import StateError
from rollout import SamplingParams
from rollout.errors import RankError
from rollout.hosted import VllmRollout
from tests.helpers.ranks import results, start_ranks
from tests.helpers.rollout.fused import KINDS, FusedEngine, loaded, random_directory, same
from tests.helpers.trainer_bridge.other_trainers import STAND_IN
from trainer_bridge import Trainer, TrainerConfig
from trainer_bridge.sync.shards import aligned_dims

ONE_TOKEN = SamplingParams(max_tokens=1)


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def synced(rollout: VllmRollout, path: str) -> dict[str, Any]:
    """Sync from a trainer of all ranks into all ranks, and again after a sleep of level 2."""
    torch.manual_seed(1)
    dims = aligned_dims(gathered(rollout.manifest))
    config = TrainerConfig(model_path=path, device="cpu", random_init=True, threads=1)
    trainer = Trainer(config, shard_dims=dims)
    named: Any = trainer.model.named_parameters()
    weights = {name: param.detach().full_tensor() for name, param in named}
    expected = loaded(rollout.engine, weights)
    with pytest.raises(AssertionError):
        same(rollout.engine.model, expected)
    trainer.connect([rollout])
    for version in (1, 2):
        receipt = trainer.sync_weights(version)
        same(rollout.engine.model, expected)
        assert rollout.served_version() == version
        assert receipt.digests[dist.get_rank()] == rollout.digest()
        rollout.sleep(2)
        rollout.wake_up()
    trainer.close()
    return {"digests": receipt.digests, "places": {p.name for p in rollout.manifest.slices}}


def write_parts(rank: int, paths: dict[str, str]) -> dict[str, Any]:
    synced_kinds = {}
    for kind, path in paths.items():
        shape = KINDS.get(kind.partition(" ")[0], {})
        engine = FusedEngine(
            AutoConfig.from_pretrained(path), "cpu", group=dist.group.WORLD, **shape
        )
        synced_kinds[kind] = synced(VllmRollout(engine, path), path)  # type: ignore[arg-type]
        engine.close()
    return synced_kinds


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False, "vocab_size": 70},  # the second rank uses 6 of 64 rows
    "qwen2 of one KV head": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3_moe": {},
}


def test_sync_writes_the_same_bytes_as_the_loaders_of_two_ranks(tmp_path: Path) -> None:
    paths = {
        kind: random_directory(tmp_path / kind, kind.partition(" ")[0], **overrides)
        for kind, overrides in MODELS.items()
    }
    first, second = results(start_ranks(write_parts, 2, tmp_path / "store", paths))
    for kind in MODELS:
        assert first[kind] == second[kind] and len(set(first[kind]["digests"])) == 2


def start(rank: int, path: str, size: int) -> dict[str, Any]:
    """Run `from_pretrained` with a stand-in for vLLM's package on a pretended GPU 4 + rank."""
    sys.path.insert(0, STAND_IN)
    with pytest.MonkeyPatch.context() as patch:
        gpu: list[Any] = []
        patch.setattr(torch.cuda, "set_device", gpu.append)
        patch.setattr(torch.cuda, "current_device", lambda: gpu[-1].index)
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
        given: dict[str, Any] = {"device": f"cuda:{4 + rank}", "load_weights": False, "seed": 8}
        with pytest.raises(ValueError, match=r"option of vLLM of .* ranks \[1\] differs from"):
            VllmRollout.from_pretrained(path, **given, max_running=8 + rank)
        with pytest.raises(ValueError, match="tensor_parallel_size=3: each of the 2 ranks"):
            VllmRollout.from_pretrained(path, **given, tensor_parallel_size=3)
        rollout = VllmRollout.from_pretrained(path, **given, tensor_parallel_size=size)
    llm = rollout.engine.llm
    assert llm.address == (str(rank), str(4 + rank)) and "LOCAL_RANK" not in os.environ
    options = {name: llm.options[name] for name in ("seed", "disable_custom_all_reduce")}
    return {**options, "sync": synced(rollout, path)}


@pytest.mark.parametrize("size", [1, 2])
def test_from_pretrained_starts_replicas_or_one_shared_engine(tmp_path: Path, size: int) -> None:
    path = random_directory(tmp_path / "model", "qwen2")
    ranks = results(start_ranks(start, 2, tmp_path / "store", path, size))
    replicas = 2 // size
    assert [started["seed"] for started in ranks] == ([8, 9] if replicas == 2 else [8, 8])
    assert all(started["disable_custom_all_reduce"] for started in ranks)
    assert ranks[0]["sync"] == ranks[1]["sync"]
    assert len(set(ranks[0]["sync"]["digests"])) == size


def draw(rank: int, path: str) -> list[Any]:
    """Return what an engine draws in two calls, and check what its trainer draws next.

    The trainers' generators have a different state on each rank.
    """
    engine = FusedEngine(AutoConfig.from_pretrained(path), "cpu", group=dist.group.WORLD)
    rollout, drawn = VllmRollout(engine, path, seed=3), list[Any]()  # type: ignore[arg-type]
    rollout.store.define(1)

    usual = engine.step

    def step() -> list[Any]:
        drawn.append((torch.rand(1).item(), int(np.random.randint(1 << 30))))
        return usual()

    engine.step = step  # type: ignore[method-assign]
    torch.manual_seed(rank)
    np.random.seed(rank)
    rollout.generate([[1, 2]], ONE_TOKEN)
    rollout.generate([[1, 2 + rank]], ONE_TOKEN)
    after = torch.rand(1).item(), int(np.random.randint(1 << 30))
    torch.manual_seed(rank)
    np.random.seed(rank)
    assert after == (torch.rand(1).item(), int(np.random.randint(1 << 30)))
    return drawn


def test_ranks_of_one_engine_draw_the_same_numbers(tmp_path: Path) -> None:
    path = random_directory(tmp_path / "model", "qwen3")
    first, second = results(start_ranks(draw, 2, tmp_path / "store", path))
    assert first == second and len(first) == 2 and first[0] != first[1]


def fail(rank: int, path: str) -> str:
    """Fail on rank 1 in the first call; rank 0 learns of the failure in its second call."""
    group = dist.new_group([0, 1])  # like vLLM's own group
    engine = FusedEngine(AutoConfig.from_pretrained(path), "cpu", group=group)
    rollout = VllmRollout(engine, path)  # type: ignore[arg-type]
    rollout.store.define(1)

    usual = engine.step

    def step() -> list[Any]:
        if rank:
            raise RuntimeError("out of blocks")
        return usual()

    engine.step = step  # type: ignore[method-assign]
    if rank:
        with pytest.raises(RuntimeError, match="out of blocks"):
            rollout.generate([[1]], ONE_TOKEN)
    else:
        rollout.generate([[1]], ONE_TOKEN)
    dist.barrier()
    if not rank:
        with pytest.raises(RankError):
            rollout.generate([[1]], ONE_TOKEN)
    with pytest.raises(StateError, match="cannot generate"):
        rollout.generate([[1]], ONE_TOKEN)
    return str(rollout.unavailable_reason())


def test_failed_rank_and_its_peer_refuse_further_calls(tmp_path: Path) -> None:
    path = random_directory(tmp_path / "model", "qwen3")
    first, second = results(start_ranks(fail, 2, tmp_path / "store", path))
    assert "out of blocks" in first and "restart all ranks" in first
    assert "rank 1 failed: RuntimeError: out of blocks" in second
