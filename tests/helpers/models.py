"""Tiny random models in Hugging Face layout.

Initial weights are large, so that greedy choices are never near ties.
"""

from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))

QWEN3_NEXT = partial(
    Qwen3NextConfig,
    num_experts=0,  # dense
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    layer_types=["linear_attention", "full_attention"],
)
QWEN3_MOE = partial(
    Qwen3MoeConfig, head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24
)
KINDS: dict[str, tuple[Any, Any]] = {
    "granite": (GraniteConfig, GraniteForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "ministral": (MinistralConfig, MinistralForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (QWEN3_MOE, Qwen3MoeForCausalLM),
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "qwen3_next": (QWEN3_NEXT, Qwen3NextForCausalLM),
}
SIZES: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
# for deepseek_v2 and deepseek_v3: dense layers, a latent row of 16 + 8 elements
MLA: dict[str, Any] = {
    "num_key_value_heads": 4, "first_k_dense_replace": 2, "kv_lora_rank": 16, "q_lora_rank": 20,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
}  # fmt: skip
# experts in all layers but the first, in groups
DEEPSEEK_MOE: dict[str, Any] = {
    "first_k_dense_replace": 1, "num_hidden_layers": 3, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 20,
    "n_shared_experts": 1, "routed_scaling_factor": 1.7,
}  # fmt: skip


def build_tiny(kind: str = "llama", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Build an fp32 model in eval mode with all parameters random, norms and biases too."""
    config_class, model_class = KINDS[kind]
    generator = torch.Generator().manual_seed(seed)
    model = model_class(config_class(**{**SIZES, **overrides})).eval()
    # transformers' grouped products do not support odd sizes
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            # a norm starts with gain 1
            parameter.copy_(noise + parameter if "norm" in name else noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
    return model


def save_tiny(
    path: str | Path, kind: str = "llama", seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """Build a tiny model and save it to `path`."""
    model = build_tiny(kind, seed, **overrides)
    model.save_pretrained(str(path))
    return model


_answers: dict[tuple[bytes, tuple[int, ...], int], list[int]] = {}


def greedy(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> list[int]:
    """Return transformers' own greedy answer, including its end token if there is one.

    Answers of small models are cached, because many tests ask equal models the same.
    """
    if model.num_parameters() > 1e6:
        return _greedy(model, prompt, max_tokens)
    key = _digest(model), tuple(prompt), max_tokens
    if key not in _answers:
        _answers[key] = _greedy(model, prompt, max_tokens)
    return list(_answers[key])


def _digest(model: PreTrainedModel) -> bytes:
    """Hash everything that decides an answer: settings, device, every bit of every weight."""
    digest = blake2b(
        repr((model.config.to_dict(), model.generation_config.to_dict(), model.device)).encode()
    )
    for name, weight in model.state_dict().items():
        digest.update(name.encode() + weight.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()


@torch.no_grad()
def _greedy(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def forward_logprobs(
    model: PreTrainedModel, prompt: list[int], answer: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """Compute an answer's log-probabilities in one full forward: fp32 [len(answer)], on the CPU."""
    ids = torch.tensor([prompt + answer], device=model.device)
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return (
        torch.log_softmax(logits / temperature, -1)
        .gather(1, ids[0, len(prompt) :, None])
        .squeeze(1)
        .cpu()
    )
