"""Memory of a device that regions must leave free."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from memsaver.errors import OutOfMemory
from memsaver.host_limits import available_memory
from memsaver.saver import MemorySaver


@contextlib.contextmanager
def headroom(saver: MemorySaver, nbytes: int) -> Iterator[None]:
    """Inside, the saver's tags cannot grow so far that less than ``nbytes`` stays free: ``OutOfMemory``.

    What is free is looked up on entry. A resume inside is held to it, too; one outside is not.
    """
    if not nbytes:
        yield
        return
    before = saver.limit_bytes
    most = saver.report().committed_bytes + max(0, _free_bytes(saver.device) - nbytes)
    saver.limit_bytes = most if before is None else min(before, most)
    try:
        yield
    except OutOfMemory as error:
        error.add_note(f"memory_margin_bytes={nbytes}: so much has to stay free; lower it to allow more")
        raise
    finally:
        saver.limit_bytes = before


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
