"""Tags with partial memory: resize, resume(at_least=) and backed_view."""

from __future__ import annotations

import contextlib
import gc
import itertools

import pytest
import torch

import memsaver
from memsaver import MemorySaver
from memsaver.memory.page_pool import imports
from memsaver.tag import transaction as switch
from memsaver.tag.arena import Arena
from tests.helpers.memory import counted, process_bytes
from tests.helpers.memsaver.savers import MIB

pytestmark = pytest.mark.alone
ROWS = 24


def make(device: str, limit: int | None = None) -> tuple[MemorySaver, torch.Tensor]:
    """Return a saver and an elastic tensor of 24 rows of 2 MiB, alone on its tag."""
    saver = MemorySaver(device, limit_bytes=limit)
    return saver, saver.empty((ROWS, 2 * MIB), torch.uint8, tag="kv", elastic=True).fill_(1)


def number_rows(rows: torch.Tensor) -> None:
    for i, row in enumerate(rows):
        row.fill_(i + 1)


def test_resize_keeps_content_of_remaining_rows(device: str) -> None:
    # Asserts compare numbers only, because pytest would read whole tensors to show them.
    saver, tensor = make(device)
    number_rows(tensor)
    address, before, rows = tensor.data_ptr(), process_bytes(device), ROWS
    for size in (16, 8, 24, 0, 24):
        backed = saver.resize("kv", size * 2 * MIB)
        assert size * 2 * MIB <= backed < size * 2 * MIB + 32 * MIB
        view = saver.backed_view(tensor)
        kept, rows = min(rows, backed // (2 * MIB)), backed // (2 * MIB)
        assert len(view) == rows
        assert [int(row[-1]) for row in view[:kept]] == list(range(1, kept + 1))
        number_rows(view)
        assert saver.report().tags["kv"].committed_bytes == backed
        assert before - process_bytes(device) == counted(ROWS * 2 * MIB - backed, device)
        saver.check_integrity()
    assert tensor.data_ptr() == address


def test_partial_resume_maps_what_fits(device: str) -> None:
    saver, tensor = make(device, limit=64 * MIB)
    saver.pause("kv")
    other = saver.empty(36 * MIB, torch.uint8, tag="other").fill_(1)
    with pytest.raises(memsaver.OutOfMemory, match="20.0 MiB are missing"):
        saver.resume("kv")
    with pytest.raises(memsaver.OutOfMemory, match="20.0 MiB are missing"):
        saver.resume("kv", at_least=30 * MIB)
    assert saver.is_paused("kv") and saver.report().committed_bytes == 36 * MIB
    saver.resume("kv", at_least=20 * MIB)
    saver.check_integrity()
    view = saver.backed_view(tensor)
    assert len(view) == 14 and saver.report().committed_bytes == 64 * MIB
    number_rows(view)
    with pytest.raises(
        memsaver.OutOfMemory, match=r"resize\('kv', 50331648\) needs 20.0 MiB: 20.0 MiB are missing"
    ):
        saver.resize("kv", tensor.nbytes)
    assert [int(row[0]) for row in view] == list(range(1, 15))
    del other
    gc.collect()
    saver.trim()
    assert saver.resize("kv", tensor.nbytes) == tensor.nbytes
    assert [int(row[0]) for row in view] == list(range(1, 15))


def test_partial_resume_refuses_several_tags_and_saved_content(device: str) -> None:
    saver, tensor = make(device)
    other = saver.empty(2 * MIB, torch.uint8, tag="other").fill_(1)
    refused = pytest.raises(ValueError, match="at_least takes one tag")
    with refused:
        saver.resume("kv", "other", at_least=2 * MIB)  # both are active
    saver.pause("kv", content="host")
    with refused:
        saver.resume("kv", at_least=2 * MIB)
    with refused:
        saver.resume("kv", "other", at_least=2 * MIB)  # "other" is active
    saver.pause("other", content="discard")
    for tags in (("kv", "other"), ()):
        with refused:
            saver.resume(*tags, at_least=2 * MIB)
    assert saver.is_paused("kv") and saver.is_paused("other")
    assert saver.report(others=False).committed_bytes == 0
    saver.resume("other", at_least=2 * MIB)
    saver.resume("kv")
    saver.resume("kv", at_least=2 * MIB)  # active already, so nothing to do
    assert bool((tensor == 1).all()) and len(saver.backed_view(other)) == 2 * MIB


def test_shrinking_revokes_imports_of_released_extents(device: str) -> None:
    saver, _ = make(device)
    memsaver.attach(saver.share("kv")).close()
    held = len(imports)
    saver.resize("kv", 16 * MIB)
    assert len(imports) < held


def test_resize_and_backed_view_refuse_bad_arguments(device: str) -> None:
    saver, tensor = make(device)
    with pytest.raises(ValueError, match="reserved for 'kv'"):
        saver.resize("kv", 1 << 60)
    with pytest.raises(ValueError, match="contiguous"):
        saver.backed_view(tensor.t())
    with pytest.raises(memsaver.TagError, match="not in any tag"):
        saver.backed_view(torch.ones(3, device=device))
    with memsaver.attach(saver.share("kv")), pytest.raises(memsaver.LeaseError, match="leased"):
        saver.resize("kv", 0)
    tensor.fill_(1)
    saver.pause(content="host")
    with pytest.raises(memsaver.StateError, match="paused"):
        saver.resize("kv", 0)
    saver.resume()
    assert bool((tensor == 1).all())


def test_resize_accepts_tag_that_grows_concurrently(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Torch's allocator may grow the tag between the reading of its size and the freeze.
    saver = MemorySaver(device, reserve_bytes=64 * MIB)
    tensors, freeze = [saver.empty(2 * MIB, torch.uint8, tag="a")], Arena.freeze

    def late(arena: Arena) -> None:
        monkeypatch.undo()
        tensors.append(saver.empty(8 * MIB, torch.uint8, tag="a"))
        freeze(arena)

    monkeypatch.setattr(Arena, "freeze", late)
    assert saver.resize("a", 4 * MIB) == 10 * MIB
    saver.check_integrity()


def test_empty_refuses_impossible_shapes(device: str) -> None:
    saver = MemorySaver(device, limit_bytes=64 * MIB)
    with pytest.raises(ValueError, match="negative"):
        saver.empty((-1,), tag="a")
    for shape in ((2**62,), (2**64,), (2**40, 2**40)):
        for elastic in (False, True):
            with pytest.raises(memsaver.OutOfMemory, match="outgrows"):
                saver.empty(shape, tag="a", elastic=elastic)
    with pytest.raises(memsaver.OutOfMemory):
        saver.empty(128 * MIB, torch.uint8, tag="b")
    assert saver.tags == [], "a tag without a first tensor stays"
    tensor = saver.empty(100, tag="a")
    assert saver.report().tags["a"].live_bytes == 400
    del tensor
    saver.check_integrity()


@pytest.mark.parametrize("release", ["driver", "retain"])
@pytest.mark.parametrize("turn", [1, 2])
def test_pause_is_atomic_when_device_lock_times_out(
    turn: int, release: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The lock fails at each of its acquisitions in turn.
    turns, done = itertools.count(1), False

    class Lock:
        def __enter__(self) -> None:
            if next(turns) == turn and not done:
                raise memsaver.LockTimeout("held by another process")

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(switch, "device_lock", lambda key: Lock())
    saver = MemorySaver(device)
    tensor = saver.empty(4 * MIB, torch.uint8, tag="a", content="host").fill_(3)
    with contextlib.suppress(memsaver.LockTimeout):
        saver.pause("a", release=release)
    done = True
    saver.check_integrity()
    assert saver.is_paused("a") == (turn > 1)
    saver.resume("a")
    assert saver.report().committed_bytes == 4 * MIB and bool((tensor == 3).all())
