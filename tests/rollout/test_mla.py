"""Latent attention (DeepSeek-V2, V3) through the engine: transformers' answers, from one latent row a token."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout import Completion, Engine, SamplingParams
from rollout.model.loading import load_model_config
from tests.helpers.models import MLA, build_tiny, forward_logprobs, greedy, save_tiny
from tests.rollout.test_greedy import LLAMA3, random_prompts
from tests.rollout.test_loading import edit_config
from tests.rollout.test_poisoned import poison

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim")  # Triton's interpreter, `tl.range`
V3, V2 = "deepseek_v3", "deepseek_v2"
MODELS: list[tuple[str, dict[str, Any]]] = [
    (V3, {}),
    (V3, {"q_lora_rank": None, "rope_interleave": False, "tie_word_embeddings": True}),
    (V3, {"attention_bias": True, "rms_norm_eps": 1e-4, "qk_rope_head_dim": 6, "kv_lora_rank": 24}),
    (V3, {"num_attention_heads": 6, "num_key_value_heads": 6, "rope_parameters": LLAMA3}),
    (V2, {}),
    (V2, {"q_lora_rank": None, "v_head_dim": 24}),
]
LENGTHS = (1, 2, 15, 16, 17, 63, 200)
MAX_TOKENS = 12
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)


def save(path: Path, kind: str = V3, seed: int = 0, **overrides: Any) -> Any:
    return save_tiny(path, kind, seed, **{**MLA, **overrides})


def check(model: Any, prompts: Sequence[list[int]], out: Sequence[Sequence[Completion]]) -> None:
    """Answers are transformers' greedy ones, and their log-probabilities those of a full forward."""
    gaps = []
    for prompt, samples in zip(prompts, out, strict=True):
        expected = greedy(model, prompt, len(samples[0].token_ids))
        for sample in samples:
            assert sample.token_ids == expected, f"prompt of {len(prompt)} tokens"
            gaps.append(torch.tensor(sample.logprobs) - forward_logprobs(model, prompt, expected))
    gap = torch.cat(gaps).abs()
    assert gap.mean() <= 1e-5 and gap.max() <= 5e-5


@pytest.mark.parametrize(("kind", "overrides"), MODELS)
def test_equals_transformers(tmp_path: Path, kind: str, overrides: dict[str, Any], device: str) -> None:
    """One mixed batch; prompts past 48 tokens are prefilled in chunks beside decoding. The same after a pause."""
    model = save(tmp_path, kind, **overrides)
    engine = Engine.from_pretrained(tmp_path, device=device, kv_tokens=1024, max_prefill_tokens=48)
    prompts = random_prompts(LENGTHS)
    out = engine.generate(prompts, GREEDY)
    check(model, prompts, out)
    engine.sleep(tags=["kv_cache"])
    assert engine.report().tags["kv_cache"].committed_bytes == 0
    engine.wake_up()
    assert [s.token_ids for (s,) in engine.generate(prompts, GREEDY)] == [s.token_ids for (s,) in out]
    engine.check_integrity()
    if device != "cpu":
        assert engine.graphs is not None and engine.graphs.replays > 0


def test_triton_path_equals_transformers(tmp_path: Path) -> None:
    """Over the Triton kernels: interpreted here, compiled where there is a GPU. Half of the group forks a page."""
    model = save(tmp_path, num_hidden_layers=1)
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    engine = Engine.from_pretrained(tmp_path, device=device, kv_tokens=512, max_prefill_tokens=32, attention="triton")
    prompts = random_prompts((1, 40, 70))
    check(model, prompts, engine.generate(prompts, SamplingParams(max_tokens=4, temperature=0, n=2)))


def test_sampled_groups_share_their_prompt(tmp_path: Path, device: str) -> None:
    model = save(tmp_path)
    engine = Engine.from_pretrained(tmp_path, device=device, kv_tokens=1024, max_prefill_tokens=16)
    prompts = random_prompts((3, 40, 90))
    params = SamplingParams(max_tokens=20, temperature=1.7, n=4, seed=3)
    gaps = [
        torch.tensor(sample.logprobs) - forward_logprobs(model, prompt, sample.token_ids, temperature=1.7)
        for prompt, samples in zip(prompts, engine.generate(prompts, params), strict=True)
        for sample in samples
    ]
    gap = torch.cat(gaps).abs()
    assert len(gap) == 3 * 4 * 20 and gap.mean() <= 1e-5 and gap.max() <= 5e-5


def test_poisoned_slots_have_no_effect(tmp_path: Path, device: str) -> None:
    """NaN in every slot that holds no computed token, page 0 too, after every step."""
    model = save(tmp_path)
    engine = Engine.from_pretrained(tmp_path, device=device, kv_tokens=512, max_prefill_tokens=48)
    prompts = random_prompts(LENGTHS)
    poison(engine)
    held: list[int] = []
    out = engine.generate(prompts, GREEDY, on_progress=lambda *_: held.append(poison(engine)))
    assert max(held) > 200 and held[-1] == 0
    check(model, prompts, out)


def test_new_weights_are_used_in_place(tmp_path: Path, device: str) -> None:
    """The halves of kv_b_proj are views of the store: nothing is derived from the weights of before."""
    save(tmp_path / "old")
    model = save(tmp_path / "new", seed=1)
    engine = Engine.from_pretrained(tmp_path / "old", device=device, kv_tokens=256)
    prompts = random_prompts((9, 30))
    before = engine.generate(prompts, GREEDY)
    engine.load(tmp_path / "new")
    after = engine.generate(prompts, GREEDY)
    check(model, prompts, after)
    assert [s.token_ids for (s,) in before] != [s.token_ids for (s,) in after]


def test_pool_is_what_the_tag_commits(tmp_path: Path, device: str) -> None:
    """Latent and rotary key of every token and layer, and the padding page: nothing a head."""
    save(tmp_path)
    engine = Engine.from_pretrained(tmp_path, device=device, kv_tokens=1024, page_size=16)
    pool, tag = engine.cache.pool, engine.report().tags["kv_cache"]
    assert pool.bytes_per_token == 2 * (16 + 8) * 4
    assert pool.nbytes == (1024 + 16) * pool.bytes_per_token == tag.live_bytes
    assert 0 <= tag.committed_bytes - pool.nbytes < engine.saver.backend.granularity


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "mscale_all_dim": 1.0}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"first_k_dense_replace": 1}, "first_k_dense_replace=1 makes layers 1..1 mixtures of experts.*dense layers"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2.*num_attention_heads=4"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim=7 must be even"),
        ({"q_lora_rank": None, "attention_bias": True}, "attention_bias=True.*q_lora_rank=None"),
        ({"rope_parameters": YARN}, "rope_type='yarn'"),
        ({"rope_parameters": LINEAR}, "mscale_all_dim=1.0"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
@pytest.mark.parametrize("kind", [V3, V2])
def test_refuses_by_name(tmp_path: Path, kind: str, changes: dict[str, Any], match: str) -> None:
    model = build_tiny(kind, **MLA)
    model.config.save_pretrained(str(tmp_path))
    edit_config(tmp_path, architectures=[type(model).__name__])
    load_model_config(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=match):
        load_model_config(tmp_path)
