"""A real vLLM on two GPUs, synced from FSDP2 over both: two replicas, or one shared engine.

The engines run in the processes of the trainer's ranks or in separate Ray actors.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from memsaver import MemorySaver
from memsaver.system.plain import all_gather_plain
from rollout import SamplingParams
from rollout.hosted import VllmRollout
from tests.helpers.ranks import results, start_ranks
from tests.helpers.ray_cluster import RayCluster
from tests.helpers.rollout.answers import random_prompts
from tests.helpers.trainer_bridge.models import describe, make_batch
from trainer_bridge import Cycle, Trainer, TrainerConfig, open_ray

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpus(2),
    pytest.mark.alone,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]

SHAPE: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 1024, "initializer_range": 0.1,
}  # fmt: skip
SIZES: dict[str, Any] = {
    "kv_tokens": 8192, "max_running": 32, "max_context_len": 256,
    "compilation_config": {"mode": 0, "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]},
}  # fmt: skip
# The learning rate is so high that one step changes the answers.
LEARNS: dict[str, Any] = {"random_init": True, "param_dtype": "bfloat16", "learning_rate": 1e-2}
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=12, temperature=1, n=2, ignore_eos=True)  # without a seed
PROMPTS = random_prompts((90, 1, 17, 60, 33, 2, 5, 71))
SECONDS = 400.0  # both ranks import vLLM and capture graphs


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")  # vLLM sets it too late, after the ranks meet
    return describe(tmp_path / "model", "qwen2", tie_word_embeddings=True, **SHAPE)


def ranks(run: Any, count: int, store: Path, *args: Any) -> list[Any]:
    started = start_ranks(run, count, store, *args, seconds=SECONDS, backend="nccl")
    return results(started, SECONDS)


def tokens(rollout: Any, params: SamplingParams = GREEDY) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in group] for group in rollout.generate(PROMPTS, params)]


def train_and_answer(rank: int, path: str, size: int) -> dict[str, Any]:
    """Run two rounds of a cycle, and save the second round's weights in the model directory."""
    device = f"cuda:{rank}"
    settings = {"device": device, "load_weights": False, "tensor_parallel_size": size}
    rollout = VllmRollout.from_pretrained(path, **settings, **SIZES)
    rollout.sleep(2)
    saver, rounds = MemorySaver(device), []
    config = TrainerConfig(model_path=path, device=device, **LEARNS)
    trainer = Trainer(config, saver)
    trainer.connect([rollout])
    cycle = Cycle(trainer, rollout)
    torch.manual_seed(rank)  # vLLM must not draw from the trainers' generators
    for version in (1, 2):
        receipt = cycle.to_rollout(version)
        assert receipt.digests[rank] == rollout.digest() and rollout.served_version() == version
        rounds.append((tokens(rollout), tokens(rollout, DRAWN)))
        cycle.to_train()
        assert rollout.report().committed_bytes == 0
        if version == 1:
            trainer.update_actor(make_batch(6))
    named: Any = trainer.model.named_parameters()
    whole = {name: param.detach().full_tensor().bfloat16() for name, param in named}
    if rank == 0:
        save_file(whole, Path(path) / "model.safetensors")
    dist.barrier()
    return {"rounds": rounds, "digests": receipt.digests}


def answer(rank: int, path: str, size: int) -> dict[str, Any]:
    """Return the answers of fresh engines that read the saved weights."""
    settings = {"device": f"cuda:{rank}", "tensor_parallel_size": size}
    rollout = VllmRollout.from_pretrained(path, **settings, **SIZES)
    return {"greedy": tokens(rollout), "digests": tuple(all_gather_plain(rollout.digest()))}


@pytest.mark.parametrize("size", [1, 2], ids=["replicas", "shared"])
def test_engines_in_the_trainers_processes_answer_with_the_trained_weights(
    path: str, tmp_path: Path, size: int
) -> None:
    first, second = ranks(train_and_answer, 2, tmp_path / "train", path, size)
    fresh = ranks(answer, 2, tmp_path / "fresh", path, size)
    for rank, trained in enumerate((first, second)):
        (old, _), (new, drawn) = trained["rounds"]
        assert new == fresh[rank]["greedy"] and new != old
        assert any(group[0] != group[1] for group in drawn)
        assert trained["digests"] == fresh[rank]["digests"]
    drawn_by = [trained["rounds"][1][1] for trained in (first, second)]
    if size == 2:
        assert drawn_by[0] == drawn_by[1] and len(set(first["digests"])) == 2
    else:
        assert drawn_by[0] != drawn_by[1] and len(set(first["digests"])) == 1
    assert first["rounds"][1][0] == second["rounds"][1][0]
    (alone,) = ranks(answer, 1, tmp_path / "alone", path, 1)
    pairs = zip(alone["greedy"], first["rounds"][1][0], strict=True)
    same = sum(left[0][0] == right[0][0] for left, right in pairs)
    assert same >= len(PROMPTS) - 2, "only the order of bf16 sums differs"


@pytest.mark.ray
@pytest.mark.parametrize("size", [1, 2], ids=["replicas", "shared"])
def test_engines_in_ray_actors_answer_with_the_trained_weights(
    path: str, ray_cluster: RayCluster, size: int
) -> None:
    """Use the actors of a recipe, each of which sees one GPU as its first."""
    config = TrainerConfig(model_path=path, device="cuda:0", **LEARNS)
    engine = {"kind": "vllm", "tensor_parallel_size": size, **SIZES}
    with open_ray(config, engine, devices=2) as (trainer, rollout):
        places = {replica.weight_layout().place for replica in rollout.each()}
        assert len(places) == 2, "not two GPUs"
        cycle, rounds = Cycle(trainer, rollout), []
        for version in (1, 2):
            receipt = cycle.to_rollout(version)
            assert receipt.digests == tuple(rollout.call_all("digest"))
            rounds.append(tokens(rollout))
            cycle.to_train()
            assert all(not replica.report().committed_bytes for replica in rollout.each())
            if version == 1:
                trainer.update_actor(make_batch(6))
        assert rounds[0] != rounds[1] and len(set(receipt.digests)) == size
