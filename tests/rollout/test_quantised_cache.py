"""fp8 and FP4 caches: answers equal those of a plain engine with rows rounded by such a pool."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcache import KVCacheConfig, layout
from kvcache.config import kv_dtype
from kvcache.ops.rotary import rotate
from kvcache.pools import MHATokenToKVPool
from rollout import Completion, Engine, SamplingParams
from rollout.model.mixers.attention import LayerKV
from rollout.ops.torch_attention import BatchShape
from tests.helpers.case_selection import some
from tests.helpers.rollout.answers import CLOSE, GAP, GREEDY, assert_same, firsts, random_prompts
from tests.helpers.rollout.attention import paged_attention, plan_attention
from tests.helpers.rollout.poison import fill
from tests.helpers.rollout.saved import Saved
from tests.helpers.triton_kernels import decode_fp8_bytes

DTYPES = ["fp8_e4m3", "fp8_e5m2", "fp4_e2m1"]
# both fp8 dtypes use one kernel, and a test below decodes every byte of both
KERNELS = some("fp8_e4m3", "fp4_e2m1", whole=["fp8_e5m2"])
FLIP = 2e-2
"""Tolerance of log-probabilities if kernels or shapes differ.

Stored elements may then differ by 2**-23, and one in a million is rounded to the next number, which
is a quarter (with FP4 a third) away. That changes one of at least 20 scores by about 0.06, its
weight by 0.003 and a logit by 0.005. The tolerance allows a few of these changes. Rows that are not
rounded are off by 0.1.
"""
MODELS: dict[str, dict[str, Any]] = {"llama": {"head_dim": 16}, "qwen3": {"head_dim": 32}}
MLA: dict[str, Any] = {  # latent rows of whole FP4 blocks
    "num_key_value_heads": 4, "first_k_dense_replace": 2, "kv_lora_rank": 32, "q_lora_rank": 20,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 16, "v_head_dim": 10,
}  # fmt: skip
PROMPTS = random_prompts((3, 50, 20))
# Triton's interpreter, `tl.range`
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim")


@pytest.fixture
def make(saved: Saved) -> Callable[..., Engine]:
    """Return a function that builds an engine for a kind of `MODELS` or "latent"."""

    def make(device: str, dtype: str, kind: str = "llama", **config: Any) -> Engine:
        path, _ = saved("deepseek_v3", **MLA) if kind == "latent" else saved(kind, **MODELS[kind])
        return Engine.from_pretrained(
            path, device=device, kv_cache_dtype=dtype, **{"kv_tokens": 512, **config}
        )

    return make


Make = Callable[..., Engine]


def answers(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[Completion]:
    return firsts(engine.generate(prompts, GREEDY))


# ---------------------------------------------------------------- one layer

SHAPE = BatchShape(rows=[3, 1, 2, 4], q_lens=[1, 1, 5, 40], kv_lens=[260, 3, 33, 40], num_decode=2)


def random_layer(
    dtype: str, device: str
) -> tuple[Any, LayerKV, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a pool with scattered rows, its layer, the table, q, and the slots in use.

    Other slots have bit patterns of NaN.
    """
    generator = torch.Generator().manual_seed(1)
    stored = kv_dtype(dtype, torch.float32)
    shape = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 32, "size": 512}
    config = KVCacheConfig(dtype=stored, device=device, compute_dtype=torch.float32, **shape)
    pool = MHATokenToKVPool(config)
    for part in pool.stored.values():
        part.fill_(0x7F if dtype == "fp8_e4m3" else 0xFF)
    total = sum(SHAPE.kv_lens)
    slots = torch.randperm(500, generator=generator)[:total]
    k, v = (torch.randn(total, 2, 32, generator=generator) * scale for scale in (3, 0.3))
    if dtype != "fp4_e2m1":
        pool.set_scales(0, 0.07, 0.01)
    pool.set_kv_buffer(0, slots.to(device), k.to(device), v.to(device))
    table = torch.full((5, 320), 499, dtype=torch.int32)
    for row, mine in zip(SHAPE.rows, slots.split(SHAPE.kv_lens), strict=True):
        table[row, : len(mine)] = mine.int()
    q = torch.randn(sum(SHAPE.q_lens), 6, 32, generator=generator)
    return pool, LayerKV(pool, 0), table.to(device), q.to(device), slots.to(device)


@pytest.mark.parametrize("dtype", KERNELS)
def test_attention_equals_attention_over_dequantized_rows(
    dtype: str, impl: Any, device: str
) -> None:
    # slots of no request are NaN, or very large with FP4
    pool, layer, table, q, slots = random_layer(dtype, device)
    k, v = (torch.full((512 + 16, 2, 32), float("nan"), device=device) for _ in range(2))
    k[slots], v[slots] = pool.get_rows(0, slots)
    expected = paged_attention(q, k, v, plan_attention(SHAPE, table, "torch"), 0.2)
    out = layer.attend(q, plan_attention(SHAPE, table, impl), 0.2)
    if impl == "torch":
        assert torch.equal(out, expected)
    else:
        torch.testing.assert_close(out, expected, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("dtype", KERNELS)
def test_attention_of_bf16_queries_is_close_to_fp32(dtype: str, triton_device: str) -> None:
    # on a GPU, products are bf16, which represents every fp8 value
    _, layer, table, q, _ = random_layer(dtype, triton_device)
    q = q.bfloat16()
    exact = layer.attend(q.float(), plan_attention(SHAPE, table, "torch"), 0.2)
    out = layer.attend(q, plan_attention(SHAPE, table, "triton"), 0.2)
    assert out.dtype == torch.bfloat16
    atol = 1e-2 if triton_device != "cpu" else 1e-5  # the interpreter truncates
    torch.testing.assert_close(out.float(), exact, atol=atol, rtol=2**-7)


@pytest.mark.parametrize(("dtype", "mantissa"), [(torch.float8_e4m3fn, 3), (torch.float8_e5m2, 2)])
def test_kernel_decodes_every_fp8_byte(
    dtype: torch.dtype, mantissa: int, triton_device: str
) -> None:
    # including NaN, infinity, -0 and subnormal numbers
    codes = torch.arange(256, dtype=torch.uint8, device=triton_device)
    out = torch.empty(256, device=triton_device)
    decode_fp8_bytes[(1,)](codes, out, MANTISSA=mantissa)
    torch.testing.assert_close(out, codes.view(dtype).float(), atol=0, rtol=0, equal_nan=True)
    assert torch.equal(out.signbit(), codes >= 128)


def test_fp8_scales_are_read_when_kernel_runs(triton_device: str) -> None:
    # a captured graph must see scales that are set later
    pool, layer, table, q, _ = random_layer("fp8_e4m3", triton_device)
    plan = plan_attention(SHAPE, table, "triton")
    before = layer.attend(q, plan, 0.2)
    pool.set_scales(0, 0.035, 0.02)  # of half the keys and twice the values
    torch.testing.assert_close(layer.attend(q, plan, 0.4), 2 * before)


# ---------------------------------------------------------------- the engine


@pytest.fixture
def rounded(make: Make) -> Make:
    """Return a function that builds the reference engine.

    It is a plain engine whose rows go through a quantized pool before they are stored.
    """

    def rounded(
        device: str, dtype: str, kind: str = "llama", scales: tuple[float, ...] = (), **config: Any
    ) -> Engine:
        # without graphs, which would keep the original methods
        engine = make(device, "auto", kind, cuda_graphs=False, **config)
        plain: Any = engine.kv_pool
        quantized = layout(engine.model.hf_config, dtype, torch.float32)
        pool: Any = quantized.build(size=512, page_size=16, device=plain.device)
        for layer in range(2) if scales else ():
            pool.set_scales(layer, *scales)
        write_latent = plain.set_mla_kv_buffer if kind == "latent" else None

        def rounded_rows(
            layer: int, loc: Any, q: Any, k: Any, v: Any, positions: Any, rotary: Any
        ) -> torch.Tensor:
            q, k = rotate(q, k, positions, rotary.cos, rotary.sin)
            pool.set_kv_buffer(layer, loc, k, v)
            plain.set_kv_buffer(layer, loc, *pool.get_rows(layer, loc))
            return q

        def rounded_latent(layer: int, loc: torch.Tensor, *rows: torch.Tensor) -> None:
            assert write_latent is not None
            pool.set_mla_kv_buffer(layer, loc, *rows)
            read, rank = pool.get_rows(layer, loc)[0], MLA["kv_lora_rank"]
            write_latent(layer, loc, read[..., :rank], read[..., rank:])

        if kind == "latent":
            plain.set_mla_kv_buffer = rounded_latent
        else:
            plain.set_rotated_kv_buffer = rounded_rows
        return engine

    return rounded


@pytest.mark.parametrize("kind", [*MODELS, "latent"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_answers_equal_plain_engine_with_rounded_rows(
    make: Make, rounded: Make, kind: str, dtype: str, device: str
) -> None:
    # chunks of prefill, which read their own tokens from the pool, share steps with decode
    engine = make(device, dtype, kind, max_prefill_tokens=16)
    plain = rounded(device, dtype, kind, max_prefill_tokens=16)
    assert engine.kv_pool.bytes_per_token < plain.kv_pool.bytes_per_token / 3
    assert_same(
        answers(engine), answers(plain), atol=GAP if device == "cpu" or kind == "latent" else FLIP
    )
    engine.check_integrity()


@pytest.mark.parametrize(
    ("dtype", "kind"),
    some(
        ("fp8_e4m3", "qwen3"),
        *((dtype, "latent") for dtype in KERNELS),
        whole=[("fp8_e5m2", "qwen3"), ("fp4_e2m1", "qwen3")],
    ),
)
def test_triton_answers_equal_plain_engine_with_rounded_rows(
    make: Make, rounded: Make, kind: str, dtype: str
) -> None:
    # the kernels are interpreted without a GPU; with one, fp8 decodes by CUDA graphs, FP4 cannot
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    engine = make(device, dtype, kind, attention="triton", max_prefill_tokens=24)
    assert (engine.graphs is not None) == (device != "cpu" and dtype != "fp4_e2m1")
    scales = () if dtype == "fp4_e2m1" else (0.25, 0.03) if kind == "qwen3" else (0.1,)
    for layer in range(2) if scales else ():
        engine.kv_pool.set_scales(layer, *scales)  # after the graphs were captured
    plain = rounded("cpu", dtype, kind, scales, attention="torch")
    params, prompts = SamplingParams(max_tokens=3, temperature=0), random_prompts((3, 40))
    mine, its = (firsts(side.generate(prompts, params)) for side in (engine, plain))
    assert_same(mine, its, atol=FLIP)


@pytest.mark.parametrize("dtype", DTYPES)
def test_group_shares_pages_and_copies_on_write(make: Make, rounded: Make, dtype: str) -> None:
    # a copied page has bytes and block scales
    engine, plain = make("cpu", dtype), rounded("cpu", dtype)
    copied: list[int] = []
    move = engine.kv_pool.move_kv_cache

    def count(tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        copied.append(len(tgt_loc))
        move(tgt_loc, src_loc)

    engine.kv_pool.move_kv_cache = count  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=12, n=4, seed=5)
    (mine,), (its,) = (side.generate([PROMPTS[1]], params) for side in (engine, plain))
    assert copied == [3 * (len(PROMPTS[1]) % 16)]
    assert len({tuple(sample.token_ids) for sample in mine}) == 4
    assert_same(mine, its)
    engine.check_integrity()


@pytest.mark.parametrize("dtype", [*DTYPES, "auto"])
def test_sleep_keeps_answers_and_scales(
    make: Make, dtype: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # resumed memory has arbitrary content, and the engine zeroes page 0
    engine = make(device, dtype)
    resume = engine.saver.resume

    def resume_dirty(*tags: str) -> None:
        resume(*tags)
        if "kv_cache" in tags:
            fill(engine.kv_pool, slice(None))

    monkeypatch.setattr(engine.saver, "resume", resume_dirty)
    if dtype.startswith("fp8"):
        engine.kv_pool.set_scales(1, 0.25, 0.03)
    scales, before = engine.kv_pool.scales(1), answers(engine)
    engine.sleep()
    assert engine.report().committed_bytes == 0
    engine.wake_up()
    assert not any(
        part[:, : engine.config.page_size].any() for part in engine.kv_pool.stored.values()
    )
    assert engine.kv_pool.scales(1) == scales
    assert_same(answers(engine), before)


def test_engine_refuses_plain_cache_dtype_that_differs_from_model_dtype(make: Make) -> None:
    with pytest.raises(ValueError, match="'bf16' with a model in torch.float32 is not supported"):
        make("cpu", "bf16")
