"""A pause reuses the saved copy of unchanged content, and copies content that changed."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

import memsaver
from tests.helpers.memsaver.savers import driver_calls

MIB = 1 << 20


def copied(saver: memsaver.MemorySaver) -> int:
    return driver_calls(saver)["copy"].nbytes


def fresh(device: str, content: str = "host") -> tuple[memsaver.MemorySaver, torch.Tensor]:
    saver = memsaver.MemorySaver(device)
    tensor = saver.empty(4 * MIB + 3, torch.uint8, tag="params", content=content)
    tensor.copy_(torch.arange(4 * MIB + 3) % 251)
    return saver, tensor


def cycle(saver: memsaver.MemorySaver, version: object) -> tuple[int, int]:
    """Pause and resume; return the bytes that each of the two copies."""
    saver.mark_clean("params", version)
    start = copied(saver)
    saver.pause("params")
    middle = copied(saver)
    saver.resume("params")
    return middle - start, copied(saver) - middle


@pytest.mark.parametrize("content", ["host", "disk"])
def test_pause_copies_nothing_when_version_is_unchanged(content: str, device: str) -> None:
    saver, tensor = fresh(device, content)
    expected = tensor.clone()
    assert cycle(saver, 7) == (tensor.nbytes, tensor.nbytes)
    for _ in range(3):
        assert cycle(saver, 7) == (0, tensor.nbytes)
        assert torch.equal(tensor, expected)
    assert cycle(saver, 8)[0] == tensor.nbytes, "another version"
    assert cycle(saver, 7)[0] == tensor.nbytes, "only the last copy is kept"


def by_the_owner(saver: memsaver.MemorySaver, tensor: torch.Tensor) -> None:
    tensor[-1] += 1


def by_a_peer(saver: memsaver.MemorySaver, tensor: torch.Tensor) -> None:
    with memsaver.attach(saver.share("params", writable=True)) as lease:
        lease.tensor((4,), torch.uint8, MIB).add_(1)
    if tensor.is_cuda:
        torch.cuda.synchronize()


def by_a_new_allocation(saver: memsaver.MemorySaver, tensor: torch.Tensor) -> None:
    KEPT.append(saver.empty(100, torch.uint8, tag="params").zero_())


def by_triton(saver: memsaver.MemorySaver, tensor: torch.Tensor) -> None:
    triton = pytest.importorskip("triton")
    from tests.helpers.triton_kernels import increment

    increment[(1,)](tensor, 5, BLOCK=triton.next_power_of_2(5))
    if tensor.is_cuda:
        torch.cuda.synchronize()


KEPT: list[torch.Tensor] = []


@pytest.mark.parametrize("write", [by_the_owner, by_a_peer, by_a_new_allocation, by_triton])
def test_pause_copies_content_after_undeclared_write(
    write: Callable[[memsaver.MemorySaver, torch.Tensor], None], device: str
) -> None:
    saver, tensor = fresh(device)
    cycle(saver, 1)
    write(saver, tensor)
    expected = tensor.clone()
    assert cycle(saver, 1)[0] >= tensor.nbytes
    assert torch.equal(tensor, expected)
    KEPT.clear()


def test_copy_is_not_reused_when_it_ends_past_the_tags_memory(device: str) -> None:
    saver = memsaver.MemorySaver(device)
    tensor = saver.empty(96 * MIB, torch.uint8, tag="params", content="host", elastic=True).fill_(3)
    assert cycle(saver, 1)[0] == 96 * MIB
    backed = saver.resize("params", 32 * MIB)  # on a GPU to whole extents
    assert backed < 96 * MIB and cycle(saver, 1)[0] == backed
    assert bool((saver.backed_view(tensor) == 3).all())


def test_clean_mark_counts_for_one_pause_only(device: str) -> None:
    saver, tensor = fresh(device)
    cycle(saver, 1)
    before = copied(saver)
    saver.pause("params")
    assert copied(saver) - before == tensor.nbytes
    with pytest.raises(memsaver.StateError, match="paused"):
        saver.mark_clean("params", 1)
    with pytest.raises(memsaver.StateError, match="paused"):
        saver.save("params", 1)
    saver.resume("params")


def test_pause_reuses_a_copy_saved_ahead(device: str) -> None:
    saver, tensor = fresh(device)
    expected, before = tensor.clone(), copied(saver)
    event = saver.save("params", version=3)
    total = int(tensor.sum())  # the tensor may be read meanwhile
    if event is not None:
        event.synchronize()
    assert copied(saver) - before == tensor.nbytes and not saver.is_paused("params")
    saver.pause("params")
    assert copied(saver) - before == tensor.nbytes
    events = [event for event in saver.drain_events() if event.op in ("save", "pause")]
    assert [event.op for event in events] == ["save", "pause"] and events[0].seconds > 0
    saver.resume("params")
    assert torch.equal(tensor, expected) and int(tensor.sum()) == total
    saver.save("params", version=4)
    tensor.zero_()  # makes the copy stale
    saver.pause("params")
    saver.resume("params")
    assert int(tensor.sum()) == 0


def test_failed_save_is_not_reused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, tensor = fresh(device)
    expected = tensor.clone()
    with monkeypatch.context() as patch:
        patch.setattr(saver.backend, "copy_overlapped", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            saver.save("params", version=1)
    assert cycle(saver, 1)[0] == tensor.nbytes
    assert torch.equal(tensor, expected)


def test_clean_copy_is_dropped_when_another_tag_needs_room(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, tensor = fresh(device)
    other = saver.empty(4 * MIB, torch.uint8, tag="other", content="host").fill_(1)
    cycle(saver, 1)
    gc.collect()
    arena = saver.pinned_arena
    free = arena.committed_bytes - arena.used_bytes
    fillers = [arena.take(free)] if free else []
    monkeypatch.setattr(arena, "budget_bytes", arena.committed_bytes)
    saver.pause("other")
    saver.resume("other")
    assert int(other.sum()) == 4 * MIB
    for pieces in fillers:
        arena.give(pieces)
    assert cycle(saver, 1)[0] == tensor.nbytes


def test_saved_content_of_a_paused_tensor_can_be_read(device: str) -> None:
    saver, tensor = fresh(device)
    matrix = saver.empty((3, 5), torch.float32, tag="params")
    matrix.copy_(torch.arange(15.0).view(3, 5))
    expected = tensor.clone().cpu()
    with pytest.raises(memsaver.StateError, match="no saved content"):
        saver.saved(tensor)
    saver.pause()
    assert torch.equal(saver.saved(tensor), expected)
    assert torch.equal(saver.saved(matrix), torch.arange(15.0).view(3, 5))
    assert torch.equal(
        saver.saved(matrix[1:, :], zero_copy=True), torch.arange(5.0, 15.0).view(2, 5)
    )
    assert saver.saved(matrix[:0]).shape == (0, 5)
    if device == "cpu":
        with saver.region("elsewhere"):
            copy = saver.saved(matrix)
        with pytest.raises(memsaver.TagError):
            saver.tag_of(copy)
    assert saver.tag_of(matrix) == "params"
    with pytest.raises(ValueError, match="not contiguous"):
        saver.saved(matrix[:, 1:])
    with pytest.raises(memsaver.TagError):
        saver.saved(torch.ones(3))
    saver.resume()
    saver.pause(content="disk")
    assert torch.equal(saver.saved(tensor), expected)
    with pytest.raises(ValueError, match="zero_copy"):
        saver.saved(matrix, zero_copy=True)
    saver.resume()
    saver.pause(content="discard")
    with pytest.raises(memsaver.StateError, match="no saved content"):
        saver.saved(matrix)
