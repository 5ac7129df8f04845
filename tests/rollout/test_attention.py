"""Paged attention: the reference against attention in fp64, and Triton kernels against it."""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from rollout.ops import attention_kernels as kernels
from rollout.ops import torch_attention as attention_module
from rollout.ops.torch_attention import MAX_BUCKET_TOKENS, BatchShape, StoredKV, plan_torch
from rollout.ops.triton_attention import TritonPlan, plan_decode, plan_triton, triton_attention
from rollout.running.graph_inputs import pack_prompts
from rollout.running.graphs import token_ladder
from tests.helpers.case_selection import some
from tests.helpers.rollout.answers import CLOSE
from tests.helpers.rollout.attention import paged_attention, plan_attention, round_products_once

# Triton's interpreter, `tl.range`
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim")


@dataclass
class Case:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    shape: BatchShape
    expected: torch.Tensor
    view: tuple[int | None, torch.Tensor | None]  # window, mapping


def make_case(
    heads: tuple[int, int],
    dims: tuple[int, int],
    q_lens: list[int],
    kv_lens: list[int],
    num_decode: int,
    device: str,
    window: int | None = None,
    mapped: bool = False,
    latent: bool = False,
) -> Case:
    """Build a case in which a read outside the requests' windows would change the result.

    Slots that no request owns or that are before all windows hold NaN, and table entries past a
    length name such a slot.

    Args:
        heads: Query heads, and heads of keys and values.
        dims: Widths of keys and values.
        q_lens: Query tokens of each request.
        kv_lens: Cached tokens of each request.
        num_decode: Number of leading decode requests.
        device: Device of the tensors.
        window: Number of keys that a query sees.
        mapped: Use a table with slots of another pool; slots before all windows map to 0.
        latent: Make values a view of the first elements of keys.
    """
    generator = torch.Generator().manual_seed(len(kv_lens) + sum(kv_lens))
    (hq, hkv), (dim, value_dim) = heads, dims
    slots = sum(kv_lens) + 40
    k = torch.full((slots, hkv, dim), float("nan"))
    v = k[..., :value_dim] if latent else torch.full((slots, hkv, value_dim), float("nan"))
    table = torch.full((len(kv_lens) + 1, max(kv_lens) + 5), 3, dtype=torch.int32)
    mapping = torch.zeros(slots, dtype=torch.int64)
    free = (torch.randperm(slots - 16, generator=generator) + 16).tolist()
    q = torch.randn((sum(q_lens), hq, dim), generator=generator)
    expected, first = [], 0
    rows = list(range(len(kv_lens), 0, -1))
    for row, q_len, kv_len in zip(rows, q_lens, kv_lens, strict=True):
        mine = torch.tensor([free.pop() for _ in range(kv_len)])
        table[row, :kv_len] = (slots - 1 - mine if mapped else mine).int()
        keys = torch.randn((kv_len, hkv, dim), generator=generator)
        values = torch.randn((kv_len, hkv, value_dim), generator=generator)
        if latent:
            keys[..., :value_dim] = values
        expected.append(plain(q[first : first + q_len], keys, values, dim**-0.5, window))
        seen = slice(max(0, kv_len - q_len + 1 - window) if window else 0, kv_len)
        mapping[slots - 1 - mine[seen]] = mine[seen]
        k[mine[seen]], v[mine[seen]] = keys[seen], values[seen]
        first += q_len
    shape = BatchShape(rows=rows, q_lens=q_lens, kv_lens=kv_lens, num_decode=num_decode)
    where = torch.device(device)
    k = k.to(where)
    v = k[..., :value_dim] if latent else v.to(where)
    view = (window, mapping.to(where) if mapped else None)
    return Case(q.to(where), k, v, table.to(where), shape, torch.cat(expected).to(where), view)


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None = None
) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    back = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    hidden = (back < 0) | (back >= (window or len(k)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


LONG = [1, 1, 1, 70, 5, 1, 33, 64], [400, 16, 1, 120, 33, 9, 33, 64], 3
CASES: list[tuple[Any, ...]] = some(
    # chunks with a prefix, one of a single token
    ((9, 3), (64, 64), [1, 1, 5, 1], [150, 3, 33, 9], 2),
    ((5, 1), (24, 24), [1, 70], [513, 70], 1),  # three splits, odd group, dim not a power of two
    ((2, 2), (32, 16), [1, 20, 3], [2, 90, 3], 1),  # values narrower than keys
    ((2, 1), (16, 16), [1] * 4, [1, 255, 256, 257], 4),  # one split, two splits
    ((2, 1), (16, 16), [1], [16 * 256 + 1], 1),  # 16 splits of more than 256
    # chunks that start and end at a block's edge
    ((2, 1), (16, 16), [32, 64, 33, 65, 1], [32, 64, 161, 128, 64], 0),
    whole=[
        ((2, 1), (16, 16), [1], [16 * 256], 1),
        ((4, 2), (16, 16), [1, 1, 1], [1, 17, 40], 3),
        ((4, 4), (16, 16), [7], [7], 0),
    ],
)
LATENT = some(
    ((4, 1), (24, 16), [1, 1, 5, 40], [1, 300, 33, 40], 2),
    # two blocks of heads, a width that is not a power of two
    ((20, 1), (40, 24), [1, 1, 1, 9], [70, 256, 300, 20], 3),
    ((40, 1), (24, 16), [3, 17], [3, 90], 0),  # a token's heads lie in several blocks
    whole=[((3, 1), (576, 512), [1, 1, 4], [1, 270, 35], 2)],  # widths of DeepSeek
)
WINDOWS = some(
    (1, True),
    (33, False),
    (300, True),
    whole=list(product([1, 7, 16, 33, 100, 300], [False, True])),
)


@pytest.mark.parametrize(
    ("case", "fields"),
    [
        *((case, {}) for case in CASES),
        # one KV head whose values are a view of its keys
        *((case, {"latent": True}) for case in LATENT),
        *(
            (((4, 2), (16, 16), *LONG), {"window": window, "mapped": mapped})
            for window, mapped in WINDOWS
        ),
    ],
)
def test_attention_equals_fp64_attention_and_reads_no_foreign_slot(
    case: tuple[Any, ...], fields: dict[str, Any], impl: Any, device: str
) -> None:
    made = make_case(*case, device, **fields)
    plan = plan_attention(made.shape, made.table, impl, *made.view)
    q = torch.cat([made.q, made.q], dim=1)[:, : made.q.shape[1]]  # a view of wider rows
    out = paged_attention(q, made.k, made.v, plan, made.q.shape[-1] ** -0.5)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), made.expected, atol=CLOSE, rtol=0)


MANY = [
    *torch.randint(1, 3001, (64,), generator=torch.Generator().manual_seed(64)).tolist(),
    300,
    900,
    2000,
    3000,
]

FEW = [1, 90, 600, 3000, 64, 257, 900, 40, 300]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "dims", "q_lens", "kv_lens"),
    [
        *(((8, 2), (dim, dim), [1] * 64 + [300, 128, 17, 1], MANY) for dim in (64, 128)),
        *(((heads, 1), (576, 512), [1] * 6 + [70, 1, 300], FEW) for heads in (16, 128)),
    ],
    ids=["64", "128", "latent-16", "latent-128"],
)
def test_triton_kernels_equal_reference_at_widths_of_real_models(
    heads: Any, dims: Any, q_lens: list[int], kv_lens: list[int], dtype: torch.dtype
) -> None:
    latent, decode = heads[1] == 1, len(q_lens) - (3 if heads[1] == 1 else 4)
    made = make_case(heads, dims, q_lens, kv_lens, decode, "cuda:0", latent=latent)
    q, k = made.q.to(dtype), made.k.to(dtype)
    v = k[..., : dims[1]] if latent else made.v.to(dtype)
    scale = (192 if latent else dims[0]) ** -0.5
    reference = plan_attention(made.shape, made.table, "torch")
    exact = paged_attention(q.float(), k.float(), v.float(), reference, scale)
    out = paged_attention(q, k, v, plan_attention(made.shape, made.table, "triton"), scale)
    tolerance = (
        {"atol": 1e-5, "rtol": 0.0} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 2**-7}
    )
    torch.testing.assert_close(out.float(), exact, **tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "dim"), [((14, 2), 64), ((28, 4), 128), ((32, 8), 128)])
def test_decode_has_the_bits_of_prefill_at_widths_of_real_models(
    heads: Any, dim: int, dtype: torch.dtype, window: int | None
) -> None:
    """Compare 200 queries: a sum in another order would change one of 50,000 elements."""
    lengths = [*range(1, 180), *range(255, 258), *range(500, 8500, 448)]
    chunks = [min(length, 70) for length in lengths]
    made = make_case(heads, (dim, dim), chunks, lengths, 0, "cuda:0")
    q, k, v = (rows.to(dtype) for rows in (made.q, made.k, made.v))
    plan = plan_attention(made.shape, made.table, "triton", window)
    lasts = torch.tensor(chunks).cumsum(0) - 1
    prefilled = paged_attention(q, k, v, plan, dim**-0.5)[lasts]
    shape = replace(made.shape, q_lens=[1] * len(lengths), num_decode=len(lengths))
    plan = plan_attention(shape, made.table, "triton", window)
    assert torch.equal(paged_attention(q[lasts], k, v, plan, dim**-0.5), prefilled)


def test_windowed_request_has_same_bits_in_batch_and_with_plan_of_decode_graph(
    triton_device: str,
) -> None:
    made = make_case(
        (2, 1), (16, 16), [1, 1, 1], [700, 9, 400], 3, triton_device, window=300, mapped=True
    )
    together = paged_attention(
        made.q, made.k, made.v, plan_attention(made.shape, made.table, "triton", *made.view), 1
    )
    for i in range(3):
        rows, positions = torch.tensor(
            [[made.shape.rows[i]], [made.shape.kv_lens[i] - 1]], device=triton_device
        )
        plan = replace(
            plan_decode(rows, positions, made.table), window=made.view[0], mapping=made.view[1]
        )
        assert torch.equal(
            paged_attention(made.q[i : i + 1], made.k, made.v, plan, 1), together[i : i + 1]
        )


def test_decode_buckets_read_only_tokens_inside_the_window() -> None:
    shape = BatchShape(rows=[1, 2, 3], q_lens=[1] * 3, kv_lens=[5000, 20, 700], num_decode=3)
    table = torch.arange(4 * 5000, dtype=torch.int32).view(4, 5000)
    buckets = plan_torch(shape, table, window=30).buckets
    assert sorted(slot for bucket in buckets for slot in bucket.slots.unique().tolist()) == [
        *range(5000 + 4970, 5000 + 5000), *range(10000, 10020), *range(15670, 15700),
    ]  # fmt: skip


def test_bf16_attention_rounds_only_its_output(impl: str, device: str) -> None:
    # The interpreter truncates. Tensor cores round the weights too. Sums are never bf16.
    made = make_case((4, 2), (16, 16), [1, 1, 6, 90], [20, 300, 30, 120], 2, device)
    q, k, v = made.q.bfloat16(), made.k.bfloat16(), made.v.bfloat16()
    exact = paged_attention(
        q.float(), k.float(), v.float(), plan_attention(made.shape, made.table, "torch"), 0.25
    )
    out = paged_attention(q, k, v, plan_attention(made.shape, made.table, impl), 0.25)  # type: ignore[arg-type]
    assert out.dtype == torch.bfloat16
    atol = 1e-2 if impl == "triton" and device != "cpu" else 0
    torch.testing.assert_close(out.float(), exact, atol=atol, rtol=2**-7)


@pytest.mark.parametrize("dtype", some(torch.bfloat16, whole=[torch.float32]))
def test_request_has_same_bits_alone_and_in_batch(dtype: torch.dtype, triton_device: str) -> None:
    made = make_case((2, 1), (16, 16), [1, 1, 1, 3, 40], [300, 10, 520, 70, 60], 3, triton_device)
    q, k, v = made.q.to(dtype), made.k.to(dtype), made.v.to(dtype)
    together = paged_attention(q, k, v, plan_attention(made.shape, made.table, "triton"), 0.25)
    first = 0
    for i, (row, q_len, kv_len) in enumerate(
        zip(made.shape.rows, made.shape.q_lens, made.shape.kv_lens, strict=True)
    ):
        shape = BatchShape(
            rows=[row], q_lens=[q_len], kv_lens=[kv_len], num_decode=int(i < made.shape.num_decode)
        )
        own = slice(first, first + q_len)
        alone = paged_attention(q[own], k, v, plan_attention(shape, made.table, "triton"), 0.25)
        assert torch.equal(alone, together[own]), f"request {i}"
        first += q_len


@pytest.mark.parametrize("window", [None, 150])
def test_query_has_same_bits_in_decode_and_in_every_chunk(
    window: int | None, impl: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if impl == "triton" and device == "cpu":
        round_products_once(monkeypatch)
        shorter = {"MIN_SPLIT": 32, "LOG_MIN_SPLIT": 5, "PARTS": 4, "LOG_PARTS": 2}
        for name, value in shorter.items():
            monkeypatch.setattr(kernels, name, tl.constexpr(value))
    # The last two splits in Triton are the first that are twice as long; the last has 8 keys.
    shortest = kernels.MIN_SPLIT.value
    last = 2 * kernels.PARTS.value * shortest + 2 * shortest + 8
    made = make_case((2, 1), (16, 16), [70], [last], 0, device)
    if device != "cpu":
        made = replace(made, **{name: getattr(made, name).bfloat16() for name in "qkv"})
    plan = plan_attention(made.shape, made.table, impl, window)
    whole = paged_attention(made.q, made.k, made.v, plan, 0.25)
    for end, count in [(last, 1), (last - 7, 1), (last - 8, 3), (last - 62, 1)]:
        rows = slice(end - count - last, end - last or None)
        for num_decode in {0, int(count == 1)}:
            shape = BatchShape(rows=[1], q_lens=[count], kv_lens=[end], num_decode=num_decode)
            plan = plan_attention(shape, made.table, impl, window)
            out = paged_attention(made.q[rows], made.k, made.v, plan, 0.25)
            assert torch.equal(out, whole[rows]), (end, count, num_decode)


@pytest.mark.parametrize("spare", [0, 1, 40])
@pytest.mark.parametrize("lens", [LONG, ([1, 1, 3, 2], [400, 16, 5, 300], 2)])
def test_plan_over_static_tensors_equals_the_plan_of_a_step(
    triton_device: str, lens: tuple[list[int], list[int], int], spare: int
) -> None:
    """Replay a step of decodes and chunks in the tensors of a graph for more tokens and requests.

    The results have the same bits, and padding writes nothing.
    """
    made = make_case((4, 2), (16, 16), *lens, triton_device)
    spans = zip(*lens[:2], strict=True)
    positions = np.concatenate([np.arange(end - count, end) for count, end in spans])
    size, most = len(positions) + spare, len(lens[0]) + spare
    ids = np.zeros(len(positions) - lens[2], dtype=np.int64)
    packed = torch.from_numpy(pack_prompts(ids, positions, made.shape, size, most))
    plan = TritonPlan(
        req_to_token=made.table,
        meta=packed[3 * size :].view(4, -1).int().to(triton_device),
        num_decode=most,
        num_prefill=most,
        num_query_tokens=size,
    )
    q, stored = torch.cat([made.q, made.q[:1].expand(spare, -1, -1)]), StoredKV(k=made.k, v=made.v)
    out = torch.full_like(q, 7.0)
    triton_attention(q, stored, plan, 0.25, out)
    wanted = paged_attention(made.q, made.k, made.v, plan_triton(made.shape, made.table), 0.25)
    assert torch.equal(out[: len(positions)], wanted) and out[len(positions) :].eq(7).all()


def test_decode_plan_over_static_tensors_ignores_padding_requests(triton_device: str) -> None:
    # As in the replay of a graph: `meta` is a slice of a wider tensor, and copies of row 0, slot 0
    # pad the batch.
    made = make_case((4, 2), (16, 16), [1, 1], [300, 20], 2, triton_device)
    made.table[0, 0] = 0
    made.k[0], made.v[0] = 1.0, 2.0
    meta = torch.full((4, 9), -1, dtype=torch.int32, device=triton_device)
    meta[:, :4] = torch.tensor([[2, 1, 0, 0], [0, 1, 2, 3], [300, 20, 1, 1], [1, 1, 1, 1]])
    plan = TritonPlan(
        req_to_token=made.table, meta=meta[:, :4], num_decode=4, num_prefill=0, num_query_tokens=0
    )
    out = paged_attention(torch.cat([made.q, made.q]), made.k, made.v, plan, 0.25)
    torch.testing.assert_close(out[:2].double(), made.expected, atol=CLOSE, rtol=0)
    # A fused multiply-add leaves the rounding error of the peak in the weight of the only key.
    torch.testing.assert_close(out[2:], torch.full_like(out[2:], 2.0), atol=CLOSE, rtol=0)


def test_long_queries_are_computed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_case((4, 2), (16, 16), [33], [50], 0, "cpu")
    monkeypatch.setattr(attention_module, "MAX_SCORES", 4 * 50 * 7)
    out = paged_attention(made.q, made.k, made.v, plan_attention(made.shape, made.table), 0.25)
    torch.testing.assert_close(out.double(), made.expected, atol=CLOSE, rtol=0)


def test_decode_buckets_bound_padding_and_cover_all_requests() -> None:
    lens = [1, 500, 70, 64, 8000, 120, 130, 3000] * 3
    shape = BatchShape(rows=list(range(1, 25)), q_lens=[1] * 24, kv_lens=lens, num_decode=24)
    plan = plan_torch(shape, torch.zeros((25, 8000), dtype=torch.int32))
    assert sorted(torch.cat([bucket.tokens for bucket in plan.buckets]).tolist()) == list(range(24))
    padded = sum(bucket.slots.numel() for bucket in plan.buckets)
    assert padded <= 2 * sum(max(length, 64) for length in lens)
    assert max(bucket.slots.numel() for bucket in plan.buckets) <= MAX_BUCKET_TOKENS


@given(st.integers(1, 9000), st.data())
def test_graph_of_a_step_with_prompts_adds_at_most_an_eighth(
    most: int, data: st.DataObject
) -> None:
    sizes, tokens = token_ladder(most), data.draw(st.integers(1, most))
    padding = min(size for size in sizes if size >= tokens) - tokens
    assert padding < 64 or padding <= tokens / 8
