"""A library of matrix products whose bits are not those of exact runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from torch import Tensor

from rollout.ops import product_probe, row_wise


@contextmanager
def other_library(differs: Callable[[int, int], bool], most_rows: int = 33) -> Iterator[None]:
    """Let products have other values if `differs(rows, columns)`, by the number of rows.

    On the CPU, other products have the defined bits. All take equally long. A probe inside the
    block compares at most `most_rows`, and its results are forgotten.
    """
    library = row_wise.library_product

    def product(
        x: Tensor, weight: Tensor, bias: Tensor | None, wide: bool, out: Tensor | None = None
    ) -> Tensor:
        if differs(len(x), len(weight)):
            result = library(x, weight, bias, wide, out)
            return result.add_(len(x) * 2**-4)
        if x.is_cuda:
            return library(x, weight, bias, wide, out)
        total = (x.double() @ weight.double().t()).float()  # as Triton's interpreter
        total = total if bias is None else total + bias.float()
        result = total if wide else total.to(x.dtype)
        return result if out is None else out.copy_(result)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_wise, "library_product", product)
        patch.setattr(row_wise, "chained", set())
        patch.setattr(row_wise, "padded", {})
        patch.setattr(product_probe, "MOST_ROWS", most_rows)
        patch.setattr(product_probe, "shortest_time", lambda compute, rows: 1.0)
        yield
