"""Torch's memory outside of tags, by its list of segments."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from memsaver import MemorySaver
from memsaver.memory.torch_allocator import outside_tags


def segment(address: int, total: int, allocated: int, pool: tuple[int, int]) -> dict[str, Any]:
    sizes = {"total_size": total, "allocated_size": allocated}
    return {"device": 0, "address": address, **sizes, "segment_pool_id": pool}


def test_outside_tags_excludes_segments_of_active_and_paused_tags() -> None:
    # Other segments in pools belong to graphs, and segments of other GPUs do not count.
    with contextlib.closing(MemorySaver("cpu")) as saver:
        on_tag = saver.empty((4096,), torch.uint8, tag="weights").data_ptr()
        elsewhere = torch.empty(1 << 20).data_ptr()
        listed = [
            segment(on_tag, 64, 64, (1, 0)),
            segment(elsewhere, 20, 5, (0, 0)),
            segment(elsewhere + 64, 10, 10, (0, 0)),
            segment(elsewhere + 128, 7, 3, (0, 2)),
            segment(elsewhere + 256, 9, 9, (0, 0)) | {"device": 1},
        ]
        names = ("torch's cache", "torch's tensors", "torch's private pools")
        for _ in range(2):
            assert outside_tags(listed, 0) == dict(zip(names, (15, 15, 7), strict=True))
            saver.pause("weights", content="discard")
    assert outside_tags(listed, 0)["torch's private pools"] == 64 + 7


def test_report_lists_other_holders_only_on_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with contextlib.closing(MemorySaver("cpu")) as saver:
        monkeypatch.setattr(saver.backend, "other_holders", lambda: {"somebody": 5})
        assert saver.report().others == {"somebody": 5}
        assert saver.report(others=False).others == {}
