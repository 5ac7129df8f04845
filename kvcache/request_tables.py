"""Request tables: the slots of each request's tokens, and the handles that identify requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcache.pools.mamba_pool import MambaPool


@dataclass(frozen=True, slots=True)
class ReqHandle:
    """Identifier of a row of a `ReqToTokenPool`, stale after the row is freed.

    Attributes:
        row: Row of the request table, from 1 on.
        generation: How often the row had been freed when the handle was issued.
    """

    row: int
    generation: int


class ReqToTokenPool:
    """The request table: `req_to_token[row, position]` is the pool slot of a request's token.

    The table, int32 `[size + 1, max_context_len]`, is on the device; free rows are tracked on the
    CPU. Row 0 is the padding row: it is never allocated and always zero, so that padded batch
    entries read the padding page. Entries past a request's length are leftovers of earlier
    requests. Not thread-safe.

    A subclass whose requests own more than a row extends `alloc` and `free`.

    Args:
        size: Requests that can be live at a time.
        max_context_len: Tokens of the longest request.
        device: Device of the table.
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
        """Return the number of free rows.

        Returns:
            The number of rows that `alloc` can allocate.
        """
        return len(self._free_rows)

    def alloc(self) -> ReqHandle | None:
        """Allocate a row.

        Returns:
            The handle of the row, or None if no row is free.
        """
        if not self._free_rows:
            return None
        row = self._free_rows.pop()
        handle = self._issued[row] = ReqHandle(row, self._generation[row])
        return handle

    def free(self, handle: ReqHandle) -> None:
        """Free a row and make its handle stale.

        Args:
            handle: A live handle.

        Raises:
            ValueError: The handle is stale.
        """
        row = self.row(handle)
        del self._issued[row]
        self._generation[row] += 1
        self._free_rows.append(row)

    def copy_states(self, target: ReqHandle, source: ReqHandle) -> None:
        """Copy a request's data other than tokens after a fork; subclasses override this method.

        Args:
            target: The new request.
            source: The request that was forked.
        """

    def row(self, handle: ReqHandle) -> int:
        """Return the row of a handle.

        Args:
            handle: A live handle.

        Returns:
            The row of the request table.

        Raises:
            ValueError: The handle is stale.
        """
        if self._issued.get(handle.row) != handle:
            raise ValueError(f"stale {handle}: released or never issued; take it from admit()")
        return handle.row

    def rows(self, handles: Sequence[ReqHandle]) -> npt.NDArray[np.int64]:
        """Return the rows of handles.

        Args:
            handles: Live handles `[n]`.

        Returns:
            Rows of the request table, int64 `[n]`.

        Raises:
            ValueError: A handle is stale; the message names the first.
        """
        rows = [handle.row for handle in handles]
        # A list comparison checks identity first, which is faster than a loop over the handles.
        if list(map(self._issued.get, rows)) != list(handles):
            for handle in handles:
                self.row(handle)
        return np.array(rows, dtype=np.int64)

    def write(self, indices: Any, values: torch.Tensor) -> None:
        """Write `req_to_token[indices] = values`.

        Args:
            indices: Any index that torch accepts.
            values: Slots, converted to int32.
        """
        self.req_to_token[indices] = values.to(torch.int32)

    def write_flat(self, positions: torch.Tensor, values: torch.Tensor) -> None:
        """Write slots at flat positions of the table, in one launch.

        Args:
            positions: int64 `[n]`, each `row * max_context_len + position`.
            values: Slots, int32 `[n]`.
        """
        self.req_to_token.view(-1).index_copy_(0, positions, values)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each row is free or live and row 0 is zero; synchronizes."""
        free = self._free_rows
        assert len(set(free)) == len(free), f"a row is in the free list twice: {free}"
        assert all(0 < row <= self.size for row in free), f"a free row is not in the table: {free}"
        assert not self._issued.keys() & {0, *free}, "a free row is marked as issued"
        assert len(self._issued) + len(free) == self.size, "rows were lost"
        assert not bool(self.req_to_token[0].any()), "the padding row was written"


class HybridReqToTokenPool(ReqToTokenPool):
    """A request table whose live rows own one slot of recurrent states each.

    `req_to_mamba`, int32 `[size + 1]` on the device, maps a row to its slot; it is 0 for row 0 and
    for free rows.

    Args:
        size: Requests that can be live at a time.
        max_context_len: Tokens of the longest request.
        device: Device of the table.
        mamba: Pool of the states, on the same device.
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
        """Allocate a row and a slot with zeroed states.

        Returns:
            The handle of the row, or None if no row or no slot is free.
        """
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
        except BaseException:  # for example, the device is out of memory
            self.free(handle)
            raise
        return handle

    def free(self, handle: ReqHandle) -> None:
        """Free a row and its slot of states, and make the handle stale.

        Args:
            handle: A live handle.

        Raises:
            ValueError: The handle is stale.
        """
        super().free(handle)
        slot, self._slot_of[handle.row] = self._slot_of[handle.row], 0
        if slot:
            self.mamba.free(slot)
            self.req_to_mamba[handle.row].fill_(0)

    def mamba_slot(self, handle: ReqHandle) -> int:
        """Return the slot of a request's states.

        Args:
            handle: A live handle.

        Returns:
            The slot in `mamba`.

        Raises:
            ValueError: The handle is stale.
        """
        return self._slot_of[self.row(handle)]

    def copy_states(self, target: ReqHandle, source: ReqHandle) -> None:
        """Copy the present states of a request to its fork.

        Args:
            target: The new request.
            source: The request that was forked.

        Raises:
            ValueError: A handle is stale.
        """
        self.mamba.copy(self.mamba_slot(target), self.mamba_slot(source))

    def check_integrity(self) -> None:
        """Raise AssertionError also if `req_to_mamba` differs from the slots; synchronizes."""
        super().check_integrity()
        self.mamba.check_integrity()
        assert self.req_to_mamba.tolist() == self._slot_of, "req_to_mamba differs from the slots"
        live = [slot for slot in self._slot_of if slot]
        rows = self.size - self.available_size()
        assert len(live) == rows == len(set(live)), "a live row has no slot of its own"
