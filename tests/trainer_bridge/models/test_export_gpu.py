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


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(2, 1000) for _ in range(rng.randint(1, 90))] for _ in range(8)]


@torch.no_grad()
def greedy(model: Any, prompt: list[int], answer: list[int]) -> list[int]:
    """Return the model's most likely token at each place of an answer."""
    ids = torch.tensor([prompt + answer], device=model.device)
    return model(ids).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()


def same(left: list[int], right: list[int]) -> float:
    return sum(map(int.__eq__, left, right)) / len(left)


@pytest.mark.parametrize("case", CASES)
def test_vllm_loads_an_export_and_answers_like_transformers_and_engine(
    case: str, tmp_path: Path, make_trainer: Make
) -> None:
    """vLLM's own loader must write the bytes of a sync.

    Rounding to bf16 decides near ties of tokens and of routers, in another way in each engine. So
    an engine's tokens must agree with fp32 as often as those of transformers in bf16: less three
    standard deviations of the difference of two such shares of n tokens, of which one differs at
    least.
    """
    family, fields, changes, options = CASES[case]
    path, out = write_model(tmp_path / "model", family, **SHAPE, **fields), str(tmp_path / "out")
    trainer = make_trainer(path, device="cuda:0", param_dtype="bfloat16", **changes)
    trainer.update_actor(make_batch(8, vocab=1000))
    trainer.save_pretrained(out, merge_adapters="lora" in changes)
    theirs, exact = (
        AutoModelForCausalLM.from_pretrained(out, dtype=dtype).to("cuda:0").eval()
        for dtype in (torch.bfloat16, torch.float32)
    )
    ours = Engine.from_pretrained(out, "cuda:0", dtype=torch.bfloat16, **SIZES)
    vllm = VllmRollout.from_pretrained(out, cuda_graphs=False, **SIZES, **options)
    try:
        loaded = vllm.digest()
        for engine in (vllm, ours):
            tokens: list[int] = []
            rounded: list[int] = []
            right: list[int] = []
            answers = [sample.token_ids for (sample,) in engine.generate(prompts(), GREEDY)]
            for prompt, answer in zip(prompts(), answers, strict=True):
                tokens += answer
                rounded += greedy(theirs, prompt, answer)
                right += greedy(exact, prompt, answer)
            share, n = same(rounded, right), len(right)
            spread = (2 * share * max(1 - share, 1 / n) / n) ** 0.5
            assert same(tokens, right) >= share - 3 * spread
        trainer.connect([vllm])
        trainer.sync_weights(1)
        assert vllm.digest() == loaded
    finally:
        vllm.close()
