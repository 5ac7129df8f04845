"""Low-rank adapters of a product: Triton kernels against the reference, and batch invariance."""

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout.ops.low_rank import SPAN, Choice, Factors, add_low_rank, low_rank
from tests.helpers.case_selection import some

# Triton's interpreter
pytestmark = [
    pytest.mark.usefixtures("triton_device"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim"),
]
# tokens, slots, rank, inner, parts
LARGE = [(70, 3, 8, 33, (40, 8, 8)), (600, 2, 16, 96, (80, 80)), (33, 4, 64, 3000, (300,))]
SHAPES = some((1, 1, 1, 16, (16,)), (37, 3, 5, 40, (70, 9, 9)), whole=LARGE)
Case = tuple[Tensor, Tensor, Factors, Tensor, Tensor]


def draw(
    tokens: int, slots: int, rank: int, inner: int, parts: tuple[int, ...], device: str
) -> Case:
    """Draw results and inputs of a product, factors in fp32, slots of tokens, and scales."""
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    ends = tuple(int(end) for end in torch.tensor(parts).cumsum(0))
    a = normal(slots, len(parts) * rank, inner) * inner**-0.5
    factors = Factors(a, normal(slots, ends[-1], rank) * rank**-0.5, ends)
    chosen = torch.randint(0, slots + 1, (tokens,), generator=generator).to(device)
    scales = torch.linspace(0.0, 2.0, slots + 1).to(device)
    return normal(tokens, ends[-1]), normal(tokens, inner), factors, chosen, scales


def cast(case: Case, dtype: torch.dtype) -> Case:
    out, x, (a, b, ends), chosen, scales = case
    return out.to(dtype), x.to(dtype), Factors(a.to(dtype), b.to(dtype), ends), chosen, scales


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", some(torch.float32, torch.bfloat16, whole=[torch.float16]))
def test_kernels_equal_reference(
    shape: tuple[int, int, int, int, tuple[int, ...]], dtype: torch.dtype, device: str
) -> None:
    out, x, factors, chosen, scales = cast(draw(*shape, device), dtype)
    results = []
    for impl in ("triton", "torch"):
        choice = Choice.of(chosen, scales, impl)  # type: ignore[arg-type]
        low = low_rank(x, factors, choice)
        results.append(add_low_rank(out.clone(), x, low, factors, choice).float())
    # fp32: two sums of at most 3,000 and 64 products of about 1 in another order, with roundings of
    # 2**-24, and a scale of at most 2. bf16: three casts (truncations in the interpreter), each off
    # by at most 2**-7 of its argument, twice that with the scale, of values below 8.
    most = {torch.float32: 1e-4, torch.bfloat16: 2**-2, torch.float16: 2**-5}[dtype]
    assert float((results[0] - results[1]).abs().max()) < most
    assert torch.equal(results[0][chosen == 0], out[chosen == 0].float()), "slot 0 is none"
    if bool((chosen > 0).any()):
        assert not torch.equal(results[0], out.float())


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_bits_of_a_token_do_not_depend_on_others(
    impl: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On some CPUs a row of numpy's product depends on its place, but not in sums one by one."""
    if device == "cpu":
        monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.einsum("mk,kn->mn", a, b))
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    case = cast(draw(700, 3, 8, SPAN + 40, (70, 9, 9), device), dtype)
    out, x, factors, chosen, scales = case

    def computed(at: Tensor) -> Tensor:
        choice = Choice.of(chosen[at], scales, impl)  # type: ignore[arg-type]
        low = low_rank(x[at], factors, choice)
        return add_low_rank(out[at], x[at], low, factors, choice)

    everything = torch.arange(len(x), device=device)
    whole = computed(everything)
    for at in (everything[:1], everything[5:50], everything[::3].flip(0)):
        assert torch.equal(computed(at), whole[at])
