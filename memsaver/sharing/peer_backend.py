"""Makes the backends that map other savers' memory here: on GPUs always for the current one.

So no context and no stream appears on a GPU because its memory is mapped, and it need not be
visible here.
"""

from __future__ import annotations

import os
from functools import cache

import torch

from memsaver.common.device_ids import device_key
from memsaver.errors import LeaseError
from memsaver.vmm import make_backend
from memsaver.vmm.backend import Backend


def peer_backend(key: str, device: torch.device | None = None) -> Backend:
    """Returns the backend for memory of device ``key``, which ``device`` (None: the current GPU) is
    to reach; ``LeaseError`` if it does not, or there is no GPU.
    """
    if key == "cpu":
        return backend_of(torch.device("cpu"))
    if not torch.cuda.is_available():
        raise LeaseError(
            f"{key} is a GPU, and this process sees none; "
            "set CUDA_VISIBLE_DEVICES to one that reaches it"
        )
    here = torch.cuda.current_device() if device is None or device.index is None else device.index
    check_reach(here, key)
    return backend_of(torch.device("cuda", here))


@cache
def backend_of(device: torch.device) -> Backend:
    return make_backend(device)


os.register_at_fork(after_in_child=backend_of.cache_clear)  # it is the parent's


@cache
def check_reach(here: int, key: str) -> None:
    """Raises ``LeaseError`` for a GPU out of reach; of one that is hidden, the driver tells when
    the memory is mapped.
    """
    for index in range(torch.cuda.device_count()):
        there = device_key(torch.device("cuda", index)) == key
        if there and index != here and not torch.cuda.can_device_access_peer(here, index):
            raise LeaseError(
                f"cuda:{here} does not reach the memory of cuda:{index} ({key}); "
                "use GPUs that reach each other (nvidia-smi topo -p2p r)"
            )
