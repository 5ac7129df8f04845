"""Dense products whose rows do not depend on each other, to the bit.

cuBLAS splits the inner dimension of a product over several programs where it has few rows, and the
sum of the parts is rounded in another order. cuBLASLt without that split gives a row of a
half-precision product the same bits whatever rows are beside it, at the same speed; a product of
one row alone is the exception at some shapes. Products of fp32 tensors keep the library's own
choice.
"""

import contextlib
import warnings
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_ROWS = 2  # a product of one row may take another way through the inner dimension
_REDUCTIONS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
_PROBED_ROWS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 64, 100, 128, 257)
_MAX_PROBED_ELEMENTS = 1 << 22  # of a product: 8 MiB


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N] in their dtype.

    Inside of `row_invariant_products` a row's bits depend on nothing but that row.
    """
    if x.is_cuda and len(x) < MIN_ROWS:
        return F.linear(x.expand(MIN_ROWS, -1), weight, bias)[: len(x)]
    return F.linear(x, weight, bias)


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
def row_variant_shapes(products: Iterable[tuple[Tensor, Tensor | None]]) -> list[tuple[int, ...]]:
    """Return the shapes of the weights whose products depend on their number of rows.

    Args:
        products: One weight [N, K] on a GPU and its bias [N] for each shape. Overwritten: they
            are zero afterwards.
    """
    found = []
    for weight, bias in products:
        generator = torch.Generator(weight.device).manual_seed(0)
        filled = [weight] if bias is None else [weight, bias]
        for tensor in filled:
            tensor.normal_(generator=generator)
        words, inner = weight.shape
        rows = min(max(_PROBED_ROWS), max(32, _MAX_PROBED_ELEMENTS // words))
        x = torch.empty((rows, inner), dtype=weight.dtype, device=weight.device)
        x.normal_(generator=generator)
        with warnings.catch_warnings(), row_invariant_products(weight.device):
            warnings.simplefilter("ignore")  # torch calls the choice of a library experimental
            whole = linear(x, weight, bias)
            differs = [
                (linear(x[:count], weight, bias) != whole[:count]).any()
                for count in _PROBED_ROWS
                if count < rows
            ]
        if torch.stack(differs).any():
            found.append((words, inner))
        for tensor in filled:
            tensor.zero_()
    return found
