"""Two savers of this process, one of which lends to the other."""

from __future__ import annotations

from typing import Any

import torch

from memsaver import MemorySaver
from tests.helpers.memsaver.savers import MIB

SIZE = 6 * MIB  # the owner's: in pieces of 4 and 2 MiB
THEIRS = [0, 1, 1, 2, 2, 3, 3]
"""What the borrower's tensors show of the owner's."""
OWN = [77, *[78] * 6]


class World:
    """An owner whose tag "params" shows 0, 1, 2 ... at every MiB, a borrower whose paused tag "weights" is smaller."""

    def __init__(self, device: str, content: str = "discard", **options: Any) -> None:
        self.owner, self.saver = MemorySaver(device), MemorySaver(device, **options)
        self.params = self.owner.empty(SIZE, torch.uint8, tag="params", elastic=True)
        self.params.view(6, -1).copy_(torch.arange(6, dtype=torch.uint8)[:, None])
        self.first = self.saver.empty(MIB, torch.uint8, tag="weights", content=content).fill_(77)
        self.rest = self.saver.empty(3 * MIB, torch.uint8, tag="weights", content=content).fill_(78)
        self.saver.pause("weights")

    def borrow(self, writable: bool = True) -> None:
        self.saver.borrow("weights", self.owner.share("params", writable))

    def seen(self) -> list[int]:
        return [int(self.first[-1]), *(int(row[at]) for row in self.rest.view(3, -1) for at in (0, -1))]

    def check(self) -> None:
        self.owner.check_integrity()
        self.saver.check_integrity()

    def close(self) -> None:
        self.check()
        self.saver.close()
        self.owner.close()
