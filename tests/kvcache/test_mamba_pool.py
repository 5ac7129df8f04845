"""The pool of recurrent states, and the request table that allocates a slot with each row."""

import random
from typing import Any

import pytest
import torch

from kvcache import BlockManager, ReqHandle
from kvcache.allocators import PagedTokenToKVPoolAllocator
from kvcache.pools import MambaConfig, MambaPool
from kvcache.request_tables import HybridReqToTokenPool
from memsaver import MemorySaver
from tests.helpers.kvcache.blocks import DEVICE, make_pool


def make(size: int = 4, saver: MemorySaver | None = None) -> MambaPool:
    shapes: dict[str, Any] = {"conv_shapes": ((5, 3), (2, 3)), "temporal_shape": (2, 4, 3)}
    shapes |= {"num_layers": 3, "conv_dtype": torch.bfloat16}
    return MambaPool(MambaConfig(size=size, device=DEVICE, **shapes), saver)


def take(pool: MambaPool, count: int) -> list[int]:
    slots = [pool.alloc() for _ in range(count)]
    return [slot for slot in slots if slot is not None]


def fill(pool: MambaPool, slot: int, value: float) -> None:
    for layer in range(3):
        conv, temporal = pool.states(layer)
        for state in (*conv, temporal):
            state[slot] = value + layer


def values(pool: MambaPool, slot: int) -> list[float]:
    """Return the number that fills each layer's states."""
    numbers = []
    for layer in range(3):
        conv, temporal = pool.states(layer)
        (value,) = {x for state in (*conv, temporal) for x in state[slot].flatten().tolist()}
        numbers.append(value)
    return numbers


def test_state_pool_has_exact_shapes_and_bytes(saver: MemorySaver) -> None:
    pool = make(saver=saver)
    assert [tuple(c.shape) for c in pool.conv] == [(3, 5, 5, 3), (3, 5, 2, 3)]
    assert tuple(pool.temporal.shape) == (3, 5, 2, 4, 3)
    assert (pool.conv[0].dtype, pool.temporal.dtype) == (torch.bfloat16, torch.float32)
    assert pool.bytes_per_slot == pool.config.bytes_per_slot == 3 * ((15 + 6) * 2 + 24 * 4)
    assert pool.nbytes == 5 * pool.bytes_per_slot
    report = saver.report().tags["kv_cache"]
    assert pool.nbytes <= report.live_bytes <= pool.nbytes + 4096


def test_alloc_returns_zeroed_slots_and_never_slot_0() -> None:
    pool = make()
    for state in (*pool.conv, pool.temporal):
        state[:, 1:].fill_(torch.nan)
    slots = take(pool, 3)
    assert len(set(slots)) == 3 and 0 not in slots
    assert all(values(pool, slot) == [0, 0, 0] for slot in (0, *slots))
    (left,) = set(range(1, 5)) - set(slots)
    assert pool.temporal[:, left].isnan().all()  # only allocated slots are zeroed
    take(pool, 1)
    assert pool.alloc() is None and pool.clone(slots[0]) is None
    pool.free(slots[1])
    pool.check_integrity()
    for wrong in (slots[1], 0, 99):
        with pytest.raises(KeyError):
            pool.free(wrong)
    pool.check_integrity()
    assert pool.available_size() == 1


def test_slots_allocated_during_a_pause_are_zeroed_after_the_resume(saver: MemorySaver) -> None:
    pool = make(saver=saver)
    (held,) = take(pool, 1)
    for _ in range(2):
        saver.pause("kv_cache")
        gone, taken = take(pool, 2)
        pool.free(gone)  # before the resume
        for call in (lambda: pool.clone(held), lambda: pool.copy(held, held)):
            with pytest.raises(
                AssertionError, match="can't be copied while tag 'kv_cache' is paused"
            ):
                call()
        pool.check_integrity()
        saver.resume("kv_cache")
        for state in (*pool.conv, pool.temporal):
            state.fill_(7)
        pool.on_resume()
        assert [values(pool, slot) for slot in (0, taken)] == [[0] * 3] * 2
        # A free slot is not zeroed, and restoring a kept slot is up to its owner.
        assert values(pool, held) == values(pool, gone) == [7] * 3
        pool.free(taken)


# ---------------------------------------------------------------- rows with states


def hybrid(rows: int, slots: int) -> HybridReqToTokenPool:
    return HybridReqToTokenPool(rows, 8, DEVICE, make(size=slots))


def test_device_failure_leaves_rows_and_slots_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    table = hybrid(rows=4, slots=4)

    # First zeroing the states fails once, then the write of the map on the device. The rollback
    # then writes the map successfully.
    for operation in ("zero_", "fill_"):
        original, errors = getattr(torch.Tensor, operation), [torch.OutOfMemoryError("no room")]

        def fail_once(
            *arguments: Any, original: Any = original, errors: Any = errors
        ) -> torch.Tensor:
            if errors:
                raise errors.pop()
            return original(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, operation, fail_once)
            with pytest.raises(torch.OutOfMemoryError):
                table.alloc()
        assert (table.available_size(), table.mamba.available_size()) == (4, 4)
        table.check_integrity()


@pytest.mark.parametrize(("rows", "slots"), [(5, 4), (3, 6)])
def test_rows_and_slots_are_allocated_together_or_not_at_all(rows: int, slots: int) -> None:
    """Check also that live slots keep their states and new slots are zeroed."""
    dice, table = random.Random(3), hybrid(rows, slots)
    slot_of: dict[ReqHandle, int] = {}
    for _ in range(60):
        live = list(slot_of)
        if live and dice.random() < 0.45:
            handle = dice.choice(live)
            table.free(handle)
            del slot_of[handle]
        else:
            handle = table.alloc()
            assert (handle is None) == (len(live) == min(rows, slots))
            if handle is not None:
                assert 0 < handle.row <= rows  # row 0 is padding
                slot_of[handle] = table.mamba_slot(handle)
                assert values(table.mamba, slot_of[handle]) == [0, 0, 0]
                fill(table.mamba, slot_of[handle], handle.row)
        assert {handle: table.mamba_slot(handle) for handle in slot_of} == slot_of
        assert all(values(table.mamba, slot)[0] == handle.row for handle, slot in slot_of.items())
        assert (
            len({handle.row for handle in slot_of})
            == len(set(slot_of.values()))
            == len(slot_of)
            == rows - table.available_size()
        )
        assert table.mamba.available_size() == slots - len(slot_of)
        table.check_integrity()


def test_fork_copies_the_states_of_its_parent(saver: MemorySaver) -> None:
    table = HybridReqToTokenPool(4, 16, DEVICE, make(size=3, saver=saver))
    blocks = BlockManager(table, PagedTokenToKVPoolAllocator(32, 4, DEVICE), make_pool(32, 4))
    parent = blocks.admit()
    assert parent is not None and blocks.extend([parent], [6]) is not None
    fill(table.mamba, table.mamba_slot(parent), 5)
    child = blocks.fork(parent)
    clone = table.mamba.clone(table.mamba_slot(parent))
    assert child is not None and blocks.seq_len(child) == 6 and clone is not None
    fill(table.mamba, table.mamba_slot(parent), 8)
    assert values(table.mamba, table.mamba_slot(child)) == values(table.mamba, clone) == [5, 6, 7]
    table.mamba.free(clone)
    saver.pause("kv_cache")
    with pytest.raises(AssertionError, match="can't be copied while tag 'kv_cache' is paused"):
        blocks.fork(parent)
    blocks.check_integrity()
    # The failed fork has freed its row and slot.
    assert (table.available_size(), table.mamba.available_size()) == (2, 1)
    blocks.release(parent)
    for use in (table.free, table.mamba_slot):
        with pytest.raises(ValueError, match="stale"):
            use(parent)
    blocks.release(child)
    blocks.check_integrity()
    assert table.mamba.available_size() == 3
