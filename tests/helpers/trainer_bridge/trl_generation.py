"""TRL's class for colocated vLLM, from TRL's wheel, with a stand-in for vLLM."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.models import save_tiny
from tests.helpers.rollout.package_names import Wheel
from tests.helpers.trainer_bridge.other_trainers import STAND_IN, missing_for_trl

WHEEL = Wheel("trl")


def imported(patch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield TRL's class, with stand-ins for vLLM and for packages that it does not need here."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("vllm", "trl")]:
        patch.delitem(sys.modules, name)
    patch.setattr(sys, "path", [STAND_IN, *sys.path, str(WHEEL.folder and WHEEL.folder.parent)])
    for name, module in missing_for_trl().items():
        patch.setitem(sys.modules, name, module)
    yield importlib.import_module("trl.generation.vllm_generation").VLLMGeneration
    for name in [name for name in sys.modules if name.partition(".")[0] in ("vllm", "trl")]:
        del sys.modules[name]  # the patch restores the original modules


def tiny_generation(kind: Any, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield an object of TRL's class `kind` over a tiny Qwen2 in fp32."""
    from accelerate import Accelerator

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        patch.setenv(name, "0")  # TRL sets the variable; the patch restores it
        patch.delenv(name)
    model = save_tiny(folder, "qwen2", tie_word_embeddings=True)
    model.name_or_path = str(folder)
    accelerator = Accelerator(cpu=True)
    generation = kind(model, accelerator, None, mode="colocate", enable_sleep_mode=True)
    yield generation
    generation.llm.fused.close()


def rank_generation(
    rank: int, folder: str, size: int, wrap: Callable[[Any], Any] = lambda model: model
) -> Any:
    """Build TRL's class in one of two ranks, with engines of `size` ranks.

    `wrap` may replace the model before vLLM starts.
    """
    assert WHEEL.folder is not None
    sys.path[:] = [STAND_IN, *sys.path, str(WHEEL.folder.parent)]
    sys.modules.update(missing_for_trl())
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # unused: the group exists
    from accelerate import Accelerator
    from trl.generation.vllm_generation import VLLMGeneration

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine: dict[str, Any] = {"enable_sleep_mode": True, "tensor_parallel_size": size}
    return VLLMGeneration(wrap(model), Accelerator(cpu=True), None, **engine)


def own_sync(generation: Any) -> None:
    """Run TRL's own sync."""
    type(generation).sync_weights(generation)
