"""Weights that come as messages: what lands in the pages, and what is refused untouched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from memsaver import StateError
from rollout import Engine, PackedBox, WeightUpdateError, WriteReceipt
from rollout.boxes import write_boxes
from tests.helpers.rollout.updates import answers, message, update, write


@pytest.fixture
def engine(path: Path, device: str) -> Engine:
    return Engine.from_pretrained(path, device=device, kv_tokens=512)


def receipt_of(engine: Engine, seed: int, version: int) -> WriteReceipt:
    """What a writer of the mapped pages would say; aborts its update."""
    made = write(engine.begin_update(version, shadow=True), seed)
    engine.abort_update("only to know the digest")
    return made


@pytest.mark.parametrize("shadow", [False, True])
def test_messages_do_what_mapped_pages_do(shadow: bool, engine: Engine) -> None:
    before = answers(engine)
    receipt = receipt_of(engine, seed=1, version=1)
    offer = engine.begin_update(1, shadow=shadow)
    boxes, data = message(offer, seed=1)
    half = len(boxes) // 2
    engine.write_update(boxes[:half], data)
    if shadow:
        assert answers(engine) == before
    engine.write_update(boxes[half:], data)
    engine.verify_update(receipt)
    engine.commit_update(1)
    found = answers(engine)
    update(engine, 2, seed=1)
    assert found == answers(engine) != before


def test_a_message_lost_is_noticed(engine: Engine) -> None:
    receipt = receipt_of(engine, seed=1, version=1)
    boxes, data = message(engine.begin_update(1), seed=1)
    engine.write_update(boxes[:-1], data)
    with pytest.raises(WeightUpdateError, match="failed verification"):
        engine.verify_update(receipt)
    assert engine.unavailable_reason() is not None


def test_only_an_open_update_is_written(engine: Engine) -> None:
    receipt = receipt_of(engine, seed=1, version=1)
    with pytest.raises(WeightUpdateError, match="no weight update is open"):
        engine.write_update([], torch.empty(0, dtype=torch.uint8))
    boxes, data = message(engine.begin_update(1, shadow=True), seed=1)
    engine.write_update(boxes, data)
    engine.verify_update(receipt)
    with pytest.raises(WeightUpdateError, match="is verified already; commit or abort it"):
        engine.write_update(boxes, torch.zeros_like(data))
    engine.commit_update(1)
    assert engine.weights_version == 1
    engine.sleep(2)
    with pytest.raises(StateError, match="tag weights is paused"):
        engine.write_update(boxes, data)


BOX = PackedBox(at=0, offset=64, shape=(2, 3), strides=(8, 1), itemsize=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"at": 44}, "bytes 44 to 68 are outside the 64 sent"),
        ({"offset": 60}, "bytes 60 to 104 are outside the weights, 64 to 128"),
        ({"offset": 88}, "bytes 88 to 132 are outside the weights, 64 to 128"),
        ({"strides": (1 << 40, 1)}, "are outside the weights"),
    ],
)
def test_a_box_outside_is_refused_before_any_is_written(changes: dict[str, Any], message: str, device: str) -> None:
    pages = torch.zeros(64, dtype=torch.uint8, device=device)
    data = torch.ones(64, dtype=torch.uint8)
    with pytest.raises(WeightUpdateError, match=message):
        write_boxes(pages, [BOX, replace(BOX, **changes)], data, base=64)
    assert not pages.any()
    write_boxes(pages, [BOX], data, base=64)
    rows = pages.view(torch.int32).view(2, 8)
    assert (rows[:, :3] == 0x01010101).all() and not rows[:, 3:].any()


@pytest.mark.parametrize(
    "data", [torch.zeros(8), torch.zeros(128, dtype=torch.uint8)[::2], torch.zeros(8, 8, dtype=torch.uint8)]
)
def test_a_message_of_another_kind_is_refused(data: Tensor) -> None:
    with pytest.raises(WeightUpdateError, match="uint8 on the CPU, in one piece"):
        write_boxes(torch.zeros(64, dtype=torch.uint8), [], data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"itemsize": 8}, "1, 2 or 4 bytes"),
        ({"strides": (1,)}, "as many strides"),
        ({"shape": (2, -3)}, "no negative"),
        ({"at": -4}, "no negative"),
        ({"offset": 66}, "multiples of the 4 bytes"),
    ],
)
def test_boxes_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(BOX, **changes)
