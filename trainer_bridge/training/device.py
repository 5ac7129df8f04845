"""Defines what a trainer runs on, and what it does there besides computing."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memsaver import MemorySaver
from memsaver.memory import empty_torch_cache, host_memory
from memsaver.ops.layout import round_up
from trainer_bridge.config import TrainerConfig
from trainer_bridge.training.initial import randomise_weights, rebuild_buffers, weights_digest
from trainer_bridge.training.packing import PACKED


@dataclass(kw_only=True)
class Runtime:
    """A device, and the ranks of a process group on it.

    A subclass has a trainer run on something else; the planner's has tensors without memory.
    mesh: the ranks that every model is sharded over. rank, world: this rank's number among those
    that share the sequences of a batch, and how many they are. attention: transformers' name of
    the attention that models compute with; None leaves the choice to transformers.
    packed_attention: of that over sequences end to end, with models that may be given such
    (`pack_if_possible`); None: they are padded. owns_group: `close` ends the default process group.
    """

    device: torch.device
    mesh: DeviceMesh
    rank: int
    world: int
    attention: str | None = None
    packed_attention: str | None = PACKED
    owns_group: bool = False

    @classmethod
    def open(cls, name: str) -> Self:
        """Take all ranks of the default process group; where there is none, of one made here.

        name: of this process's device, as `TrainerConfig.device` has it.
        """
        device = _use_device(name)
        made = _ensure_process_group(device)
        rank, world = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("fsdp",))
        return cls(device=device, mesh=mesh, rank=rank, world=world, owns_group=made)

    def close(self) -> None:
        """End the process group if it was made here."""
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self.owns_group = False

    def make_buffers(self, model: nn.Module) -> None:
        """Give the buffers of a meta model their content; see `rebuild_buffers`."""
        rebuild_buffers(model, self.device)

    def digest(self, model: nn.Module) -> str:
        """Return `weights_digest`."""
        return weights_digest(model)

    def draw_weights(
        self, model: nn.Module, config: TrainerConfig, into: Mapping[nn.Parameter, Tensor]
    ) -> None:
        """Fill a model without a checkpoint; see `randomise_weights`."""
        randomise_weights(model, config, into)

    def host_memory(self, nbytes: int) -> Tensor:
        """Return uint8 [nbytes], 0, pinned for a GPU; a HostMemoryError says what is missing."""
        remedy = "take more devices, or optimizer_offload=False,"
        return host_memory(nbytes, self.device, "the optimizer's state", remedy)

    def empty_cache(self) -> None:
        """Give torch's cached blocks back to the device."""
        empty_torch_cache(self.device)

    def finish(self) -> None:
        """Wait for the work that is queued on the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def numbers(self, tensor: Tensor) -> list[float]:
        """Return the content of an fp32 tensor of shape [N], read from the device."""
        return tensor.tolist()

    def sum_ranks(self, values: list[float]) -> list[float]:
        """Return the sums of the ranks' values, element by element, in fp64."""
        if self.world == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()


def _use_device(name: str) -> torch.device:
    """Return the device of that name; a GPU with its number, and current from here on."""
    device = torch.device(name)
    if device.type == "cuda":
        device = torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
        torch.cuda.set_device(device)
    return device


def _ensure_process_group(device: torch.device) -> bool:
    """Join the default group, or make one of this process only. True if it was made here and is the
    caller's to end.

    A group that is there must suit the device: gloo for the CPU, NCCL for CUDA.
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


ALIGN = 64  # bytes: whole cache lines, and any vector load on a GPU
_END = 256  # bytes: a rollout's weights end so, and who aliases pages needs all of them


def side_by_side(
    specs: Sequence[tuple[tuple[int, ...], torch.dtype]],
    saver: MemorySaver,
    tag: str,
    starts: Sequence[int] | None = None,
) -> list[Tensor]:
    """Make one tensor a (shape, dtype), all in one allocation of `tag` (content host).

    starts: the first byte of each in the block, None: one after the other. The content is
    undefined. The tensors keep the block alive.
    """
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in specs]
    if starts is None:
        starts = [0, *accumulate(round_up(size, ALIGN) for size in sizes)][: len(sizes)]
    ends = (start + size for start, size in zip(starts, sizes, strict=True))
    end = round_up(max(ends, default=0), _END)
    block = saver.empty((end,), torch.uint8, tag=tag, content="host")
    return [
        block[start : start + size].view(dtype).view(shape)
        for start, size, (shape, dtype) in zip(starts, sizes, specs, strict=True)
    ]
