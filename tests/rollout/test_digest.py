"""The digest: its definition, additivity, and what it notices."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.ops import digest as digest_module
from rollout.ops.digest import digest
from rollout.ops.hash import MASK64, finalize_int, signed, splitmix64, splitmix64_int

INT_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64]


def by_definition(tensor: torch.Tensor, base: int) -> int:
    width = tensor.element_size()
    bits = tensor.reshape(-1).view(INT_OF_WIDTH[width]).tolist()
    mask = (1 << 8 * width) - 1
    return sum(finalize_int(splitmix64_int(base + i) ^ (value & mask)) for i, value in enumerate(bits)) & MASK64


def values(dtype: torch.dtype, n: int = 300) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("base", [0, 7, 2**40])
def test_matches_its_definition(dtype: torch.dtype, base: int) -> None:
    assert digest(values(dtype), base) == by_definition(values(dtype), base)


def test_definition_is_pinned() -> None:
    """Trainer, kernels and stored receipts of other processes rely on exactly these numbers."""
    assert splitmix64_int(0) == 0xE220A8397B1DCDAF  # the published first output of splitmix64 seeded with 0
    assert digest(torch.tensor([1.0, -2.5]), 3) == 0x3A6D5BFD71D7AB9E
    assert digest(torch.tensor([], dtype=torch.float32), 3) == 0


@settings(derandomize=True, deadline=None, max_examples=40)
@given(n=st.integers(1, 500), cut=st.integers(0, 500), base=st.integers(0, 2**50), chunk=st.integers(1, 200))
def test_additive_over_any_cut_and_chunk(n: int, cut: int, base: int, chunk: int) -> None:
    x = values(torch.bfloat16, n)
    cut = min(cut, n)
    whole = digest(x, base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest_module, "_CHUNK", chunk)
        assert (digest(x[:cut], base) + digest(x[cut:], base + cut)) % 2**64 == whole


def test_notices_a_bit_a_swap_a_shift_and_signed_zero() -> None:
    x = values(torch.float32)
    seen = {digest(x, 0), digest(x, 1), digest(x.flip(0), 0), digest(x.roll(1), 0)}
    swapped = x.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    seen.add(digest(swapped, 0))
    for bit in range(32):
        flipped = x.clone()
        flipped.view(torch.int32)[17] ^= signed(1 << bit) if bit < 31 else -(2**31)
        seen.add(digest(flipped, 0))
    assert len(seen) == 5 + 32
    assert digest(torch.zeros(4), 0) != digest(-torch.zeros(4), 0)


def test_refuses_strides() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        digest(torch.zeros(4, 4).t()[:, :2], 0)


def test_tensor_hash_equals_integer_hash() -> None:
    i = torch.tensor([0, 1, 5, 2**62, -1, -(2**63)])
    assert [v & MASK64 for v in splitmix64(i).tolist()] == [splitmix64_int(v) for v in i.tolist()]
