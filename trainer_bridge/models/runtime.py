"""The device and the ranks that a trainer runs on, and blocks of tensors on its tags."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, Protocol, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memsaver import Content, MemorySaver
from memsaver.graph_pool import GraphPool
from memsaver.memory import empty_torch_cache, host_memory
from memsaver.ops.layout import round_up
from trainer_bridge.config import TrainerConfig
from trainer_bridge.models.files.initial import randomise_weights, rebuild_buffers, weights_digest
from trainer_bridge.models.packing import PACKED

# Memory of NCCL on each GPU, as measured with groups of 2 and 4 H100 of one host: of the trainer's
# ranks, and more once they have saved a checkpoint.
_GROUP, _CHECKPOINT = 400 << 20, 450 << 20


def group_bytes(ranks: int, checkpoints: bool) -> int:
    """Return the bytes that NCCL takes of each GPU for the ranks of a trainer."""
    if ranks == 1:
        return 0
    return _GROUP + (_CHECKPOINT if checkpoints else 0)


class Graphs(Protocol):
    """Graphs of a model's passes."""

    def take_memory(self) -> None:
        """Give them memory."""

    def free(self) -> None:
        """Free their memory."""


class GraphMemory(Protocol):
    """Memory in which launches are captured as graphs."""

    def placing(self) -> AbstractContextManager[None]:
        """Return a context that places tensors in this memory."""

    def capture(self, run: Callable[[], None]) -> Any:
        """Capture what a function launches, as an object with a method `replay`."""


@dataclass(frozen=True)
class HostGraphs:
    """Memory of a tag on the CPU, where a replay calls what was captured."""

    saver: MemorySaver
    tag: str

    def placing(self) -> AbstractContextManager[None]:
        return self.saver.region(self.tag, content="discard")

    def capture(self, run: Callable[[], None]) -> Any:
        def replay() -> None:
            with self.placing():
                run()

        return SimpleNamespace(replay=replay)


@dataclass(kw_only=True)
class Runtime:
    """A device and the ranks of a process group, on which one trainer runs.

    A subclass replaces the device: the planner's runs a trainer on tensors without memory.
    """

    device: torch.device
    mesh: DeviceMesh  # ranks over which models are sharded
    rank: int  # among the ranks that share the sequences of a batch
    world: int  # number of these ranks
    attention: str | None = None  # name in transformers; None lets transformers choose
    # Name of the attention over packed sequences, for models that support it (`pack_if_possible`);
    # None pads sequences.
    packed_attention: str | None = PACKED
    keep_unsharded: bool = False  # as `TrainerConfig.keep_unsharded`
    owns_group: bool = False  # whether `close` ends the default process group
    compiles: bool = True  # whether kernels have to be compiled before they are captured
    graphs: Graphs | None = None  # those that have memory

    @classmethod
    def open(cls, name: str, replicate: bool = False) -> Self:
        """Open a device with the ranks of the default process group, created if there is none.

        With `replicate`, no rank shares its models with others.
        """
        device = _use_device(name)
        owned = _ensure_process_group(device)
        rank, world = dist.get_rank(), dist.get_world_size()
        if replicate:
            replicas = init_device_mesh(device.type, (world, 1), mesh_dim_names=("ranks", "fsdp"))
            mesh = replicas["fsdp"]
        else:
            mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("fsdp",))
        return cls(device=device, mesh=mesh, rank=rank, world=world, owns_group=owned)

    def close(self) -> None:
        """End the process group if `open` created it."""
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self.owns_group = False

    def make_buffers(self, model: nn.Module) -> None:
        """Materialize the buffers of a meta model; see `rebuild_buffers`."""
        rebuild_buffers(model, self.device)

    def digest(self, model: nn.Module, masters: Mapping[nn.Parameter, Tensor]) -> str:
        """Return the `weights_digest` of a model."""
        return weights_digest(model, masters)

    def draw_weights(
        self, model: nn.Module, config: TrainerConfig, into: Mapping[nn.Parameter, Tensor]
    ) -> None:
        """Fill a model with random weights; see `randomise_weights`."""
        randomise_weights(model, config, into)

    def host_memory(self, nbytes: int) -> Tensor:
        """Allocate zeroed uint8 [nbytes], pinned for a GPU, or raise a HostMemoryError."""
        remedy = "take more devices, or optimizer_offload=False,"
        return host_memory(nbytes, self.device, "the optimizer's state", remedy)

    def empty_cache(self) -> None:
        """Free torch's cached blocks."""
        empty_torch_cache(self.device)

    def graph_memory(self, saver: MemorySaver, tag: str) -> GraphMemory:
        """Return memory for graphs on a tag."""
        on_gpu = self.device.type == "cuda"
        return GraphPool(saver, tag, "discard") if on_gpu else HostGraphs(saver, tag)

    def use_graphs(self, graphs: Graphs | None) -> None:
        """Give memory to the graphs of the next passes, and to no others."""
        if self.graphs is not None and self.graphs is not graphs:
            self.graphs.free()
        self.graphs = graphs
        if graphs is not None:
            graphs.take_memory()

    def finish(self) -> None:
        """Wait for all work queued on the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def numbers(self, tensor: Tensor) -> NDArray[np.float64]:
        """Read a tensor [N] from the device."""
        return tensor.detach().cpu().double().numpy()

    def average_replicas(self, gradients: Iterable[Tensor]) -> None:
        """Replace gradients by their mean over ranks that have all parameters each."""
        replicas = self.world // self.mesh.size()
        if replicas > 1:
            shards = [*gradients]
            for reduction in [dist.all_reduce(shard, async_op=True) for shard in shards]:
                reduction.wait()
            torch._foreach_mul_(shards, 1 / replicas)

    def sum_ranks(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sum the values of all ranks element by element, in fp64."""
        if self.world == 1:
            return values
        total = torch.from_numpy(values).to(self.device, copy=True)
        dist.all_reduce(total)
        return total.cpu().numpy()


def _use_device(name: str) -> torch.device:
    """Return the named device; a GPU gets an index and becomes the current one."""
    device = torch.device(name)
    if device.type == "cuda":
        device = torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
        torch.cuda.set_device(device)
    return device


def _ensure_process_group(device: torch.device) -> bool:
    """Create a process group of this process alone if there is none; return whether it was created.

    The caller must end a group that was created. An existing group must have the device's backend
    (gloo for the CPU, NCCL for CUDA).
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    if not dist.is_initialized():
        device_id = device if device.type == "cuda" else None
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device_id
        )
        return True
    if backend not in str(dist.get_backend_config()):
        text = f"device {device} needs a process group with {backend}"
        raise ValueError(f"{text}, this process has {dist.get_backend()}")
    return False


ALIGN = 64  # bytes; whole cache lines, and enough for any vector load on a GPU
_END = 256  # bytes; a rollout's weights end at such multiples, and an alias needs as many bytes


def side_by_side(
    specs: Sequence[tuple[tuple[int, ...], torch.dtype]],
    saver: MemorySaver,
    tag: str,
    starts: Sequence[int] | None = None,
    content: Content = "host",
) -> list[Tensor]:
    """Allocate undefined tensors in one block of a tag.

    The tensors keep the block alive. `specs` has the shape and dtype of each tensor, `starts` its
    first byte in the block; None places the tensors one after another.
    """
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in specs]
    if starts is None:
        starts = [0, *accumulate(round_up(size, ALIGN) for size in sizes)][: len(sizes)]
    ends = (start + size for start, size in zip(starts, sizes, strict=True))
    end = round_up(max(ends, default=0), _END)
    block = saver.empty((end,), torch.uint8, tag=tag, content=content)
    return [
        block[start : start + size].view(dtype).view(shape)
        for start, size, (shape, dtype) in zip(starts, sizes, specs, strict=True)
    ]
