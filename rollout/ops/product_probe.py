"""Measurements of the products that `row_wise.linear` computes, at the shapes of a model.

Rows are padded where few rows have other bits than many, or where the library only has a slow
kernel for them; as the bits are the same, time chooses the number of rows. In exact runs, products
have the bits of `chain_product`, which replaces the library for shapes that differ from it.
"""

import logging
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import chain, pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from rollout.ops import row_wise
from rollout.ops.chain_product import TILE_ROWS, chain_product

_log = logging.getLogger("rollout")
_T = TypeVar("_T")
_RUNGS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
_BETWEEN = (3, 5, 7, 15, 17, 31, 33, 65, 100, 200)  # rows that padding to _RUNGS avoids
_MANY = (257, 300, 512, 513, 1000, 1024, 2047, 2048)  # rows that are never padded
MOST_ROWS = 4096  # of a product that is compared with its definition
_SLOW = 1.5  # a product is slow if it takes this many times as long as one with more rows
_REPEATS = 5
_MAX_ELEMENTS = 1 << 24  # maximum size of a measured product, in elements (32 MiB)
_MAX_COMPARED = 1 << 26  # the same of a product that is compared with its definition (128 MiB)
_ELEMENTS = 1 << 13  # elements to compare of few rows: of some products, 1 in 200 differs
_PLACES = 4  # most places at which to compare few rows
_MAX_ROUTERS = 1024  # rows of the largest weight that may be a router's: its products may be wide


def is_probed(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a probe must measure the bits of a device's products, which no rule gives."""
    return device.type == "cuda" and dtype != torch.float32


def probe_products(products: Iterable[tuple[Tensor, Tensor | None]]) -> list[tuple[int, ...]]:
    """Measure products on a GPU, choose the number of rows to pad to, and log what padding lacks.

    `products` has one weight [N, K] of each shape and its bias [N]; they are overwritten with
    zeros.

    Returns:
        The shapes for which the bits of a row depend on the number of rows even with padding.
    """
    most = 2 * _RUNGS[-1] + 1
    found = _judge(products, most, _MAX_ELEMENTS, lambda case: _pad(case, case.library()), True)
    shapes = list(dict.fromkeys(shape for shape, same in found if not same))
    if shapes:
        text = "products with weights of %s depend on the number of rows on %s: the same prompt may"
        text += " get results with different last bits in another batch"
        _log.warning(text, _named(shapes), _place())
    return shapes


def define_products(
    products: Iterable[tuple[Tensor, Tensor | None]], *, routers: bool = False, strict: bool = True
) -> str:
    """Let `linear` compute products on a GPU with the bits of `chain_product`; log what was found.

    Where the library has other bits even with padding, `linear` uses `chain_product` from then on.
    Bits alone decide, so all processes with the same kind of GPU and the same libraries decide
    alike. `products` are as for `probe_products`. With `routers`, small ones are also compared with
    results in fp32.

    Returns:
        The text of the log.

    Raises:
        ValueError: The bits of `chain_product` depend on the number of rows on this GPU. Without
            `strict`, a warning says so.
    """
    found = _judge(products, MOST_ROWS, _MAX_COMPARED, _define, routers)
    place = _place()
    if wrong := _named(shape for shape, costs in found if costs == ()):
        rule = f"exact=True: products with weights of {wrong} depend on the number of rows"
        text = f"{rule} on {place}, in Triton too; use exact=False"
        if strict:
            raise ValueError(text)
        _log.warning("%s", text)
        return text
    equal = sum(costs is None for _, costs in found)
    done = f"{equal} of {len(found)} products"
    text = f"exact=True: the library of {place} computes {done} with the defined bits"
    if equal == len(found):
        _log.info("%s", text)
        return text
    slower = {shape: costs for shape, costs in found if costs}
    named, factors = _named(slower), [*chain.from_iterable(slower.values())]
    times = f"{min(factors):.2f} to {max(factors):.2f} times the library's time"
    text += f"; Triton computes those with weights of {named}, in {times}"
    _log.warning("%s", text)
    return text


def _named(shapes: Iterable[tuple[int, ...]]) -> str:
    return ", ".join(dict.fromkeys(f"{words} x {inner}" for words, inner in shapes))


def _place() -> str:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"this {gpu} (torch {torch.__version__})"


class _Case(NamedTuple):
    """A product to measure, with random values."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    wide: bool

    def library(self, rows: slice = slice(None)) -> Tensor:
        return row_wise.library_product(self.x[rows], self.weight, self.bias, self.wide)

    def chain(self, rows: slice = slice(None)) -> Tensor:
        return chain_product(self.x[rows], self.weight, self.bias, wide=self.wide)

    def agrees(self, compute: Callable[[slice], Tensor], whole: Tensor, count: int) -> bool:
        """Return whether `count` rows, at several places, have the bits that `whole` has."""
        enough = -(-_ELEMENTS // (count * len(self.weight)))
        places = min(len(self.x) // count, enough, _PLACES)
        parts = [slice(place * count, (place + 1) * count) for place in range(places)]
        return all(torch.equal(compute(part), whole[part]) for part in parts)


@torch.no_grad()
def _judge(
    products: Iterable[tuple[Tensor, Tensor | None]],
    rows: int,
    elements: int,
    judge: Callable[[_Case], _T],
    routers: bool,
) -> list[tuple[tuple[int, ...], _T]]:
    """Return the shape and the result of `judge` for each product with random values.

    A case has at most `rows` rows, and fewer if the product would exceed `elements`.
    """
    found = []
    for weight, bias in products:
        generator = torch.Generator(weight.device).manual_seed(0)
        filled = [weight] if bias is None else [weight, bias]
        x = weight.new_empty((max(33, min(rows, elements // len(weight))), weight.shape[1]))
        for tensor in (*filled, x):
            tensor.normal_(generator=generator)
        may_route = routers and bias is None and len(weight) <= _MAX_ROUTERS
        with (
            torch.cuda.device_of(weight),
            warnings.catch_warnings(),
            row_wise.row_invariant_products(weight.device),
        ):
            warnings.simplefilter("ignore")  # torch warns that choosing a library is experimental
            for wide in (False, True) if may_route else (False,):
                found.append((tuple(weight.shape), judge(_Case(x, weight, bias, wide))))
        for tensor in filled:
            tensor.zero_()
    return found


def _define(case: _Case) -> tuple[float, ...] | None:
    """Choose how `linear` computes a product with the bits of `chain_product`.

    Returns:
        None if by the library; else how many times longer `chain_product` takes for few and for
        many rows, or an empty tuple if its bits depend on the number of rows.
    """
    whole, most = case.chain(), len(case.x)
    if not all(case.agrees(case.chain, whole, rows) for rows in TILE_ROWS if rows < most):
        return ()
    many = (rows for rows in (*_MANY, most) if rows <= most)
    if _pad(case, whole, _BETWEEN) and all(case.agrees(case.library, whole, n) for n in many):
        return None
    row_wise.chained.add(row_wise.product_key(*case[1:]))
    few_and_many = slice(TILE_ROWS[0]), slice(None)
    return tuple(
        shortest_time(case.chain, rows) / shortest_time(case.library, rows) for rows in few_and_many
    )


def _pad(case: _Case, whole: Tensor, between: tuple[int, ...] = ()) -> bool:
    """Record the padded numbers of rows; return whether all then have the bits of `whole`.

    Rows are padded, too, if `between` has a number of rows with other bits.
    """
    most, times = len(case.x), dict[int, float]()
    for rows in _RUNGS:
        if rows < most and case.agrees(case.library, whole, rows):
            times[rows] = shortest_time(case.library, slice(rows))
    chosen = {rows: _fastest(times, rows) for rows in _RUNGS if rows < most}
    compared = (rows for rows in between if rows < max(chosen))
    if any(rows != more for rows, more in chosen.items()) or not all(
        case.agrees(case.library, whole, rows) for rows in compared
    ):
        rungs = (_RUNGS[bisect_left(_RUNGS, count)] for count in range(max(chosen) + 1))
        row_wise.padded[row_wise.product_key(*case[1:])] = tuple(chosen[rung] for rung in rungs)
    return all(more in times for more in chosen.values())


def _fastest(times: dict[int, float], rows: int) -> int:
    """Return the smallest number of rows, at least `rows`, whose product is not slow."""
    enough = {more: time for more, time in times.items() if more >= rows}
    limit = _SLOW * min(enough.values(), default=0.0)
    return min((more for more, time in enough.items() if time <= limit), default=rows)


def shortest_time(compute: Callable[[slice], Tensor], rows: slice) -> float:
    """Return the milliseconds that a GPU computes a product of `rows`, the minimum of repeats."""
    clock = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
    for event in clock:
        event.record()
        compute(rows)
    torch.cuda.synchronize()
    return min(first.elapsed_time(then) for first, then in pairwise(clock))
