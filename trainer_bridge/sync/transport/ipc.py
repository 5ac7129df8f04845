"""cudaIpc, for engines that are not ours: cudaMalloc's memory has no descriptor for `attach`."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from memsaver.common.machine import device_key

_DEVICE = 6  # of the arguments of rebuild_cuda_tensor
# Of them, the same for every ticket.
_KNOWN = {0: torch.Tensor, 4: torch.storage.TypedStorage, 5: torch.uint8}


@dataclass(frozen=True, kw_only=True)
class IpcTicket:
    """Permission to map one tensor of another process; plain data. Good as long as that process
    keeps the tensor.

    arguments: of rebuild_cuda_tensor, without those that are the same for every ticket.
    """

    arguments: tuple[Any, ...]
    device_key: str

    def map(self) -> Tensor:
        """Maps all bytes of the tensor, uint8, once in this process; it stays mapped until others
        have taken its place.

        Raises a ValueError if the GPU is not visible here. The ticket's own maker cannot map it.
        """
        return map_once(self)


def ipc_ticket(tensor: Tensor) -> IpcTicket:
    """tensor: contiguous, of cudaMalloc (not of expandable segments), the arena of an offer."""
    if not tensor.is_cuda or not tensor.is_contiguous():
        raise ValueError(
            f"cudaIpc shares contiguous CUDA tensors, got {tuple(tensor.shape)} on {tensor.device}"
        )
    _, arguments = reduce_tensor(tensor.detach().view(-1).view(torch.uint8))
    assert all(arguments[at] is known for at, known in _KNOWN.items()), (
        "torch shares CUDA tensors in another way"
    )
    plain = [tuple(each) if isinstance(each, torch.Size) else each for each in arguments]
    kept = tuple(each for at, each in enumerate(plain) if at not in _KNOWN)
    return IpcTicket(arguments=kept, device_key=device_key(tensor.device))


@lru_cache(maxsize=16)  # torch counts how often a ticket is opened
def map_once(ticket: IpcTicket) -> Tensor:
    for index in range(torch.cuda.device_count()):
        if device_key(torch.device("cuda", index)) == ticket.device_key:
            arguments = list(ticket.arguments)
            for at, known in _KNOWN.items():
                arguments.insert(at, known)
            arguments[_DEVICE] = index  # the other process may count its GPUs otherwise
            return rebuild_cuda_tensor(*arguments)
    raise ValueError(
        f"{ticket.device_key} is not visible in this process; add it to CUDA_VISIBLE_DEVICES"
    )
