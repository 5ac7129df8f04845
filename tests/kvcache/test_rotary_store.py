"""Rotary kernels, with and without the write to the pool, against the torch reference."""

import pytest
import torch

from kvcache.config import FP4_DTYPE
from kvcache.ops.rotary import RotaryTables, apply_rotary, rotate, rotate_and_store, rotate_heads
from kvcache.pools import MHATokenToKVPool
from tests.helpers.case_selection import some
from tests.helpers.kvcache.blocks import DEVICE
from tests.helpers.kvcache.pools import mha, pool_of, stored

SLOTS = 50
# query heads, KV heads, head dim, value dim, tokens, rotated elements of a head
CASES = some(
    (14, 2, 64, 64, 5, 64),
    (3, 3, 24, 24, 2, 24),
    (2, 1, 16, 40, 3, 16),
    (4, 2, 16, 16, 0, 16),
    (6, 2, 64, 64, 4, 16),
    whole=[(3, 1, 24, 24, 2, 6), (40, 20, 128, 128, 2, 128)],
)


class Case:
    """Queries, keys and values as views of one product, with random slots and marked caches."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        heads, kv_heads, dim, value_dim, tokens, rotated = shape
        generator = torch.Generator().manual_seed(sum(shape))
        widths = (heads * dim, kv_heads * dim, kv_heads * value_dim)
        fused = torch.randn(tokens, sum(widths) + 8, generator=generator).to(DEVICE, dtype)
        q, k, v = fused[:, : sum(widths)].split(widths, dim=1)
        self.q, self.k = q.view(tokens, heads, dim), k.view(tokens, kv_heads, dim)
        self.v = v.view(tokens, kv_heads, value_dim)
        self.positions = torch.randint(1000, (tokens,), generator=generator).to(DEVICE)
        self.slots = torch.randperm(SLOTS, generator=generator)[:tokens].to(DEVICE)
        angles = torch.arange(1000.0)[:, None] / 10000.0 ** (torch.arange(0, rotated, 2) / rotated)
        self.tables = RotaryTables(cos=angles.cos().to(DEVICE), sin=angles.sin().to(DEVICE))
        self.caches = [
            torch.full((SLOTS, kv_heads, width), 7.0, dtype=dtype, device=DEVICE)
            for width in (dim, value_dim)
        ]

    def run(self, impl: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotate and store; return the rotated q and both caches."""
        k_cache, v_cache = (cache.clone() for cache in self.caches)
        tables = (self.tables.cos, self.tables.sin)
        q = rotate_and_store(
            self.q, self.k, self.v, self.positions, self.slots, *tables, k_cache, v_cache, impl
        )  # type: ignore[arg-type]
        return q, k_cache, v_cache


@pytest.mark.parametrize("shape", CASES)
def test_rotate_and_store_in_fp32_equals_the_reference(shape: tuple[int, ...]) -> None:
    case = Case(shape, torch.float32)
    inputs = case.q.clone(), case.k.clone(), case.v.clone()
    for out, expected in zip(case.run("triton"), case.run("torch"), strict=True):
        assert out.is_contiguous() and torch.equal(out, expected)
    assert all(map(torch.equal, inputs, (case.q, case.k, case.v)))


@pytest.mark.parametrize("shape", [CASES[0], CASES[4]])
def test_rotate_and_store_in_bf16_rounds_as_the_reference(shape: tuple[int, ...]) -> None:
    case = Case(shape, torch.bfloat16)
    outs, expected = case.run("triton"), case.run("torch")
    assert torch.equal(outs[2], expected[2])  # values are copied
    for out, reference in zip(outs[:2], expected[:2], strict=True):
        if case.q.is_cuda:
            assert torch.equal(out, reference)
        else:  # Triton's interpreter truncates cosine, sine, two products and their sum
            torch.testing.assert_close(out.float(), reference.float(), rtol=2**-7, atol=2**-5)


@pytest.mark.parametrize("shape", [CASES[0], CASES[4]])
def test_rotate_and_store_equals_rotation_and_assignment(shape: tuple[int, ...]) -> None:
    """Compare also with `rotate`, and check that the rest of a head does not change."""
    case = Case(shape, torch.bfloat16)
    cos, sin = case.tables.at(case.positions, torch.bfloat16)
    for impl in ("torch", "triton"):
        q, k_cache, v_cache = case.run(impl)
        rotated = rotate(case.q, case.k, case.positions, case.tables.cos, case.tables.sin, impl)  # type: ignore[arg-type]
        assert torch.equal(rotated[0], q) and torch.equal(rotated[1], k_cache[case.slots])
    q, k_cache, v_cache = case.run("torch")
    width = shape[-1]
    assert torch.equal(q[..., width:], case.q[..., width:])
    assert torch.equal(q, apply_rotary(case.q, cos, sin))
    expected_k, expected_v = case.caches
    expected_k[case.slots], expected_v[case.slots] = apply_rotary(case.k, cos, sin), case.v
    assert torch.equal(k_cache, expected_k) and torch.equal(v_cache, expected_v)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("heads", [1, 20])
def test_rotate_heads_writes_only_its_view(heads: int, interleaved: bool) -> None:
    """Rotate between views of wider rows, splitting adjacent pairs into halves."""
    case = Case((heads, 1, 24, 24, 5, 24), torch.float32)
    wide = torch.full((5, heads, 40), 7.0, device=DEVICE)
    outs = [wide.clone(), wide.clone()]
    for out, impl in zip(outs, ("torch", "triton"), strict=True):
        tables = case.tables.cos, case.tables.sin
        rotate_heads(
            case.q, case.positions, *tables, out[..., 16:], interleaved=interleaved, impl=impl
        )  # type: ignore[arg-type]
    assert torch.equal(*outs) and (outs[0][..., :16] == 7).all()
    order = [*range(0, 24, 2), *range(1, 24, 2)] if interleaved else list(range(24))
    cos, sin = case.tables.at(case.positions, torch.float32)
    assert torch.equal(outs[0][..., 16:], apply_rotary(case.q[..., order], cos, sin))


POOL_DTYPES = [torch.float32, torch.float8_e4m3fn, FP4_DTYPE]


def layer_of(dtype: torch.dtype, case: Case) -> MHATokenToKVPool:
    """Build a pool of one layer for the case's rows, with markers in all slots."""
    heads, dim = case.k.shape[1:]
    widths = {"head_dim": dim, "v_head_dim": case.v.shape[2]}
    pool = pool_of(mha(dtype, layers=1, num_kv_heads=heads, **widths))
    assert isinstance(pool, MHATokenToKVPool)
    for part in stored(pool):
        part.fill_(7)
    return pool


@pytest.mark.parametrize("dtype", POOL_DTYPES)
def test_set_rotated_kv_buffer_equals_rotate_and_set_kv_buffer(dtype: torch.dtype) -> None:
    case = Case(CASES[4], torch.float32)
    pools = [layer_of(dtype, case) for _ in range(2)]
    inputs = case.q.clone(), case.k.clone(), case.v.clone()
    q, k = rotate(case.q, case.k, case.positions, case.tables.cos, case.tables.sin)
    pools[0].set_kv_buffer(0, case.slots, k, case.v)
    given = case.q, case.k, case.v, case.positions, case.tables
    assert torch.equal(pools[1].set_rotated_kv_buffer(0, case.slots, *given), q)
    assert all(map(torch.equal, stored(pools[0]), stored(pools[1])))
    assert all(map(torch.equal, inputs, (case.q, case.k, case.v)))


def test_set_rotated_kv_buffer_refuses_wrong_tensors_before_writing() -> None:
    case = Case(CASES[4], torch.float32)
    pool = layer_of(torch.float32, case)
    before = [part.clone() for part in stored(pool)]
    q, k, v, positions = case.q, case.k, case.v, case.positions
    for wrong, message in (
        ((q.half(), k, v, positions), "q is torch.float16"),
        ((q[..., :-1], k, v, positions), "q is .*; the pool takes"),
        ((q, k, v[1:], positions), "v is .*; the pool takes"),
        ((q, k, v, positions[1:]), "positions is .*; the pool takes"),
    ):
        with pytest.raises(ValueError, match=message):
            pool.set_rotated_kv_buffer(0, case.slots, *wrong, case.tables)
    assert all(map(torch.equal, before, stored(pool)))
