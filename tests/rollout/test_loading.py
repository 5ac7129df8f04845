"""Reading model directories: supported and refused configs, experts, stop tokens, rotary tables."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM

from rollout import Engine
from rollout.model.decoder import ExpertsConfig, GatedConfig, ModelConfig
from rollout.model.loading import load_model_config
from rollout.model.mixers.base import inverse_frequencies, rotary_tables
from rollout.ops.experts import Routing
from tests.helpers.models import KINDS, MLA, build_tiny, save_tiny
from tests.helpers.rollout.answers import LLAMA3, YARN

V3, NEXT = "deepseek_v3", "qwen3_next"


def edit_config(path: Path, remove: tuple[str, ...] = (), **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in remove} | changes
    (path / "config.json").write_text(json.dumps(config))


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
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("llama", {"mlp_bias": True}, "mlp_bias=True"),
    ("mistral", {"sliding_window": 0}, "sliding_window=0"),
    ("qwen2", WINDOW, "sliding_window=-3"),
    ("qwen3", {"layer_types": LAYERS[1:3]}, "layer_types .*use_sliding_window"),
    ("qwen3", {"layer_types": LAYERS[1:4:2]}, "chunked_attention"),
    ("llama", {"rope_parameters": DYNAMIC}, "rope_type='dynamic'"),
    ("llama", {"rope_parameters": THETA | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads=3"),
    ("llama", {"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config"),
    (V3, MOE_V3 | {"n_group": 3}, "n_group=3 and topk_group=2 do not fit 8 experts"),
    (V3, MOE_V3 | {"n_group": 8}, "n_group=8 and"),
    (V3, MOE_V3 | {"num_experts_per_tok": 5}, "must have num_experts_per_tok=5"),
    (V3, {"num_key_value_heads": 2}, "num_key_value_heads=2.*num_attention_heads=4"),
    (V3, {"qk_rope_head_dim": 7}, "qk_rope_head_dim=7 must be even"),
    (V3, {"q_lora_rank": None, "attention_bias": True}, "attention_bias=True.*q_lora_rank=None"),
    ("deepseek_v2", MOE_V3 | {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
    ("qwen3_moe", {"num_experts_per_tok": 9}, r"num_experts_per_tok=9 must be in 1\.\.8"),
    (NEXT, {"linear_num_value_heads": 3}, "linear_num_value_heads=3 .*linear_num_key_heads=2"),
    (NEXT, {"layer_types": LAYERS[0:3:2]}, "layer_types=.*sliding_attention"),
    (NEXT, {"rope_parameters": THETA | {"partial_rotary_factor": 0.2}}, "rotary_dim=3 must be"),
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


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.config\.json not found"):
        load_model_config(tmp_path / "nowhere")


def test_truncated_file_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for length in (0, 5, 100, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"safetensors cannot be read \(.*download or save"):
            Engine.from_pretrained(tmp_path)


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
    ("config_ids", "generation_ids", "expected"),
    [(None, None, set()), (5, None, {5}), ([5, 6], None, {5, 6}), (5, 7, {7}), (5, [7, 8], {7, 8})],
)
def test_generation_config_overrides_the_configs_stop_tokens(
    tmp_path: Path, config_ids: Any, generation_ids: Any, expected: set[int]
) -> None:
    save_tiny(tmp_path)
    edit_config(tmp_path, eos_token_id=config_ids)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_ids}))
    assert load_model_config(tmp_path).stop_token_ids == expected
    (tmp_path / "generation_config.json").unlink()
    if generation_ids is None:
        assert load_model_config(tmp_path).stop_token_ids == expected


WORDS = models.WordLevel({"a": 0, "b": 1}, unk_token="a")
PIECES = models.Unigram([("a", 0.0), ("b", 0.0)], unk_id=0)
END = {"id": 11, "content": "<end>"}


@pytest.mark.parametrize(
    ("config", "model", "expected"),
    [
        ({"eos_token": "<end>", "added_tokens_decoder": {"11": END}}, WORDS, {7, 11}),
        ({"eos_token": {"content": "<end>"}}, WORDS, {7, 2}),
        ({"eos_token": "b"}, WORDS, {7, 1}),
        ({"eos_token": "b"}, PIECES, {7, 1}),
        ({"eos_token": "c"}, PIECES, {7}),
        ({"eos_token": None}, WORDS, {7}),
    ],
)
def test_end_token_of_the_tokenizer_is_a_stop_token_too(
    tmp_path: Path, config: dict[str, Any], model: Any, expected: set[int]
) -> None:
    save_tiny(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_model_config(tmp_path).stop_token_ids == expected


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
    assert torch.equal(inverse_frequencies(rope_config, 32), theirs.inv_freq)
    cos, sin = theirs(torch.zeros(1), torch.arange(300)[None])
    tables = rotary_tables(rope_config, 32, 300, torch.device("cpu"))
    assert torch.equal(tables.cos, cos[0, :, :16]) and torch.equal(tables.sin, sin[0, :, :16])
