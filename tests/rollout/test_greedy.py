"""Answers and log-probabilities against transformers, in fp32, token for token."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rollout import Engine, SamplingParams
from tests.helpers.effort import some
from tests.helpers.models import greedy, save_tiny
from tests.helpers.rollout.answers import LLAMA3, check, random_prompts
from tests.helpers.rollout.saved import Saved

MODELS: list[tuple[str, dict[str, Any]]] = some(
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 4}),
    ("llama", {"head_dim": 32, "num_attention_heads": 6, "num_key_value_heads": 3, "rms_norm_eps": 1e-5}),
    ("qwen2", {"num_key_value_heads": 1}),
    ("qwen3", {"head_dim": 8, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 16, "num_key_value_heads": 4, "attention_bias": True}),
    whole=[("qwen2", {"tie_word_embeddings": True, "hidden_size": 64}), ("qwen3", {"head_dim": 32})],
)
LENGTHS = (1, 2, 15, 16, 17, 63, 200, 500)
MAX_TOKENS = 12
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)


@pytest.mark.parametrize(("kind", "overrides"), MODELS)
def test_equals_transformers(saved: Saved, kind: str, overrides: dict[str, Any], device: str) -> None:
    """Prompts of 1 to 500 tokens in one mixed batch; those past 48 tokens are prefilled in chunks beside decoding."""
    path, model = saved(kind, **overrides)
    engine = Engine.from_pretrained(path, device=device, kv_tokens=2048, max_prefill_tokens=48)
    prompts = random_prompts(LENGTHS)
    out = engine.generate(prompts, GREEDY)
    check(model, prompts, out)
    for (completion,) in out:
        assert completion.finish_reason == "length" and completion.weight_versions == [0] * MAX_TOKENS
    engine.check_integrity()


def test_sampled_logprobs_equal_the_trainers_forward(saved: Saved) -> None:
    path, model = saved("qwen3", head_dim=32)
    engine = Engine.from_pretrained(path, kv_tokens=1024, max_prefill_tokens=16)
    prompts = random_prompts((3, 40, 90))
    params = SamplingParams(max_tokens=30, temperature=1.7, top_k=60, top_p=0.95, n=4, seed=3)
    check(model, prompts, engine.generate(prompts, params), temperature=1.7)


def test_triton_path_equals_transformers(saved: Saved) -> None:
    """The whole engine over the Triton kernels: interpreted here, compiled where there is a GPU."""
    path, model = saved("qwen3", head_dim=32, num_hidden_layers=1)
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    engine = Engine.from_pretrained(path, device=device, kv_tokens=512, max_prefill_tokens=32, attention="triton")
    prompts = random_prompts((1, 40, 70))
    check(model, prompts, engine.generate(prompts, SamplingParams(max_tokens=4, temperature=0)))


@pytest.mark.parametrize("eos", [[], [7], "found"])
def test_end_tokens_are_transformers_end_tokens(tmp_path: Path, eos: Any) -> None:
    model = save_tiny(tmp_path, "llama")
    prompts = random_prompts((9, 30))
    answers = [greedy(model, prompt, MAX_TOKENS) for prompt in prompts]
    ids = [answers[0][4], answers[1][2]] if eos == "found" else eos
    model.generation_config.eos_token_id = ids or None
    model.generation_config.save_pretrained(str(tmp_path))
    out = Engine.from_pretrained(tmp_path, kv_tokens=256).generate(prompts, GREEDY)
    for prompt, (completion,) in zip(prompts, out, strict=True):
        expected = greedy(model, prompt, MAX_TOKENS)
        assert completion.token_ids == expected
        assert completion.finish_reason == ("stop" if expected[-1] in ids else "length")
    assert (eos == "found") == any(completion.finish_reason == "stop" for (completion,) in out)
