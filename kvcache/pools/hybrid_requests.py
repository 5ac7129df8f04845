"""The request table of models with states: a row and a state slot are taken and given back
together.
"""

from collections.abc import Sequence

import torch

from kvcache.pools.mamba import MambaPool
from kvcache.requests import ReqHandle, ReqToTokenPool


class HybridReqToTokenPool(ReqToTokenPool):
    """A `ReqToTokenPool` whose rows hold one slot of `mamba` each, the same as long as the handle
    lives.

    `req_to_mamba` int32 `[size + 1]` on the device: row -> slot; 0, the padding slot, for row 0 and
    for free rows.
    """

    def __init__(
        self, size: int, max_context_len: int, device: torch.device | str, mamba: MambaPool
    ) -> None:
        super().__init__(size, max_context_len, device)
        if mamba.device != self.device:
            raise ValueError(
                f"the table is on {self.device}, the state pool on {mamba.device}; use one device"
            )
        self.mamba = mamba
        self.req_to_mamba = torch.zeros(size + 1, dtype=torch.int32, device=device)
        self._slot_of = [0] * (size + 1)

    def alloc(self, reqs: Sequence[ReqHandle | None]) -> list[ReqHandle] | None:
        """Allocates as the base does; new rows come with zeroed states.

        Returns None, and changes nothing, if rows or slots are short.
        """
        handles = super().alloc(reqs)
        if handles is None:
            return None
        fresh = [handle for handle, req in zip(handles, reqs, strict=True) if req is None]
        try:
            slots = self.mamba.alloc(len(fresh))
            assert slots is not None, "slots were counted before"
            for handle, slot in zip(fresh, slots, strict=True):
                self._slot_of[handle.row] = slot
            self._map([handle.row for handle in fresh], slots)
        except BaseException:  # such as the device being out of memory
            for handle in fresh:
                self._drop(handle.row)
            raise
        return handles

    def _fits(self, count: int) -> bool:
        return super()._fits(count) and count <= self.mamba.available_size()

    def _drop(self, row: int) -> None:
        slot, self._slot_of[row] = self._slot_of[row], 0
        super()._drop(row)
        if slot:
            self.mamba.free([slot])
            self._map([row], [0])

    def shortage(self, request: object, rows: int = 1) -> str:
        """Names the state slots instead where they are what is missing."""
        free = self.mamba.available_size()
        if rows <= free:
            return super().shortage(request, rows)
        return (
            f"{request} needs {rows} state slot(s), {free} of {self.mamba.size} are free: "
            f"{rows - free} are missing; end a request, or make the state pool larger"
        )

    def mamba_slot(self, handle: ReqHandle) -> int:
        """The state slot of a live handle; ValueError for a stale one."""
        return self._slot_of[self.row(handle)]

    def copy_states(self, target: ReqHandle, source: ReqHandle) -> None:
        """Gives `target` the states that `source` has now, as after a fork."""
        self.mamba.copy([self.mamba_slot(target)], [self.mamba_slot(source)])

    def check_integrity(self) -> None:
        """Checks as the base does, and raises AssertionError when the map on the device and the
        slots held differ (synchronises).
        """
        super().check_integrity()
        self.mamba.check_integrity()
        assert self.req_to_mamba.tolist() == self._slot_of, (
            "req_to_mamba differs from the slots held"
        )
        live = [slot for slot in self._slot_of if slot]
        assert len(live) == self.size - self.available_size() == len(set(live)), (
            "a live row has no slot of its own"
        )

    def _map(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        pairs = torch.tensor([rows, slots], dtype=torch.int64).to(self.device, non_blocking=True)
        self.req_to_mamba.index_copy_(0, pairs[0], pairs[1].to(torch.int32))
