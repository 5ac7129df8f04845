"""Latent attention (DeepSeek-V2, V3) through the engine: transformers' answers, from one latent row a token."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rollout import Engine, SamplingParams
from tests.helpers.effort import some
from tests.helpers.models import MLA
from tests.helpers.rollout.answers import LLAMA3, check, ids, random_prompts
from tests.helpers.rollout.configs import assert_refused
from tests.helpers.rollout.poison import page_bytes, poison
from tests.helpers.rollout.saved import Saved

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim")  # Triton's interpreter, `tl.range`
V3, V2 = "deepseek_v3", "deepseek_v2"
MODELS: list[tuple[str, dict[str, Any]]] = some(
    (V3, {"q_lora_rank": None, "rope_interleave": False, "tie_word_embeddings": True}),
    (V3, {"attention_bias": True, "rms_norm_eps": 1e-4, "qk_rope_head_dim": 6, "kv_lora_rank": 24}),
    (V3, {"num_attention_heads": 6, "num_key_value_heads": 6, "rope_parameters": LLAMA3}),
    (V2, {"q_lora_rank": None, "v_head_dim": 24}),
    whole=[(V3, {}), (V2, {})],
)
LENGTHS = (1, 2, 15, 16, 17, 63, 200)
MAX_TOKENS = 12
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)


@pytest.mark.parametrize(("kind", "overrides"), MODELS)
def test_equals_transformers(saved: Saved, kind: str, overrides: dict[str, Any], device: str) -> None:
    """One mixed batch; prompts past 48 tokens are prefilled in chunks beside decoding. The same after a pause."""
    path, model = saved(kind, **MLA | overrides)
    engine = Engine.from_pretrained(path, device=device, kv_tokens=1024, max_prefill_tokens=48)
    prompts = random_prompts(LENGTHS)
    out = engine.generate(prompts, GREEDY)
    check(model, prompts, out)
    engine.sleep(tags=["kv_cache"])
    assert engine.report().tags["kv_cache"].committed_bytes == 0
    engine.wake_up()
    assert ids(engine.generate(prompts, GREEDY)) == ids(out)
    engine.check_integrity()
    if device != "cpu":
        assert engine.graphs is not None and engine.graphs.replays > 0


def test_triton_path_equals_transformers(saved: Saved) -> None:
    """Over the Triton kernels: interpreted here, compiled where there is a GPU. Half of the group forks a page."""
    path, model = saved(V3, **MLA, num_hidden_layers=1)
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    engine = Engine.from_pretrained(path, device=device, kv_tokens=512, max_prefill_tokens=32, attention="triton")
    prompts = random_prompts((1, 40))
    check(model, prompts, engine.generate(prompts, SamplingParams(max_tokens=3, temperature=0, n=2)))


def test_sampled_groups_share_their_prompt_and_read_no_free_slot(saved: Saved, device: str) -> None:
    """NaN in every slot that holds no computed token, page 0 too, after every step."""
    path, model = saved(V3, **MLA)
    engine = Engine.from_pretrained(path, device=device, kv_tokens=1024, max_prefill_tokens=16, prefix_cache=False)
    prompts = random_prompts((3, 40, 90))
    params = SamplingParams(max_tokens=20, temperature=1.7, n=4, seed=3)
    poison(engine)
    held: list[int] = []
    out = engine.generate(prompts, params, on_progress=lambda *_: held.append(poison(engine)["kv"]))
    check(model, prompts, out, temperature=1.7)
    assert max(held) > 130 and held[-1] == 0


def test_new_weights_are_used_in_place(saved: Saved, device: str) -> None:
    """The halves of kv_b_proj are views of the store: nothing is derived from the weights of before."""
    engine = Engine.from_pretrained(saved(V3, **MLA)[0], device=device, kv_tokens=256)
    prompts = random_prompts((9, 30))
    before = ids(engine.generate(prompts, GREEDY))
    path, model = saved(V3, seed=1, **MLA)
    engine.load(path)
    after = engine.generate(prompts, GREEDY)
    check(model, prompts, after)
    assert before != ids(after)


def test_pool_is_what_the_tag_commits(saved: Saved, device: str) -> None:
    """Latent and rotary key of every token and layer, and the padding page: nothing a head."""
    engine = Engine.from_pretrained(saved(V3, **MLA)[0], device=device, kv_tokens=1024, page_size=16)
    pool, tag = engine.cache.pool, engine.report().tags["kv_cache"]
    assert pool.bytes_per_token == 2 * (16 + 8) * 4
    assert pool.nbytes == (1024 + 16) * pool.bytes_per_token == tag.live_bytes
    assert 0 <= tag.committed_bytes - pool.nbytes < page_bytes(engine)


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
@pytest.mark.parametrize("kind", some(V3, whole=[V2]))
def test_refuses_by_name(tmp_path: Path, kind: str, changes: dict[str, Any], match: str) -> None:
    assert_refused(tmp_path, kind, MLA, changes, match)
