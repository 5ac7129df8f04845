"""Answers have the same bits in every batch, at the widths of real models."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV2Config, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from rollout import AdapterSlots, Engine, SamplingParams
from rollout.ops.chain_product import chain_product
from rollout.ops.product_probe import define_products, probe_products
from rollout.ops.row_wise import linear, row_invariant_products
from tests.helpers.rollout.adapters import write_adapter

pytestmark = pytest.mark.gpu

LENGTHS = (1500, 777, 2001, 300, 1024, 129, 640, 33, 1)
MODELS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "qwen2.5-0.5b": (
        Qwen2Config,
        {
            "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
            "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
        },
    ),
    "qwen2.5-7b": (
        Qwen2Config,
        {
            "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
            "num_key_value_heads": 4, "vocab_size": 152064,
        },
    ),
    "qwen3-30b-a3b": (
        Qwen3MoeConfig,
        {
            "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
            "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768, "vocab_size": 151936,
        },
    ),
    "deepseek-v2-lite": (
        DeepseekV2Config,
        {
            "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
            "vocab_size": 102400, "num_attention_heads": 16, "num_key_value_heads": 16,
            "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
            "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
            "n_group": 1, "topk_group": 1,
        },
    ),
}  # fmt: skip


def describe(name: str, path: Path, layers: int) -> None:
    kind, shape = MODELS[name]
    config = kind(
        **shape, num_hidden_layers=layers, max_position_embeddings=4096, eos_token_id=None
    )
    config.architectures = [kind.__name__.removesuffix("Config") + "ForCausalLM"]
    config.save_pretrained(path)


@contextmanager
def engine_of(path: Path, **changes: Any) -> Iterator[Engine]:
    """Create an engine with random weights, which are the same each time."""
    settings = {"kv_tokens": 32768, "max_running": 32, "max_prefill_tokens": 8192, **changes}
    engine = Engine.from_pretrained(
        path, "cuda:0", dtype=torch.bfloat16, max_context_len=4096, load_weights=False, **settings
    )
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = {piece.name: piece.global_shape for piece in engine.manifest.slices}

    def weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        noise = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        return torch.ones(shape) if "norm" in name else noise.mul_(0.05)

    engine.store.load(((name, weight(name, shape)) for name, shape in shapes.items()), "random")
    yield engine
    engine.saver.close()


def answers(
    engine: Engine,
    prompts: list[list[int]],
    tokens: int = 6,
    adapters: list[str | None] | None = None,
) -> list[Any]:
    params = [
        SamplingParams(max_tokens=tokens, temperature=0, adapter=adapter)
        for adapter in adapters or [None] * len(prompts)
    ]
    return [(out.token_ids, out.logprobs) for (out,) in engine.generate(prompts, params)]


@pytest.mark.parametrize("name", MODELS)
def test_answer_has_same_bits_alone_batched_chunked_and_with_prefix_hits(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    describe(name, tmp_path, layers=2)
    rng = random.Random(0)
    prompts = [[rng.randrange(1000, 100_000) for _ in range(length)] for length in LENGTHS]
    with engine_of(tmp_path) as engine:
        batched = answers(engine, prompts)
        assert [answers(engine, [prompt])[0] for prompt in prompts] == batched
    for chunk in (512, 384, 100):
        with engine_of(tmp_path, max_prefill_tokens=chunk) as engine:
            assert answers(engine, prompts) == batched, f"chunks of {chunk}"
    with engine_of(tmp_path, prefix_cache=True, cuda_graphs=False) as engine:
        answers(engine, [prompt[:256] for prompt in prompts], 1)
        assert answers(engine, prompts) == batched, "with prefix hits"
        assert answers(engine, prompts) == batched, "all but the last token cached"
    assert "depend on the number of rows" not in caplog.text


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-7b"])
def test_answer_of_adapter_has_same_bits_alone_and_among_others(name: str, tmp_path: Path) -> None:
    describe(name, tmp_path / "model", layers=2)
    rng, slots = random.Random(0), AdapterSlots(slots=3, rank=32)
    prompts = [[rng.randrange(1000, 100_000) for _ in range(length)] for length in LENGTHS]
    named = [(None, "0", "1", "2")[i % 4] for i in range(len(LENGTHS))]
    answered = []
    for options in ({}, {"cuda_graphs": False, "max_prefill_tokens": 384}):
        with engine_of(tmp_path / "model", adapters=slots, **options) as engine:
            pieces = engine.manifest.slices
            layers = {p.name: p.global_shape for p in pieces if "_proj.weight" in p.name}
            for seed in range(3):
                folder = tmp_path / f"{seed} {len(answered)}"
                engine.load_adapter(write_adapter(folder, layers, 32 - 8 * seed, seed), str(seed))
            answered.append(answers(engine, prompts, adapters=named))
            alone = [
                answers(engine, [prompt], adapters=[adapter])[0]
                for prompt, adapter in zip(prompts, named, strict=True)
            ]
            assert alone == answered[-1] != answers(engine, prompts)
    assert answered[0] == answered[1], "with and without graphs, in other chunks"


SETTINGS = [
    ("cublas", (True, True), (True, True)),
    ("cublaslt", (False, True), (True, True)),
    ("cublaslt", (False, False), (False, True)),
]


def settings() -> tuple[Any, ...]:
    matmul = torch.backends.cuda.matmul
    return (
        torch.backends.cuda.preferred_blas_library(),
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction_split_k,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction_split_k,
    )


@contextmanager
def configured(library: str, bf16: tuple[bool, bool], fp16: tuple[bool, bool]) -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    torch.backends.cuda.preferred_blas_library(library)
    matmul.allow_bf16_reduced_precision_reduction = bf16
    matmul.allow_fp16_reduced_precision_reduction = fp16
    yield
    matmul.allow_bf16_reduced_precision_reduction = (True, True)
    matmul.allow_fp16_reduced_precision_reduction = (True, True)
    torch.backends.cuda.preferred_blas_library("cublas")


@pytest.mark.parametrize("user", SETTINGS)
def test_engine_restores_global_blas_settings(user: Any, tmp_path: Path) -> None:
    describe("qwen2.5-0.5b", tmp_path, layers=1)
    with configured(*user):
        before = settings()
        with engine_of(tmp_path) as engine:
            assert settings() == before
            answers(engine, [[1, 2, 3]])
            assert settings() == before
            with pytest.raises(ZeroDivisionError), row_invariant_products(engine.saver.device):
                assert settings() != before or user == SETTINGS[2]
                raise ZeroDivisionError
            assert settings() == before


def test_probe_returns_shape_whose_bits_depend_on_number_of_rows() -> None:
    # fp32 products keep split-K, which the library uses for few rows of this shape
    weight = torch.empty(896, 18944, device="cuda")
    assert probe_products([(weight, None)]) == [(896, 18944)]
    assert not weight.any()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("words", "inner"), [(896, 4864), (3584, 18944), (64, 2048), (256, 7168)])
def test_rows_of_product_have_same_bits_for_any_number_of_rows(
    words: int, inner: int, wide: bool
) -> None:
    device, generator = torch.device("cuda:0"), torch.Generator("cuda").manual_seed(1)
    weight = torch.empty(words, inner, dtype=torch.bfloat16, device=device)
    assert probe_products([(weight, None)]) == []
    weight.normal_(generator=generator)
    x = torch.empty(600, inner, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    with row_invariant_products(device):
        whole = linear(x, weight, wide=wide)
        for count in (*range(1, 70), 95, 96, 97, 127, 128, 129, 255, 256, 257, 300, 511, 512):
            for first in (0, 7):
                rows = slice(first, first + count)
                assert torch.equal(linear(x[rows], weight, wide=wide), whole[rows]), count
    # A tensor core adds 16 products at a time to a sum of up to 5 times the mean result and
    # truncates; then the result is rounded to bf16.
    exact = x.double() @ weight.double().t()
    error = (whole.double() - exact).abs().max() / exact.abs().mean()
    assert error < 5 * (inner / 16 * 2**-23 + (0 if wide else 2**-8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("words", "inner", "biased"),
    [
        (1152, 896, True), (128, 896, True), (896, 896, False), (9728, 896, False),
        (896, 4864, False), (16384, 896, False), (151936, 896, False),
        (4608, 3584, True), (512, 3584, True), (3584, 3584, False), (37888, 3584, False),
        (3584, 18944, False), (16384, 3584, False), (152064, 3584, False),
    ],
)  # fmt: skip
def test_products_of_real_models_have_the_bits_of_the_chain(
    words: int, inner: int, biased: bool, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """Compare at the shapes of Qwen2.5 0.5B and 7B, in the engine and in the trainer."""
    device, generator = torch.device("cuda:0"), torch.Generator("cuda").manual_seed(1)
    weight = torch.empty(words, inner, dtype=dtype, device=device)
    bias = torch.empty(words, dtype=dtype, device=device) if biased else None
    with caplog.at_level("INFO", "rollout"):
        define_products([(weight, bias)])
    assert "computes 1 of 1 products with the defined bits" in caplog.text
    weight.normal_(generator=generator).mul_(inner**-0.5)
    if bias is not None:
        bias.normal_(generator=generator)
    most = 4096 if words < 65536 else 512
    x = torch.empty(most, inner, dtype=dtype, device=device).normal_(generator=generator)
    with row_invariant_products(device):
        for count in (1, 2, 3, 7, 16, 17, 31, 64, 65, 100, 257, 500, 1000, 2500, 4096):
            rows = x[-count:]
            assert torch.equal(linear(rows, weight, bias), chain_product(rows, weight, bias)), count
