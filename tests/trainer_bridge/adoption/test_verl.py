"""In-place syncs in verl's classes, from verl's wheel, with a stand-in for vLLM's engine."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from memsaver import StateError
from memsaver.doctor import run_check
from rollout.tag_names import KV_CACHE, WEIGHTS
from tests.helpers.docs.pages import ROOT
from tests.helpers.models import save_tiny
from tests.helpers.ranks import results, start_ranks
from tests.helpers.rollout.package_names import Wheel
from tests.helpers.trainer_bridge.other_trainers import use_verl
from tests.helpers.trainer_bridge.verl_sides import (
    EngineHandle,
    model_config,
    rollout_config,
    server_prefix,
    start_engine,
    trainer_engine,
)
from trainer_bridge.adoption.verl import CLIENTS

WHEEL = Wheel("verl")
pytestmark = pytest.mark.skipif(WHEEL.may_skip, reason="verl is not installed")


class Pair:
    """One rank of verl's trainer, and its vLLM server in another process."""

    def __init__(
        self, rank: int, calls: Any, wheels: str, folder: str, path: str, size: int
    ) -> None:
        self.server = EngineHandle(calls)
        os.environ.update(RANK=str(rank), RAY_LOCAL_WORLD_SIZE=str(size))
        use_verl(Path(wheels), Path(folder) / f"trainer-{rank}")
        from verl.workers.rollout.base import get_rollout_class

        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for layer in self.model.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.path, self.kind = path, get_rollout_class("memsaver_vllm")
        self.engine = trainer_engine(self.model, model_config(path))
        config = rollout_config(tensor_model_parallel_size=size)
        self.rollout: Any = self.kind(config, model_config(path), None)
        vars(self.rollout)["_has_server"] = True  # verl has one server for all workers
        assert server_prefix(self.rollout) == "memsaver_vllm_"
        self.rollout.server_handle = self.server
        self.server.wait()

    def sync(self, version: int | None) -> None:
        weights, adapters = self.engine.get_per_tensor_param(base_sync_done=True)
        assert adapters is None
        asyncio.run(self.rollout.update_weights(weights, global_steps=version))

    def change(self) -> None:
        with torch.no_grad():
            for param in self.model.parameters():
                param.add_(0.25)


def rank_syncs(rank: int, calls: list[Any], *args: Any) -> str:
    pair = Pair(rank, calls[rank], *args)
    if len(calls) == 1:
        check_misfits(pair)
    check_updates(pair)
    if len(calls) == 1:
        check_failures(pair)
    return f"{type(pair.engine).__name__} {type(pair.rollout).__name__}"


def check_misfits(pair: Pair) -> None:
    """Expect errors that name settings of verl, and an error about a trainer of other shapes."""
    from verl.workers.engine import EngineRegistry

    assert EngineRegistry.get_engine_cls("language_model", "fsdp").__module__.startswith("verl.")
    for on_rollout, on_model, key in (
        ({}, {"lora_rank": 8}, "model.lora_rank=8"),
        ({}, {"lora": {"rank": 4, "merge": True}}, "model.lora_rank=4"),
        ({"quantization": "fp8"}, {}, "rollout.quantization=fp8"),
        ({"pipeline_model_parallel_size": 2}, {}, "pipeline_model_parallel_size=2"),
        ({"enable_sleep_mode": False}, {}, "enable_sleep_mode=False"),
    ):
        with pytest.raises(ValueError, match=f"actor_rollout_ref.*{key}: in-place sync needs"):
            pair.kind(rollout_config(**on_rollout), model_config(pair.path, **on_model), None)
    with pytest.raises(ValueError, match="actor_rollout_ref.actor.strategy=fsdp2"):
        asyncio.run(pair.rollout.update_weights(iter([])))
    pair.engine.engine_config.offload_policy = True
    with pytest.raises(ValueError, match="fsdp_config.offload_policy=False"):
        pair.sync(0)
    pair.engine.engine_config.offload_policy = False
    moved: list[Any] = []
    vars(pair.engine).update(_is_offload_param=True, to=lambda *args, **_: moved.append(args))
    assert pair.engine.get_per_tensor_param()[0].module() is pair.model and moved == [("cuda",)]
    vars(pair.engine).update(_is_offload_param=False)
    pair.server.call("wake_up", WEIGHTS)
    pair.engine.module = fully_shard(torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match="missing in the trainer"):
        pair.sync(0)
    pair.engine.module = pair.model
    assert_refuses(pair, "serves")
    pair.server.call("wake_up", KV_CACHE)
    pair.server.call("sleep")


def check_updates(pair: Pair) -> None:
    """Compare three syncs, between sleeps of vLLM, with verl's own."""
    for given, version in (None, 0), (1, 1), (1, 1):
        pair.change()
        pair.server.call("wake_up", WEIGHTS)
        before, _ = pair.server.call("state")
        pair.sync(given)
        assert pair.server.call("state") == (before, version)  # a sleeping cache is empty
        receipt = pair.rollout.receipt
        assert receipt.version == version
        assert [*pair.rollout.stages] == ["call", "wait", *receipt.stages, "reply"]
        written = pair.server.call("weights")
        gathered = [*pair.engine.get_per_tensor_param()[0]]
        for name, tensor in pair.server.call("load", gathered).items():
            assert torch.equal(written[name].view(torch.uint8), tensor.view(torch.uint8)), name
        pair.server.call("wake_up", KV_CACHE)
        before, _ = pair.server.call("state")
        pair.sync(version)
        assert pair.server.call("state") == (before + 1, version)
        pair.server.call("sleep")


def check_failures(pair: Pair) -> None:
    """Expect a server that refuses requests after failures, and serves after a success."""
    with pytest.raises(StateError, match="tag weights is paused"):
        pair.sync(2)
    pair.server.call("wake_up", WEIGHTS)
    with pytest.raises(ValueError, match="version 0 is stale"):
        pair.sync(0)
    assert_refuses(pair, r"the engine serves .*\[\(None, .*not version 0")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="no luck"):
        patch.setattr("trainer_bridge.sync.writer.Writer.start", fail)
        pair.sync(2)
    assert_refuses(pair, r"\(None, 'paused: kv_cache .*weights undefined: OSError: no luck")
    vars(pair.rollout)["_server"].close()  # a lost connection is opened again
    pair.sync(2)
    with pytest.raises(RuntimeError, match="'InPlaceServer' object has no attribute"):
        pair.server.call("generate")  # verl's own method, without its __init__
    pair.server.call("die_in", "verify_update")
    with pytest.raises(StateError, match="verify_update: vLLM's worker has ended"):
        pair.sync(3)


def fail(*_: Any) -> None:
    raise OSError("no luck")


def assert_refuses(pair: Pair, reason: str) -> None:
    with pytest.raises(RuntimeError, match=f"cannot generate: the last weight update .*{reason}"):
        pair.server.call("generate")


def run_pairs(count: int, folder: Path, size: int = 1) -> list[Any]:
    """Run `rank_syncs` in the ranks of a trainer; every `size` ranks share one vLLM."""
    assert WHEEL.folder is not None
    save_tiny(folder / "model", "qwen2", tie_word_embeddings=True)
    args = str(WHEEL.folder.parent), str(folder), str(folder / "model"), size
    engines = [start_engine(*args, rank) for rank in range(count)]
    try:
        ranks = start_ranks(
            rank_syncs, count, folder / "meet", [calls for _, calls in engines], *args
        )
        return results(ranks)
    finally:
        for engine, calls in engines:
            calls.close()
            engine.kill()


def test_sync_writes_the_same_weights_as_verl(tmp_path: Path) -> None:
    assert run_pairs(1, tmp_path) == ["UngatheredEngine InPlaceRollout"]


@pytest.mark.extended
@pytest.mark.parametrize("size", [1, 2])
def test_two_ranks_write_into_all_workers(tmp_path: Path, size: int) -> None:
    assert run_pairs(2, tmp_path, size) == ["UngatheredEngine InPlaceRollout"] * 2


def test_entry_point_is_a_module_because_verl_calls_nothing() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["verl.plugins"] == {"memsaver": "memsaver.compat.verl_plugin"}


def test_doctor_names_the_rollouts_that_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert WHEEL.folder is not None
    monkeypatch.setattr(sys, "path", [*sys.path, str(WHEEL.folder.parent)])
    entry = importlib.metadata.EntryPoint("memsaver", "memsaver.compat.verl_plugin", "verl.plugins")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [entry])
    monkeypatch.delenv("VERL_USE_EXTERNAL_PLUGINS", raising=False)
    check = run_check("verl")
    assert check.status == "ok" and check.finding.startswith("0.9.1; ")  # the wheel's version
    assert [name for name in CLIENTS if not re.search(rf"\b{name}\b", check.finding)] == []
