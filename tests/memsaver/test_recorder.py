"""Statistics and log of the driver's calls, whoever makes them."""

from __future__ import annotations

import logging

import pytest
import torch

import memsaver
from tests.helpers.memsaver.savers import MIB


def test_calls_of_both_sides_are_counted(device: str) -> None:
    saver = memsaver.MemorySaver(device)
    assert saver.statistics() == {}
    tensor = saver.empty(4 * MIB, torch.uint8, tag="a")  # by the shim
    committed = saver.report().committed_bytes
    first = saver.statistics()
    assert first["reserve"].calls == first["create"].calls == first["map"].calls == 1
    assert first["create"].nbytes == first["map"].nbytes == committed
    saver.pause()  # from Python
    saver.resume()
    second = saver.statistics()
    assert (second["unmap"].calls, second["release"].calls, second["create"].calls) == (1, 1, 2)
    assert second["release"].nbytes == second["unmap"].nbytes == committed
    assert second["synchronize"].calls > 0
    with saver.region("b"):  # by torch's allocator
        inside = torch.ones(3 * MIB, dtype=torch.uint8, device=device)
    third = saver.statistics()
    assert (
        third["map"].nbytes - second["map"].nbytes >= inside.nbytes and third["create"].calls > second["create"].calls
    )
    assert all(stats.seconds > 0 for stats in second.values())
    tensor.fill_(1)


def test_failures_are_counted_and_their_bytes_are_not(device: str) -> None:
    saver = memsaver.MemorySaver(device)
    saver.empty(MIB, torch.uint8, tag="a")
    saver.pause()
    before = saver.statistics()["create"]
    saver.backend.inject_fault(1, 2)
    saver.resume()  # tries once more
    after = saver.statistics()["create"]
    assert (after.calls - before.calls, after.failed, after.nbytes) == (2, 1, 2 * before.nbytes)


def test_the_log_has_operations_and_driver_calls(device: str, caplog: pytest.LogCaptureFixture) -> None:
    saver = memsaver.MemorySaver(device)
    with caplog.at_level(logging.DEBUG, "memsaver"):
        tensor = saver.empty(4 * MIB, torch.uint8, tag="a")
        saver.pause("a")
        saver.backend.inject_fault(1, 2)
        saver.resume("a")  # tries once more
    operations = [record.getMessage() for record in caplog.records if record.name == "memsaver"]
    assert any(text.startswith(f"pause 'a' on {device}: 0 B") for text in operations)
    driver = [record.getMessage() for record in caplog.records if record.name == "memsaver.driver"]
    assert [text.split()[0] for text in driver[:3]] == ["reserve", "create", "map"]
    assert any(text.startswith("create 4.0 MiB") and "us: failed with" in text for text in driver)
    del tensor


def test_a_quiet_log_costs_nothing_and_forgets_nothing_new(device: str, caplog: pytest.LogCaptureFixture) -> None:
    saver = memsaver.MemorySaver(device)
    tensor = saver.empty(MIB, torch.uint8, tag="a")
    for _ in range(400):  # more calls than are remembered
        saver.pause()
        saver.resume()
    assert not caplog.records
    with caplog.at_level(logging.DEBUG, "memsaver.driver"):
        saver.pause()
    texts = [record.getMessage() for record in caplog.records]
    assert "calls are not shown" in texts[0] and len(texts) == 1025
    assert any(text.startswith("unmap") for text in texts[-3:])
    del tensor
