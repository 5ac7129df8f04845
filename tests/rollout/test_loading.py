"""Reading model directories: supported and refused configs, experts, rotary tables."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from rollout import Engine
from rollout.model.decoder import ExpertsConfig, GatedConfig, ModelConfig
from rollout.model.loading import load_model_config
from rollout.model.mixers.base import rotary_tables
from rollout.ops.routing import Routing
from tests.helpers.models import KINDS, MLA, build_tiny, save_tiny
from tests.helpers.rollout.answers import LLAMA3, YARN
from tests.helpers.rollout.folders import edit_config

V3, NEXT = "deepseek_v3", "qwen3_next"


def save_config(path: Path, kind: str) -> None:
    build_tiny(kind, **(MLA if kind.startswith("deepseek") else {})).config.save_pretrained(
        str(path)
    )
    remove = () if kind == NEXT else ("layer_types",)  # other keys imply it in the other kinds
    edit_config(path, remove=remove, architectures=[KINDS[kind][1].__name__])


MOE_V3: dict[str, Any] = {
    "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4,
    "topk_group": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
}  # fmt: skip
WIDE = {"wide_router": True, "wide_weights": True, "shared": 24, "shared_gate": False}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


THETA: dict[str, Any] = {"rope_theta": 1e4}
WINDOW = {"use_sliding_window": True, "sliding_window": -3, "max_window_layers": 1}
LAYERS = ["linear_attention", "full_attention", "sliding_attention", "chunked_attention"]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"architectures": ["GemmaForCausalLM"]}, "architectures=.*Gemma.*LlamaForCausalLM"),
    ("llama", {"model_type": "granite"}, "architectures=.*GraniteForCausalLM.*not supported"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("llama", {"mlp_bias": True}, "mlp_bias=True"),
    ("mistral", {"sliding_window": 0}, "sliding_window=0"),
    ("qwen2", WINDOW, "sliding_window=-3"),
    ("qwen3", {"layer_types": LAYERS[1:3]}, "Could not find a `sliding_window`"),
    ("qwen3", {"layer_types": LAYERS[1:4:2]}, "chunked_attention"),
    ("llama", {"rope_parameters": DYNAMIC}, "rope_type='dynamic'"),
    ("llama", {"rope_parameters": THETA | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads=3"),
    ("llama", {"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config"),
    (V3, MOE_V3 | {"n_group": 3}, "n_group=3 and topk_group=2 do not fit 8 experts"),
    (V3, MOE_V3 | {"n_group": 8}, "n_group=8 and"),
    (V3, MOE_V3 | {"num_experts_per_tok": 5}, "must have num_experts_per_tok=5"),
    (V3, {"num_key_value_heads": 2}, "num_key_value_heads=2.*num_attention_heads=4"),
    (V3, {"qk_rope_head_dim": 7}, "qk_rope_head_dim=7.*even"),
    (V3, {"q_lora_rank": None, "attention_bias": True}, "attention_bias=True.*q_lora_rank=None"),
    ("deepseek_v2", MOE_V3 | {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
    ("qwen3_moe", {"num_experts_per_tok": 9}, r"num_experts_per_tok=9 must be in 1\.\.8"),
    (NEXT, {"linear_num_value_heads": 3}, "linear_num_value_heads=3 .*linear_num_key_heads=2"),
    (NEXT, {"layer_types": LAYERS[0:3:2]}, "cannot be observed"),
]


@pytest.mark.parametrize(("kind", "changes", "match"), REFUSED)
def test_unsupported_config_is_refused_with_its_key(
    tmp_path: Path, kind: str, changes: dict[str, Any], match: str
) -> None:
    """Check a supported config, and refuse it with the changes."""
    save_config(tmp_path, kind)
    load_model_config(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=match):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [1]}, {}),
        ("qwen3_moe", {"decoder_sparse_step": 2}, {"routing": Routing(top_k=2, normalise=False)}),
        ("mixtral", {}, {"wide_weights": True, "inner": 80}),
        (
            NEXT,
            {"num_experts": 8, "moe_intermediate_size": 24, "num_experts_per_tok": 2},
            {"shared": 512},
        ),
        (
            V3,
            MOE_V3 | {"routed_scaling_factor": 1.5},
            {
                "routing": Routing(
                    top_k=2,
                    normalise=True,
                    sigmoid=True,
                    groups=4,
                    top_groups=2,
                    judges=2,
                    scale=1.5,
                ),
                "bias": True,
            }
            | WIDE,
        ),
        (
            "deepseek_v2",
            MOE_V3 | {"topk_method": "group_limited_greedy", "n_shared_experts": 2},
            {"routing": Routing(top_k=2, normalise=False, groups=4, top_groups=2)}
            | {**WIDE, "shared": 48},
        ),
        ("deepseek_v2", MOE_V3, {"routing": Routing(top_k=2, normalise=False)} | WIDE),
    ],
)
def test_expert_layers_and_routing_equal_those_of_transformers(
    tmp_path: Path, kind: str, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    save_config(tmp_path, kind)
    edit_config(tmp_path, **changes)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    usual = {"experts": 8, "inner": 24, "routing": Routing(top_k=2, normalise=True)}
    experts = ExpertsConfig(**usual | expected)
    sparse = [hasattr(layer.mlp, "experts") for layer in model.model.layers]
    assert any(sparse)
    assert load_model_config(tmp_path).mlps == tuple(
        experts if has_experts else GatedConfig(inner=80) for has_experts in sparse
    )


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_separate_and_stacked_experts_load_the_same_weights(tmp_path: Path, kind: str) -> None:
    """Load experts that are stored like on the Hub, like in transformers, or half of each.

    On the Hub, Mixtral has its own names.
    """
    model = save_tiny(tmp_path, kind)
    apart = load_file(tmp_path / "model.safetensors")
    assert any(".experts.0." in name for name in apart)
    stacked = {name: param.detach() for name, param in model.named_parameters()}
    first = {name: param for name, param in stacked.items() if ".layers.0." in name}
    half = {name: param for name, param in apart.items() if ".layers.0." not in name} | first
    engine = Engine.from_pretrained(tmp_path)
    digest = engine.store.digest()
    for tensors in (stacked, half):
        engine.store.load(tensors.items(), "files")
        assert engine.store.digest() == digest
    for name, param in stacked.items():
        assert torch.equal(engine.store.tensor(name), param) or "proj.weight" in name


def test_experts_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    engine = Engine.from_pretrained(tmp_path)
    layer = "model.layers.1.mlp.experts."
    for name, changed, match in [
        (f"{layer}3.up_proj.weight", None, rf"missing {layer}gate_up_proj, unexpected nothing"),
        (
            f"{layer}3.up_proj.weight",
            (23, 48),
            r"shape \(23, 48\), config.json asks for \(24, 48\)",
        ),
        (f"{layer}8.up_proj.weight", (24, 48), rf"missing nothing, unexpected {layer}8.up"),
    ]:
        unchanged = {key: tensor for key, tensor in tensors.items() if key != name}
        added = {} if changed is None else {name: torch.zeros(changed)}
        with pytest.raises(ValueError, match=match):
            engine.store.load((unchanged | added).items(), "files")
        assert engine.store.version is None


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
        LLAMA3,
        YARN,
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False, "beta_fast": 20},
        YARN | {"attention_factor": 1.1, "original_max_position_embeddings": 64},
    ],
)
def test_rotary_tables_equal_transformers(tmp_path: Path, rope: dict[str, Any]) -> None:
    model = save_tiny(tmp_path, "llama", rope_parameters=rope, head_dim=32)
    config: ModelConfig = load_model_config(tmp_path)
    theirs = model.model.rotary_emb
    rope_config = config.mixers[0].rope
    assert torch.equal(torch.tensor(rope_config.frequencies), theirs.inv_freq)
    cos, sin = theirs(torch.zeros(1), torch.arange(300)[None])
    tables = rotary_tables(rope_config, 300, torch.device("cpu"))
    assert torch.equal(tables.cos, cos[0, :, :16]) and torch.equal(tables.sin, sin[0, :, :16])
