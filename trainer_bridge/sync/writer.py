"""Write one rank's part of a plan: a table of rows for each target, made once; and weights that are
made of the shards while they are written, in bounded memory.
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from memsaver.ops.rows import RowCopies, Rows, box_rows
from trainer_bridge.errors import listed
from trainer_bridge.sync.plan import Copy, SyncPlan
from trainer_bridge.sync.shards import SourceShard, shard_of

SCRATCH_BYTES = 32 << 20
_SAMPLED_NAMES, _SAMPLED_ELEMENTS = 8, 1 << 17


class Shards:
    """This rank's part of parameters and buffers."""

    def __init__(self, read: Callable[[], Mapping[str, Tensor]]) -> None:
        """read: returns them as they are now, by checkpoint name, tied ones once. What is no
        DTensor is whole on every rank.
        """
        self._read = read
        self._sharded: dict[str, object] = {}

    def described(self) -> list[SourceShard]:
        """Return which box of which parameter this rank holds; `tensors` are of these boxes."""
        rank, found = dist.get_rank() if dist.is_initialized() else 0, []
        for name, param in self._read().items():
            self._sharded[name] = _sharding(param)
            found.append(shard_of(name, param, rank))
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's rows of every parameter. A ValueError names one that is sharded
        otherwise than it was described.
        """
        params = self._read()
        for name, before in self._sharded.items():
            if name in params and (now := _sharding(params[name])) != before:
                raise ValueError(
                    f"{name} is {now or 'whole'}, and was {before or 'whole'} when the sync was "
                    "connected; connect anew (nothing was written)"
                )
        return {name: _stored(param).detach() for name, param in params.items()}


def _sharding(param: Tensor) -> object:
    """Return over which mesh, and how, a parameter is sharded; None: whole."""
    return (param.device_mesh, param.placements) if isinstance(param, DTensor) else None


def _stored(param: Tensor) -> Tensor:
    """Return the local shard. `to_local` takes a hundred times as long, every time."""
    return param._local_tensor if isinstance(param, DTensor) else param


def copy_rows(copy: Copy, source: Tensor) -> Rows:
    """Return a copy as rows. source: of any strides; the box at `copy.start` is in it."""
    return box_rows(
        copy.shape,
        copy.torch_dtype,
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


def scratch_for(sources: Mapping[str, Tensor], derived: Iterable[str]) -> Tensor:
    """Make fp32 memory, on the sources' device, for as many rows of these shards as a part of it
    holds (`SCRATCH_BYTES`), at least one.
    """
    bases = [sources[name] for name in derived if name in sources]
    least = max((math.prod(base.shape[1:]) for base in bases), default=0)
    most = max((base.numel() for base in bases), default=0)
    size = max(least, min(most, SCRATCH_BYTES // 4))
    return torch.empty(size, dtype=torch.float32, device=device_of(sources))


_Step = tuple[str, int, int, dict[int, RowCopies]]
"""Rows of a derived parameter: its name, first row, last row, what is written of them by target."""


class Writer:
    """Copies of one rank, with the shards they come from, into targets' bytes or into a message.

    Derived parameters are computed a few rows (of a stack: matrices) at a time into the scratch,
    and written from there. Tables are made once, and are good as long as the plan's layout is
    offered and the shards keep their addresses; the factors may be others with every run.
    """

    def __init__(
        self,
        copies: Iterable[Copy],
        sources: Mapping[str, Tensor],
        derived: Collection[str],
        scratch: Tensor,
        remote: Set[int] = frozenset(),
    ) -> None:
        """Make the tables.

        Args:
            copies: What is written, of one rank.
            sources: Its tensors, by name.
            derived: Names of parameters that are made of their shard (`LowRank`).
            scratch: `scratch_for` them; others may have it that write before or after, on the same
                stream.
            remote: Targets on other devices.
        """
        self.sources, self._scratch = sources, scratch
        plain: dict[int, list[Rows]] = {}
        made: dict[str, list[Copy]] = defaultdict(list)
        for copy in copies:
            rows = plain.setdefault(copy.target, [])
            if copy.name in derived:
                made[copy.name].append(copy)
            else:
                rows.append(copy_rows(copy, sources[copy.name]))
        device = scratch.device
        self._tables = {target: RowCopies(rows, device) for target, rows in plain.items()}
        steps = (self._steps_of(name, mine) for name, mine in made.items())
        self._steps = list(chain.from_iterable(steps))
        self._remote = remote & self.targets
        self._streams: dict[int, torch.cuda.Stream] = {}

    @property
    def targets(self) -> Set[int]:
        """Return the numbers of the targets that are written."""
        return self._tables.keys()

    def start(self, pages: Mapping[int, Tensor], derived: Mapping[str, LowRank]) -> None:
        """Begin to write all copies into the targets' bytes: by target, uint8.

        On a GPU the writes over links begin first, each on a stream of its own, and the others run
        beside them, on the current stream.
        """
        for target in self._remote:
            self._start_remote(target, pages[target])
        for target in self.targets - self._remote:
            self._tables[target].start(pages[target])
        for name, first, last, tables in self._steps:  # each in the scratch after the one before
            base = self.sources[name]
            derived[name].rows(base, first, last, self._made(first, last, base))
            for target, table in tables.items():
                table.start(pages[target])

    def digests(self) -> dict[int, int]:
        """Wait; return the digests of what `start` wrote, by target."""
        digests: dict[int, int] = defaultdict(int)
        for tables in (self._tables, *(tables for *_, tables in self._steps)):
            for target, table in tables.items():
                digests[target] += table.result()
        return digests

    def _steps_of(self, name: str, copies: Sequence[Copy]) -> Iterator[_Step]:
        base = self.sources[name]
        rows = max(1, self._scratch.numel() // max(1, math.prod(base.shape[1:])))
        for first in range(0, len(base), rows):
            last = min(first + rows, len(base))
            if tables := self._derived_tables(copies, first, last):
                yield name, first, last, tables

    def _derived_tables(
        self, copies: Sequence[Copy], first: int, last: int
    ) -> dict[int, RowCopies]:
        source = self._made(first, last, self.sources[copies[0].name])
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


def rounding(
    derived: Mapping[str, LowRank], sources: Mapping[str, Tensor], plan: SyncPlan
) -> tuple[float, float]:
    """Return `LowRank.rounding` to what the plan writes, summed over a few parameters at even
    distances: about eighty small launches and a wait, however large the model.
    """
    names = [name for name in sorted(derived) if sources[name].numel()]
    chosen = names[:: max(1, math.ceil(len(names) / _SAMPLED_NAMES))]
    dtypes: dict[str, set[torch.dtype]] = {name: set() for name in chosen}
    for each in plan.slices:
        if each.name in dtypes:
            dtypes[each.name].add(each.piece.torch_dtype)
    sums = [
        derived[name].rounding(sources[name], min(found, key=attrgetter("itemsize")))
        for name, found in dtypes.items()
        if found
    ]
    if not sums:
        return 0.0, 0.0
    lost, moved = torch.stack(sums).sum(0).tolist()
    return lost, moved


def check_sources(shards: Iterable[SourceShard], sources: Mapping[str, Tensor]) -> None:
    """Raise a ValueError that lists shards that are missing, or cannot be written from."""
    misfits = (_misfit(sources, shard) for shard in shards)
    if problems := [misfit for misfit in misfits if misfit is not None]:
        raise ValueError(f"the shards do not fit the plan, nothing was written: {listed(problems)}")


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
