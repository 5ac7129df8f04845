"""Latent attention (DeepSeek-V2, V3) through the engine: transformers' answers, from one latent row a token."""

from pathlib import Path
from typing import Any

import pytest
import torch

from memsaver import MemorySaver
from rollout import Engine, SamplingParams
from rollout.model.loading import load_model_config
from rollout.model.mixers.mla import MLAConfig
from tests.helpers.models import MLA, forward_logprobs, greedy, save_tiny
from tests.rollout.test_greedy import LLAMA3, random_prompts
from tests.rollout.test_loading import edit_config
from tests.rollout.test_poisoned import poison

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("deepseek_v3", {}),
    ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False, "tie_word_embeddings": True}),
    ("deepseek_v3", {"attention_bias": True, "rms_norm_eps": 1e-4, "qk_rope_head_dim": 6, "kv_lora_rank": 24}),
    ("deepseek_v3", {"num_attention_heads": 6, "num_key_value_heads": 6, "rope_parameters": LLAMA3}),
    ("deepseek_v2", {}),
    ("deepseek_v2", {"q_lora_rank": None, "v_head_dim": 24}),
]
LENGTHS = (1, 2, 15, 16, 17, 63, 200)
MAX_TOKENS = 12
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)


def save(path: Path, kind: str, overrides: dict[str, Any]) -> Any:
    return save_tiny(path, kind, **{**MLA, **overrides})


def check(model: Any, prompts: list[list[int]], out: Any) -> None:
    gaps = []
    for prompt, samples in zip(prompts, out, strict=True):
        expected = greedy(model, prompt, len(samples[0].token_ids))
        for completion in samples:
            assert completion.token_ids == expected, f"prompt of {len(prompt)} tokens"
            gaps.append(torch.tensor(completion.logprobs) - forward_logprobs(model, prompt, expected))
    gap = torch.cat(gaps).abs()
    print(f"gap mean {gap.mean():.2e} max {gap.max():.2e}")
    assert gap.mean() <= 1e-5 and gap.max() <= 5e-5


@pytest.mark.parametrize(("kind", "overrides"), MODELS)
def test_equals_transformers(tmp_path: Path, kind: str, overrides: dict[str, Any], device: str) -> None:
    """One mixed batch; prompts past 48 tokens are prefilled in chunks beside decoding. Then asleep, awake, once more."""
    model = save(tmp_path, kind, overrides)
    engine = Engine.from_pretrained(tmp_path, device=device, kv_tokens=1024, max_prefill_tokens=48)
    prompts = random_prompts(LENGTHS)
    out = engine.generate(prompts, GREEDY)
    check(model, prompts, out)
    engine.sleep(tags=["kv_cache"])
    engine.wake_up()
    assert [s.token_ids for (s,) in engine.generate(prompts, GREEDY)] == [s.token_ids for (s,) in out]
    engine.check_integrity()
