"""Keys of config.json: the engine follows a key only if transformers' model of the family does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollout import Engine, SamplingParams
from rollout.model.loading import ARCHITECTURES, longest_context
from tests.helpers.case_selection import some
from tests.helpers.models import DEEPSEEK_MOE, KINDS, MLA, save_tiny
from tests.helpers.rollout.folders import edit_config

LIKE_ANOTHER = ("mistral", "mixtral", "qwen3", "deepseek_v3")  # families with another's code
ALL = [kind for kind, (_, model) in KINDS.items() if model.__name__ in ARCHITECTURES]
FAMILIES = some(*(kind for kind in ALL if kind not in LIKE_ANOTHER), whole=LIKE_ANOTHER)
YARN = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BOTH = YARN | {"original_max_position_embeddings": 400, "mscale": 0.8, "mscale_all_dim": 0.5}
LATENT = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "q_lora_rank": 8, "qk_nope_head_dim": 8}
ROUTED = {"num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "mlp_only_layers": [0]}
KEYS: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 5},
    "window off": {"sliding_window": 5, "use_sliding_window": False, "max_window_layers": 1},
    "window on": {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
    "layers": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "context": {"rope_parameters": YARN, "original_max_position_embeddings": 16},
    "llama3": {"rope_parameters": LLAMA3, "original_max_position_embeddings": 16},
    "both contexts": {"rope_parameters": BOTH, "original_max_position_embeddings": 16},
    "widths": {
        "v_head_dim": 6,
        "head_dim": 8,
        "attention_multiplier": 3.0,
        "query_pre_attn_scalar": 7,
    },
    "latents": LATENT,
    "experts": ROUTED | {"num_experts_per_tok": 1, "shared_expert_intermediate_size": 8},
}
SIZES = {"ministral": {"head_dim": 16}, "deepseek_v2": MLA | DEEPSEEK_MOE}
SIZES["deepseek_v3"] = SIZES["deepseek_v2"]
PROMPT = [(7 * i + 3) % 199 for i in range(40)]


def save(path: Path, **keys: Any) -> Any:
    """Save a model's folder with keys in config.json, which decide the shapes of the weights."""
    edit_config(path, **keys)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).eval()
    model.set_experts_implementation("eager")
    model.save_pretrained(path)
    edit_config(path, **keys)  # a model saves the keys that its family knows
    return model


@torch.no_grad()
def scores(model: Any, ids: list[int]) -> torch.Tensor:
    """Return the log-probabilities after the sequence by a whole forward pass without any cache."""
    return model(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)


@pytest.mark.parametrize("kind", FAMILIES)
def test_keys_change_the_engine_as_they_change_transformers_model(
    tmp_path: Path, kind: str
) -> None:
    """Accept a refusal only if it says why, and where transformers has no such model either."""
    for case, keys in KEYS.items():
        folder = tmp_path / case
        save_tiny(folder, kind, **SIZES.get(kind, {}))
        try:
            model = save(folder, **keys)
            wanted = scores(model, PROMPT)
        except Exception:
            with pytest.raises(ValueError, match="observed|not supported|refused by|do not fit"):
                Engine.from_pretrained(folder, kv_tokens=64)
            continue
        engine = Engine.from_pretrained(folder, kv_tokens=64)
        ((answer,),) = engine.generate([PROMPT], SamplingParams(max_tokens=1, temperature=0))
        token = answer.token_ids[0]
        assert token == int(wanted.argmax()), case
        assert answer.logprobs[0] == pytest.approx(float(wanted[token]), abs=1e-4), case


@pytest.mark.parametrize(
    ("rope", "top", "expected"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, {}, 128),
        (YARN | {"original_max_position_embeddings": 128}, {}, 512),
        (YARN, {}, 512),
        (YARN | {"factor": 40.0, "original_max_position_embeddings": 2}, {}, 128),
        (YARN, {"original_max_position_embeddings": 64}, 256),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, {}, 256),
        (LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 64}, {}, 128),
    ],
)
def test_longest_context_includes_the_factor_of_rotary_scaling(
    tmp_path: Path, rope: dict[str, Any], top: dict[str, Any], expected: int
) -> None:
    save_tiny(tmp_path, "qwen2")
    model = save(tmp_path, rope_parameters=rope, max_position_embeddings=128, **top)
    assert longest_context(model.config) == expected
    assert longest_context(AutoConfig.from_pretrained(tmp_path)) == expected
    engine = Engine.from_pretrained(tmp_path, kv_tokens=1024, max_context_len=expected)
    prompt = (PROMPT * 13)[: expected - 1]
    ((answer,),) = engine.generate([prompt], SamplingParams(max_tokens=1, temperature=0))
    assert answer.token_ids == [int(scores(model, prompt).argmax())]
    with pytest.raises(ValueError, match=f"max_context_len={expected + 1} exceeds"):
        Engine.from_pretrained(tmp_path, kv_tokens=1024, max_context_len=expected + 1)
