"""Long prompts in chunks beside decoding, NaN in every slot of the KV pool that holds no computed token, page 0 too.

Greedy answers are those of transformers. On a GPU this goes through kernels and CUDA graphs.
"""

import random
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout import Completion, Engine, SamplingParams
from tests.helpers.effort import some
from tests.helpers.rollout.answers import check
from tests.helpers.rollout.poison import poison
from tests.helpers.rollout.saved import Saved

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


def generate_poisoned(path: Path, device: str, prompts: list[list[int]]) -> list[list[Completion]]:
    kv_tokens = 16 * sum(-(-(len(prompt) + MAX_TOKENS) // 16) for prompt in prompts)
    engine = Engine.from_pretrained(
        path, device=device, kv_tokens=kv_tokens, max_running=len(prompts), max_prefill_tokens=384,
        max_context_len=2048, prefix_cache=False,
    )  # fmt: skip
    assert poison(engine) == {"kv": 0}
    held: list[int] = []
    out = engine.generate(prompts, GREEDY, on_progress=lambda *_: held.append(poison(engine)["kv"]))
    assert max(held) > LONGEST and held[-1] == 0
    engine.check_integrity()
    return out


@pytest.mark.parametrize(
    ("kind", "batch"),
    some(("llama", 1), ("qwen3", 9), whole=product(["llama", "qwen2", "qwen3"], [1, 9, 64])),
)
def test_random_models(saved: Saved, kind: str, batch: int, device: str) -> None:
    path, model = saved(kind, max_position_embeddings=2048)
    prompts = make_prompts(batch, model.config.vocab_size)
    check(model, prompts, generate_poisoned(path, device, prompts))


@needs_smollm2
@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 9, 64])
def test_smollm2(batch: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).to("cuda:0").eval()
    model.generation_config.eos_token_id = None
    prompts = make_prompts(batch, model.config.vocab_size)
    check(model, prompts, generate_poisoned(MODEL_DIR, "cuda:0", prompts))
