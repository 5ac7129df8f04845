"""A model of transformers whose forward has the engine's bits.

The modules stay, so that FSDP, checkpointing and the sync work as always. What they compute is
exchanged: linear layers, rotary tables, attention, routers and experts become the engine's
operations, as norms, gated activation and rotation are in every trainer (`fuse`). Embedding and
residual additions are elementwise or copies, and have the same bits everywhere. A probe refuses a
model with any other operation.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from memsaver.system.replaced import replaced
from rollout.model import ExpertsConfig, ModelConfig, load_model_config
from trainer_bridge.config import TrainerConfig
from trainer_bridge.models.adapters.lora import LoraLinear, expert_layers
from trainer_bridge.models.moe import Routed, expert_routers
from trainer_bridge.models.packing import Packing
from trainer_bridge.ops import exact
from trainer_bridge.ops.token_scores import ScoringHead, slice_widths

ATTENTION = "exact"
"""Name under which `make_exact` registers `exact_attention` with transformers."""
FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
ROW_PARALLEL = ("o_proj", "down_proj")  # layers whose inner dimension the engine's ranks share
_SAME_BITS = {
    "add", "mul", "neg", "embedding", "empty",
    "alias", "cat", "clone", "_to_copy", "detach", "expand", "permute", "reshape", "select",
    "slice", "split", "squeeze", "t", "transpose", "unsqueeze", "_unsafe_view", "view",
    "trainer_bridge::gated", "trainer_bridge::normed", "trainer_bridge::rotated",
}  # fmt: skip
_OF_ENGINE = ("attention", "linear", "mix_experts", "rotary_rows", "route", "router_logits")


def why_not_exact(model: ModelConfig) -> str:
    """Return why a trainer cannot follow an engine of the model; empty if it can."""
    kind = model.hf_config.model_type
    if kind not in FAMILIES:
        return f"is for {', '.join(FAMILIES)}, and this is {kind}"
    return ""


def make_exact(model: Any, config: TrainerConfig) -> None:
    """Exchange the operations of a meta model for those of the engine.

    Raises:
        ValueError: The model's family or any of its operations is not supported.
    """
    description = load_model_config(config.model_dir)
    if why := why_not_exact(description):
        raise _refusal(why)
    if not isinstance(model.get_output_embeddings(), ScoringHead):
        raise _refusal("needs a plain output embedding")
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, exact_attention)
    model.set_attn_implementation(ATTENTION)
    model.packs = True
    model.forward_products = partial(exact.engine_products, torch.device(config.device))
    mixer: Any = description.mixers[0]
    for name, module in model.get_decoder().named_modules():
        if name.endswith("rotary_emb"):
            frequencies = torch.tensor(mixer.rope.frequencies, dtype=torch.float32)
            module.forward = partial(_rotary, frequencies, mixer.rope.table_scale)
    for name, layer in _layers(model):
        layer.forward = partial(_linear, layer, _ranks_of(name, config.exact_ranks))  # type: ignore[method-assign]
    mixtures = description.with_fp32_routers() if config.fp32_router else description
    sparse = [mlp for mlp in mixtures.mlps if isinstance(mlp, ExpertsConfig)]
    for mlp, router in zip(sparse, expert_routers(model), strict=True):
        router.forward = partial(_route, mlp, router)  # type: ignore[method-assign]
    shares = exact.ExpertRanks(config.exact_ranks, config.exact_expert_parallel)
    for experts in expert_layers(model):
        experts.forward = partial(_mix_experts, experts, shares)  # type: ignore[method-assign]
    if found := foreign_operations(model):
        raise _refusal(f"does not know operations of this model: {', '.join(sorted(found))}")


def _layers(model: Any) -> list[tuple[str, nn.Linear]]:
    named = model.get_decoder().named_modules()
    kinds = nn.Linear, LoraLinear
    return [(name, module) for name, module in named if type(module) in kinds]


def _refusal(why: str) -> ValueError:
    return ValueError(f"TrainerConfig.exact {why}; set it to False")


def define_products(model: Any, device: torch.device, config: TrainerConfig) -> None:
    """Probe the products of an exact model, and replace those of the library that differ."""
    shapes = dict[tuple[int, int, bool], None]()
    for name, layer in _layers(model):
        ranks = _ranks_of(name, config.exact_ranks)
        shape = layer.out_features, layer.in_features // ranks
        shapes[*shape, layer.bias is not None] = None
        if ranks > 1:  # the first adds the bias
            shapes[*shape, False] = None
    head, routers = model.get_output_embeddings(), expert_routers(model)
    weights: list[Any] = [router.weight for router in routers]
    for words in sorted(slice_widths(head.out_features)):
        shapes[words, head.in_features, False] = None
    shapes |= {(*weight.shape, False): None for weight in weights}
    options = {"routers": bool(routers), "strict": config.exact != "warn"}
    exact.define_products(shapes, device, config.torch_param_dtype, **options)


def _ranks_of(layer: str, exact_ranks: int) -> int:
    """Return the number of the engine's ranks that share the inner dimension of a layer."""
    return exact_ranks if layer.endswith(ROW_PARALLEL) else 1


def exact_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    packing: Packing,
    scaling: float,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute `ops.exact.attention` by the interface of transformers, see `packed_attention`."""
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return exact.attention(q, k, v, packing.sequences, scaling, sliding_window)[None], None


def _linear(layer: nn.Linear, ranks: int, x: Tensor) -> Tensor:
    adapter = None
    if isinstance(layer, LoraLinear) and layer.adapted:
        adapter = exact.LinearAdapter(layer.lora_a, layer.lora_b, layer.scale)
    return exact.linear(x, layer.weight, layer.bias, ranks, adapter)


def _rotary(frequencies: Tensor, scale: float, x: Tensor, position_ids: Tensor) -> Any:
    return exact.rotary_rows(position_ids, frequencies, scale, like=x)


def _route(mlp: ExpertsConfig, router: Any, x: Tensor) -> Routed:
    logits = exact.router_logits(x.reshape(-1, x.shape[-1]), router.weight, mlp.wide_router)
    ids, weights = exact.route(logits, mlp.routing)
    return logits, weights if mlp.wide_weights else weights.to(x.dtype), ids


def _mix_experts(
    experts: Any, ranks: exact.ExpertRanks, x: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    return exact.mix_experts(x, ids, weights, experts.gate_up_proj, experts.down_proj, ranks=ranks)


class _OperationProbe(TorchDispatchMode):
    """Record the names of operations that are neither the engine's nor sure to have its bits."""

    def __init__(self) -> None:
        super().__init__()
        self.found = set[str]()
        self._inside = 0  # operations of the engine, one in the other, that run now

    def call(self, operation: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call an operation of the engine, in place of the model."""
        self._inside += 1
        result = operation(*args, **options)
        self._inside -= 1
        return result

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        if not self._inside and name not in _SAME_BITS:
            self.found.add(name)
        return func(*args, **(kwargs or {}))


def foreign_operations(model: Any) -> set[str]:
    """Return the operations of a meta model's decoder that are not those of the engine."""
    bounds = torch.tensor([0, 3, 5], dtype=torch.int32, device="meta")
    positions = torch.zeros((1, 5), dtype=torch.int64, device="meta")
    packing = Packing((3, 2), bounds, positions)
    ids = torch.zeros((1, 5), dtype=torch.int64, device="meta")
    forward: Callable[..., Any] = model.get_decoder()
    probe = _OperationProbe()
    with torch.no_grad(), probe, replaced(exact, **dict.fromkeys(_OF_ENGINE, probe.call)):
        forward(input_ids=ids, packing=packing, position_ids=positions, use_cache=False)
    return probe.found
