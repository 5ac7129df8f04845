"""Rows between the slots of a device pool and pages of host memory: dispatch, and the torch
reference.

Everything is moved as bytes. A slot's row of one part and layer is contiguous on both sides. On a
GPU one launch copies any number of layers and parts, and reads or writes the host memory itself: it
has to be pinned.
"""

import torch

from kvcache.ops.host_copy_plan import HostCopyPlan
from memsaver.common.dispatch import Impl, use_triton


def copy_rows(
    plan: HostCopyPlan,
    host_rows: torch.Tensor,
    device_slots: torch.Tensor,
    layers: range,
    to_host: bool,
    impl: Impl = "auto",
) -> None:
    """Row i of `layers` (neighbours): from slot `device_slots[i]` to row `host_rows[i]` = page * ps
    + token, or back.

    Both int64 `[n]` on the device, not range-checked. On a GPU it is queued on the current stream
    by the Triton kernel; the torch reference waits for it. A target named twice holds any of its
    rows.
    """
    if not len(host_rows) or not layers:
        return
    if use_triton(impl, plan.device):
        from kvcache.ops.host_copy_triton import copy_rows_triton

        copy_rows_triton(plan, host_rows, device_slots, layers, to_host)
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
