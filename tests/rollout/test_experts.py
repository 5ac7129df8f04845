"""Mixtures of experts: Triton kernels against the reference, sorting, and batch invariance."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from memsaver.system.devices import Impl
from rollout.ops.experts import mix_experts
from rollout.ops.routing import Routing
from rollout.weights.params import held
from tests.helpers.case_selection import some

# Triton's interpreter
pytestmark = [
    pytest.mark.usefixtures("triton_device"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim"),
]
# tokens, experts, top_k, hidden, inner
LARGE = [(37, 64, 8, 33, 20), (70, 8, 2, 40, 45), (260, 4, 4, 64, 32), (19, 130, 8, 96, 64)]
LARGE += [(2000, 16, 2, 128, 96)]
SHAPES = some((1, 1, 1, 16, 16), (2, 64, 3, 33, 9), (20, 5, 3, 48, 20), whole=LARGE)
Case = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def draw(
    tokens: int, experts: int, top_k: int, hidden: int, inner: int, device: str, seed: int = 0
) -> Case:
    """Draw x, ids, weights, gate_up and down in fp32, with outputs of about 1."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    ids, weights = Routing(top_k=top_k, normalise=True).choose(normal(tokens, experts))
    gate_up = normal(experts, 2 * inner, hidden) * hidden**-0.5
    down = normal(experts, hidden, inner) * inner**-0.5
    return normal(tokens, hidden), ids, weights, gate_up, down


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", some(torch.float32, torch.bfloat16, whole=[torch.float16]))
def test_kernels_equal_reference(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: str
) -> None:
    x, ids, weights, gate_up, down = draw(*shape, device)
    x, gate_up, down = (tensor.to(dtype) for tensor in (x, gate_up, down))
    # fp32: three sums of at most 128 products in a different order, with roundings of 2**-24, add
    # up to less than 1e-5. bf16: six casts (truncations in the interpreter), each off by at most
    # 2**-7 of its argument, are less than 2**-4 of the result, or of 1 if terms cancel. fp16 has
    # three bits more.
    most = {torch.float32: 1e-5, torch.bfloat16: 2**-4, torch.float16: 2**-7}[dtype]
    for wide in {torch.float32: weights, dtype: weights.to(dtype)}.values():
        out = mix_experts(x, ids, wide, gate_up, down, "triton")
        expected = mix_experts(x, ids, wide, gate_up, down, "torch")
        assert out.dtype == expected.dtype == dtype and out.is_contiguous()
        apart = (out.float() - expected.float()).abs() / expected.float().abs().clamp(min=1)
        assert float(apart.max()) < most


@pytest.mark.parametrize("part", [(0, 1), (0, 0.5), (0.25, 1)])
@pytest.mark.parametrize(("pairs", "experts"), [(1, 7), (300, 128), (4100, 20)])
def test_pairs_are_sorted_by_expert_and_divided_into_blocks(
    pairs: int, experts: int, part: tuple[float, float], device: str
) -> None:
    # `part` is the range of held experts; pairs of other experts are left out
    from rollout.ops.experts import sort_pairs

    generator = torch.Generator().manual_seed(pairs)
    ids = torch.randint(0, experts, (pairs, 1), generator=generator).to(device)
    begin, last = (int(share * experts) for share in part)
    result = sort_pairs(ids, last - begin, 16, begin)
    chosen, order = ids.flatten().sort(stable=True)
    order = order[(chosen >= begin) & (chosen < last)]
    assert torch.equal(result.order[: len(order)].long(), order)
    expected, first = list[tuple[int, int, int]](), 0
    counts = ids.flatten().bincount(minlength=experts)[begin:last].tolist()
    for expert, count in enumerate(counts):
        end = first + count
        expected += [(expert, begin, end) for begin in range(first, end, 16)]
        first = end
    blocks = result.blocks.T.tolist()
    assert [(expert, *rows) for expert, *rows in blocks if rows[1]] == expected


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("chosen", [[0, 1], [6, 0], [3, 2]])
def test_experts_without_tokens_are_not_read(impl: str, chosen: list[int], device: str) -> None:
    # all tokens go to two experts of seven, and the weights of the other experts are NaN
    x, ids, weights, gate_up, down = draw(21, 7, 2, 24, 16, device)
    ids = torch.tensor([chosen], device=device).repeat(len(ids), 1)
    others = [expert for expert in range(7) if expert not in chosen]
    exact = mix_experts(x, ids, weights, gate_up, down, "torch")
    gate_up[others], down[others] = torch.nan, torch.nan
    out = mix_experts(x, ids, weights, gate_up, down, impl)  # type: ignore[arg-type]
    torch.testing.assert_close(out, exact, rtol=0, atol=1e-5)
    empty = mix_experts(x[:0], ids[:0], weights[:0], gate_up, down, impl)  # type: ignore[arg-type]
    assert empty.shape == (0, 24)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize(("tokens", "parts"), some((20, 1), (2, 6), whole=[(20, 2), (1500, 3)]))
def test_partial_sums_of_expert_parallel_ranks_add_up(
    tokens: int, parts: int, impl: Impl, device: str
) -> None:
    # Each rank has some of five experts, the last of six ranks none. Products are exact and
    # uninitialized memory is NaN, so a rank's result is bitwise the result of all experts with
    # weight 0 for those of other ranks.
    x, ids, _, gate_up, down = draw(tokens, 5, 3, 8, 8, device)
    weights = torch.tensor([0.5, 0.25, 0.125], device=device).repeat(tokens, 1)
    x, gate_up, down = (tensor.mul(2).round() for tensor in (x, gate_up, down.sign()))
    total = torch.zeros_like(x)
    for part in range(parts):
        first, end = held(5, parts, part)
        mine = slice(first, end)
        with undefined_is_nan():
            stored = gate_up[mine], down[mine]
            out = mix_experts(x, ids, weights, *stored, impl, first=first, total=5)
        only = weights * ((ids >= first) & (ids < end))
        assert torch.equal(out, mix_experts(x, ids, only, gate_up, down, impl))
        total += out
    torch.testing.assert_close(total, mix_experts(x, ids, weights, gate_up, down, "torch"))


@contextmanager
def undefined_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_token_has_same_bits_in_every_batch_and_at_every_position(device: str) -> None:
    x, ids, weights, gate_up, down = draw(12, 5, 3, 40, 24, device)
    if device == "cpu":
        # NumPy's products in the interpreter depend on the position of a row. With these inputs
        # they are exact, and only the sum over a token's experts is rounded.
        x, gate_up = (tensor.mul(2).round() for tensor in (x, gate_up))
        down = down.argmax(2, keepdim=True) == torch.arange(24)
        down = down.float()
    whole = mix_experts(x, ids, weights, gate_up, down, "triton")
    for rows in ([7], list(range(4, 12)), list(reversed(range(12)))):
        part = mix_experts(x[rows], ids[rows], weights[rows], gate_up, down, "triton")
        assert torch.equal(part, whole[rows])


def test_routing_selects_most_likely_experts_and_weights_them_by_probability(device: str) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0], [3.0, 0.0, 3.5, 0.0]], device=device)
    ids, weights = Routing(top_k=2, normalise=False).choose(logits.bfloat16())
    assert ids.tolist() == [[1, 2], [2, 0]] and weights.dtype == torch.float32
    torch.testing.assert_close(weights, logits.softmax(-1).gather(1, ids))
    _, normalised = Routing(top_k=2, normalise=True).choose(logits)
    torch.testing.assert_close(normalised, weights / weights.sum(1, keepdim=True))


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("experts", some(8, 128, whole=[5, 512]))
@pytest.mark.parametrize("tokens", [1, 70])
def test_experts_with_equal_scores_are_ordered_by_id(
    tokens: int, experts: int, impl: Impl, device: str
) -> None:
    logits = torch.randint(3, (tokens, experts), generator=torch.Generator().manual_seed(0))
    ids, _ = Routing(top_k=4, normalise=True).choose(logits.float().to(device), None, impl)
    for row, chosen in zip(logits.tolist(), ids.tolist(), strict=True):
        assert chosen == sorted(range(experts), key=lambda expert: (-row[expert], expert))[:4]


@pytest.mark.parametrize(
    "routing",
    [
        Routing(top_k=8, normalise=True),
        Routing(top_k=3, normalise=False, scale=2.5),
        Routing(top_k=3, normalise=True, sigmoid=True, groups=4, top_groups=2, judges=2),
    ],
)
@pytest.mark.parametrize("biased", [True, False])
def test_kernel_that_selects_experts_equals_reference_and_sees_one_token(
    routing: Routing, biased: bool, device: str
) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (4 * torch.randn(37, 24, generator=generator)).to(device)
    bias = torch.randn(24, generator=generator).to(device) if biased else None
    ids, weights = routing.choose(logits, bias, "triton")
    expected = routing.choose(logits, bias, "torch")
    assert torch.equal(ids, expected[0]) and ids.dtype == expected[0].dtype
    # an exponential (2 ulp), a sum of 24 terms, two quotients and a product, of 2**-24 each
    torch.testing.assert_close(weights, expected[1], rtol=2**-19, atol=0)
    for rows in ([9], list(range(5, 30)), list(reversed(range(37)))):
        part = routing.choose(logits[rows], bias, "triton")
        assert torch.equal(part[0], ids[rows]) and torch.equal(part[1], weights[rows])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy
def test_experts_of_token_without_numbers_exist(device: str) -> None:
    logits = torch.full((2, 5), torch.nan, device=device)
    ids, _ = Routing(top_k=3, normalise=True).choose(logits, None, "triton")
    assert ((ids >= 0) & (ids < 5)).all()
