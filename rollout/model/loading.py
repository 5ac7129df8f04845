"""Loading of Hugging Face model directories. No other file of `rollout` imports transformers."""

import functools
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from kvcache import layout
from rollout.model.decoder import ExpertsConfig, GatedConfig, MLPConfig, ModelConfig
from rollout.model.mixers import mla
from rollout.model.mixers.attention import AttentionConfig
from rollout.model.mixers.base import MixerConfig, RopeConfig
from rollout.model.mixers.delta_net import DeltaNetConfig
from rollout.ops.experts import Routing

ARCHITECTURES = (
    "LlamaForCausalLM", "MinistralForCausalLM", "MistralForCausalLM", "MixtralForCausalLM",
    "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM",
    "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM",
)  # fmt: skip
_QWEN3_NEXT_TYPES = ("full_attention", "linear_attention")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


# Configuration, weights and tokenizer of a model on the Hub, without copies in other formats.
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_HUB_COPIES = ["*/*", "consolidated*"]
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")


def resolve_model(path: str | Path, *, weights: bool = True) -> Path:
    """Return the folder of a model; download a model of the Hugging Face Hub into its cache.

    `path` is a folder, or ORG/NAME on the Hub. An existing folder takes precedence. A path that is
    neither is returned unchanged. Weights are downloaded only if `weights` is true.

    Raises:
        ValueError: The download failed; the message begins with the model's name.
    """
    if Path(path).exists() or not _HUB_NAME.fullmatch(str(path)):
        return Path(path)
    return _from_hub(str(path), weights)


@functools.cache
def _from_hub(name: str, weights: bool) -> Path:
    from huggingface_hub import errors, snapshot_download

    ignored = _HUB_COPIES if weights else [*_HUB_COPIES, "*.safetensors"]
    try:
        folder = snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=ignored)
    except errors.GatedRepoError as error:
        remedy = f"accept its terms at https://huggingface.co/{name}, and set HF_TOKEN"
        raise ValueError(f"{name}: access to it on the Hub is restricted; {remedy}") from error
    except errors.RepositoryNotFoundError as error:
        rule = "is neither a folder here nor a public model of the Hub"
        raise ValueError(f"{name}: {rule}; correct it, or set HF_TOKEN") from error
    except errors.LocalEntryNotFoundError as error:
        rule = "is not a folder here, and the Hub cannot be reached (HF_HUB_OFFLINE, HF_ENDPOINT)"
        raise ValueError(f"{name}: {rule}; connect, or name a folder") from error
    except Exception as error:  # a broken connection or a full disk raises many types
        why = " ".join(str(error).split())
        raise ValueError(f"{name}: the download from the Hub failed: {why}; try again") from error
    return Path(folder)


def load_model_config(path: str | Path) -> ModelConfig:
    """Read a decoder's configuration and stop tokens from a Hugging Face model directory.

    Raises:
        ValueError: config.json is missing, or this engine does not support the architecture or a
            value; names the key.
    """
    directory = Path(path)
    raw = _read_json(directory / "config.json")
    architectures = raw.get("architectures") or []
    if not any(name in ARCHITECTURES for name in architectures):
        known = ", ".join(ARCHITECTURES)
        raise ValueError(
            f"{directory}: architectures={architectures} not supported; supported: {known}"
        )
    from transformers import AutoConfig  # slow to import, and only needed here

    config = AutoConfig.from_pretrained(str(directory))
    _refuse_unsupported(config, str(directory))
    return ModelConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        mixers=_mixers(config, str(directory)),
        mlps=_mlps(config),
        zero_centred_norms=config.model_type == "qwen3_next",
        stop_token_ids=_stop_token_ids(directory, config.eos_token_id),
        hf_config=config,
    )


def _mixers(config: Any, where: str) -> tuple[MixerConfig, ...]:
    rope = _rope(config.rope_parameters, config.max_position_embeddings)
    if config.model_type in mla.MODEL_TYPES:
        return (mla.MLAConfig.of(config, rope),) * config.num_hidden_layers
    if config.model_type == "qwen3_next":
        return _qwen3_next_mixers(config, _attention(config, rope, None))
    return tuple(_attention(config, rope, window) for window in _windows(config, where))


def _windows(config: Any, where: str) -> list[int | None]:
    """Return the number of keys that a query sees in each layer; None for all."""
    kinds, window = layout(config).kinds, getattr(config, "sliding_window", None)
    if "sliding" in kinds and window is None:
        raise ValueError(
            f"{where}: layer_types has sliding_attention, which needs use_sliding_window and "
            f"sliding_window"
        )
    return [window if kind == "sliding" else None for kind in kinds]


def _attention(config: Any, rope: RopeConfig, window: int | None) -> AttentionConfig:
    kind = config.model_type
    attention_bias = bool(getattr(config, "attention_bias", False))
    return AttentionConfig(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        rope=rope,
        qkv_bias=kind == "qwen2" or attention_bias,
        o_bias=kind != "qwen2" and attention_bias,
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        window=window,
    )


def _qwen3_next_mixers(config: Any, attention: AttentionConfig) -> tuple[MixerConfig, ...]:
    """Return a gated delta net or gated attention for each layer; `attention` lacks the gates."""
    if unknown := sorted(set(config.layer_types) - set(_QWEN3_NEXT_TYPES)):
        raise ValueError(
            f"layer_types={unknown} are not supported; supported: {', '.join(_QWEN3_NEXT_TYPES)}"
        )
    rotary_dim = int(attention.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
    gated = replace(attention, qk_norm=True, output_gate=True, rotary_dim=rotary_dim)
    linear = DeltaNetConfig(
        num_key_heads=config.linear_num_key_heads,
        num_value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        kernel=config.linear_conv_kernel_dim,
    )
    return tuple(linear if kind == "linear_attention" else gated for kind in config.layer_types)


def _mlps(config: Any) -> tuple[MLPConfig, ...]:
    sparse = _expert_layers(config)
    experts = _experts(config) if sparse else None
    dense = GatedConfig(inner=config.intermediate_size)
    layers = range(config.num_hidden_layers)
    return tuple(experts if experts and layer in sparse else dense for layer in layers)


def _experts(config: Any) -> ExpertsConfig:
    mixtral, deepseek = config.model_type == "mixtral", config.model_type in mla.MODEL_TYPES
    if deepseek:
        shared = config.moe_intermediate_size * config.n_shared_experts
    else:
        shared = getattr(config, "shared_expert_intermediate_size", None)
    return ExpertsConfig(
        experts=config.n_routed_experts if deepseek else config.num_experts,
        inner=config.intermediate_size if mixtral else config.moe_intermediate_size,
        routing=expert_routing(config),
        wide_router=deepseek,
        wide_weights=mixtral or deepseek,
        bias=config.model_type == "deepseek_v3",
        shared=shared,
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


def _expert_layers(config: Any) -> set[int]:
    """Return the layers that are mixtures of experts, as in transformers."""
    layers = range(config.num_hidden_layers)
    if config.model_type == "mixtral":
        return set(layers)
    if config.model_type in mla.MODEL_TYPES:
        return set(layers[config.first_k_dense_replace :])
    if config.model_type not in ("qwen3_moe", "qwen3_next") or not config.num_experts:
        return set()
    step, dense = config.decoder_sparse_step, config.mlp_only_layers
    return {layer for layer in layers if layer not in dense and (layer + 1) % step == 0}


def parameter_shapes(path: str | Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return shapes and ties of the parameters of transformers' model of this directory.

    Returns:
        Shapes by name, without tied parameters; and the tied names, each with its stored name.
    """
    model = _meta_model(path)
    stored = {param: name for name, param in model.named_parameters()}
    named = model.named_parameters(remove_duplicate=False)
    aliases = {name: stored[param] for name, param in named if stored[param] != name}
    return {name: tuple(param.shape) for param, name in stored.items()}, aliases


def buffer_shapes(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the buffers that transformers' model of this directory stores."""
    return {name: tuple(buffer.shape) for name, buffer in stored_buffers(_meta_model(path)).items()}


def stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers in checkpoints by full name, such as DeepSeek-V3's router biases."""
    buffers: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                buffers[f"{path}.{name}" if path else name] = buffer
    return buffers


def read_buffers(path: str | Path, names: Collection[str]) -> dict[str, Tensor]:
    """Read the named buffers from a directory's files; return none if it has no files."""
    if not names or not any(Path(path).glob("*.safetensors")):
        return {}
    return dict(iter_checkpoint(path, names))


def _meta_model(path: str | Path) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(path))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def stop_token_ids(path: str | Path) -> frozenset[int]:
    """Return the tokens that end an answer of the model."""
    directory = Path(path)
    return _stop_token_ids(directory, _read_json(directory / "config.json").get("eos_token_id"))


def iter_checkpoint(
    path: str | Path, names: Collection[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, CPU tensor) from a directory's safetensors files, one at a time.

    `names` selects the tensors; None reads all.

    Raises:
        ValueError: A file is missing, truncated or damaged; names it.
    """
    for file_path in checkpoint_files(path):
        with open_checkpoint(file_path) as file:
            for key in file.keys():  # noqa: SIM118  (safe_open is not a mapping)
                if names is None or key in names:
                    yield key, file.get_tensor(key)


def open_checkpoint(file: Path) -> Any:
    """Open a safetensors file by `safetensors.safe_open`; it is mapped, not read.

    Raises:
        ValueError: The file is truncated or damaged; names it.
    """
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(
            f"{file} cannot be read ({error}); download or save the model again"
        ) from error


def checkpoint_files(path: str | Path) -> list[Path]:
    """List the safetensors files of a model directory, all of which exist.

    Raises:
        ValueError: A file is missing; names it.
    """
    directory, names = Path(path), [_SINGLE]
    if (directory / _INDEX).is_file():
        names = sorted(set(_read_json(directory / _INDEX)["weight_map"].values()))
    for name in names:
        if not (directory / name).is_file():
            remedy = "download the model again, or save it with save_pretrained()"
            raise ValueError(f"{directory} lacks {name}; {remedy}")
    return [directory / name for name in names]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path} not found; the model path must be a Hugging Face model directory")
    return json.loads(path.read_text())


def _read_optional(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.is_file() else {}


def _refuse_unsupported(config: Any, where: str) -> None:
    partial = config.rope_parameters.get("partial_rotary_factor", 1.0)
    rotates = partial == 1.0 or config.model_type == "qwen3_next"
    bias, window = getattr(config, "mlp_bias", False), getattr(config, "sliding_window", None)
    quantized = getattr(config, "quantization_config", None)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    shared = config.model_type not in mla.MODEL_TYPES or kv_heads == heads
    for key, value, good, supported in (
        ("hidden_act", config.hidden_act, config.hidden_act == "silu", "silu"),
        ("mlp_bias", bias, not bias, "False"),
        ("sliding_window", window, window is None or window >= 1, "at least 1, or null"),
        ("partial_rotary_factor", partial, rotates, "1.0"),
        ("num_key_value_heads", kv_heads, shared, f"num_attention_heads={heads}"),
        ("quantization_config", quantized, quantized is None, "null; dequantize the weights"),
    ):
        if not good:
            raise ValueError(
                f"{where}: config key {key}={value!r} is not supported; supported: {supported}"
            )


def _rope(parameters: dict[str, Any], max_position_embeddings: int) -> RopeConfig:
    known = {option.name for option in fields(RopeConfig)} - {"theta", "rope_type"}
    options: dict[str, Any] = {"original_max_position_embeddings": max_position_embeddings}
    options |= {key: parameters[key] for key in known if parameters.get(key) is not None}
    kind = parameters.get("rope_type", "default")
    if kind == "yarn" and "factor" not in options:
        options["factor"] = max_position_embeddings / options["original_max_position_embeddings"]
    return RopeConfig(theta=parameters["rope_theta"], rope_type=kind, **options)


def _stop_token_ids(directory: Path, from_config: int | list[int] | None) -> frozenset[int]:
    """Return the end tokens of generation_config.json, else of config.json, and the tokenizer's.

    A fine-tuned model often ends its turns with a token that only its tokenizer names.
    """
    ids = _read_optional(directory / "generation_config.json").get("eos_token_id")
    if ids is None:
        ids = from_config
    listed = [ids] if isinstance(ids, int) else ids or []
    return frozenset([*listed, *_tokenizer_end(directory)])


def _tokenizer_end(directory: Path) -> list[int]:
    """Return the id of the tokenizer's end token in a list, which is empty if it has none."""
    config = _read_optional(directory / "tokenizer_config.json")
    token = config.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    added = config.get("added_tokens_decoder", {}).items()
    ids = {entry["content"]: int(number) for number, entry in added}
    if text in ids:
        return [ids[text]]
    file = directory / "tokenizer.json"
    if text is None or not file.is_file():
        return []
    from tokenizers import Tokenizer  # reads the file in half the time that json takes

    token_id = Tokenizer.from_file(str(file)).token_to_id(text)
    return [] if token_id is None else [token_id]
