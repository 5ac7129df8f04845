"""Copies slots within a pool, or to host memory and back: dispatch, and the torch reference.

A slot's row of one part and layer is contiguous on both sides, and moved as bytes. To and from the
host one launch copies any number of layers and parts of pinned host memory.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from memsaver.common.machine import Impl, use_triton


def move_rows(
    parts: Sequence[torch.Tensor], tgt: torch.Tensor, src: torch.Tensor, impl: Impl = "auto"
) -> None:
    """`part[:, tgt[i]] = part[:, src[i]]` for every i and part, all read before any is written.

    parts: integers `[L, N, W]`, the same L and N, each with a contiguous last dimension. tgt and
    src: int64 `[n]` on their device, not range-checked; a slot twice in tgt holds any of its rows
    afterwards. Nothing here synchronises.
    """
    if tgt.shape[0] == 0:
        return
    if use_triton(impl, tgt.device):
        from kvcache.ops.move_triton import move_triton

        move_triton(parts, tgt, src)
        return
    for part in parts:
        part[:, tgt] = part[:, src]


@dataclass(frozen=True)
class Side:
    """A part of a slot: `device` uint8 `[L, N, R]`, `host` uint8 `[L, pages, ps, R]`."""

    device: torch.Tensor
    host: torch.Tensor


class HostCopyPlan:
    """The parts of a pool and where their host pages are; good as long as both addresses hold."""

    def __init__(self, parts: Sequence[Side]) -> None:
        self.parts = tuple(parts)
        self.layers, self.page_size = parts[0].device.shape[0], parts[0].host.shape[2]
        self.device = parts[0].device.device
        for part in parts:
            rows = part.device.shape[2], part.host.shape[3]
            assert rows[0] == rows[1] and part.device.stride(2) == part.host.stride(3) == 1, (
                "rows differ"
            )
            assert part.device.dtype == part.host.dtype == torch.uint8, "rows are moved as bytes"

    @cached_property
    def table(self) -> torch.Tensor:
        """int64 `[L * parts, 6]` on the device, all parts of layer 0 first: device address, host
        address, bytes from slot to slot on the device, from page to page and from token to token on
        the host, row bytes.
        """
        rows = [
            (
                part.device.data_ptr() + layer * part.device.stride(0),
                part.host.data_ptr() + layer * part.host.stride(0),
                part.device.stride(1),
                part.host.stride(1),
                part.host.stride(2),
                part.device.shape[2],
            )
            for layer, part in itertools.product(range(self.layers), self.parts)
        ]
        return torch.tensor(rows, dtype=torch.int64, device=self.device)

    @cached_property
    def unit(self) -> int:
        """Bytes moved at once: the most, up to 16, that divide all addresses, strides and rows."""
        numbers = [16]
        for part in self.parts:
            numbers += [part.device.data_ptr(), part.host.data_ptr(), part.device.shape[2]]
            numbers += [*part.device.stride()[:2], *part.host.stride()[:3]]
        return math.gcd(*numbers)


def copy_rows(
    plan: HostCopyPlan,
    host_rows: torch.Tensor,
    device_slots: torch.Tensor,
    layers: range,
    to_host: bool,
    impl: Impl = "auto",
) -> None:
    """Row i of neighbouring `layers`: slot `device_slots[i]` to row `host_rows[i]`, or back.

    Both int64 `[n]` on the device, not range-checked. On a GPU the kernel is queued on the current
    stream; the reference waits. A target named twice holds any of its rows.
    """
    if not len(host_rows) or not layers:
        return
    if use_triton(impl, plan.device):
        from kvcache.ops.move_triton import copy_rows_triton

        parts = len(plan.parts)
        copy_rows_triton(
            plan.table,
            range(layers.start * parts, layers.stop * parts),
            host_rows,
            device_slots,
            page_size=plan.page_size,
            widest=max(part.device.shape[2] for part in plan.parts),
            unit=plan.unit,
            to_host=to_host,
        )
        return
    rows = host_rows.cpu()
    page, token = rows // plan.page_size, rows % plan.page_size
    for part in plan.parts:
        device = part.device[layers.start : layers.stop]
        host = part.host[layers.start : layers.stop]
        if to_host:
            host[:, page, token] = device[:, device_slots].to(host.device)
        else:
            device[:, device_slots] = host[:, page, token].to(device.device)
