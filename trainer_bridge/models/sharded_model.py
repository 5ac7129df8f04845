"""A causal LM of transformers as FSDP2 shards on a tag.

The model is built on the meta device, its shards are allocated in one block, and the weights are
loaded into them. Adapters are shards of the same FSDP groups on tag `adapters`. Buffers that no
checkpoint contains (rotary tables) use torch's own memory: on a tag they would be discarded or
saved needlessly.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint

from memsaver import MemorySaver
from memsaver.ops.hash import hash_text
from rollout.model import load_hf_config, stored_buffers
from rollout.weights import Manifest
from trainer_bridge.config import TrainerConfig
from trainer_bridge.errors import listed
from trainer_bridge.fsdp_internals import (
    initialize_fsdp,
    keep_fp32_gradients,
    pad_shards,
    run_alone,
)
from trainer_bridge.models.adapters.lora import (
    NAMES,
    adapted_params,
    add_adapters,
    base_params,
    is_adapter,
    target_names,
)
from trainer_bridge.models.files.initial import CheckpointFiles, open_weights, part_of_rank
from trainer_bridge.models.fused import fuse
from trainer_bridge.models.moe import NAME as EXPERTS
from trainer_bridge.models.moe import check_widths, register_experts, route_in_fp32
from trainer_bridge.models.packing import pack_if_possible
from trainer_bridge.models.runtime import Runtime, side_by_side
from trainer_bridge.ops.exact import engine_products
from trainer_bridge.ops.token_scores import score_in_head
from trainer_bridge.sync.alias import byte_offsets
from trainer_bridge.sync.shards import like_shard, local_shard, shard_box
from trainer_bridge.tag_names import ADAPTERS, CRITIC, PARAMS, REFERENCE

UNIT_BYTES = 128 << 20  # of unsharded parameters; small against the activations of a micro batch
_NOISES = ("drop", "jitter")


def build_model(
    config: TrainerConfig,
    runtime: Runtime,
    saver: MemorySaver,
    shard_dims: Mapping[str, int] | None = None,
    layout: Manifest | None = None,
    *,
    tag: str = PARAMS,
) -> nn.Module:
    """Build a sharded model with the weights of `config.model_path`, or random weights.

    With `config.optimizer_offload` the weights stay undefined: the caller fills the masters first
    (`fill_weights`). The shards keep their addresses for good.

    `shard_dims` has the dimension to shard, by parameter, if it is not the first (`aligned_dims`).
    On one rank, the parameters, adapters apart, can adopt the `layout` of a rollout's weights.

    The shards lie on `tag`. `critic` replaces the output embedding by a value head with one output
    per token, initially zero. `reference` builds a frozen model in the dtype of forward, because
    weights that never change need no masters.

    A ValueError reports a missing file; parameters that are missing, unknown, of another shape, or
    cannot be sharded or laid out as requested; or an adapter's target that does not exist.
    """
    if tag != PARAMS:
        # Only log-probabilities of the policy are compared with the engine's.
        config = dataclasses.replace(config, exact=False)
    model = meta_model(config, runtime.attention, frozen=tag == REFERENCE)
    pack_if_possible(model, runtime.packed_attention)
    if value_head := tag == CRITIC:
        _put_value_head(model, config)
    else:
        score_in_head(model)
    if config.exact:
        # The room `exact` needs this one, so it is imported when it is used.
        from trainer_bridge.exact.model import define_products, make_exact

        make_exact(model, config)
        define_products(model, runtime.device, config)
    starts = None if layout is None else byte_offsets(layout, base_params(model))
    _shard(model, config, runtime.mesh, shard_dims or {})
    _allocate_shards(model, runtime.device, saver, tag, starts)
    if config.optimizer_offload:
        for param in model.parameters():
            param.grad_dtype = torch.float32  # read by FSDP's lazy initialization
    _pad_shards(model, config, saver, tag)
    run_alone(model)
    runtime.make_buffers(model)
    if config.optimizer_offload:
        keep_fp32_gradients(model)
        return model
    _fill_new(model, config, runtime, _output_name(model) if value_head else None)
    return model


def _fill_new(
    model: nn.Module, config: TrainerConfig, runtime: Runtime, value_head: str | None
) -> None:
    """Fill the shards of a new model. A value head and B of adapters are zero."""
    fill_weights(model, config, runtime, created={value_head} if value_head else set())
    if value_head:
        local_shard(dict(model.named_parameters())[value_head]).zero_()
    _start_adapters(model, config.seed)


def fill_weights(
    model: nn.Module,
    config: TrainerConfig,
    runtime: Runtime,
    into: Mapping[nn.Parameter, Tensor] | None = None,
    created: Collection[str] = (),
) -> None:
    """Fill the shards with the weights of `config.model_path`, or with random weights.

    Tensors in `into` are filled in place of the shards of their parameters. Parameters whose names
    are in `created` are not in the files.
    """
    if config.random_init:
        runtime.draw_weights(model, config, into or {})
    else:
        _load_weights(model, open_weights(model, config.model_dir, created), into or {}, created)


def trained_params(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name: the adapters, or all parameters without adapters."""
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def lora_target_names(model_path: str) -> set[str]:
    """Return the names that adapters of a model may target, from its config.json alone."""
    return target_names(meta_model(TrainerConfig(model_path=model_path)))


def check_layout(config: TrainerConfig, layout: Manifest) -> None:
    """Raise a ValueError if this model's parameters cannot be laid out like a rollout's."""
    byte_offsets(layout, base_params(meta_model(config)))


def meta_model(
    config: TrainerConfig, attention: str | None = None, frozen: bool = False
) -> nn.Module:
    """Build the model of `config.model_path`, adapters included, on the meta device.

    `attention` is transformers' name of the attention to use; None leaves it the choice.
    """
    from transformers import AutoModelForCausalLM

    register_experts()
    hf_config = load_hf_config(config.model_dir)
    _without_noise(hf_config)
    dtype = config.torch_param_dtype if frozen else config.torch_model_dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            hf_config, dtype=dtype, attn_implementation=attention, experts_implementation=EXPERTS
        )
    for module in model.modules():
        _without_noise(module)
    for param in model.parameters():
        # Some models have fp32 routers, but FSDP and the engines need one dtype.
        param.data = param.data.to(dtype)
    check_widths(model, config.torch_param_dtype)
    model.requires_grad_(not frozen)
    if config.fp32_router:
        route_in_fp32(model)
    if config.lora is not None:
        add_adapters(model, config.lora, config.torch_dtype)
    fuse(model)
    if config.activation_checkpointing == "layers":
        # Renamed in later releases of transformers 5; version 6 only has the new name.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)(_recomputation(config))
    elif config.activation_checkpointing == "mlp":
        _recompute_mlps(model, _recomputation(config))
    return model


def _recomputation(config: TrainerConfig) -> dict[str, Any]:
    """Return the arguments of torch's `checkpoint`: what it recomputes has forward's products."""
    how: dict[str, Any] = {"use_reentrant": False}
    if config.exact:
        products = partial(engine_products, torch.device(config.device))
        how["context_fn"] = lambda: (nullcontext(), products())
    return how


def _without_noise(owner: Any) -> None:
    """Set all rates of dropout and jitter in a config or a module to 0.

    Scores must be deterministic, so that the importance ratio of an unchanged policy is 1.
    """
    if isinstance(owner, _DropoutNd):
        owner.p = 0.0
    for name, value in list(vars(owner).items()):
        if value and type(value) in (int, float) and any(word in name for word in _NOISES):
            setattr(owner, name, type(value)(0))  # configs check types
        elif hasattr(value, "model_type") and not isinstance(owner, nn.Module):
            _without_noise(value)  # a nested config


def _recompute_mlps(model: Any, how: Mapping[str, Any]) -> None:
    """Recompute each layer's MLP in the backward pass.

    The activations of the MLP are most of a layer's bytes. They are cheap to recompute, because the
    MLP's last product need not be repeated.
    """
    for layer in model.get_decoder().layers:
        if (mlp := getattr(layer, "mlp", None)) is None:
            kind = model.config.model_type
            raise ValueError(
                f"activation_checkpointing=mlp: {kind} has layers without a module mlp; use layers"
            )
        forward = mlp.forward
        recomputed = partial(checkpoint, forward, preserve_rng_state=False, **how)
        mlp.forward = partial(_recomputed_with_gradient, forward, recomputed)


def _recomputed_with_gradient(
    forward: Callable[..., Any], recomputed: Callable[..., Any], *args: Any, **more: Any
) -> Any:
    return (recomputed if torch.is_grad_enabled() else forward)(*args, **more)


def _put_value_head(model: Any, config: TrainerConfig) -> None:
    """Replace the output embedding by a value head, which is not tied to the input embedding."""
    width = model.get_output_embeddings().in_features
    model.set_output_embeddings(
        nn.Linear(width, 1, bias=False, device="meta", dtype=config.torch_dtype)
    )


def _output_name(model: Any) -> str:
    weight = model.get_output_embeddings().weight
    return next(name for name, param in model.named_parameters() if param is weight)


def _shard(
    model: nn.Module, config: TrainerConfig, mesh: DeviceMesh, shard_dims: Mapping[str, int]
) -> None:
    named = dict(model.named_parameters())
    if unknown := sorted(shard_dims.keys() - named.keys()):
        rule = f"this model has no parameters {listed(unknown)}"
        raise ValueError(f"shard_dims: {rule}; leave them out")
    chosen = {named[name]: Shard(dim) for name, dim in shard_dims.items()}
    half = config.param_dtype is not None
    policy = MixedPrecisionPolicy(
        param_dtype=config.torch_param_dtype if half else None,
        reduce_dtype=torch.float32 if half else None,
    )
    layers = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in layers]
    units: list[Any] = [*_units(blocks, config.torch_param_dtype), *_vocabulary(model), model]
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy, shard_placement_fn=chosen.get)


def _units(layers: Sequence[nn.Module], dtype: torch.dtype) -> list[list[nn.Module]]:
    """Divide layers into units, of neighbors that have at most `UNIT_BYTES` in `dtype` together.

    A unit is gathered and reduced together, which takes the host more time than a small layer takes
    the device.
    """
    units = list[list[nn.Module]]()
    room = 0
    for layer in layers:
        size = sum(param.numel() for param in layer.parameters()) * dtype.itemsize
        if size > room:
            units.append([])
            room = UNIT_BYTES
        units[-1].append(layer)
        room -= size
    return units


def _vocabulary(model: Any) -> list[nn.Module]:
    """Return embedding and head if they are two matrices, to be separate FSDP units.

    Gathering and reducing them separately from the root saves 7 GiB at 152,064 words of width
    5,120. Tied matrices are one parameter of the root.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    two = head.weight is not embedding.weight and head.weight.shape == embedding.weight.shape
    return [embedding, head] if two else []


def _allocate_shards(
    model: nn.Module,
    device: torch.device,
    saver: MemorySaver,
    tag: str,
    starts: Mapping[str, int] | None,
) -> None:
    """Allocate memory for all meta shards: one block per tag, except for shards that FSDP pads.

    FSDP gathers shards of equal size, so its lazy initialization copies a shorter shard to padded
    memory. That copy is allocated in the region, so the source is in torch's own memory. `starts`
    has the first byte of each parameter in the block, by name; None places them in order.
    """
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            owners.setdefault(param, []).append((module, name))  # a tied parameter has several
    padded = [param for param in owners if _is_padded(param)]
    whole = [param for param in owners if not _is_padded(param)]
    names = {param: name for name, param in model.named_parameters()}
    memory = {}
    for param in padded:
        memory[param] = torch.empty(local_shard(param).shape, dtype=param.dtype, device=device)
    for on in (tag, ADAPTERS):
        params = [param for param in whole if is_adapter(names[param]) == (on == ADAPTERS)]
        specs = [(tuple(local_shard(param).shape), param.dtype) for param in params]
        places = starts if on == tag else None
        first = None if places is None else [places[names[param]] for param in params]
        if params:
            memory |= zip(params, side_by_side(specs, saver, on, first), strict=True)
    for param, users in owners.items():
        shard = nn.Parameter(like_shard(memory[param], param), requires_grad=param.requires_grad)
        for module, name in users:
            setattr(module, name, shard)


def _is_padded(param: Tensor) -> bool:
    """Return whether FSDP pads this rank's shard, because other ranks' shards have more rows."""
    assert isinstance(param, DTensor)
    most_rows = math.ceil(param.shape[0] / param.device_mesh.size())
    return param.placements[0].is_shard(0) and local_shard(param).shape[0] < most_rows


def _pad_shards(model: nn.Module, config: TrainerConfig, saver: MemorySaver, tag: str) -> None:
    """Let FSDP pad shards in regions of their tags, because it allocates memory for them."""
    if config.lora is not None:
        with saver.region(ADAPTERS, content="host"):
            pad_shards(model, NAMES)
    with saver.region(tag, content="host"):
        initialize_fsdp(model)


def _load_weights(
    model: nn.Module,
    files: CheckpointFiles,
    into: Mapping[nn.Parameter, Tensor],
    created: Collection[str],
) -> None:
    """Copy this rank's boxes from the files into its shards, or into their stand-ins in `into`."""
    params = {name: param for name, param in base_params(model).items() if name not in created}
    for name, buffer in stored_buffers(model).items():
        buffer.copy_(files.whole(name, buffer.shape))
    for name, param in params.items():
        shard = into.get(param, local_shard(param))
        if shard.numel():
            shard.copy_(files.box(name, *shard_box(param)))


def _start_adapters(model: nn.Module, seed: int) -> None:
    """Draw A uniformly in +-1 / sqrt(columns), as PEFT does, and set B to zero.

    The adapted model starts equal to the base. The same seed and name give the same bits on any
    device and number of ranks.
    """
    for name, adapter in adapted_params(model).items():
        path = name.removesuffix(".weight")
        generator = torch.Generator().manual_seed(hash_text(f"{seed}/{path}") >> 1)
        bound = 1 / math.sqrt(adapter.a.shape[-1])
        whole = torch.empty(adapter.a.shape).uniform_(-bound, bound, generator=generator)
        local_shard(adapter.a).copy_(part_of_rank(whole, adapter.a))
        local_shard(adapter.b).zero_()
