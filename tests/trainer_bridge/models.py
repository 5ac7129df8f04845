"""Tiny random models on disk, batches for them, and the same model as plain transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from trainer_bridge import SequenceBatch, TrainerConfig

_SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def write_model(path: Path, family: str = "qwen3", seed: int = 0, **changes: Any) -> str:
    """A Hugging Face directory with a random model, norms and biases too; the same bits for the same arguments."""
    torch.manual_seed(seed)
    config = FAMILIES[family](**{**_SHAPE, "tie_word_embeddings": True, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim == 1:  # transformers starts norms at 1 and biases at 0: nobody would notice them missing
                param.add_(torch.randn_like(param) * 0.1)
    model.save_pretrained(path)
    return str(path)


def reference(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def reference_logprobs(model: Any, batch: SequenceBatch) -> list[torch.Tensor]:
    """One sequence at a time, no padding, all logits."""
    out = []
    for prompt, response in zip(batch.prompt_ids, batch.response_ids, strict=True):
        logits = model(torch.tensor([prompt + response])).logits[0].float() / batch.temperature
        logp = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
        out.append(logp.gather(-1, torch.tensor(response)[:, None]).squeeze(-1))
    return out


def make_batch(count: int, seed: int = 0, vocab: int = 96, temperature: float = 1.0) -> SequenceBatch:
    """Sequences of different lengths, with old log-probabilities and advantages that make some tokens clip."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(vocab) for _ in range(rng.randint(1, 9))] for _ in range(count)]
    responses = [[rng.randrange(vocab) for _ in range(rng.randint(1, 7))] for _ in range(count)]
    return SequenceBatch(
        prompt_ids=prompts,
        response_ids=responses,
        old_logprobs=[[-4.5 + rng.gauss(0, 0.5) for _ in response] for response in responses],
        advantages=[rng.gauss(0, 1) for _ in range(count)],
        temperature=temperature,
    )


def config(path: str, **changes: Any) -> TrainerConfig:
    return TrainerConfig(**{"model_path": path, "learning_rate": 1e-2, "micro_batch_size": 3, "threads": 1, **changes})
