"""RMS norm and silu(gate) * up: kernels against references, the norm also against transformers."""

from typing import Any

import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from rollout.ops.row_wise import add_rms_norm, rms_norm, silu_mul
from tests.helpers.case_selection import some

EPS = 1e-6
SHAPES = some((5, 896), (70, 16), (0, 64), whole=[(3, 64), (2, 100), (1, 4096)])
DTYPES = some(torch.float32, torch.bfloat16, whole=[torch.float16])
pytestmark = pytest.mark.usefixtures("triton_device")


def randn(*shape: int, device: str, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Draw rows of very different magnitude."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return (x * torch.logspace(-3, 3, shape[0]).view(-1, *[1] * (len(shape) - 1))).to(device, dtype)


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare a norm with its reference, up to the order of the sum of squares."""
    # fp32: the order changes a sum of positive squares by a few 2**-24 and its root by half of
    # that, then three products: below 16 roundings, 1e-6. bf16: the order may change both roundings
    # by an ulp, and the interpreter truncates. fp16 has three bits more, but numbers below 2**-14
    # have multiples of 2**-24.
    assert out.dtype == expected.dtype and out.shape == expected.shape and out.is_contiguous()
    rtol = {torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}[out.dtype]
    atol = 2**-23 if out.dtype == torch.float16 else 0
    torch.testing.assert_close(out.float(), expected.float(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("centred", [False, True])
def test_norm_kernel_equals_reference(
    shape: tuple[int, int], dtype: torch.dtype, centred: bool, device: str
) -> None:
    x = randn(*shape, device=device, dtype=dtype)
    weight = randn(1, shape[1], device=device, dtype=dtype)[0]
    out, expected = (
        rms_norm(x, weight, EPS, impl, zero_centred=centred) for impl in ("triton", "torch")
    )
    assert_close(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_residual_sum_is_rounded_before_its_norm(
    shape: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    x, residual = (randn(*shape, device=device, dtype=dtype, seed=seed) for seed in (1, 2))
    weight = randn(1, shape[1], device=device, dtype=dtype)[0]
    normed, total = add_rms_norm(x, residual, weight, EPS, "triton")
    expected, expected_total = add_rms_norm(x, residual, weight, EPS, "torch")
    if dtype == torch.float32 or x.is_cuda:
        assert torch.equal(total, expected_total) and total.is_contiguous()
    else:
        assert_close(total, expected_total)
    assert_close(normed, rms_norm(total, weight, EPS, "torch"))
    assert torch.equal(expected_total, x + residual)
    assert torch.equal(expected, rms_norm(x + residual, weight, EPS, "torch"))
    for impl in ("triton", "torch"):
        normed, total = add_rms_norm(x, residual, weight, EPS, impl, zero_centred=True)
        assert_close(normed, rms_norm(total, weight, EPS, "torch", zero_centred=True))


@pytest.mark.parametrize("head", [0, 3, 5])
def test_norm_of_heads_in_fused_product_equals_norm_of_copy(head: int, device: str) -> None:
    fused = randn(9, 7, 24, device=device, dtype=torch.float32)
    view = fused[:, head : head + 2]
    weight = torch.linspace(-1, 2, 24, device=device)
    assert_close(
        rms_norm(view, weight, EPS, "triton"), rms_norm(view.contiguous(), weight, EPS, "torch")
    )
    normed, total = add_rms_norm(view, fused[:, 2:4], weight, EPS, "triton")
    assert torch.equal(total, view + fused[:, 2:4])
    assert_close(normed, rms_norm(total, weight, EPS, "torch"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("theirs", "centred"), [(Qwen2RMSNorm, False), (Qwen3NextRMSNorm, True)])
def test_norm_reference_equals_transformers(
    theirs: Any, centred: bool, dtype: torch.dtype, device: str
) -> None:
    x = randn(5, 896, device=device, dtype=dtype)
    norm = theirs(896, EPS).to(device, dtype)
    norm.weight.data.copy_(randn(1, 896, device=device, dtype=dtype)[0])
    assert torch.equal(rms_norm(x, norm.weight, EPS, "torch", zero_centred=centred), norm(x))


# ---------------------------------------------------------------- silu(gate) * up


def gate_up(tokens: int, size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return (torch.randn(tokens, 2 * size, generator=torch.Generator().manual_seed(size)) * 8).to(
        device, dtype
    )


@pytest.mark.parametrize(("tokens", "size"), [(3, 4864), (2, 100), (17, 1), (0, 64)])
def test_fp32_activation_equals_reference(tokens: int, size: int, device: str) -> None:
    x = gate_up(tokens, size, torch.float32, device)
    out = silu_mul(*x.chunk(2, dim=-1), "triton")
    assert out.is_contiguous() and out.shape == (tokens, size)
    torch.testing.assert_close(out, silu_mul(*x.chunk(2, dim=-1), "torch"), rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [4864, 100])
def test_bf16_activation_rounds_at_same_points_as_torch(size: int, device: str) -> None:
    # Each of the two roundings may differ by an ulp, because exp may differ in its last bit and the
    # interpreter truncates.
    x = gate_up(2, size, torch.bfloat16, device)
    torch.testing.assert_close(
        silu_mul(*x.chunk(2, dim=-1), "triton"),
        silu_mul(*x.chunk(2, dim=-1), "torch"),
        rtol=2**-6,
        atol=0,
    )


def test_activation_is_accurate_over_whole_range_of_gates(device: str) -> None:
    # at gate -80, exp2(x * log2(e)) would be off by 40 ulp
    gate = torch.linspace(-86, 100, 4099)
    out = silu_mul(gate[None].to(device), torch.ones(1, 4099, device=device), "triton")[0].cpu()
    exact = gate.double() / (1 + (-gate.double()).exp())
    torch.testing.assert_close(out.double(), exact, rtol=5e-7, atol=0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy divides inf by inf
def test_activation_of_extreme_gates_equals_reference(device: str) -> None:
    gate = torch.tensor(
        [0.0, -0.0, 1e30, -1e30, -1000.0, -89.0, float("inf"), float("-inf"), float("nan")]
    )
    x = torch.cat([gate, torch.ones(9)]).view(1, -1).to(device)
    torch.testing.assert_close(
        silu_mul(*x.chunk(2, dim=-1), "triton"),
        silu_mul(*x.chunk(2, dim=-1), "torch"),
        rtol=1e-6,
        atol=1e-35,
        equal_nan=True,
    )
