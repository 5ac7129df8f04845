"""The table request -> token ids, with states of linear layers or without, and the handles that
name its rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcache.pools.mamba import MambaPool


@dataclass(frozen=True, slots=True)
class ReqHandle:
    """Names a row of a `ReqToTokenPool` until it is freed; after that it raises ValueError."""

    row: int
    generation: int


class ReqToTokenPool:
    """`req_to_token[row, position]` is the pool slot of a request's token at `position`.

    The table (int32 `[size + 1, max_context_len]`) is on the device, who owns which row is decided
    on the CPU. Row 0 is the padding row: never issued, always zero, so padded batch entries read
    the padding page. Positions past a request's length hold leftovers of earlier owners.

    A pool whose requests hold more than a row extends `alloc` and `free`.
    """

    def __init__(self, size: int, max_context_len: int, device: torch.device | str) -> None:
        assert size >= 1 and max_context_len >= 1, f"a table of {size} rows of {max_context_len}"
        self.size = size
        self.max_context_len = max_context_len
        shape = (size + 1, max_context_len)
        self.req_to_token = torch.zeros(shape, dtype=torch.int32, device=device)
        self.device = self.req_to_token.device
        self._free_rows = list(range(size, 0, -1))
        self._generation = [0] * (size + 1)
        self._issued: dict[int, ReqHandle] = {}  # by row

    def available_size(self) -> int:
        """Return how many rows can still be handed out."""
        return len(self._free_rows)

    def alloc(self) -> ReqHandle | None:
        """Take a row; None, with nothing changed, when there is none."""
        if not self._free_rows:
            return None
        row = self._free_rows.pop()
        handle = self._issued[row] = ReqHandle(row, self._generation[row])
        return handle

    def free(self, handle: ReqHandle) -> None:
        """Give the row back and make `handle` stale. Freeing it again raises ValueError."""
        row = self.row(handle)
        del self._issued[row]
        self._generation[row] += 1
        self._free_rows.append(row)

    def copy_states(self, target: ReqHandle, source: ReqHandle) -> None:
        """Give `target`, after a fork, what `source` holds besides tokens. Here that is nothing."""

    def row(self, handle: ReqHandle) -> int:
        """Return the row of a live handle; ValueError for a stale one."""
        if self._issued.get(handle.row) != handle:
            raise ValueError(f"stale {handle}: released or never issued; take it from admit()")
        return handle.row

    def rows(self, handles: Sequence[ReqHandle]) -> npt.NDArray[np.int64]:
        """Return rows of live handles as int64 `[n]`; ValueError names the first stale one."""
        rows = [handle.row for handle in handles]
        # comparing lists asks for identity first: quicker than to look at each
        if list(map(self._issued.get, rows)) != list(handles):
            for handle in handles:
                self.row(handle)
        return np.array(rows, dtype=np.int64)

    def write(self, indices: Any, values: torch.Tensor) -> None:
        """`req_to_token[indices] = values`: one indexed write, any index that torch accepts."""
        self.req_to_token[indices] = values.to(torch.int32)

    def write_flat(self, positions: torch.Tensor, values: torch.Tensor) -> None:
        """One write of `values`, int32 `[n]`, at int64 `row * max_context_len + position`."""
        self.req_to_token.view(-1).index_copy_(0, positions, values)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each row is free or live, and row 0 untouched; waits."""
        free = self._free_rows
        assert len(set(free)) == len(free), f"a row is twice in the free list: {free}"
        assert all(0 < row <= self.size for row in free), f"a free row is not in the table: {free}"
        assert not self._issued.keys() & {0, *free}, "a free row is marked as issued"
        assert len(self._issued) + len(free) == self.size, "rows were lost"
        assert not bool(self.req_to_token[0].any()), "the padding row was written"


class HybridReqToTokenPool(ReqToTokenPool):
    """A `ReqToTokenPool` whose rows hold one slot of `mamba` each, as long as they live.

    `req_to_mamba` int32 `[size + 1]` on the device: row -> slot, 0 for row 0 and free rows.
    """

    def __init__(
        self, size: int, max_context_len: int, device: torch.device | str, mamba: MambaPool
    ) -> None:
        super().__init__(size, max_context_len, device)
        assert mamba.device == self.device, f"table on {self.device}, states on {mamba.device}"
        self.mamba = mamba
        self.req_to_mamba = torch.zeros(size + 1, dtype=torch.int32, device=device)
        self._slot_of = [0] * (size + 1)

    def alloc(self) -> ReqHandle | None:
        """Take a row with zeroed states; None, with nothing changed, without a row or a slot."""
        if not self.mamba.available_size():
            return None
        handle = super().alloc()
        if handle is None:
            return None
        try:
            slot = self.mamba.alloc()
            assert slot is not None
            self._slot_of[handle.row] = slot
            self.req_to_mamba[handle.row].fill_(slot)
        except BaseException:  # such as the device being out of memory
            self.free(handle)
            raise
        return handle

    def free(self, handle: ReqHandle) -> None:
        super().free(handle)
        slot, self._slot_of[handle.row] = self._slot_of[handle.row], 0
        if slot:
            self.mamba.free(slot)
            self.req_to_mamba[handle.row].fill_(0)

    def mamba_slot(self, handle: ReqHandle) -> int:
        """Return the state slot of a live handle; ValueError for a stale one."""
        return self._slot_of[self.row(handle)]

    def copy_states(self, target: ReqHandle, source: ReqHandle) -> None:
        """Give `target` the states that `source` has now, as after a fork."""
        self.mamba.copy(self.mamba_slot(target), self.mamba_slot(source))

    def check_integrity(self) -> None:
        """Check as the base does, and the map on the device against the slots held; waits."""
        super().check_integrity()
        self.mamba.check_integrity()
        assert self.req_to_mamba.tolist() == self._slot_of, "req_to_mamba differs from the slots"
        live = [slot for slot in self._slot_of if slot]
        rows = self.size - self.available_size()
        assert len(live) == rows == len(set(live)), "a live row has no slot of its own"
