"""Norm, gated activation and rotation against fp64, values and gradients, in torch and in Triton.

Whole models are compared with those of transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from memsaver.system.devices import Impl
from tests.helpers.case_selection import some
from tests.helpers.models import build_tiny
from trainer_bridge.models.fused import fuse
from trainer_bridge.ops import decoder_ops
from trainer_bridge.ops.decoder_ops import rms_norm, rotate, silu_gate

EPS = 1e-5
# Relative to the largest value. The longest chain is a gate's gradient, with fewer than 16
# roundings of 2**-24: an exponential (two), a sum and a quotient, its complement, five products and
# a sum. Triton's interpreter truncates bf16.
U = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
DTYPES = some(torch.float32, torch.bfloat16, whole=[torch.float16])


def check(
    ours: Callable[..., Any], exact: Callable[..., Any], inputs: list[Tensor], terms: int = 1
) -> None:
    """Compare results and all gradients with those in fp64; sums of gradients have `terms` terms.

    A sum of n terms in fp32 is off by at most n * 2**-24 of the sum of their sizes.
    """
    narrow = [tensor.detach().requires_grad_() for tensor in inputs]
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    sides = list[list[Tensor]]()
    for compute, given in ((ours, narrow), (exact, wide)):
        results = compute(*given)
        results = [results] if isinstance(results, Tensor) else [*results]
        draw = torch.Generator().manual_seed(1)
        slopes = [torch.randn(out.shape, generator=draw).to(inputs[0]).to(out) for out in results]
        torch.autograd.backward(results, slopes)
        sides.append([*results, *(tensor.grad for tensor in given)])  # type: ignore[list-item]
    for mine, want in zip(*sides, strict=True):
        assert mine.dtype == inputs[0].dtype and mine.shape == want.shape
        if want.numel():
            most, bound = float(want.detach().abs().max()), U[mine.dtype] + terms * 2.0**-24
            error = (mine.detach().double() - want.detach()).abs().max()
            assert float(error) <= bound * max(1.0, most)


@pytest.mark.parametrize(
    "shape", some((1, 5, 3, 24), (2, 7), whole=[(4, 8192), (0, 16), (2100, 896)])
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_and_its_gradients_match_fp64(
    shape: tuple[int, ...], dtype: torch.dtype, impl: Impl, device: str
) -> None:
    x, weight = torch.randn(shape, device=device).to(dtype), torch.randn(shape[-1:], device=device)

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)

    rows = x.numel() // shape[-1]
    check(lambda *given: rms_norm(*given, EPS, impl), exact, [x, weight.to(dtype)], rows)


def test_norm_of_more_rows_than_programs_sums_each_row_once(
    impl: Impl, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_ops, "_PROGRAMS", 3)  # with 4 rows at a time
    x = torch.ones(29, 1024, device=device)
    weight = torch.ones(1024, device=device, requires_grad=True)
    rms_norm(x, weight, 0.0, impl).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [len(x)] * 1024


@pytest.mark.parametrize("rows", [1, 37])
@pytest.mark.parametrize("inner", some(40, whole=[768, 4096]))
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_gate_and_its_gradients_match_fp64(
    rows: int, inner: int, dtype: torch.dtype, impl: Impl, device: str
) -> None:
    """Gate and up are two tensors or one; include inputs whose sigmoid is 0 or 1."""
    both = 3 * torch.randn(rows, 2 * inner, device=device)
    both[0, :2] = torch.tensor([-200.0, 200.0])

    def exact(gate: Tensor, up: Tensor | None = None) -> Tensor:
        gate, up = gate.chunk(2, -1) if up is None else (gate, up)
        return torch.nn.functional.silu(gate) * up

    check(lambda x: silu_gate(x, impl=impl), exact, [both.to(dtype)])
    halves = [half[None].contiguous() for half in both.to(dtype).chunk(2, -1)]
    check(lambda *given: silu_gate(*given, impl), exact, halves)


@pytest.mark.parametrize("heads", [(4, 2), (5, 1)])
@pytest.mark.parametrize("width", some(16, whole=[2, 96, 128, 256]))
@pytest.mark.parametrize("tables", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_and_its_gradients_match_fp64(
    heads: tuple[int, int], width: int, tables: int, dtype: torch.dtype, impl: Impl, device: str
) -> None:
    """Queries and keys are parts of one product; the halves of a table may differ."""
    batch, tokens, (queries, keys) = 2, 5, heads
    angles = torch.rand(2, tables, tokens, width, device=device).to(dtype)

    def parts(x: Tensor) -> list[Tensor]:
        return [part.transpose(1, 2) for part in x.unflatten(-1, (-1, width)).split(heads, 2)]

    def exact(x: Tensor) -> list[Tensor]:
        cos, sin = angles.double().unsqueeze(2)
        halves = (part.chunk(2, -1) for part in parts(x))
        turned = (torch.cat([-second, first], -1) for first, second in halves)
        return [part * cos + other * sin for part, other in zip(parts(x), turned, strict=True)]

    x = torch.randn(batch, tokens, (queries + keys) * width, device=device).to(dtype)
    check(lambda x: rotate(*parts(x), *angles, impl), exact, [x])
    assert rotate(*parts(x), *angles, impl)[0].transpose(1, 2).is_contiguous()


FUSED = {"rms_norm", "silu_gate", "rotate"}
FAMILIES = some(
    ("llama", FUSED),
    ("qwen3", FUSED),
    ("qwen3_next", {"silu_gate"}),  # norms multiply by 1 + weight, and parts of heads are rotated
    whole=[("granite", FUSED), ("mistral", FUSED), ("mixtral", {"rms_norm", "rotate"})],
)


@pytest.mark.parametrize(("family", "expected"), FAMILIES)
def test_fused_models_compute_what_transformers_computes(
    family: str, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rounding is at most 2**-24; fewer than 2**8 of them follow one another here."""
    plain, used = build_tiny(family).train(), set[str]()
    fused = copy.deepcopy(plain)
    fuse(fused)
    for name in FUSED:
        ours = getattr(decoder_ops, name)
        noted = lambda *given, name=name, ours=ours: (used.add(name), ours(*given))[1]  # noqa: E731
        monkeypatch.setattr(decoder_ops, name, noted)
    ids = torch.randint(plain.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))
    sides = list[list[Tensor]]()
    for model in (plain, fused):
        logits = model(input_ids=ids, use_cache=False).logits
        logits.float().log_softmax(-1)[..., 3].sum().backward()
        sides.append([logits, *(param.grad for param in model.parameters())])
    assert used == expected
    for mine, want in zip(*reversed(sides), strict=True):
        assert (mine is None) == (want is None)
        if mine is not None:
            most = 2**-16 * float(want.detach().abs().max())
            torch.testing.assert_close(mine, want, rtol=2**-16, atol=most)
