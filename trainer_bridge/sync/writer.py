"""Execution of one rank's part of a plan, by tables of rows that are built once per target.

Weights that are computed from shards (merged adapters) are written in bounded memory.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from memsaver.ops.rows import RowCopies, Rows, box_rows
from memsaver.system.replaced import having
from trainer_bridge.errors import listed
from trainer_bridge.fsdp_internals import local_tensor
from trainer_bridge.sync.plan import Copy, SyncPlan
from trainer_bridge.sync.shards import SourceShard, shard_of

SCRATCH_BYTES = 128 << 20  # each step through it takes the host more time than the GPU
_SAMPLED_NAMES, _SAMPLED_ELEMENTS = 8, 1 << 17


class Shards:
    """The part of parameters and buffers that this rank holds.

    `read` returns the current tensors by checkpoint name, tied ones once. A tensor that is not a
    DTensor is whole on every rank.
    """

    def __init__(self, read: Callable[[], Mapping[str, Tensor]]) -> None:
        self._read = read
        self._sharded: dict[str, object] = {}

    def described(self) -> list[SourceShard]:
        """Return the boxes that this rank holds, whose content `tensors` returns."""
        rank, shards = dist.get_rank() if dist.is_initialized() else 0, []
        for name, param in self._read().items():
            self._sharded[name] = _sharding(param)
            shards.append(shard_of(name, param, rank))
        return shards

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's part of every parameter and buffer, by name.

        A parameter that is sharded differently than when it was described raises a ValueError.
        """
        params = self._read()
        for name, before in self._sharded.items():
            if name in params and (now := _sharding(params[name])) != before:
                raise ValueError(
                    f"{name} is {now or 'whole'}, and was {before or 'whole'} when the sync was "
                    "connected; connect again (nothing was written)"
                )
        return {name: local_tensor(param) for name, param in params.items()}


def _sharding(param: Tensor) -> object:
    """Return mesh and placements of a sharded parameter; None if it is whole."""
    return (param.device_mesh, param.placements) if isinstance(param, DTensor) else None


def rows_of_copy(copy: Copy, source: Tensor) -> Rows:
    """Convert a copy to rows of `source`, which has any strides and the box at `copy.start`."""
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
    gpus = (tensor.device for tensor in tensors.values() if tensor.is_cuda)
    return next(gpus, torch.device("cpu"))


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """Factors of a merged LoRA weight, base + scale * b @ a.

    The merge is computed in fp32 and rounded once to the target's dtype. The base is not changed.

    Attributes:
        a: [rank, columns] or, for a stack of matrices, [experts, rank, columns], of any float
            dtype. Columns are those of this rank's shard of the base.
        b: [rows, rank] or [experts, rows, rank], of any float dtype. Rows are those of the shard.
        scale: Factor of the product.
    """

    a: Tensor
    b: Tensor
    scale: float

    def rows(self, base: Tensor, first: int, last: int, out: Tensor) -> None:
        """Write rows (or matrices of a stack) `first` to `last` of the merge to `out`, fp32.

        The product is complete before it is added to the base. Adding partial products would round
        each of them to the precision of the base.
        """
        stacked = base.ndim == 3
        a, product = (self.a[first:last], torch.bmm) if stacked else (self.a, torch.mm)
        with _full_precision(out.device):
            product(self.b[first:last].float(), a.float(), out=out)
        torch.add(base[first:last], out, alpha=self.scale, out=out)

    def merge(self, base: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the merge, rounded once to `dtype`, with the bits that a sync writes."""
        out, scratch = torch.empty_like(base, dtype=dtype), scratch_for([base], base.device)
        for first, last in _row_steps(base):
            rows = _made(first, last, base, scratch)
            self.rows(base, first, last, rows)
            out[first:last] = rows
        return out

    def rounding(self, base: Tensor, dtype: torch.dtype) -> Tensor:
        """Measure how much of the product survives when the merge is rounded to `dtype`.

        The measure ignores the error of rounding the base itself.

        Returns:
            fp32 [2]: the inner product of the rounded move with the exact one, and the exact one's
            sum of squares, over a sample of the first rows. Their ratio is the length of the
            rounded move along the exact one.
        """
        a, b = self.a, self.b
        if base.ndim == 3:
            a, b, base = a[0], b[0], base[0]
        count = max(1, _SAMPLED_ELEMENTS // base.shape[1])
        base = base[:count].float()
        with _full_precision(base.device):
            move = b[:count].float() @ a.float() * self.scale
        moved = (base + move).to(dtype).float() - base.to(dtype).float()
        return torch.stack([(moved * move).sum(), move.square().sum()])


def _full_precision(device: torch.device) -> AbstractContextManager[None]:
    """Compute fp32 products in full precision, even if the program allows tf32 or bf16."""
    backends: Any = torch.backends  # its types lack mkldnn.matmul
    products = backends.cuda.matmul if device.type == "cuda" else backends.mkldnn.matmul
    return having(products, fp32_precision="ieee")


def scratch_for(bases: Iterable[Tensor], device: torch.device) -> Tensor:
    """Allocate fp32 scratch on `device` for the merges of shards, one step of one shard at a time.

    It has `SCRATCH_BYTES`, less if the shards are smaller, more if a single row needs more.
    """
    size = max((base[: _step_rows(base)].numel() for base in bases), default=0)
    return torch.empty(size, dtype=torch.float32, device=device)


def _step_rows(base: Tensor) -> int:
    return max(1, SCRATCH_BYTES // 4 // max(1, math.prod(base.shape[1:])))


def _row_steps(base: Tensor) -> Iterator[tuple[int, int]]:
    """Yield the ranges of rows (or matrices of a stack) that are computed together."""
    rows = _step_rows(base)
    for first in range(0, len(base), rows):
        yield first, min(first + rows, len(base))


def _made(first: int, last: int, base: Tensor, scratch: Tensor) -> Tensor:
    """Return the view of the scratch that holds rows `first` to `last` of a merge."""
    shape = (last - first, *base.shape[1:])
    return scratch[: math.prod(shape)].view(shape)


_Step = tuple[str, int, int, dict[int, RowCopies]]
"""Rows of a derived parameter: name, first row, last row, and tables that write them by target."""


class Writer:
    """Copies of one rank from its shards into the bytes of targets or of a message.

    Derived parameters are computed a few rows (or matrices of a stack) at a time in the scratch,
    and written from there. The tables are built once. They stay valid while the layout of the
    targets and the addresses of the shards do not change; factors may change with every run.
    """

    def __init__(
        self,
        copies: Iterable[Copy],
        sources: Mapping[str, Tensor],
        derived: Collection[str],
        scratch: Tensor,
        remote: Set[int] = frozenset(),
    ) -> None:
        """Build the tables of this rank's copies.

        `sources` has this rank's tensors by name. `derived` names the parameters that are computed
        from their shard (`LowRank`). `scratch` is from `scratch_for`; writers that run on the same
        stream may share it. `remote` numbers the targets on other devices.
        """
        self.sources, self._scratch = sources, scratch
        plain: dict[int, list[Rows]] = {}
        computed: dict[str, list[Copy]] = defaultdict(list)
        for copy in copies:
            rows = plain.setdefault(copy.target, [])
            if copy.name in derived:
                computed[copy.name].append(copy)
            else:
                rows.append(rows_of_copy(copy, sources[copy.name]))
        self._tables = {target: RowCopies(rows, scratch.device) for target, rows in plain.items()}
        steps = (self._steps_of(name, parts) for name, parts in computed.items())
        self._steps = list(chain.from_iterable(steps))
        self._remote = remote & self.targets
        self._streams: dict[int, torch.cuda.Stream] = {}

    @property
    def targets(self) -> Set[int]:
        """Return the numbers of the targets that this writer writes."""
        return self._tables.keys()

    def start(self, pages: Mapping[int, Tensor], derived: Mapping[str, LowRank]) -> None:
        """Begin to write all copies.

        `pages` has the bytes of each target, uint8, and `derived` the factors of the derived
        parameters, by name. On a GPU, writes over links begin first, each target on its own stream.
        Writes on the same device overlap with them, on the current stream.
        """
        for target in self._remote:
            self._start_remote(target, pages[target])
        for target in self.targets - self._remote:
            self._tables[target].start(pages[target])
        for name, first, last, tables in self._steps:  # the steps use the scratch one by one
            base = self.sources[name]
            derived[name].rows(base, first, last, _made(first, last, base, self._scratch))
            for target, table in tables.items():
                table.start(pages[target])

    def digests(self) -> dict[int, int]:
        """Wait for the copies, and return their digests by target."""
        digests: dict[int, int] = defaultdict(int)
        for tables in (self._tables, *(tables for *_, tables in self._steps)):
            for target, table in tables.items():
                digests[target] += table.result()
        return digests

    def _steps_of(self, name: str, copies: Sequence[Copy]) -> Iterator[_Step]:
        for first, last in _row_steps(self.sources[name]):
            if tables := self._derived_tables(copies, first, last):
                yield name, first, last, tables

    def _derived_tables(
        self, copies: Sequence[Copy], first: int, last: int
    ) -> dict[int, RowCopies]:
        source = _made(first, last, self.sources[copies[0].name], self._scratch)
        rows: dict[int, list[Rows]] = defaultdict(list)
        for copy in copies:
            begin, end = max(copy.start[0], first), min(copy.start[0] + copy.shape[0], last)
            if begin < end:
                part = copy.part(0, begin - copy.start[0], end - begin)
                part = replace(part, start=(begin - first, *copy.start[1:]))
                rows[copy.target].append(rows_of_copy(part, source))
        return {target: RowCopies(parts, source.device) for target, parts in rows.items()}

    def _start_remote(self, target: int, pages: Tensor) -> None:
        """Begin the copies for a target on another device.

        One program per multiprocessor saturates NVLink, and leaves room for copies on this GPU.
        """
        table = self._tables[target]
        if not table.on_gpu:
            table.start(pages)
            return
        if target not in self._streams:
            self._streams[target] = torch.cuda.Stream()
        stream = self._streams[target]
        # The optimizer step may still be queued.
        stream.wait_stream(torch.cuda.current_stream())
        programs = torch.cuda.get_device_properties(stream.device).multi_processor_count
        with torch.cuda.stream(stream):
            table.start(pages, programs)


def rounding(
    derived: Mapping[str, LowRank], sources: Mapping[str, Tensor], plan: SyncPlan
) -> tuple[float, float]:
    """Sum `LowRank.rounding` over a sample of the derived parameters.

    The sample takes about eighty kernel launches and one synchronization for any model.
    """
    names = [name for name in sorted(derived) if sources[name].numel()]
    chosen = names[:: max(1, math.ceil(len(names) / _SAMPLED_NAMES))]
    dtypes: dict[str, set[torch.dtype]] = {name: set() for name in chosen}
    for planned in plan.slices:
        if planned.name in dtypes:
            dtypes[planned.name].add(planned.piece.torch_dtype)
    sums = [
        derived[name].rounding(sources[name], min(written, key=attrgetter("itemsize")))
        for name, written in dtypes.items()
        if written
    ]
    if not sums:
        return 0.0, 0.0
    served, meant = torch.stack(sums).sum(0).tolist()
    return served, meant


def check_sources(shards: Iterable[SourceShard], sources: Mapping[str, Tensor]) -> None:
    """Raise a ValueError that lists shards that are missing or cannot be read by a sync."""
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
        return f"{shard.name}: {source.dtype} is not a weight's dtype; dequantize it"
    if source.layout != torch.strided or (source.numel() and not source.data_ptr()):
        return f"{shard.name}: its tensor on {source.device} has no memory now"
    return None


def places(sources: Mapping[str, Tensor]) -> list[tuple[object, ...]]:
    """Return address, shape, strides, dtype and device of each tensor, on which tables depend."""
    return [
        (name, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        for name, tensor in sources.items()
    ]
