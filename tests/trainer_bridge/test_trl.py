"""In-place syncs in TRL's class for colocated vLLM, from TRL's wheel, with a stand-in for vLLM."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from memsaver import StateError
from tests.helpers.models import save_tiny
from tests.helpers.ranks import results, start_ranks
from tests.helpers.rollout.package_names import Wheel
from tests.helpers.trainer_bridge.other_trainers import STAND_IN, missing_for_trl
from trainer_bridge import trl

WHEEL = Wheel("trl")
pytestmark = pytest.mark.skipif(WHEEL.may_skip, reason="trl is not installed")


@pytest.fixture
def generation_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import TRL's class with stand-ins for vLLM and for packages that it does not need here."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("vllm", "trl")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [STAND_IN, *sys.path, str(WHEEL.folder.parent)])
    for name, module in missing_for_trl().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield importlib.import_module("trl.generation.vllm_generation").VLLMGeneration
    for name in [name for name in sys.modules if name.partition(".")[0] in ("vllm", "trl")]:
        del sys.modules[name]  # monkeypatch restores the original modules


@pytest.fixture
def generation(
    generation_class: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    from accelerate import Accelerator

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")  # TRL sets the variable; monkeypatch restores it
        monkeypatch.delenv(name)
    model = save_tiny(tmp_path, "qwen2", tie_word_embeddings=True)
    model.name_or_path = str(tmp_path)
    accelerator = Accelerator(cpu=True)
    generation = generation_class(model, accelerator, None, mode="colocate", enable_sleep_mode=True)
    yield generation
    generation.llm.fused.close()


def change(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.25)


def assert_matches_own_sync(generation: Any, written: dict[str, torch.Tensor]) -> None:
    """Check that TRL's own sync writes the same weights as `written`."""
    type(generation).sync_weights(generation)
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
    adapted = SimpleNamespace(peft_config={})
    for attribute, value, words in (
        ("mode", "server", 'vllm_mode="colocate"'),
        ("enable_sleep_mode", False, "vllm_enable_sleep_mode=True"),
        ("model", adapted, "adapters"),
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
    assert WHEEL.folder is not None
    sys.path[:] = [STAND_IN, *sys.path, str(WHEEL.folder.parent)]
    sys.modules.update(missing_for_trl())
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # unused: the group exists
    from accelerate import Accelerator
    from trl.generation.vllm_generation import VLLMGeneration

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine: dict[str, Any] = {"enable_sleep_mode": True, "tensor_parallel_size": size}
    generation = VLLMGeneration(model, Accelerator(cpu=True), None, **engine)
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
