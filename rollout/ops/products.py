"""Dense products whose rows do not depend on each other, to the bit.

cuBLAS splits the inner dimension of a product over several programs where it has few rows, and the
sum of the parts is rounded in another order. cuBLASLt without that split gives a row of a
half-precision product the same bits whatever rows are beside it, with two exceptions at few rows:
for some shapes it has nothing but a kernel that is up to eleven times slower, and a single row may
differ. There rows are added: as the bits are the same, a measurement may choose how many.

Products of fp32 tensors keep the library's own choice.
"""

import contextlib
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

_REDUCTIONS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
_RUNGS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
_SLOW = 1.5  # times as long as more rows take
_REPEATS = 5
_MAX_ELEMENTS = 1 << 24  # of a product that is measured: 32 MiB
_MAX_ROUTERS = 1024  # rows of a weight that may be a router, whose product may be wide

_Key = tuple[torch.device, torch.dtype, torch.Size, bool, bool]
_padded: dict[_Key, tuple[int, ...]] = {}
"""Rows to compute for each number of rows, of the shapes that need it on a device. Written by
`probe_products` alone.
"""


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    wide: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N].

    Inside of `row_invariant_products` a row's bits depend on nothing but that row.

    Args:
        wide: Return fp32 sums of the exact products, not rounded to x's dtype.
        out: Where to write the result.
    """
    rows, count = _padded.get(_key(weight, bias, wide), ()), len(x)
    if count >= len(rows) or rows[count] == count:
        return _product(x, weight, bias, wide, out)
    more = x.new_empty((rows[count], x.shape[1]))
    more[:count] = x
    found = _product(more, weight, bias, wide)[:count]
    return found if out is None else out.copy_(found)


def _key(weight: Tensor, bias: Tensor | None, wide: bool) -> _Key:
    return weight.device, weight.dtype, weight.shape, bias is not None, wide


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, wide: bool, out: Tensor | None = None
) -> Tensor:
    if wide and x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    if wide:
        return F.linear(x.float(), weight.float())
    return F.linear(x, weight, bias) if out is None else torch.mm(x, weight.t(), out=out)


@contextlib.contextmanager
def row_invariant_products(device: torch.device) -> Iterator[None]:
    """Launch half-precision products on a GPU without split-K, and restore torch's settings.

    The settings are the process's: products that other threads launch meanwhile have them too.
    """
    if device.type != "cuda":
        yield
        return
    matmul, library = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library()
    found = {
        name: (getattr(matmul, name), getattr(matmul, f"{name}_split_k")) for name in _REDUCTIONS
    }
    try:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        for name in _REDUCTIONS:
            setattr(matmul, name, (False, False))
        yield
    finally:
        for name, setting in found.items():
            setattr(matmul, name, setting)
        torch.backends.cuda.preferred_blas_library(library)


@torch.no_grad()
def probe_products(products: Iterable[tuple[Tensor, Tensor | None]]) -> list[tuple[int, ...]]:
    """Measure products with weights on a GPU, and return the shapes whose bits depend on the rows.

    Args:
        products: One weight [N, K] of each shape and its bias [N]. Overwritten: they are zero
            afterwards.
    """
    variant = []
    for weight, bias in products:
        generator = torch.Generator(weight.device).manual_seed(0)
        filled = [weight] if bias is None else [weight, bias]
        for tensor in filled:
            tensor.normal_(generator=generator)
        with warnings.catch_warnings(), row_invariant_products(weight.device):
            warnings.simplefilter("ignore")  # torch calls the choice of a library experimental
            kinds = (False, True) if bias is None and len(weight) <= _MAX_ROUTERS else (False,)
            same = [_probe(weight, bias, wide, generator) for wide in kinds]
            if not all(same):
                variant.append(tuple(weight.shape))
        for tensor in filled:
            tensor.zero_()
    return variant


def _probe(weight: Tensor, bias: Tensor | None, wide: bool, generator: torch.Generator) -> bool:
    """Note how many rows to compute; return whether all of them then have the same bits."""
    most = max(33, min(2 * _RUNGS[-1] + 1, _MAX_ELEMENTS // len(weight)))
    x = torch.empty((most, weight.shape[1]), dtype=weight.dtype, device=weight.device)
    x.normal_(generator=generator)
    whole = _product(x, weight, bias, wide)
    times: dict[int, float] = {}
    for rows in _RUNGS:
        if rows < most and torch.equal(_product(x[:rows], weight, bias, wide), whole[:rows]):
            times[rows] = _shortest(x[:rows], weight, bias, wide)
    chosen = {rows: _fastest(times, rows) for rows in _RUNGS if rows < most}
    if any(rows != more for rows, more in chosen.items()):
        rungs = (_RUNGS[bisect_left(_RUNGS, count)] for count in range(max(chosen) + 1))
        _padded[_key(weight, bias, wide)] = tuple(chosen[rung] for rung in rungs)
    return all(more in times for more in chosen.values())


def _fastest(times: dict[int, float], rows: int) -> int:
    """Return the least number of rows from `rows` on that is not slow for its size."""
    enough = {more: time for more, time in times.items() if more >= rows}
    limit = _SLOW * min(enough.values(), default=0.0)
    return min((more for more, time in enough.items() if time <= limit), default=rows)


def _shortest(x: Tensor, weight: Tensor, bias: Tensor | None, wide: bool) -> float:
    """Return the milliseconds of one product, the least of some."""
    clock = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
    for event in clock:
        event.record()
        _product(x, weight, bias, wide)
    torch.cuda.synchronize(x.device)
    return min(first.elapsed_time(then) for first, then in pairwise(clock))
