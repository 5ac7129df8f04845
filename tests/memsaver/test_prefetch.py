"""Prefetch: content returns in the requested order, and callers wait only for their tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memsaver import BackendError, MemorySaver, StateError
from memsaver.tag import prefetch as prefetches
from tests.helpers.case_selection import rounds
from tests.helpers.memsaver.prefetches import gated
from tests.helpers.memsaver.savers import MIB, driver_calls, large, until

SIZES = (3 * MIB, 1, 5 * MIB + 7, 64, 2 * MIB)


def filled(
    saver: MemorySaver, sizes: Sequence[int], tag: str = "p", content: str = "host"
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return tensors of random bytes on a tag, and copies of them on no tag."""
    tensors = [saver.empty(size, torch.uint8, tag=tag, content=content) for size in sizes]
    return tensors, [tensor.random_(0, 256).clone() for tensor in tensors]


def test_wait_returns_for_each_tensor_in_requested_order(device: str) -> None:
    saver = MemorySaver(device)
    tensors, before = filled(saver, [MIB] * 6)
    order = [tensors[i] for i in (4, 0, 5)]
    saver.pause()
    with gated(saver) as gate, ThreadPoolExecutor(1) as thread:
        prefetch = saver.begin_resume("p", order=order)
        assert not saver.is_paused("p")
        for count, i in enumerate((4, 0, 5, 1, 2, 3), 1):  # the rest by address
            later = thread.submit(prefetch.wait, [tensors[i]])
            assert wait_for([later], 0.02).not_done
            gate.let(1)
            later.result(60)
            assert torch.equal(tensors[i], before[i])
            assert gate.passed[-1] == tensors[i].data_ptr() and len(gate.passed) == count
        prefetch.wait()
        assert prefetch.arrived
    assert all(map(torch.equal, tensors, before))
    saver.check_integrity()
    saver.close()


def test_wait_covers_tensor_that_begins_inside_a_piece(device: str) -> None:
    saver = MemorySaver(device)
    tensors, before = filled(saver, [MIB] * 4)
    saver.pause()
    with gated(saver, 2 * MIB) as gate, ThreadPoolExecutor(1) as thread:
        prefetch = saver.begin_resume("p")
        for i in (1, 3):
            later = thread.submit(prefetch.wait, [tensors[i]])
            assert wait_for([later], 0.02).not_done
            gate.let(1)
            later.result(60)
            assert torch.equal(tensors[i], before[i])
    saver.close()


def test_operations_wait_for_prefetch_of_their_own_tag_only(device: str) -> None:
    # A pause that copied too early would save bytes that have not arrived.
    saver = MemorySaver(device)
    tensors, before = filled(saver, SIZES)
    other, _ = filled(saver, [MIB], "other")
    operations = {
        "pause": lambda: saver.pause("p"),
        "resume": lambda: saver.resume("p"),
        "begin_resume": lambda: saver.begin_resume("p"),
        "save": lambda: saver.save("p", 1),
        "empty": lambda: saver.empty(10, torch.uint8, tag="p"),
        "resize": lambda: saver.resize("p", saver.report().tags["p"].committed_bytes),
        "share": lambda: saver.share("p"),
        "mark_clean": lambda: saver.mark_clean("p", 3),
        "trim": lambda: saver.trim(),
        "swap": lambda: saver.swap(pause="p", resume="other"),
    }
    with ThreadPoolExecutor(1) as thread:
        for name, operation in operations.items():
            saver.resume("other")
            saver.pause("p")
            with gated(saver, 4 * MIB) as gate:
                saver.begin_resume("p")
                saver.pause("other")
                report = saver.report().tags["p"]
                assert report.state == "active" and report.backup_bytes >= sum(SIZES)
                gate.let(1)
                later = thread.submit(operation)
                assert wait_for([later], 0.02).not_done, name
                gate.let(1000)
                later.result(60)
            saver.check_integrity()
            saver.resume("p")
            assert all(map(torch.equal, tensors, before)), name
            assert saver.report().tags["p"].backup_bytes == 0
    del other
    saver.close()


@pytest.mark.soak
@given(data=st.data())
@settings(max_examples=rounds(100, 2000), deadline=None)
def test_prefetch_restores_same_bytes_as_resume_in_any_order(data: st.DataObject) -> None:
    saver = MemorySaver("cpu")
    sizes = data.draw(st.lists(st.integers(1, 40_000), min_size=1, max_size=12))
    tags = data.draw(st.lists(st.sampled_from("ab"), min_size=len(sizes), max_size=len(sizes)))
    pairs = [filled(saver, [size], tag) for size, tag in zip(sizes, tags, strict=True)]
    tensors, before = [pair[0][0] for pair in pairs], [pair[1][0] for pair in pairs]
    for number in data.draw(st.sets(st.integers(0, len(sizes) - 1), max_size=len(sizes) - 1)):
        tensors[number] = before[number] = torch.empty(0, dtype=torch.uint8)  # leaves a hole
    orders = st.permutations(range(len(sizes)))
    order = data.draw(orders)[: data.draw(st.integers(0, len(sizes)))]
    wanted = [tensors[i] for i in order]
    if wanted and data.draw(st.booleans()):
        wanted.append(wanted[0][: len(wanted[0]) // 2])  # a view of a tensor that comes first
    saver.pause(*dict.fromkeys(tags))
    with pytest.MonkeyPatch.context() as patch:
        small = [100] if sum(sizes) < 100_000 else []
        patch.setattr(prefetches, "PIECE", data.draw(st.sampled_from([*small, 4096, 30_000, MIB])))
        prefetch = saver.begin_resume(*dict.fromkeys(tags), order=wanted)
        for i in data.draw(orders):
            prefetch.wait([tensors[i]])
            assert torch.equal(tensors[i], before[i])
    prefetch.wait()
    saver.check_integrity()
    saver.pause()
    saver.resume()
    assert all(map(torch.equal, tensors, before))
    saver.close()


@pytest.mark.parametrize("asked", ["unit", "all", "pause"])
def test_failed_copy_raises_its_cause_and_tags_can_be_resumed(asked: str, device: str) -> None:
    saver = MemorySaver(device)
    tensors, before = filled(saver, [MIB] * 4)
    beside, same = filled(saver, [MIB], "q")
    held = saver.report().committed_bytes
    saver.pause()
    with gated(saver) as gate:
        prefetch = saver.begin_resume("p", "q")
        gate.let(2)
        prefetch.wait([tensors[0]])
        gate.failing = RuntimeError("the cable is out")
        waits = driver_calls(saver)["synchronize"].calls
        gate.let(1000)
        message = "content of 'p', 'q' was not restored: the cable is out; resume again"
        with pytest.raises(BackendError, match=message):
            if asked == "unit":
                prefetch.wait([tensors[3]])
            elif asked == "all":
                prefetch.wait()
            else:
                saver.pause("p")
        for late in ([tensors[3]], None):  # later callers get the error, too
            with pytest.raises(BackendError, match="cable"):
                prefetch.wait(late)
    assert saver.is_paused("p") and saver.is_paused("q")
    assert driver_calls(saver)["synchronize"].calls == waits + 1  # for early users
    assert saver.report().committed_bytes == 0
    saver.check_integrity()
    saver.begin_resume().wait()
    assert all(map(torch.equal, (*tensors, *beside), (*before, *same)))
    assert saver.report().committed_bytes == held
    saver.close()


def test_close_waits_for_prefetch(device: str) -> None:
    saver = MemorySaver(device)
    tensors, _ = filled(saver, [MIB, MIB])
    saver.pause()
    with gated(saver) as gate, ThreadPoolExecutor(1) as thread:
        saver.begin_resume()
        later = thread.submit(saver.close)
        assert wait_for([later], 0.02).not_done  # must not unmap during a copy
        gate.let(1000)
        later.result(60)
    with pytest.raises(StateError, match="closed"):
        saver.resume()
    del tensors


def test_dropped_saver_is_released_after_its_copies(device: str) -> None:
    saver = MemorySaver(device)
    backend, (tensors, _) = saver.backend, filled(saver, [MIB] * 3)
    saver.pause()
    with gated(saver) as gate:
        saver.begin_resume()
        del saver, tensors
        gc.collect()
        assert backend.committed_bytes >= 3 * MIB  # the copies still write to it
        gate.let(1000)
        until(lambda: gc.collect() >= 0 and not backend.committed_bytes)


@pytest.mark.gpu
def test_wait_with_streams_blocks_streams_but_not_host() -> None:
    # A kernel holds the copies up: `wait` returns, and work queued after it sees the bytes. Each
    # piece has one event.
    saver = MemorySaver("cuda:0")
    nbytes, size = large("cuda:0") // 8, prefetches.PIECE
    tensors, before = filled(saver, [nbytes] * 4)
    first, expected = tensors[3][:size], before[3][:size].sum(dtype=torch.int64)
    backend, events = saver.backend, list[Any]()
    feed, busy, side = backend.feed, torch.cuda.Stream(), torch.cuda.Stream()
    saver.pause()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(int(2e9))  # a second
        backend.start_copy([], inward=True)  # later copies wait for the kernel

    def noted(pieces: Any, queued: Callable[[Any], None], inward: bool) -> None:
        def note(event: Any) -> None:
            events.append(event)
            queued(event)

        feed(pieces, note, inward)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "feed", noted)
        prefetch = saver.begin_resume("p", order=tensors[::-1])
        prefetch.wait([first], [side])
        with torch.cuda.stream(side):
            total = first.sum(dtype=torch.int64)
            summed = side.record_event()
        # The host has not waited.
        assert not summed.query() and not busy.query() and not prefetch.arrived
        prefetch.wait(tensors, [torch.cuda.current_stream()])
        assert all(map(torch.equal, tensors, before))
        summed.synchronize()
        assert torch.equal(total, expected)
        prefetch.wait()
    assert len({id(event) for event in events}) == len(events) == 4 * nbytes // size
    saver.check_integrity()
    saver.close()
