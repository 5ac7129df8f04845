"""silu(gate) * up: the Triton kernel against the reference."""

import pytest
import torch

from rollout.ops.activation import silu_mul

pytestmark = pytest.mark.usefixtures("triton_device")


def gate_up(tokens: int, size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return (torch.randn(tokens, 2 * size, generator=torch.Generator().manual_seed(size)) * 8).to(device, dtype)


@pytest.mark.parametrize(("tokens", "size"), [(3, 4864), (2, 100), (17, 1), (0, 64)])
def test_fp32_equals_the_reference(tokens: int, size: int, device: str) -> None:
    x = gate_up(tokens, size, torch.float32, device)
    out = silu_mul(x, "triton")
    assert out.is_contiguous() and out.shape == (tokens, size)
    torch.testing.assert_close(out, silu_mul(x, "torch"), rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [4864, 100])
def test_bf16_rounds_where_torch_does(size: int, device: str) -> None:
    """To an ulp for each of the two roundings: exp may differ in its last bit, and the interpreter truncates."""
    x = gate_up(2, size, torch.bfloat16, device)
    torch.testing.assert_close(silu_mul(x, "triton"), silu_mul(x, "torch"), rtol=2**-6, atol=0)


def test_rows_of_a_wider_matrix(device: str) -> None:
    wide = gate_up(3, 60, torch.float32, device)
    torch.testing.assert_close(silu_mul(wide[:, :80], "triton"), silu_mul(wide[:, :80].contiguous(), "torch"))


def test_exponential_is_accurate_over_its_whole_range(device: str) -> None:
    """Against double: at gate -80 a plain exp2(x * log2(e)) would be off by 40 ulp."""
    gate = torch.linspace(-86, 100, 4099)
    out = silu_mul(torch.cat([gate, torch.ones(4099)]).view(1, -1).to(device), "triton")[0].cpu()
    exact = gate.double() / (1 + (-gate.double()).exp())
    torch.testing.assert_close(out.double(), exact, rtol=5e-7, atol=0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy divides inf by inf
def test_extreme_gates(device: str) -> None:
    gate = torch.tensor([0.0, -0.0, 1e30, -1e30, -1000.0, -89.0, float("inf"), float("-inf"), float("nan")])
    x = torch.cat([gate, torch.ones(9)]).view(1, -1).to(device)
    torch.testing.assert_close(silu_mul(x, "triton"), silu_mul(x, "torch"), rtol=1e-6, atol=1e-35, equal_nan=True)
