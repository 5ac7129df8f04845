"""Syncs of modules whose tensors move or change strides, and of buffers that rollouts need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from rollout import Engine
from tests.helpers.models import DEEPSEEK_MOE, MLA, build_tiny
from tests.helpers.rollout.fused import FusedEngine, random_directory
from tests.helpers.trainer_bridge.models import write_model
from trainer_bridge import module_sync
from trainer_bridge.sync.writer import Shards

SQUARE = "model.layers.0.self_attn.o_proj.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def engine_of(path: str, device: str, **more: Any) -> Engine:
    return Engine.from_pretrained(path, device, kv_tokens=64, load_weights=False, **more)


def params_of(path: Path, device: str) -> dict[str, nn.Parameter]:
    """Write a model with a square projection, and return its parameters."""
    model = build_tiny("llama", vocab_size=64, tie_word_embeddings=True)
    model.save_pretrained(path)
    return dict(model.to(device).named_parameters())


def serves(engine: Engine, params: dict[str, nn.Parameter]) -> bool:
    return all(
        torch.equal(engine.store.tensor(name), param.detach().to(engine.store.tensor(name).dtype))
        for name, param in params.items()
        if engine.store.tensor(name).shape == param.shape
    )


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda old: old.t(),
    "by columns": lambda old: old.as_strided(old.shape, (1, old.shape[0])),
    "another dtype": lambda old: old.view(torch.bfloat16)[:, ::2].copy_(old.clone()),
    "one row": lambda old: old[:1].expand(old.shape),
    "elsewhere": lambda old: old.clone(),
}


@pytest.mark.parametrize("way", WAYS)
def test_parameter_with_new_view_of_its_memory_is_served_as_it_reads(
    way: str, device: str, tmp_path: Path
) -> None:
    params = params_of(tmp_path, device)
    engine = engine_of(str(tmp_path), device)
    sync = module_sync(params, [engine])
    sync.sync(1)
    assert serves(engine, params)
    params[SQUARE].data = WAYS[way](params[SQUARE].data)
    sync.sync(2)
    assert serves(engine, params)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda old: old[:3], r"shard \(3, 48\), \(48, 48\) in the plan"),
        (lambda old: old.to(torch.int8), r"torch.int8 is not a weight.s dtype"),
        (lambda old: old.to("meta"), "its tensor on meta has no memory now"),
    ],
)
def test_parameter_of_new_shape_dtype_or_device_is_refused_by_name(
    change: Callable[[Tensor], Tensor], message: str, tmp_path: Path
) -> None:
    params = params_of(tmp_path, "cpu")
    engine = engine_of(str(tmp_path), "cpu")
    sync = module_sync(params, [engine])
    sync.sync(1)
    before = dict(params)
    params[SQUARE] = nn.Parameter(change(params[SQUARE].data), requires_grad=False)
    with pytest.raises(ValueError, match=f"{SQUARE}: {message}"):
        sync.sync(2)
    assert engine.served_version() == 1 and serves(engine, before)


@pytest.mark.parametrize("shadow", [False, True])
@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float16, 7e4), (torch.bfloat16, -3.4e38), (torch.float32, torch.nan)],
)
def test_value_beyond_the_engine_s_dtype_is_refused_by_name(
    dtype: torch.dtype, value: float, shadow: bool, device: str, tmp_path: Path
) -> None:
    params = params_of(tmp_path, device)
    engine = engine_of(str(tmp_path), device, dtype=dtype)
    sync = module_sync(params, [engine])
    sync.sync(1)
    kept = params[SQUARE].data[3, 5].clone()
    params[SQUARE].data[3, 5] = value
    with pytest.raises(Exception, match=f"version 2 has NaN or infinity in {SQUARE}: "):
        sync.sync(2, shadow=shadow)
    assert engine.served_version() == (1 if shadow else None)
    params[SQUARE].data[3, 5] = kept
    sync.sync(3)
    assert serves(engine, params)


def test_parameter_with_new_sharding_is_refused_by_name(
    model_path: str, make_trainer: Callable[..., Any]
) -> None:
    make_trainer(model_path)  # creates a process group
    mesh = init_device_mesh("cpu", (1,))
    params: dict[str, Tensor] = {"w": nn.Parameter(torch.ones(4, 4))}
    shards = Shards(lambda: params)
    shards.described()
    params["w"] = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))
    with pytest.raises(ValueError, match=r"w is .*Replicate.*, and was whole .*; connect again"):
        shards.tensors()


def deepseek(path: Path, dtype: torch.dtype = torch.float32) -> tuple[str, Any]:
    fields: dict[str, Any] = {**MLA, **DEEPSEEK_MOE, "head_dim": 8}
    model = build_tiny("deepseek_v3", tie_word_embeddings=True, **fields)
    model.save_pretrained(path)
    return str(path), model


@pytest.mark.parametrize("how", ["module", "buffer by name", "parameter by name"])
@pytest.mark.parametrize("shadow", [False, True])
def test_router_bias_that_changes_is_served(how: str, shadow: bool, tmp_path: Path) -> None:
    """Expect an fp32 bias with bf16 weights, after a sleep, and after its tensor was replaced."""
    path, model = deepseek(tmp_path)
    engine = engine_of(path, "cpu", dtype=torch.bfloat16)
    source: Any = model
    if how != "module":
        source = dict(model.named_parameters()) | {
            name: nn.Parameter(buffer, requires_grad=False) if how.startswith("param") else buffer
            for name, buffer in model.named_buffers()
            if name in engine.weight_layout().buffers
        }
    sync = module_sync(source, [engine])
    engine.sleep(2)
    engine.wake_up()
    sync.sync(1)
    gate, served = model.get_submodule(BIAS.rpartition(".")[0]), engine.store.buffers[BIAS]
    assert torch.equal(served, gate.e_score_correction_bias)
    gate.e_score_correction_bias.mul_(1 / 3)
    if how == "module":
        gate.e_score_correction_bias = gate.e_score_correction_bias / 3
    before = served.clone()
    sync.sync(2, shadow=shadow)
    assert not torch.equal(served, before)
    assert torch.equal(served, gate.e_score_correction_bias)


def test_missing_router_bias_is_refused(tmp_path: Path) -> None:
    path, model = deepseek(tmp_path)
    with pytest.raises(ValueError, match=rf"computes with {BIAS}; .* pass module_sync the module"):
        module_sync(dict(model.named_parameters()), [engine_of(path, "cpu")])


def test_aliased_sync_copies_router_bias(tmp_path: Path, make_trainer: Callable[..., Any]) -> None:
    fields = {**MLA, **DEEPSEEK_MOE, "head_dim": 8, "moe_intermediate_size": 24}
    path = write_model(tmp_path, "deepseek_v3", **fields)
    engine = engine_of(path, "cpu")
    trainer = make_trainer(path, layout=engine.manifest)
    trainer.connect([engine])
    trainer.model.get_buffer(BIAS).fill_(0.5)
    for version, send in ((1, trainer.sync_weights), (2, trainer.alias_weights)):
        trainer.model.get_buffer(BIAS).mul_(2)
        send(version)
        assert engine.store.buffers[BIAS].tolist() == [0.5 * 2**version] * 8
    engine.sleep(2)


def test_router_bias_that_is_a_parameter_of_hosted_engine_is_served(
    device: str, tmp_path: Path, make_trainer: Callable[..., Any]
) -> None:
    """Expect the bias after a sleep at level 2, too, after which no update writes it."""
    from transformers import AutoConfig

    from rollout.hosted import VllmRollout

    path = random_directory(tmp_path, "glm4_moe")
    hosted: Any = FusedEngine(AutoConfig.from_pretrained(path), device, normed=False)
    rollout = VllmRollout(hosted, path)
    trainer = make_trainer(path, device=device, random_init=True)
    trainer.connect([rollout])
    trainer.model.get_buffer(BIAS).fill_(0.25)
    trainer.sync_weights(1)
    bias = hosted.model.state_dict()[BIAS.replace(".", "/")]
    assert bias.tolist() == [0.25] * 4
    rollout.sleep(2)
    rollout.wake_up()
    assert bias.tolist() == [0.25] * 4
    trainer.model.get_buffer(BIAS).fill_(-1)
    trainer.sync_weights(2)
    assert bias.tolist() == [-1] * 4
    hosted.close()
