"""Tells which pages a rank can map, and maps them."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

import memsaver
from memsaver.common.device_ids import device_key
from rollout.types import WeightOffer
from trainer_bridge.sync.transport.ipc import IpcTicket


def obstacle(place: str, target: str) -> str | None:
    """Tells why this process, its device at `place`, cannot map pages at `target`; None: it can.

    Places are as of `memsaver.common.device_ids.place_of`; one without a host is on this one. Of a
    GPU that is hidden here (CUDA_VISIBLE_DEVICES) only mapping can tell; it is tried.
    """
    (host, mine), (other, theirs) = _split(place), _split(target)
    if host and other and host != other:
        return f"{other} is another machine than {host}"
    if not theirs.startswith("GPU-") or theirs == mine:
        return None
    gpus = {
        device_key(torch.device("cuda", index)): index for index in range(torch.cuda.device_count())
    }
    if (
        mine in gpus
        and theirs in gpus
        and not torch.cuda.can_device_access_peer(gpus[mine], gpus[theirs])
    ):
        return f"{mine} cannot reach {theirs}"
    return None


def _split(place: str) -> tuple[str, str]:
    host, _, device = place.rpartition("/")
    return host, device


def mapped(offer: WeightOffer, kept: memsaver.LeaseCache, uses: contextlib.ExitStack) -> Tensor:
    """Maps all bytes of the offered pages, uint8, for as long as the uses last."""
    if isinstance(offer.ticket, IpcTicket):
        pages = offer.ticket.map()
    else:
        try:
            lease = uses.enter_context(kept.use(offer.ticket, at_least=offer.manifest.nbytes))
        except memsaver.LeaseError as error:
            raise memsaver.LeaseError(
                f"{error} (where pages cannot be mapped at all, connect with transport='handle')"
            ) from error
        pages = lease.tensor((lease.nbytes,), torch.uint8)
    if pages.nbytes < offer.manifest.nbytes:
        described = f"its manifest describes {offer.manifest.nbytes}"
        text = f"the rollout shares {pages.nbytes} bytes, {described}"
        raise ValueError(f"{text}; offer all of tag weights")
    return pages
