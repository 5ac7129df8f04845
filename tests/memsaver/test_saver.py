"""The contract of `MemorySaver` on every backend, and its records of driver calls."""

from __future__ import annotations

import gc
import logging
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import memsaver
from memsaver.tag.events import Recorder
from memsaver.tag.tags import Tags
from tests.helpers.memory import counted, family_bytes, process_bytes, scribble
from tests.helpers.memsaver.savers import MIB, driver_calls, inject_fault

pytestmark = pytest.mark.alone


def test_pause_releases_exactly_the_committed_bytes(device: str) -> None:
    saver = memsaver.MemorySaver(device)
    tensors = [
        saver.empty((1 << n, 3), torch.float32, tag="kv_cache").fill_(1) for n in range(4, 21, 4)
    ]
    saver.empty(5, tag="other").fill_(1)
    committed = saver.report().tags["kv_cache"].committed_bytes
    live = sum(tensor.nbytes for tensor in tensors)
    assert live <= committed < live + 2 * saver.backend.granularity + 64 * 1024
    before, held = process_bytes(device), family_bytes(device)
    saver.pause("kv_cache")
    assert before - process_bytes(device) == counted(committed, device), "unmapped"
    assert held - family_bytes(device) == counted(committed, device), "released"
    assert saver.report().tags["kv_cache"].committed_bytes == 0
    saver.resume("kv_cache")
    for tensor in tensors:
        tensor.fill_(2)
    assert process_bytes(device) == counted(before, device)
    saver.check_integrity()


def test_host_content_is_restored_at_the_same_addresses(device: str) -> None:
    saver = memsaver.MemorySaver(device)
    with saver.region("weights", content="host"):
        model = torch.nn.Sequential(torch.nn.Linear(700, 300), torch.nn.Linear(300, 11)).to(device)
        noise = torch.randn(12345, device=device)
    kept = [tensor.detach().cpu().clone() for tensor in (*model.parameters(), noise)]
    addresses = [tensor.data_ptr() for tensor in (*model.parameters(), noise)]
    live = sum(tensor.nbytes for tensor in kept)
    saver.pause("weights")
    assert saver.report().tags["weights"].backup_bytes == saver.report().backup_bytes == live
    scribble(16 << 20, device)
    saver.resume("weights")
    assert saver.report().backup_bytes == 0
    after = [*model.parameters(), noise]
    assert [tensor.data_ptr() for tensor in after] == addresses
    assert all(
        torch.equal(tensor.detach().cpu(), old) for tensor, old in zip(after, kept, strict=True)
    )


def test_tags_are_independent_and_errors_name_their_state(device: str) -> None:
    saver = memsaver.MemorySaver(device)
    one, two = saver.empty(10, tag="one"), saver.empty(10, tag="two")
    two.fill_(2)
    saver.pause("one")
    assert saver.is_paused("one") and not saver.is_paused("two")
    assert two.sum() == 20
    saver.pause("one")  # a no-op
    assert saver.report().tags["one"].state == "paused"
    with pytest.raises(memsaver.StateError, match="'one' is paused"):
        saver.empty(1, tag="one")
    with pytest.raises(memsaver.StateError, match="'one' is paused"), saver.region("one"):
        pass
    saver.resume()
    one.fill_(1)
    with pytest.raises(memsaver.TagError, match="unknown tag 'three'.*'one', 'two'"):
        saver.pause("one", "three")
    assert not saver.is_paused("one")
    assert saver.tags == ["one", "two"]


def test_content_policy_is_fixed_but_a_pause_can_override_it(device: str) -> None:
    saver = memsaver.MemorySaver(device)
    value = saver.empty(100, tag="t", content="discard")
    value.fill_(5)
    with pytest.raises(memsaver.TagError, match="content='discard', not 'host'"):
        saver.empty(1, tag="t", content="host")
    with pytest.raises(ValueError, match="content='disc'"):
        saver.empty(1, tag="u", content="disc")
    saver.pause("t", content="host")
    saver.resume("t")
    assert value.sum() == 500
    saver.pause("t")
    assert saver.report().backup_bytes == 0


def test_resume_is_atomic_under_a_limit(device: str) -> None:
    saver = memsaver.MemorySaver(device, limit_bytes=32 * MIB)
    saver.empty(16 * MIB, torch.uint8, tag="a").fill_(1)
    saver.pause("a")
    saver.empty(4 * MIB, torch.uint8, tag="c")
    saver.pause("c")
    saver.empty(24 * MIB, torch.uint8, tag="b").fill_(2)
    with pytest.raises(memsaver.OutOfMemory, match=r"12\.0 MiB are missing.*b 24\.0 MiB") as caught:
        saver.resume("c", "a")
    assert isinstance(caught.value, MemoryError)
    assert (caught.value.requested_bytes, caught.value.missing_bytes) == (20 * MIB, 12 * MIB)
    assert caught.value.holders["b"] == 24 * MIB
    assert saver.is_paused("a") and saver.is_paused("c")
    assert saver.report().committed_bytes == 24 * MIB
    saver.check_integrity()
    saver.pause("b")
    saver.resume("a", "c")
    assert saver.report().committed_bytes == 20 * MIB


def test_full_region_raises_out_of_memory_and_releases_its_tensors(device: str) -> None:
    saver = memsaver.MemorySaver(device, limit_bytes=32 << 20)
    with (
        pytest.raises(memsaver.OutOfMemory, match="region 'weights' needs"),
        saver.region("weights"),
    ):
        kept = [torch.empty(12 << 20, dtype=torch.uint8, device=device) for _ in range(4)]
        del kept
    assert saver.report().committed_bytes <= 32 << 20
    with saver.region("weights"):
        torch.empty(12 << 20, dtype=torch.uint8, device=device)


def test_region_passes_other_errors_through(device: str) -> None:
    saver = memsaver.MemorySaver(device, limit_bytes=32 << 20)
    with (
        pytest.raises(RuntimeError, match="an error of the caller") as caught,
        saver.region("weights"),
    ):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(64 << 20, dtype=torch.uint8, device=device)
        raise RuntimeError("an error of the caller")
    assert not isinstance(caught.value, memsaver.OutOfMemory)


def test_innermost_region_applies_and_outside_is_plain(device: str) -> None:
    saver, other = memsaver.MemorySaver(device), memsaver.MemorySaver(device)
    with saver.region("outer"):
        first = torch.ones(1000, device=device)
        with other.region("inner"):
            second = torch.ones(1000, device=device)
        third = torch.ones(1000, device=device)
    plain = torch.ones(1000, device=device)
    assert saver.offset_of(first) != saver.offset_of(third)
    assert other.offset_of(second) == 0
    with pytest.raises(memsaver.TagError):
        saver.offset_of(plain)
    with pytest.raises(memsaver.StateError, match="region of it is open"), saver.region("outer"):
        saver.pause("outer")


@pytest.mark.parametrize(
    "arguments", [{"limit_bytes": 0}, {"reserve_bytes": -1}, {"device": "meta"}, {"device": "tpu"}]
)
def test_bad_arguments_are_refused(arguments: dict) -> None:
    with pytest.raises(ValueError):
        memsaver.MemorySaver(**{"device": "cpu", **arguments})


def test_missing_gpu_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(memsaver.BackendError, match=r"'cuda:99' cannot be used: .*memsaver doctor"):
        memsaver.MemorySaver("cuda:99")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)  # as if not installed
    monkeypatch.delitem(sys.modules, "memsaver.memory.cuda", raising=False)
    with pytest.raises(memsaver.BackendError, match=r"pip install 'memsaver\[cuda\]'"):
        memsaver.MemorySaver("cuda:0")


def test_saver_and_report_are_readable_as_text(device: str) -> None:
    saver = memsaver.MemorySaver(device, limit_bytes=64 << 20)
    kept = [saver.empty(4 << 20, torch.uint8, tag=tag) for tag in ("weights", "kv_cache")]
    saver.pause("kv_cache")
    assert repr(saver) == f"MemorySaver('{device}': weights 4.0 MiB, kv_cache paused)"
    lines = str(saver.report(others=False)).splitlines()
    assert lines[0] == f"{device}: 4.0 MiB committed of at most 64.0 MiB"
    assert [line.split()[:2] for line in lines[1:4]] == [
        ["tag", "state"],
        ["weights", "active"],
        ["kv_cache", "paused"],
    ]
    assert len(lines) == 5 and max(map(len, lines)) < 80
    saver.close()
    assert repr(saver) == f"MemorySaver('{device}': closed)"
    del kept


def test_committed_bytes_exceed_live_bytes_by_two_percent_at_most(device: str) -> None:
    saver = memsaver.MemorySaver(device)
    with saver.region("weights"):
        layers = [torch.nn.Linear(1000, 1000, device=device) for _ in range(20)]
        scratch = [torch.empty(1 << 22, device=device) for _ in range(3)]
        del scratch
    tag = saver.report().tags["weights"]
    assert tag.live_bytes == sum(p.nbytes for layer in layers for p in layer.parameters())
    # Torch's segments of 2 and 20 MiB round up a model of this size.
    slack = 1.02 if device == "cpu" else 1.3
    assert tag.committed_bytes <= tag.live_bytes * slack


@pytest.mark.parametrize("how", ["drop", "close"])
def test_saver_releases_memory_when_dropped_or_closed(device: str, how: str) -> None:
    saver = memsaver.MemorySaver(device)
    tensor = saver.empty(8 << 20, torch.uint8).fill_(1)
    assert tensor.sum() == 8 << 20  # loads the kernel
    before = process_bytes(device)
    if how == "close":
        saver.close()
        saver.close()
        with pytest.raises(memsaver.StateError, match="closed"):
            saver.empty(1)
    else:
        del saver
        gc.collect()
        assert tensor.sum() == 8 << 20  # the saver lives as long as its tensors
        del tensor
        gc.collect()
    assert before - process_bytes(device) == counted(8 << 20, device)


@pytest.mark.parametrize("paused", [True, False])
def test_closed_saver_keeps_no_saved_content(device: str, paused: bool) -> None:
    saver = memsaver.MemorySaver(device)
    tensor = saver.empty(1 << 20, torch.uint8, tag="t", content="host").fill_(1)
    gc.collect()
    used = saver.pinned_arena.used_bytes
    if paused:
        saver.pause()
    else:
        saver.save("t", version=1)
    assert saver.pinned_arena.used_bytes == used + tensor.nbytes
    saver.close()
    assert saver.pinned_arena.used_bytes == used


def test_events_and_report_are_plain_data(device: str) -> None:
    saver = memsaver.MemorySaver(device, limit_bytes=1 << 30)
    tensor = saver.empty(1 << 20, torch.uint8, tag="t", content="host")
    saver.pause()
    saver.resume()
    report = pickle.loads(pickle.dumps(saver.report()))
    assert (report.tags["t"].live_bytes, report.limit_bytes) == (tensor.nbytes, 1 << 30)
    events = saver.drain_events()
    assert [(event.op, event.committed_bytes > 0) for event in events] == [
        ("grow", True), ("pause", False), ("resume", True)
    ]  # fmt: skip
    assert events[1].backup_bytes == tensor.nbytes
    assert saver.drain_events() == []


def test_drain_loses_no_event_of_a_concurrent_thread() -> None:
    saver = memsaver.MemorySaver()
    arena, recorder = Tags(saver.backend, MIB).open("a", None), Recorder(saver.backend)
    done, drained, before = threading.Event(), 0, sys.getswitchinterval()

    def copy_often() -> None:
        for _ in range(20_000):
            recorder.record("save", arena, 0.0)
        done.set()

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(copy_often)
            while not done.is_set():
                drained += len(recorder.drain())
    finally:
        sys.setswitchinterval(before)
    assert drained + len(recorder.drain()) == 20_000
    arena.close()


def test_driver_log_shows_latest_calls_once_enabled(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    saver = memsaver.MemorySaver(device)
    tensor = saver.empty(MIB, torch.uint8, tag="a")
    for _ in range(400):  # more calls than the shim remembers
        saver.pause()
        saver.resume()
    assert not caplog.records
    with caplog.at_level(logging.DEBUG, "memsaver.driver"):
        saver.pause()
    texts = [record.getMessage() for record in caplog.records]
    assert "calls are not shown" in texts[0] and len(texts) == 1025
    assert any(text.startswith("unmap") for text in texts[-3:])
    del tensor


def test_failed_driver_call_is_counted_and_logged_without_its_bytes(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    saver = memsaver.MemorySaver(device)
    with caplog.at_level(logging.DEBUG, "memsaver"):
        tensor = saver.empty(4 * MIB, torch.uint8, tag="a")
        saver.pause("a")
        before = driver_calls(saver)["create"]
        inject_fault(saver.backend, 1, 2)
        saver.resume("a")  # retries once
    after = driver_calls(saver)["create"]
    assert (after.calls - before.calls, after.failed, after.nbytes) == (2, 1, 2 * before.nbytes)
    operations = [record.getMessage() for record in caplog.records if record.name == "memsaver"]
    assert any(text.startswith(f"pause 'a' on {device}: 0 B") for text in operations)
    driver = [record.getMessage() for record in caplog.records if record.name == "memsaver.driver"]
    assert [text.split()[0] for text in driver[:3]] == ["reserve", "create", "map"]
    assert any(text.startswith("create 4.0 MiB") and "us: failed with" in text for text in driver)
    del tensor
