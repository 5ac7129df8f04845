"""Does a call wait for the device?"""

from __future__ import annotations

from collections.abc import Callable

import torch


def check_no_wait(run: Callable[[], object]) -> None:
    """AssertionError or RuntimeError if `run` waits for the device, which is kept busy meanwhile.

    Warm it up before.
    """
    if not torch.cuda.is_available():  # nobody to wait for
        run()
        return
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # 0.2 s
    awake = torch.cuda.Event()
    awake.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not awake.query(), "the call came back after the device was done: it waited"
    torch.cuda.synchronize()
