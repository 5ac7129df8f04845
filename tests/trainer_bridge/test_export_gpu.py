"""A real vLLM loads exported models, and answers like transformers and our engine."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout import Engine, SamplingParams
from rollout.hosted import VllmRollout
from tests.helpers.trainer_bridge.models import make_batch, write_model
from trainer_bridge import LoraConfig, Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
Make = Callable[..., Trainer]
SHAPE: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 1024,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
LORA = LoraConfig(rank=8, alpha=16.0, target_modules=("q_proj", "down_proj"))
# family, fields of the model, options of the trainer, options of vLLM
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "tied": ("qwen2", {}, {}, {}),
    "experts": ("qwen3_moe", EXPERTS, {}, {"moe_backend": "triton"}),
    "merged adapters": ("llama", {"tie_word_embeddings": False}, {"lora": LORA}, {}),
}
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SIZES: dict[str, Any] = {"kv_tokens": 8192, "max_running": 32, "max_context_len": 256}
# Logits of these models deviate by about 3 from token to token, and the largest of 1,000 is about
# 10. In bf16 two engines may order logits differently that are less than this apart.
NEAR = 1.0


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(2, 1000) for _ in range(rng.randint(1, 90))] for _ in range(8)]


@torch.no_grad()
def distances(model: Any, prompt: list[int], answer: list[int]) -> list[float]:
    """Return how far each token of a greedy answer is below the largest logit."""
    ids = torch.tensor([prompt + answer], device=model.device)
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
    return (logits.amax(1) - chosen).tolist()


@pytest.mark.parametrize("case", CASES)
def test_vllm_loads_an_export_and_answers_like_transformers_and_engine(
    case: str, tmp_path: Path, make_trainer: Make
) -> None:
    """vLLM's own loader must write the bytes of a sync; near ties are allowed among tokens."""
    family, fields, changes, options = CASES[case]
    path, out = write_model(tmp_path / "model", family, **SHAPE, **fields), str(tmp_path / "out")
    trainer = make_trainer(path, device="cuda:0", param_dtype="bfloat16", **changes)
    trainer.update_actor(make_batch(8, vocab=1000))
    trainer.save_pretrained(out, merge_adapters="lora" in changes)
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).to("cuda:0").eval()
    ours = Engine.from_pretrained(out, "cuda:0", dtype=torch.bfloat16, **SIZES)
    vllm = VllmRollout.from_pretrained(out, cuda_graphs=False, **SIZES, **options)
    try:
        loaded = vllm.digest()
        for engine in (vllm, ours):
            far: list[float] = []
            for prompt, (sample,) in zip(
                prompts(), engine.generate(prompts(), GREEDY), strict=True
            ):
                far += distances(theirs, prompt, sample.token_ids)
            # A near tie of the router changes an expert, and logits by more than rounding does.
            assert case == "experts" or max(far) < NEAR
            assert sum(distance == 0 for distance in far) >= 0.9 * len(far)
        trainer.connect([vllm])
        trainer.sync_weights(1)
        assert vllm.digest() == loaded
    finally:
        vllm.close()
