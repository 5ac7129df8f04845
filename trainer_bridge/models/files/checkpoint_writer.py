"""Writer of a checkpoint's tensors: at once, or from a copy on the host while training goes on.

The files are those of torch's HuggingFaceStorageWriter, which HuggingFaceStorageReader reads. That
writer serializes under Python's global lock, twice, which would stop a training beside it. Here, a
thread writes the bytes of the copy, without the lock.
"""

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from memsaver.errors import HostMemoryError
from memsaver.ops.layout import round_up
from memsaver.system.threads import workers
from trainer_bridge.models.runtime import Runtime
from trainer_bridge.sync.shards import local_shard, shard_box, shard_ranks

_FILE_BYTES = 2 << 30
_CHUNK = 64 << 20  # bytes of a call of write
_ALIGNED = 64
_DTYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8",
}  # fmt: skip


class _Part(NamedTuple):
    """The part of a tensor that this rank holds."""

    name: str
    start: tuple[int, ...]  # in the whole tensor
    tensor: Tensor


_Files = dict[str, list[_Part]]
"""The parts in each file of this rank, by the file's name."""


class Staging:
    """Host memory of a rank, pinned for a GPU, for the copy of a checkpoint.

    It is kept from checkpoint to checkpoint, because pinning takes longer than copying.

    Args:
        runtime: The rank's device.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._memory: Tensor | None = None

    def copied(self, files: _Files) -> _Files | None:
        """Copy the parts; None if the host has no room."""
        sizes = (part.tensor.nbytes for part in chain.from_iterable(files.values()))
        total = sum(round_up(nbytes, _ALIGNED) for nbytes in sizes)
        if not total:  # another rank writes what all ranks have
            return _Files()
        if self._memory is None or self._memory.nbytes < total:
            self._memory = None
            try:
                self._memory = self._runtime.host_memory(total)
            except HostMemoryError:
                return None
        copies, at = _Files(), 0
        for name, parts in files.items():
            copies[name] = []
            for part in parts:
                source = part.tensor
                place = self._memory[at : at + source.nbytes].view(source.dtype).view(source.shape)
                place.copy_(source, non_blocking=True)
                copies[name].append(part._replace(tensor=place))
                at += round_up(source.nbytes, _ALIGNED)
        self._runtime.finish()
        return copies


class Writing:
    """The writing of this rank's parts of tensors, which may change at once.

    Args:
        directory: An existing directory, shared by the ranks.
        tensors: The tensors by name, each shared by the ranks, or the same on every rank.
        staging: Memory for a copy, which a thread writes; None: all is written in the construction.

    Attributes:
        end: The end of the writing.
    """

    def __init__(
        self, directory: str, tensors: Mapping[str, Tensor], staging: Staging | None
    ) -> None:
        self._directory, self._stopped = directory, False
        files, self.end = _files(tensors), Future[None]()
        if staging is not None and (copies := staging.copied(files)) is not None:
            self.end = workers("checkpoint", 1).submit(self._write, copies)
        else:
            self._write(files)
            self.end.set_result(None)

    def stop(self) -> None:
        """Write no more, and wait for what is being written."""
        self._stopped = True
        wait([self.end])

    def _write(self, files: _Files) -> None:
        for name, parts in files.items():
            # Wide elements come first, so that each begins at a multiple of its size.
            parts.sort(key=lambda part: -part.tensor.element_size())
            with open(Path(self._directory, name), "xb", buffering=0) as file:
                for data in chain([_header(parts)], map(_bytes, parts)):
                    self._write_all(file.fileno(), data)
                os.fsync(file.fileno())

    def _write_all(self, file: int, data: memoryview) -> None:
        while data and not self._stopped:
            data = data[os.write(file, data[:_CHUNK]) :]


def _files(tensors: Mapping[str, Tensor]) -> _Files:
    """Divide the tensors among numbered files of limited size, of which every rank has its own."""
    rank, size = dist.get_rank(), _FILE_BYTES * dist.get_world_size()
    total, files = 0, defaultdict[int, list[_Part]](list)
    for name, tensor in tensors.items():
        number = 1 + total // size
        total += tensor.nbytes
        if isinstance(tensor, DTensor):
            part = _Part(name, tuple(shard_box(tensor).start), local_shard(tensor))
        else:
            part = _Part(name, (0,) * tensor.ndim, tensor.detach())
        if part.tensor.numel() and (rank == 0 or shard_ranks(tensor) > 1):
            files[number].append(part)
    last = 1 + max(0, total - 1) // size
    named = "shard-{:05}-model-{:05}-of-{:05}.safetensors"
    return {named.format(rank + 1, number, last): parts for number, parts in files.items()}


def _header(parts: Sequence[_Part]) -> memoryview:
    entries, at = dict[str, object](), 0
    for name, _, tensor in parts:
        offsets = [at, at + tensor.nbytes]
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": offsets,
        }  # fmt: skip
        at += tensor.nbytes
    places = {name: {"saved_offsets": start} for name, start, _ in parts}
    about = {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}
    text = json.dumps({"__metadata__": about, **entries}).encode()
    text += b" " * (-len(text) % 8)
    return memoryview(len(text).to_bytes(8, "little") + text)


def _bytes(part: _Part) -> memoryview:
    flat: Any = part.tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)
