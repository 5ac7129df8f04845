"""Writes one rank's part of a plan: a table of copies for each target, made once; and
weights that are made of the shards while they are written, in bounded memory.
"""

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from trainer_bridge.errors import listed
from trainer_bridge.sync.cast_copy import CastCopy, OnPart, Placement, all_finite, placements
from trainer_bridge.sync.plan import Copy, SyncPlan
from trainer_bridge.sync.shards import SourceShard, itemsize, torch_dtype

_SCRATCH_BYTES = 32 << 20
_SAMPLED_NAMES, _SAMPLED_ELEMENTS = 8, 1 << 17


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
        """Write rows (of a stack: matrices) `first` to `last` of the merge to `out`, fp32.

        The product is whole before it is added: products that are added to the base one by one are
        rounded to its units each.
        """
        stacked = base.ndim == 3
        a, product = (self.a[first:last], torch.bmm) if stacked else (self.a, torch.mm)
        with _full_precision(out.device):
            product(self.b[first:last].float(), a.float(), out=out)
        torch.add(base[first:last], out, alpha=self.scale, out=out)

    def rounding(self, base: Tensor, dtype: torch.dtype) -> Tensor:
        """Return fp32 [2], sums of squares over a sample of the first rows: what rounding to
        `dtype` takes from the product, beyond what it takes from the base, and the product.
        """
        a, b = self.a, self.b
        if base.ndim == 3:
            a, b, base = a[0], b[0], base[0]
        count = max(1, _SAMPLED_ELEMENTS // base.shape[1])
        base = base[:count].float()
        with _full_precision(base.device):
            move = b[:count].float() @ a.float() * self.scale
        moved = (base + move).to(dtype).float() - base.to(dtype).float()
        return torch.stack([(moved - move).square().sum(), move.square().sum()])

    def finite(self) -> bool:
        return all_finite(self.a) and all_finite(self.b)

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


@dataclass(frozen=True, kw_only=True)
class Written:
    """Tells what a rank wrote into a target; link_bytes: to another device. digest: mod 2**64."""

    nbytes: int
    link_bytes: int
    digest: int


class RankCopies:
    """The copies of rank `rank`, with the shards they come from.

    They are good as long as the plan's layout is offered and the shards keep their addresses.
    """

    def __init__(
        self,
        plan: SyncPlan,
        shards: Iterable[SourceShard],
        sources: Mapping[str, Tensor],
        *,
        rank: int = 0,
        derived: Collection[str] = (),
        targets: Collection[int] | None = None,
    ) -> None:
        """shards: this rank's; sources: their tensors, by name. derived: which of them are made of
        their shard (`LowRank`). targets: write into these only; None: all. A ValueError lists
        shards that are missing or of another shape.
        """
        boxes = {shard.name: shard for shard in shards}
        copies = plan.copies(rank)
        self.names = sorted({copy.name for copy in copies})
        self._dtypes: dict[str, set[str]] = {name: set() for name in self.names}
        for copy in copies:
            self._dtypes[copy.name].add(copy.dtype)
        problems = [problem for name in self.names if (problem := _misfit(sources, boxes[name]))]
        if problems:
            rule = f"the shards of rank {rank} do not fit the plan, nothing was written"
            raise ValueError(f"{rule}: {listed(problems)}")
        self.sources = sources
        copies = [copy for copy in copies if targets is None or copy.target in targets]
        self._nbytes: dict[int, int] = {}
        self._casts: dict[int, CastCopy] = {}
        for target in sorted({copy.target for copy in copies}):
            mine = [copy for copy in copies if copy.target == target]
            self._nbytes[target] = sum(copy.nbytes for copy in mine)
            plain = [copy for copy in mine if copy.name not in derived]
            places = (placements(copy, sources[copy.name]) for copy in plain)
            self._casts[target] = CastCopy(list(chain.from_iterable(places)))
        self._derived = DerivedCopies([copy for copy in copies if copy.name in derived], sources)
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._remote = [
            target for target in self._casts if plan.targets[target].place != plan.places[rank]
        ]

    @property
    def targets(self) -> list[int]:
        """Returns the numbers of the targets that this rank writes into."""
        return list(self._casts)

    def write(
        self,
        pages: Mapping[int, Tensor],
        derived: Mapping[str, LowRank],
        on_part: OnPart | None = None,
    ) -> dict[int, Written]:
        """Write all copies into the targets' bytes (by target: uint8, from the start of the tag),
        and wait.

        On a GPU the writes over links begin first, each on a stream of its own, and the others run
        beside them.
        """
        self._start_remote(pages, on_part)
        for target in self._casts.keys() - set(self._remote):
            self._casts[target].start(pages[target], on_part)
        self._derived.start(pages, derived)
        made = self._derived.digests()
        return {
            target: Written(
                nbytes=self._nbytes[target],
                link_bytes=self._nbytes[target] if target in self._remote else 0,
                digest=cast.result() + made.get(target, 0),
            )
            for target, cast in self._casts.items()
        }

    def check(self, derived: Mapping[str, LowRank], finite: bool) -> None:
        """A ValueError lists factors that do not fit their base and, if `finite`, what would be NaN
        or infinite in the dtype that it is written in: all shards are read for that, and the
        derived ones computed.
        """
        misfits = [
            derived[name].misfit(name, self.sources[name]) for name in self.names if name in derived
        ]
        problems = [problem for problem in misfits if problem is not None]
        if finite and not problems:
            problems += self._not_finite(derived)
        if problems:
            raise ValueError(f"the weights are refused, nothing was written: {listed(problems)}")

    def rounding(self, derived: Mapping[str, LowRank]) -> tuple[float, float]:
        """Return `LowRank.rounding` summed over a few parameters, at even distances: about eighty
        small launches and a wait, however large the model.
        """
        names = [name for name in self.names if name in derived and self.sources[name].numel()]
        chosen = names[:: max(1, math.ceil(len(names) / _SAMPLED_NAMES))]
        if not chosen:
            return 0.0, 0.0
        sums = list[Tensor]()
        for name in chosen:
            dtype = torch_dtype(min(self._dtypes[name], key=itemsize))
            sums.append(derived[name].rounding(self.sources[name], dtype))
        lost, moved = torch.stack(sums).sum(0).tolist()
        return lost, moved

    def _not_finite(self, derived: Mapping[str, LowRank]) -> Iterator[str]:
        for name, dtypes in self._dtypes.items():
            beyond = [dtype for dtype in dtypes if not self._finite_as(name, dtype, derived)]
            if not beyond:
                continue
            if name in derived and not derived[name].finite():
                yield f"the adapter of {name} has NaN or infinite values"
            elif not all_finite(self.sources[name]):
                yield f"{name} has NaN or infinite values"
            else:
                yield f"{name} has values beyond the range of {' and '.join(sorted(beyond))}"

    def _finite_as(self, name: str, dtype: str, derived: Mapping[str, LowRank]) -> bool:
        if name in derived:
            return self._derived.finite(name, derived[name], torch_dtype(dtype))
        return all_finite(self.sources[name], torch_dtype(dtype))

    def _start_remote(self, pages: Mapping[int, Tensor], on_part: OnPart | None) -> None:
        """One program a multiprocessor fills NVLink, and leaves room for the copies on this GPU."""
        for target in self._remote:
            cast = self._casts[target]
            if not cast.on_gpu:
                cast.start(pages[target], on_part)
                continue
            if target not in self._streams:
                self._streams[target] = torch.cuda.Stream()
            stream = self._streams[target]
            # The step that made the weights may be queued.
            stream.wait_stream(torch.cuda.current_stream())
            programs = torch.cuda.get_device_properties(stream.device).multi_processor_count
            with torch.cuda.stream(stream):
                cast.start(pages[target], on_part, programs=programs)


def _misfit(sources: Mapping[str, Tensor], shard: SourceShard) -> str | None:
    source = sources.get(shard.name)
    if source is None:
        return f"no shard {shard.name}"
    if tuple(source.shape) != shard.shape:
        return f"{shard.name}: shard {tuple(source.shape)}, {shard.shape} in the plan"
    if not source.is_floating_point():
        return f"{shard.name}: {source.dtype} is not a weight's dtype; dequantise it"
    if source.layout != torch.strided or (source.numel() and not source.data_ptr()):
        return f"{shard.name}: no memory of its own on {source.device}, as it is now"
    return None
