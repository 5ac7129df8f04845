"""Write one rank's part of a plan: a table of rows for each target, made once; and weights that are
made of the shards while they are written, in bounded memory.
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from memsaver.ops.rows import RowCopies, Rows, box_rows
from trainer_bridge.errors import listed
from trainer_bridge.sync.plan import Copy, SyncPlan
from trainer_bridge.sync.shards import SourceShard, itemsize, torch_dtype

_SCRATCH_BYTES = 32 << 20
_SAMPLED_NAMES, _SAMPLED_ELEMENTS = 8, 1 << 17


def copy_rows(copy: Copy, source: Tensor) -> Rows:
    """Return a copy as rows. source: of any strides; the box at `copy.start` is in it."""
    return box_rows(
        copy.shape,
        torch_dtype(copy.dtype),
        offset=copy.offset,
        strides=copy.strides,
        index=copy.index_base,
        index_strides=copy.index_strides,
        source=source,
        start=copy.start,
    )


def device_of(tensors: Mapping[str, Tensor]) -> torch.device:
    """Return the GPU of this rank's tensors, or the CPU."""
    return next((each.device for each in tensors.values() if each.is_cuda), torch.device("cpu"))


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


class DerivedCopies:
    """The copies of one rank whose sources are derived: computed a few rows (of a stack: matrices)
    at a time into one scratch tensor, written from there. Tables are made once; the factors may be
    others with every run.
    """

    def __init__(
        self,
        copies: Sequence[Copy],
        sources: Mapping[str, Tensor],
        scratch_bytes: int = _SCRATCH_BYTES,
    ) -> None:
        """copies: of derived names only. sources: the shards of their bases."""
        self._sources = sources
        named: dict[str, list[Copy]] = defaultdict(list)
        for copy in copies:
            named[copy.name].append(copy)
        steps, wanted = dict[str, int](), 0
        for name in named:
            count, width = len(sources[name]), math.prod(sources[name].shape[1:])
            steps[name] = max(1, min(count, scratch_bytes // 4 // max(1, width)))
            wanted = max(wanted, steps[name] * width)
        self._scratch = torch.empty(wanted, dtype=torch.float32, device=device_of(sources))
        # (name, first row, last row, what is written of them by target)
        self._steps: list[tuple[str, int, int, dict[int, RowCopies]]] = []
        for name, mine in named.items():
            count = len(sources[name])
            for first in range(0, count, steps[name]):
                last = min(first + steps[name], count)
                if tables := self._tables(mine, first, last):
                    self._steps.append((name, first, last, tables))

    def start(self, pages: Mapping[int, Tensor], derived: Mapping[str, LowRank]) -> None:
        """Start the copies on the current stream, each in the scratch after the one before."""
        for name, first, last, tables in self._steps:
            base = self._sources[name]
            derived[name].rows(base, first, last, self._made(first, last, base))
            for target, table in tables.items():
                table.start(pages[target])

    def digests(self) -> dict[int, int]:
        """Wait; return the digests of what `start` wrote, by target."""
        sums: dict[int, int] = defaultdict(int)
        for _, _, _, tables in self._steps:
            for target, table in tables.items():
                sums[target] += table.result()
        return sums

    def _tables(self, copies: Sequence[Copy], first: int, last: int) -> dict[int, RowCopies]:
        source = self._made(first, last, self._sources[copies[0].name])
        rows: dict[int, list[Rows]] = defaultdict(list)
        for copy in copies:
            begin, end = max(copy.start[0], first), min(copy.start[0] + copy.shape[0], last)
            if begin < end:
                part = copy.part(0, begin - copy.start[0], end - begin)
                part = replace(part, start=(begin - first, *copy.start[1:]))
                rows[copy.target].append(copy_rows(part, source))
        return {target: RowCopies(mine, source.device) for target, mine in rows.items()}

    def _made(self, first: int, last: int, base: Tensor) -> Tensor:
        shape = (last - first, *base.shape[1:])
        return self._scratch[: math.prod(shape)].view(shape)


@dataclass(frozen=True, kw_only=True)
class Written:
    """Bytes of a rank that lie in a target; link_bytes: to another device. digest: mod 2**64."""

    nbytes: int
    link_bytes: int
    digest: int


class Writer:
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
        """Make the tables.

        Args:
            plan: Of all ranks.
            shards: This rank's.
            sources: Their tensors, by name.
            rank: This one.
            derived: Names of parameters that are made of their shard (`LowRank`).
            targets: Write into these only; None: all.

        Raises:
            ValueError: Lists shards that are missing or of another shape.
        """
        boxes = {shard.name: shard for shard in shards}
        self.sources, self._dtypes = sources, defaultdict[str, set[str]](set)
        mine: dict[int, list[Copy]] = defaultdict(list)
        for copy in plan.copies(rank):
            self._dtypes[copy.name].add(copy.dtype)
            if targets is None or copy.target in targets:
                mine[copy.target].append(copy)
        misfits = (_misfit(sources, boxes[name]) for name in sorted(self._dtypes))
        if problems := [misfit for misfit in misfits if misfit is not None]:
            rule = f"the shards of rank {rank} do not fit the plan, nothing was written"
            raise ValueError(f"{rule}: {listed(problems)}")
        self._nbytes: dict[int, int] = {}
        self._tables: dict[int, RowCopies] = {}
        made: list[Copy] = []
        for target, copies in mine.items():
            self._nbytes[target] = sum(copy.nbytes for copy in copies)
            made += (copy for copy in copies if copy.name in derived)
            plain = (copy for copy in copies if copy.name not in derived)
            rows = [copy_rows(copy, sources[copy.name]) for copy in plain]
            self._tables[target] = RowCopies(rows, device_of(sources))
        self._derived = DerivedCopies(made, sources)
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._remote = {
            target for target in mine if plan.targets[target].place != plan.places[rank]
        }

    @property
    def targets(self) -> Set[int]:
        """Return the numbers of the targets that this rank writes into."""
        return self._tables.keys()

    def write(
        self, pages: Mapping[int, Tensor], derived: Mapping[str, LowRank]
    ) -> dict[int, Written]:
        """Write all copies into the targets' bytes (by target: uint8, from the start of the tag),
        and wait.

        On a GPU the writes over links begin first, each on a stream of its own, and the others run
        beside them.
        """
        for target in self._remote:
            self._start_remote(target, pages[target])
        for target in self.targets - self._remote:
            self._tables[target].start(pages[target])
        self._derived.start(pages, derived)
        made = self._derived.digests()
        return {
            target: Written(
                nbytes=self._nbytes[target],
                link_bytes=self._nbytes[target] if target in self._remote else 0,
                digest=table.result() + made.get(target, 0),
            )
            for target, table in self._tables.items()
        }

    def check(self, derived: Mapping[str, LowRank]) -> None:
        """Raise a ValueError that lists factors that do not fit their base."""
        names = sorted(derived.keys() & self._dtypes.keys())
        misfits = (derived[name].misfit(name, self.sources[name]) for name in names)
        if problems := [misfit for misfit in misfits if misfit is not None]:
            raise ValueError(f"the weights are refused, nothing was written: {listed(problems)}")

    def rounding(self, derived: Mapping[str, LowRank]) -> tuple[float, float]:
        """Return `LowRank.rounding` summed over a few parameters, at even distances: about eighty
        small launches and a wait, however large the model.
        """
        names = sorted(derived.keys() & self._dtypes.keys())
        names = [name for name in names if self.sources[name].numel()]
        chosen = names[:: max(1, math.ceil(len(names) / _SAMPLED_NAMES))]
        if not chosen:
            return 0.0, 0.0
        sums = list[Tensor]()
        for name in chosen:
            dtype = torch_dtype(min(self._dtypes[name], key=itemsize))
            sums.append(derived[name].rounding(self.sources[name], dtype))
        lost, moved = torch.stack(sums).sum(0).tolist()
        return lost, moved

    def _start_remote(self, target: int, pages: Tensor) -> None:
        """One program a multiprocessor fills NVLink, and leaves room for the copies on this GPU."""
        table = self._tables[target]
        if not table.on_gpu:
            table.start(pages)
            return
        if target not in self._streams:
            self._streams[target] = torch.cuda.Stream()
        stream = self._streams[target]
        # The step that made the weights may be queued.
        stream.wait_stream(torch.cuda.current_stream())
        programs = torch.cuda.get_device_properties(stream.device).multi_processor_count
        with torch.cuda.stream(stream):
            table.start(pages, programs)


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
