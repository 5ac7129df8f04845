"""Long prompts in chunks beside decoding, NaN in every slot of the KV pool that holds no computed token, page 0 too.

Greedy answers equal `transformers.generate` token for token. On a GPU this goes through kernels and CUDA graphs.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout import Completion, Engine, SamplingParams
from tests.helpers.models import forward_logprobs, greedy, save_tiny

LONGEST = 2000
MAX_TOKENS = 8
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
MODEL_DIR = Path.home() / ".cache/memsaver/models/smollm2-135m"  # where `memsaver fetch` puts it
needs_smollm2 = pytest.mark.skipif(not (MODEL_DIR / "config.json").is_file(), reason="memsaver fetch smollm2-135m")


def make_prompts(batch: int, vocab: int) -> list[list[int]]:
    """The first has LONGEST tokens, the others from 1 to that, short ones more often."""
    rng = random.Random(batch)
    lengths = [LONGEST] + [int(LONGEST ** rng.random()) for _ in range(batch - 1)]
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


def poison(engine: Engine) -> int:
    """Returns how many slots keep what they hold."""
    parts = engine.cache.pool._storage.parts.values()
    free = torch.ones(next(iter(parts)).shape[1], dtype=torch.bool)
    for sample in engine.scheduler.running:
        assert sample.handle is not None
        known = sample.length - 1 if sample.prefilled else sample.computed  # the last token is not computed yet
        free[engine.blocks.req_to_token.req_to_token[sample.handle.row, :known].long().cpu()] = False
    slots = free.nonzero().squeeze(1).to(engine.cache.pool.device)
    for part in parts:
        part.index_fill_(1, slots, float("nan"))
    return len(free) - len(slots)


def generate_poisoned(path: Path, device: str, prompts: Sequence[Sequence[int]]) -> list[Completion]:
    kv_tokens = 16 * sum(-(-(len(prompt) + MAX_TOKENS) // 16) for prompt in prompts)
    engine = Engine.from_pretrained(
        path, device=device, kv_tokens=kv_tokens, max_running=len(prompts), max_prefill_tokens=384, max_context_len=2048
    )
    assert poison(engine) == 0
    held = []
    out = engine.generate(prompts, GREEDY, on_progress=lambda *_: held.append(poison(engine)))
    assert max(held) > LONGEST and held[-1] == 0
    engine.check_integrity()
    return [completion for (completion,) in out]


@torch.no_grad()
def check(model: Any, prompts: list[list[int]], answers: list[Completion]) -> None:
    gaps = []
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == greedy(model, prompt, MAX_TOKENS), f"prompt of {len(prompt)} tokens"
        gaps.append(torch.tensor(answer.logprobs) - forward_logprobs(model, prompt, answer.token_ids))
    gap = torch.cat(gaps).abs()
    assert gap.mean() <= 1e-5 and gap.max() <= 5e-5


@pytest.mark.parametrize("batch", [1, 9, 64])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_random_models(tmp_path: Path, kind: str, batch: int, device: str) -> None:
    model = save_tiny(tmp_path, kind, max_position_embeddings=2048)
    prompts = make_prompts(batch, model.config.vocab_size)
    check(model, prompts, generate_poisoned(tmp_path, device, prompts))


@needs_smollm2
@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 9, 64])
def test_smollm2(batch: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).to("cuda:0").eval()
    model.generation_config.eos_token_id = None
    prompts = make_prompts(batch, model.config.vocab_size)
    check(model, prompts, generate_poisoned(MODEL_DIR, "cuda:0", prompts))
