"""Weights made of the trainer's shards while they are written, in bounded memory."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainer_bridge.sync.cast_copy import CastCopy, Placement, all_finite, placements
from trainer_bridge.sync.plan import Copy

_SCRATCH_BYTES = 32 << 20


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """base + scale * b @ a, computed in fp32 and rounded once, to the target's dtype: LoRA, merged.
    The base stays.

    a: [rank, columns], b: [rows, rank], any float dtypes, of the rows and columns of this rank's
    shard of the base; of a stack of matrices [experts, rank, columns] and [experts, rows, rank].
    """

    a: Tensor
    b: Tensor
    scale: float

    def rows(self, base: Tensor, first: int, last: int, out: Tensor) -> None:
        """Writes rows (of a stack: matrices) `first` to `last` of the merge to `out`, fp32."""
        out.copy_(base[first:last])
        b = self.b[first:last].float()
        with _full_precision(out.device):
            if base.ndim == 3:
                out.baddbmm_(b, self.a[first:last].float(), alpha=self.scale)
            else:
                out.addmm_(b, self.a.float(), alpha=self.scale)

    def finite(self) -> bool:
        return all_finite(self.a.contiguous()) and all_finite(self.b.contiguous())

    def misfit(self, name: str, base: Tensor) -> str | None:
        *experts, rank, columns = self.a.shape
        if (*experts, columns) == (*base.shape[:-2], base.shape[-1]) and (
            tuple(self.b.shape) == (*base.shape[:-1], rank)
        ):
            return None
        product = f"b {tuple(self.b.shape)} @ a {tuple(self.a.shape)}"
        return f"{name}: {product} does not fit the shard {tuple(base.shape)}"


@contextlib.contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Products of fp32 are computed as such, also where a program allows tf32 or bf16 for speed."""
    backends: Any = torch.backends  # typed without mkldnn's products
    products = backends.cuda.matmul if device.type == "cuda" else backends.mkldnn.matmul
    before = products.fp32_precision
    products.fp32_precision = "ieee"
    try:
        yield
    finally:
        products.fp32_precision = before


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Rows (of a stack: matrices) `first` to `last` of a shard, written from the scratch."""

    name: str
    first: int
    last: int
    casts: Mapping[int, CastCopy]


class DerivedCopies:
    """The copies of one rank whose sources are derived: computed piece by piece into one scratch
    tensor, written from there. Tables are made once; the factors may be others with every run.
    """

    def __init__(
        self,
        copies: Sequence[Copy],
        sources: Mapping[str, Tensor],
        scratch_bytes: int = _SCRATCH_BYTES,
    ) -> None:
        """copies: of derived names only. sources: the shards of their bases."""
        self._sources = sources
        named: dict[str, list[Copy]] = {}
        for copy in copies:
            named.setdefault(copy.name, []).append(copy)
        rows, wanted = dict[str, int](), 0
        for name in named:
            count, width = len(sources[name]), math.prod(sources[name].shape[1:])
            rows[name] = max(1, scratch_bytes // 4 // max(1, width))
            wanted = max(wanted, min(rows[name], count) * width)
        device = next((sources[name].device for name in named), None)
        self._scratch = torch.empty(wanted, dtype=torch.float32, device=device)
        self._pieces: list[_Piece] = []
        for name, mine in named.items():
            count, step = len(sources[name]), rows[name]
            for first in range(0, count, step):
                piece = self._piece(name, first, min(first + step, count), mine)
                if piece.casts:
                    self._pieces.append(piece)

    def start(self, pages: Mapping[int, Tensor], derived: Mapping[str, LowRank]) -> None:
        """Starts the copies on the current stream, each in the scratch after the one before."""
        for piece in self._pieces:
            base = self._sources[piece.name]
            derived[piece.name].rows(
                base, piece.first, piece.last, self._rows(piece.first, piece.last, base)
            )
            for target, cast in piece.casts.items():
                cast.start(pages[target])

    def finite(self, name: str, factors: LowRank, dtype: torch.dtype) -> bool:
        """Tells whether all is finite in `dtype`; computed as for `start`, written nowhere."""
        base = self._sources[name]
        for piece in self._pieces:
            if piece.name == name:
                made = self._rows(piece.first, piece.last, base)
                factors.rows(base, piece.first, piece.last, made)
                if not all_finite(made, dtype):
                    return False
        return True

    def digests(self) -> dict[int, int]:
        """Waits; returns the digests of what `start` wrote, by target."""
        sums: dict[int, int] = {}
        for piece in self._pieces:
            for target, cast in piece.casts.items():
                sums[target] = sums.get(target, 0) + cast.result()
        return sums

    def _piece(self, name: str, first: int, last: int, copies: Sequence[Copy]) -> _Piece:
        source = self._rows(first, last, self._sources[name])
        parts: dict[int, list[Placement]] = {}
        for copy in copies:
            if (part := _rows_of(copy, first, last)) is not None:
                parts.setdefault(copy.target, []).extend(placements(part, source))
        casts = {target: CastCopy(places) for target, places in parts.items()}
        return _Piece(name=name, first=first, last=last, casts=casts)

    def _rows(self, first: int, last: int, base: Tensor) -> Tensor:
        shape = (last - first, *base.shape[1:])
        return self._scratch[: math.prod(shape)].view(shape)


def _rows_of(copy: Copy, first: int, last: int) -> Copy | None:
    """Returns what a copy takes of rows `first` to `last`, counted from `first`; None: nothing."""
    begin, end = max(copy.start[0], first), min(copy.start[0] + copy.shape[0], last)
    if begin >= end:
        return None
    part = copy.part(0, begin - copy.start[0], end - begin)
    return replace(part, start=(begin - first, *copy.start[1:]))
