"""Paged attention: the reference against plain attention in double, the Triton kernels against the reference."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from rollout.ops import attention as attention_module
from rollout.ops.attention import BatchShape, paged_attention, plan_attention

ROOT = Path(__file__).parents[2]


@dataclass
class Case:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    shape: BatchShape
    expected: torch.Tensor


def make_case(
    heads: tuple[int, int], dims: tuple[int, int], q_lens: list[int], kv_lens: list[int], num_decode: int, device: str
) -> Case:
    """Every slot that belongs to no request, and every table entry past a length, is poison."""
    generator = torch.Generator().manual_seed(len(kv_lens) + sum(kv_lens))
    (hq, hkv), (dim, value_dim) = heads, dims
    slots = sum(kv_lens) + 40
    k = torch.full((slots, hkv, dim), float("nan"))
    v = torch.full((slots, hkv, value_dim), float("nan"))
    table = torch.full((len(kv_lens) + 1, max(kv_lens) + 5), 3, dtype=torch.int32)
    free = (torch.randperm(slots - 16, generator=generator) + 16).tolist()
    q = torch.randn((sum(q_lens), hq, dim), generator=generator)
    expected, first = [], 0
    rows = list(range(len(kv_lens), 0, -1))
    for row, q_len, kv_len in zip(rows, q_lens, kv_lens, strict=True):
        mine = torch.tensor([free.pop() for _ in range(kv_len)])
        table[row, :kv_len] = mine.int()
        k[mine] = torch.randn((kv_len, hkv, dim), generator=generator)
        v[mine] = torch.randn((kv_len, hkv, value_dim), generator=generator)
        expected.append(plain(q[first : first + q_len], k[mine], v[mine], dim**-0.5))
        first += q_len
    shape = BatchShape(rows=rows, q_lens=q_lens, kv_lens=kv_lens, num_decode=num_decode)
    where = torch.device(device)
    return Case(q.to(where), k.to(where), v.to(where), table.to(where), shape, torch.cat(expected).to(where))


@pytest.fixture(params=["torch", "triton"])
def impl(request: pytest.FixtureRequest, device: str) -> str:
    if request.param == "triton" and device == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton is not interpreted here: the kernel runs on the GPU")
    return request.param


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    future = torch.arange(len(k)) > torch.arange(len(k) - len(q), len(k))[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, float("-inf")).softmax(-1), v)


CASES = [
    ((4, 2), (16, 16), [1, 1, 1], [1, 17, 40], 3),
    ((4, 4), (16, 16), [7], [7], 0),
    ((9, 3), (64, 64), [1, 1, 5, 1], [300, 3, 33, 9], 2),  # chunks with a prefix, one of a single token
    ((5, 1), (24, 24), [1, 70], [513, 70], 1),  # three splits, odd group, dim no power of two
    ((2, 2), (32, 16), [1, 20, 3], [2, 90, 3], 1),  # values narrower than keys
]


@pytest.mark.parametrize("case", CASES)
def test_equals_plain_attention_and_reads_no_foreign_slot(case: tuple, impl: str, device: str) -> None:
    made = make_case(*case, device)
    plan = plan_attention(made.shape, made.table, impl)  # type: ignore[arg-type]
    out = paged_attention(made.q, made.k, made.v, plan, made.q.shape[-1] ** -0.5)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), made.expected, atol=3e-6, rtol=0)


def test_bf16_storage_is_computed_in_fp32(impl: str, device: str) -> None:
    made = make_case((4, 2), (16, 16), [1, 6], [20, 30], 1, device)
    q, k, v = made.q.bfloat16(), made.k.bfloat16(), made.v.bfloat16()
    exact = paged_attention(q.float(), k.float(), v.float(), plan_attention(made.shape, made.table, "torch"), 0.25)
    out = paged_attention(q, k, v, plan_attention(made.shape, made.table, impl), 0.25)  # type: ignore[arg-type]
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), exact, atol=0, rtol=2**-7)  # one rounding; the interpreter truncates


def test_strided_queries(impl: str, device: str) -> None:
    made = make_case((4, 2), (16, 16), [1, 6], [20, 30], 1, device)
    wide = torch.cat([made.q, made.q], dim=1)[:, :4]
    plan = plan_attention(made.shape, made.table, impl)  # type: ignore[arg-type]
    assert torch.equal(
        paged_attention(wide, made.k, made.v, plan, 1.0), paged_attention(made.q, made.k, made.v, plan, 1.0)
    )


def test_long_queries_are_computed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_case((4, 2), (16, 16), [33], [50], 0, "cpu")
    monkeypatch.setattr(attention_module, "_MAX_SCORES", 4 * 50 * 7)
    out = paged_attention(made.q, made.k, made.v, plan_attention(made.shape, made.table), 0.25)
    torch.testing.assert_close(out.double(), made.expected, atol=3e-6, rtol=0)


def test_decode_buckets_bound_padding_and_cover_everyone() -> None:
    lens = [1, 500, 70, 64, 8000, 120, 130, 3000] * 3
    shape = BatchShape(rows=list(range(1, 25)), q_lens=[1] * 24, kv_lens=lens, num_decode=24)
    plan = attention_module.plan_torch(shape, torch.zeros((25, 8000), dtype=torch.int32))
    assert sorted(torch.cat([bucket.tokens for bucket in plan.buckets]).tolist()) == list(range(24))
    padded = sum(bucket.slots.numel() for bucket in plan.buckets)
    assert padded <= 2 * sum(max(length, 64) for length in lens)
    assert max(bucket.slots.numel() for bucket in plan.buckets) <= attention_module._MAX_BUCKET_TOKENS


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
import rollout.ops.attention_triton as kernels

int_ptr, dims = "*i32", dict(DIM=64, VALUE_DIM=64, BLOCK_D=64, BLOCK_V=64)
types = {"scale": "fp32", "part": "*fp32", "lse": "*fp32", **dict.fromkeys(["q", "k_cache", "v_cache", "out"], "*bf16"),
         **dict.fromkeys(["table", "rows", "starts", "kv_lens", "q_lens"], int_ptr)}
for kernel, constants in [
    (kernels._decode_split, dict(dims, GROUP=4, SPLIT=256, BLOCK_G=16, BLOCK_N=64)),
    (kernels._decode_combine, dict(VALUE_DIM=64, BLOCK_V=64, SPLIT=256, BLOCK_SPLITS=8)),
    (kernels._prefill, dict(dims, GROUP=4, BLOCK_M=64, BLOCK_N=32)),
]:
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    compiled = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
    print(kernel.__name__, compiled.metadata.shared)
"""


def test_kernels_compile_for_hopper() -> None:
    """The interpreter accepts more than the compiler; the compiler needs no GPU."""
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ".", "HOME": "/tmp"}  # without TRITON_INTERPRET
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    shared = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(shared) == 3 and max(shared) < 160 * 1024
