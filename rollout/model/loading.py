"""Models of Hugging Face directories: configuration of the decoder, parameters and buffers.

What a model computes is taken from transformers' model of the directory, built on the meta device
(`kvcache.observed_model`): heads, widths, windows, rotary frequencies, biases, norms, experts.
"""

from collections.abc import Collection
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from kvcache.observed_model import ObservedAttention, ObservedModel, observe
from rollout.model.decoder import (
    ExpertsConfig,
    GatedConfig,
    MLPConfig,
    ModelConfig,
    buffers,
    parameter_groups,
)
from rollout.model.mixers import mla
from rollout.model.mixers.attention import AttentionConfig
from rollout.model.mixers.base import MixerConfig, RopeConfig
from rollout.model.mixers.delta_net import DeltaNetConfig
from rollout.model.model_folder import (
    cached_by_content,
    load_hf_config,
    open_tensors,
    read_json,
    token_ids,
)
from rollout.ops.routing import Routing
from rollout.weights.pages import shorten

ARCHITECTURES = (
    "LlamaForCausalLM", "MinistralForCausalLM", "MistralForCausalLM", "MixtralForCausalLM",
    "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM",
    "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM",
)  # fmt: skip
# Rotary frequencies that do not depend on the length of a sequence.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_STRETCHED = ("linear", "yarn")  # types that extend the context without max_position_embeddings
_NOT_THE_MODEL = ("_name_or_path", "architectures", "dtype", "transformers_version")
Shapes = dict[str, tuple[int, ...]]


@cached_by_content
def load_model_config(directory: Path) -> ModelConfig:
    """Read a decoder's configuration and stop tokens from a Hugging Face model directory.

    Raises:
        ValueError: A JSON file is missing or damaged, or this engine does not support the
            architecture or a value; names the file or the key.
    """
    architectures = read_json(directory / "config.json").get("architectures") or []
    _refuse_architectures(architectures, directory)
    config = load_hf_config(directory)
    _refuse_unsupported(config, str(directory))
    observed = _observed(config, str(directory))
    _refuse_architectures([type(observed.model).__name__], directory)  # chosen by model_type
    shapes = _shapes(observed.model) | stored_shapes(observed.model)
    ids = token_ids(directory)
    model = ModelConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=longest_context(observed.model.config),
        tie_word_embeddings=bool(config.tie_word_embeddings),
        mixers=_mixers(observed, shapes),
        mlps=_mlps(config, shapes),
        zero_centred_norms=config.model_type == "qwen3_next",
        stop_token_ids=ids.ends,
        tokenizer_ids=ids.size,
        hf_config=config,
    )
    _check_parameters(model, shapes, str(directory))
    return model


def _refuse_architectures(names: list[str], directory: Path) -> None:
    if not any(name in ARCHITECTURES for name in names):
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"{directory}: architectures={names} are not supported, only {known}")


def _observed(config: Any, where: str) -> ObservedModel:
    try:
        return observe(config)
    except ValueError as error:
        raise ValueError(f"{where}: {error}; correct config.json") from error


def longest_context(config: Any) -> int:
    """Return the tokens of the longest sequence of a Hugging Face config's model.

    Rotary embeddings of the types linear and yarn stretch the original context by their factor,
    which `max_position_embeddings` need not include.
    """
    most, rope = config.max_position_embeddings, getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") not in _STRETCHED:
        return most
    original = rope.get("original_max_position_embeddings") or most
    original = getattr(config, "original_max_position_embeddings", None) or original
    return max(most, int(original * (rope.get("factor") or 1)))


def differences(own: ModelConfig, other: ModelConfig) -> str:
    """Return the keys and end tokens in which another model differs; empty if it does not."""
    if own == other:
        return ""
    keys, others = own.hf_config.to_dict(), other.hf_config.to_dict()
    texts = [
        f"{key}={others.get(key)!r} (here {keys.get(key)!r})"
        for key in sorted(keys.keys() | others.keys() - {*_NOT_THE_MODEL})
        if keys.get(key) != others.get(key) and key not in _NOT_THE_MODEL
    ]
    if own.stop_token_ids != other.stop_token_ids:
        ends = sorted(other.stop_token_ids), sorted(own.stop_token_ids)
        texts.append("end tokens {} (here {})".format(*ends))
    if further := _params(own).keys() ^ _params(other).keys():
        texts.append(f"parameters {shorten(sorted(further))}")
    return ", ".join(texts)


def _params(model: ModelConfig) -> Shapes:
    params = chain.from_iterable(group.params for group in parameter_groups(model))
    return {param.name: param.whole for param in params}


def _mixers(observed: ObservedModel, shapes: Shapes) -> tuple[MixerConfig, ...]:
    config, rope = observed.model.config, _rope(observed.model)
    mixers: list[MixerConfig] = []
    for index, layer in enumerate(observed.layers):
        if layer is None:
            mixers.append(_delta_net(config))
        elif layer.latent is not None:
            mixers.append(mla.MLAConfig.of(config, layer, rope))
        else:
            mixers.append(_attention(f"model.layers.{index}.self_attn.", layer, shapes, rope))
    return tuple(mixers)


def _attention(
    name: str, layer: ObservedAttention, shapes: Shapes, rope: RopeConfig
) -> AttentionConfig:
    width = layer.key_width
    return AttentionConfig(
        num_heads=layer.query_heads,
        num_kv_heads=layer.kv_heads,
        head_dim=width,
        rope=rope,
        qkv_bias=name + "q_proj.bias" in shapes,
        o_bias=name + "o_proj.bias" in shapes,
        qk_norm=name + "q_norm.weight" in shapes,
        output_gate=shapes[name + "q_proj.weight"][0] == 2 * layer.query_heads * width,
        window=layer.window,
    )


def _delta_net(config: Any) -> DeltaNetConfig:
    return DeltaNetConfig(
        num_key_heads=config.linear_num_key_heads,
        num_value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        kernel=config.linear_conv_kernel_dim,
    )


def _rope(model: Any) -> RopeConfig:
    """Compute the rotary frequencies as transformers' model does, on the CPU."""
    rotary = type(model.get_decoder().rotary_emb)(model.config)
    frequencies = tuple(rotary.inv_freq.tolist())
    return RopeConfig(frequencies=frequencies, table_scale=float(rotary.attention_scaling))


def _mlps(config: Any, shapes: Shapes) -> tuple[MLPConfig, ...]:
    names = (f"model.layers.{layer}.mlp." for layer in range(config.num_hidden_layers))
    return tuple(
        _experts(config, name, shapes)
        if f"{name}experts.gate_up_proj" in shapes
        else GatedConfig(inner=shapes[f"{name}gate_proj.weight"][0])
        for name in names
    )


def _experts(config: Any, name: str, shapes: Shapes) -> ExpertsConfig:
    mixtral, deepseek = config.model_type == "mixtral", config.model_type in mla.MODEL_TYPES
    experts, rows, _ = shapes[name + "experts.gate_up_proj"]
    shared = f"{name}shared_expert{'s' if deepseek else ''}.gate_proj.weight"
    return ExpertsConfig(
        experts=experts,
        inner=rows // 2,
        routing=expert_routing(config),
        wide_router=deepseek,
        wide_weights=mixtral or deepseek,
        bias=name + "gate.e_score_correction_bias" in shapes,
        shared=shapes[shared][0] if shared in shapes else None,
        shared_gate=not deepseek,
    )


def expert_routing(config: Any) -> Routing:
    """Return how the routers of a Hugging Face config's model select and weight experts.

    Raises:
        ValueError: The config's `topk_method` is not supported.
    """
    top_k, kind = config.num_experts_per_tok, config.model_type
    if kind not in mla.MODEL_TYPES:
        return Routing(top_k=top_k, normalise=kind == "mixtral" or bool(config.norm_topk_prob))
    v3, method = kind == "deepseek_v3", getattr(config, "topk_method", None)
    if not v3 and method not in ("greedy", "group_limited_greedy"):
        known = "supported: 'greedy', 'group_limited_greedy'"
        raise ValueError(f"topk_method={method!r} is not supported; {known}")
    grouped = v3 or method == "group_limited_greedy"
    return Routing(
        top_k=top_k or 0,
        normalise=v3 and bool(config.norm_topk_prob),  # transformers ignores it for V2
        sigmoid=v3,
        groups=config.n_group if grouped else 1,
        top_groups=config.topk_group if grouped else 1,
        judges=2 if v3 else 1,
        scale=config.routed_scaling_factor,
    )


def parameter_shapes(path: str | Path) -> tuple[Shapes, dict[str, str]]:
    """Return shapes and ties of the parameters of transformers' model of this directory.

    Returns:
        Shapes by name, without tied parameters; and the tied names, each with its stored name.
    """
    model = _meta_model(path)
    stored = {param: name for name, param in model.named_parameters()}
    named = model.named_parameters(remove_duplicate=False)
    aliases = {name: stored[param] for name, param in named if stored[param] != name}
    return _shapes(model), aliases


def _shapes(model: nn.Module) -> Shapes:
    return {name: tuple(param.shape) for name, param in model.named_parameters()}


def buffer_shapes(path: str | Path) -> Shapes:
    """Return the shapes of the buffers that transformers' model of this directory stores."""
    return stored_shapes(_meta_model(path))


def stored_shapes(model: nn.Module) -> Shapes:
    """Return the shapes of the model's buffers in checkpoints."""
    return {name: tuple(buffer.shape) for name, buffer in stored_buffers(model).items()}


def stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers in checkpoints by full name, such as DeepSeek-V3's router biases."""
    buffers: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                buffers[f"{path}.{name}" if path else name] = buffer
    return buffers


def read_buffers(path: str | Path, names: Collection[str]) -> dict[str, Tensor]:
    """Read the named buffers from a directory's files; return none if it has no files."""
    if not names or not any(Path(path).glob("*.safetensors")):
        return {}
    files = open_tensors(path)
    return {name: files[name].get_tensor(name) for name in names if name in files}


def _meta_model(path: str | Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    config = load_hf_config(path)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _refuse_unsupported(config: Any, where: str) -> None:
    rope = config.rope_parameters
    partial, kind = rope.get("partial_rotary_factor", 1.0), rope.get("rope_type", "default")
    rotates = partial == 1.0 or config.model_type == "qwen3_next"
    bias, window = getattr(config, "mlp_bias", False), getattr(config, "sliding_window", None)
    quantized = getattr(config, "quantization_config", None)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    latent = config.model_type in mla.MODEL_TYPES
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    name, width = ("qk_rope_head_dim", config.qk_rope_head_dim) if latent else ("head_dim", width)
    for key, value, good, supported in (
        ("hidden_act", config.hidden_act, config.hidden_act == "silu", "silu"),
        ("mlp_bias", bias, not bias, "False"),
        ("sliding_window", window, window is None or window >= 1, "at least 1, or null"),
        ("rope_type", kind, kind in ROPE_TYPES, ", ".join(ROPE_TYPES)),
        ("partial_rotary_factor", partial, rotates, "1.0"),
        (
            "num_key_value_heads",
            kv_heads,
            not latent or kv_heads == heads,
            f"num_attention_heads={heads}",
        ),
        (name, width, width % 2 == 0, "even widths, for rotary embeddings"),
        ("quantization_config", quantized, quantized is None, "null; dequantize the weights"),
    ):
        if not good:
            raise ValueError(
                f"{where}: config key {key}={value!r} is not supported; supported: {supported}"
            )


def _check_parameters(model: ModelConfig, shapes: Shapes, where: str) -> None:
    """Refuse a model whose parameters or buffers are not those of transformers' model."""
    own = _params(model) | buffers(model)
    if other := [name for name in own | shapes if own.get(name) != shapes.get(name)]:
        rule = "transformers' model has other parameters than this engine's"
        raise ValueError(f"{where}: {rule}: {shorten(other)}; use rollout.name=vllm or sglang")
