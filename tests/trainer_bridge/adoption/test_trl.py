"""In-place syncs in TRL's class for colocated vLLM, from TRL's wheel, with a stand-in for vLLM."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from memsaver import StateError
from tests.helpers.models import save_tiny
from tests.helpers.ranks import results, start_ranks
from tests.helpers.trainer_bridge.trl_generation import WHEEL, own_sync, rank_generation
from trainer_bridge.adoption import trl

pytestmark = pytest.mark.skipif(WHEEL.may_skip, reason="trl is not installed")


def change(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.25)


def assert_matches_own_sync(generation: Any, written: dict[str, torch.Tensor]) -> None:
    """Check that TRL's own sync writes the same weights as `written`."""
    own_sync(generation)
    for name, stored in generation.llm.fused.model.tensors().items():
        assert torch.equal(written[name].view(torch.uint8), stored.view(torch.uint8)), name


def test_generate_uses_the_trainers_weights(generation: Any) -> None:
    """Expect a sync before each `generate` that finds the weights asleep, as with TRL's own."""
    sync, digests = trl.use(SimpleNamespace(vllm_generation=generation)), set()
    for _ in range(2):
        generation.llm.calls.clear()
        answers = generation.generate([[1, 2], [3]], None, 1)
        assert answers[1] == [[7], [7]] and answers[2] == [[[-1.5]], [[-1.5]]]
        expected = [("wake_up", "weights"), ("wake_up", "kv_cache"), "generate", ("sleep", 2)]
        assert generation.llm.calls == expected and sync.receipt is not None
        digests.add(sync.receipt.digests)
        change(generation.model)
    assert len(digests) == 2
    generation.sync_weights()
    assert_matches_own_sync(generation, generation.llm.fused.model.tensors())


def test_replaced_parameters_are_synced(generation: Any) -> None:
    """Replace a parameter, as accelerate does when it shards the model for training."""
    sync = trl.use(SimpleNamespace(vllm_generation=generation))
    generation.sync_weights()
    with torch.no_grad():
        generation.model.model.norm.weight = torch.nn.Parameter(
            generation.model.model.norm.weight + 1
        )
    generation.sync_weights()
    assert_matches_own_sync(generation, generation.llm.fused.model.tensors())
    assert sync.receipt is not None and sync.receipt.version == 2


def test_unsupported_settings_sharding_and_allocators_are_refused(generation: Any) -> None:
    for attribute, value, words in (
        ("mode", "server", 'vllm_mode="colocate"'),
        ("enable_sleep_mode", False, "vllm_enable_sleep_mode=True"),
    ):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match=words):
            patch.setattr(generation, attribute, value)
            trl.use(SimpleNamespace(vllm_generation=generation))
    with pytest.raises(ValueError, match="use_vllm=True"):
        trl.use(SimpleNamespace())
    trl.use(SimpleNamespace(vllm_generation=generation))
    kind = type(generation.accelerator.distributed_type).DEEPSPEED
    generation.accelerator = SimpleNamespace(distributed_type=kind, is_fsdp2=False)
    with pytest.raises(ValueError, match="DEEPSPEED: .* fsdp_version: 2"):
        generation.sync_weights()
    generation.accelerator = SimpleNamespace(distributed_type="NO")
    generation.model.to("meta")
    with pytest.raises(ValueError, match="is not on cpu, .* fsdp_offload_params: false"):
        generation.sync_weights()
    sys.modules["vllm"].device_allocator.instance = SimpleNamespace()
    with pytest.raises(StateError, match="VLLM_PLUGINS=memsaver"):
        trl.use(SimpleNamespace(vllm_generation=generation))


def rank_of_two(rank: int, folder: str, size: int) -> int:
    """Run a rank whose model is sharded by FSDP2 after vLLM has started, as accelerate does."""
    generation = rank_generation(rank, folder, size)
    model: Any = generation.model
    sync = trl.use(SimpleNamespace(vllm_generation=generation))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    for _ in range(2):
        change(model)
        generation.generate([[1, 2]], None, 1)
    generation.sync_weights()
    weights = generation.llm.fused.model
    written = weights.tensors()
    weights.load_weights([(name, param.full_tensor()) for name, param in model.named_parameters()])
    for name, tensor in weights.tensors().items():
        assert torch.equal(written[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert sync.receipt is not None
    generation.llm.fused.close()
    return sync.receipt.version


@pytest.mark.extended
@pytest.mark.parametrize("size", [1, 2])
def test_two_fsdp2_ranks_write_into_both_engines(tmp_path: Path, size: int) -> None:
    save_tiny(tmp_path / "model", "qwen2", tie_word_embeddings=True)
    ranks = start_ranks(rank_of_two, 2, tmp_path / "meet", str(tmp_path / "model"), size)
    assert results(ranks) == [3, 3]
