"""Tiny random models on disk, batches for them, and scores by plain transformers."""

from __future__ import annotations

import dataclasses
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.helpers.models import forward_logprobs, save_tiny
from trainer_bridge import SequenceBatch, TrainerConfig

_SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "eos_token_id": 1, "bos_token_id": 0,
}  # fmt: skip


_written: dict[str, dict[str, bytes]] = {}


def write_model(path: Path, family: str = "qwen3", seed: int = 0, **changes: Any) -> str:
    """Write a Hugging Face directory with random weights, including norms and biases.

    The same arguments give the same bits, which are made once.
    """
    key = f"{family} {seed} {sorted(changes.items())}"
    if key not in _written:
        with tempfile.TemporaryDirectory() as folder:
            save_tiny(folder, family, seed, **{**_SHAPE, "tie_word_embeddings": True, **changes})
            _written[key] = {file.name: file.read_bytes() for file in Path(folder).iterdir()}
    path.mkdir(parents=True, exist_ok=True)
    for name, content in _written[key].items():
        (path / name).write_bytes(content)
    return str(path)


def describe(path: Path, family: str = "qwen3", pad: int = 5, **changes: Any) -> str:
    """Write a model directory without weights."""
    write_model(path, family, pad_token_id=pad, **changes)
    (path / "model.safetensors").unlink()
    return str(path)


def reference(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def reference_logprobs(model: Any, batch: SequenceBatch) -> list[torch.Tensor]:
    """Compute log-probabilities with gradient, one unpadded sequence at a time."""
    pairs = zip(batch.prompt_ids, batch.response_ids, strict=True)
    return [
        forward_logprobs(model, prompt, response, batch.temperature) for prompt, response in pairs
    ]


def make_batch(
    count: int, seed: int = 0, vocab: int = 96, temperature: float = 1.0
) -> SequenceBatch:
    """Build random sequences of different lengths, some of whose tokens clip."""
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


def as_sampled(batch: SequenceBatch) -> SequenceBatch:
    """Return a batch whose old log-probabilities are those of a rollout instead."""
    return dataclasses.replace(batch, old_logprobs=None, rollout_logprobs=batch.old_logprobs)


def value_batch(count: int, seed: int = 0) -> SequenceBatch:
    """Build a batch with old values and returns, some of whose values clip."""
    batch = make_batch(count, seed)
    draw = torch.Generator().manual_seed(seed)
    values, returns = (
        [
            torch.randn(len(response), generator=draw).mul(0.3).tolist()
            for response in batch.response_ids
        ]
        for _ in "vr"
    )
    return dataclasses.replace(batch, values=values, returns=returns)


def config(path: str, **changes: Any) -> TrainerConfig:
    return TrainerConfig(
        **{
            "model_path": path,
            "learning_rate": 1e-2,
            "micro_batch_size": 3,
            "threads": 1,
            **changes,
        }
    )
