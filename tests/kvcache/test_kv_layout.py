"""KV cache layouts of transformers' configs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcache import kv_dtype, layout
from kvcache.config import FP4_DTYPE
from kvcache.pools import HybridLinearKVPool, MLATokenToKVPool, SWAKVPool
from tests.helpers.kvcache.blocks import DEVICE

transformers = pytest.importorskip("transformers")


QWEN = {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2}
SLIDING = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}
QWEN3 = {"num_key_value_heads": 8, "head_dim": 96}
OPT_13B = {"num_attention_heads": 40, "hidden_size": 5120, "dtype": "float16"}
ALTERNATING = ("sliding", "full") * 2 + ("sliding",)
MODELS: list[tuple[str, dict[str, Any], tuple[str, ...], str, tuple[int, int], int | None, int]] = [
    # fields, kinds of layers, pool, heads and their width, window, bytes per token
    ("LlamaConfig", {}, ("full",) * 4, "mha", (32, 128), None, 65_536),
    ("LlamaConfig", OPT_13B, ("full",) * 40, "mha", (40, 128), None, 819_200),
    ("Qwen2Config", QWEN, ("full",) * 24, "mha", (2, 64), None, 12_288),  # Qwen2.5-0.5B
    ("Qwen2Config", SLIDING, ("full",) * 3 + ("sliding",), "swa", (32, 128), 64, 65_536),
    ("Qwen3Config", QWEN3, ("full",) * 2, "mha", (8, 96), None, 6144),
    ("MistralConfig", {}, ("sliding",) * 3, "mha", (8, 128), 4096, 12_288),
    ("MistralConfig", {"sliding_window": None}, ("full",) * 3, "mha", (8, 128), None, 12_288),
    ("Gemma2Config", {}, ALTERNATING, "swa", (4, 256), 4096, 20_480),
    ("GptOssConfig", {}, ("sliding", "full") * 2, "swa", (8, 64), 128, 8192),
    ("Qwen2MoeConfig", {}, ("full",) * 2, "mha", (16, 128), None, 16_384),
    ("DeepseekV2Config", {}, ("mla",) * 3, "mla", (1, 576), None, 3456),
    ("DeepseekV3Config", {}, ("mla",) * 3, "mla", (1, 576), None, 3456),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model[0])
def test_layout_has_the_kinds_rows_and_bytes_of_attention_models(model: Any) -> None:
    name, fields, kinds, pool, heads, *wanted = model
    got = layout(
        getattr(transformers, name)(
            **{"num_hidden_layers": len(kinds), "dtype": "bfloat16"} | fields
        )
    )
    assert (got.kinds, got.pool) == (kinds, pool)
    assert got.rows == dict.fromkeys(("kv",) if pool == "mla" else ("k", "v"), heads)
    assert [got.sliding_window, got.bytes_per_token] == wanted and got.state_bytes == 0


def test_layout_uses_the_given_or_the_configs_dtype() -> None:
    config = transformers.LlamaConfig(num_hidden_layers=4, dtype="bfloat16")
    sizes = {"auto": 256, "fp16": 256, "fp32": 512, "fp8_e4m3": 128, "fp8_e5m2": 128}
    sizes["fp4_e2m1"] = 72
    for name, head in sizes.items():
        assert layout(config, name).bytes_per_token == 4 * 2 * 32 * head
    assert layout(config, "fp8_e4m3").dtype == torch.float8_e4m3fn
    assert layout(config, "fp4_e2m1").dtype == FP4_DTYPE
    assert layout(config, dtype=torch.float16).dtype == torch.float16
    assert layout(transformers.LlamaConfig()).dtype == torch.float32  # as of a model built from it
    with pytest.raises(ValueError, match="unknown kv_cache_dtype 'int4'"):
        layout(config, "int4")
    with pytest.raises(ValueError, match="a multiple of 16 elements"):
        layout(transformers.LlamaConfig(hidden_size=120, num_attention_heads=5), "fp4_e2m1")


def test_layout_builds_the_matching_pool() -> None:
    got = layout(transformers.Gemma2Config(num_hidden_layers=5, dtype="bfloat16"))
    with pytest.raises(ValueError, match="need window_size"):
        got.build(size=32, page_size=4, device=DEVICE)
    pool = got.build(size=32, page_size=4, device=DEVICE, window_size=8)
    assert isinstance(pool, SWAKVPool)
    assert pool.nbytes == (36 * 2 + 12 * 3) * 4096  # slots times layers, 4096 bytes each
    assert [i for i in range(5) if pool.route(i)[0] is pool.full_pool] == [1, 3]
    fp4 = layout(transformers.DeepseekV3Config(num_hidden_layers=3, dtype="bfloat16"), "fp4_e2m1")
    latent = fp4.build(size=8, page_size=4, device=DEVICE)
    assert isinstance(latent, MLATokenToKVPool) and fp4.kv_lora_rank == 512
    assert latent.bytes_per_token == fp4.bytes_per_token == 3 * (288 + 36)


def tiny(name: str, **fields: Any) -> Any:
    common = {"num_hidden_layers": 4, "hidden_size": 32, "vocab_size": 40, "intermediate_size": 16}
    common |= {"num_attention_heads": 4, "num_key_value_heads": 2, "dtype": "float32"}
    return getattr(transformers, name)(**common | fields)


def states_of(config: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]] | None]:
    """Run the model itself; return the shapes of each layer's states, None for attention layers."""
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    cache = model(torch.tensor([[1, 2, 3, 4, 5, 6]]), use_cache=True).past_key_values
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]] | None] = []
    for layer in cache.layers:
        kinds = ("conv_states", "recurrent_states")
        states = [getattr(layer, kind) for kind in kinds if hasattr(layer, kind)]
        # A state is a tensor, or a dict of tensors in later releases of transformers.
        first = [state if isinstance(state, torch.Tensor) else state[0] for state in states]
        shapes.append((tuple(first[0].shape[1:]), tuple(first[1].shape[1:])) if first else None)
    return shapes


QWEN3_NEXT = {"head_dim": 8, "linear_key_head_dim": 4, "linear_value_head_dim": 6}
QWEN3_NEXT |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
QWEN3_NEXT |= {"num_experts": 2, "num_experts_per_tok": 1}
QWEN3_NEXT |= {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
BAMBA = {"attn_layer_indices": [1, 3], "mamba_n_heads": 4, "mamba_d_state": 8}
BAMBA |= {"mamba_d_conv": 4, "mamba_chunk_size": 4}


@pytest.mark.parametrize(
    ("name", "fields", "kinds", "state_bytes"),
    [
        ("Qwen3NextConfig", QWEN3_NEXT, ("linear",) * 3 + ("full",), 3 * 4 * (40 * 3 + 4 * 4 * 6)),
        ("BambaConfig", BAMBA, ("linear", "full") * 2, 2 * 4 * (80 * 3 + 4 * 16 * 8)),
    ],
)
def test_state_shapes_equal_those_of_the_model(
    name: str, fields: dict[str, Any], kinds: tuple[str, ...], state_bytes: int
) -> None:
    config = tiny(name, **fields)
    got = layout(config)
    assert (got.kinds, got.pool) == (kinds, "hybrid_linear")
    for kind, own in zip(kinds, states_of(config), strict=True):
        assert (kind == "linear") == (own is not None)
        # transformers keeps one more column of the convolution, which the next token shifts out.
        if own is not None:
            (channels, kernel), temporal = own
            assert got.conv_shapes == ((channels, kernel - 1),) and got.temporal_shape == temporal
    assert got.rows == {"k": (2, 8), "v": (2, 8)}
    pool = got.build(size=8, page_size=4, device=DEVICE)
    assert isinstance(pool, HybridLinearKVPool)
    assert pool.bytes_per_token == got.bytes_per_token == kinds.count("full") * 2 * 2 * 8 * 4
    assert got.build_states(size=3, device=DEVICE).nbytes == 4 * got.state_bytes == 4 * state_bytes


GPT: dict[str, Any] = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 40}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("LlamaConfig", {"v_head_dim": 32}),
        ("LlamaConfig", {"kv_lora_rank": 8, "qk_rope_head_dim": 4}),
        ("LlamaConfig", {"sliding_window": 4, "use_sliding_window": True}),
        ("LlamaConfig", {"layer_types": ["sliding_attention", "linear_attention"] * 2}),
        ("MistralConfig", {"sliding_window": 4, "use_sliding_window": False}),
        ("GPTBigCodeConfig", GPT | {"multi_query": True}),
        ("GPTBigCodeConfig", GPT | {"multi_query": False}),
        ("GPT2Config", GPT),
        ("Phi3Config", {"pad_token_id": 0, "sliding_window": 4}),
    ],
)
def test_layout_has_the_rows_of_the_models_own_cache(name: str, fields: dict[str, Any]) -> None:
    """Follow only the keys that the model follows."""
    config = getattr(transformers, name)(**fields) if fields.items() >= GPT.items() else None
    config = config or tiny(name, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    cache = transformers.DynamicCache()
    model(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]]), past_key_values=cache)
    got = layout(config, "fp32", torch.float32)
    for layer in cache.layers:
        rows = {"k": layer.keys, "v": layer.values}
        assert got.rows == {key: (row.shape[1], row.shape[3]) for key, row in rows.items()}
    slides = name in ("MistralConfig", "Phi3Config")
    assert got.kinds == ("sliding" if slides else "full",) * len(cache.layers)
    assert got.sliding_window == (4 if slides else None)


def test_layout_reads_the_text_config_of_a_multimodal_config() -> None:
    text = {"num_hidden_layers": 6, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8}
    text |= {"num_key_value_heads": 2, "vocab_size": 40, "sliding_window": 16, "dtype": "float16"}
    got = layout(transformers.Gemma3Config(text_config=text))
    assert (got.kinds, got.rows["k"]) == (("sliding",) * 5 + ("full",), (2, 8))
    assert (got.sliding_window, got.model_dtype) == (16, torch.float16)


def test_layout_refuses_models_that_it_cannot_observe() -> None:
    for config, message in (
        (transformers.FalconConfig(num_hidden_layers=2), "FalconConfig cannot be observed"),
        (transformers.FalconH1Config(num_hidden_layers=2), "attention and a recurrent state"),
        (SimpleNamespace(num_hidden_layers=2), "SimpleNamespace cannot be observed"),
        (tiny("Qwen3Config", layer_types=["full_attention", "conv"] * 2), "observed: .*'conv'"),
        (tiny("MistralConfig", sliding_window=0), "neither causal nor a sliding window"),
        (SimpleNamespace(dtype="float7"), "'float7' is not a torch dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            layout(config)
    assert kv_dtype("auto", torch.float64) == torch.float64
