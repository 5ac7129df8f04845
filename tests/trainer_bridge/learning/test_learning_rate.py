"""Learning rates of all schedules: their shapes, and the seams of resumed runs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers as hf  # imports its schedulers, which take seconds, where they are named
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LambdaLR

from trainer_bridge import Schedule, TrainerConfig
from trainer_bridge.learning.optimizer import LearningRate

LARGEST = 3e-4
# A rate comes from at most 16 roundings, each of at most eps / 2 of the largest rate.
ROUNDED = LARGEST * 8 * torch.finfo(torch.float64).eps
KINDS = ("constant", "linear", "cosine")


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    kind = draw(st.sampled_from(KINDS))
    warmup = draw(st.integers(0, 6))
    final = 0.0 if kind == "constant" else draw(st.sampled_from([0.0, 0.1, 0.9]))
    updates = warmup + draw(st.integers(1, 12))
    return Schedule(kind=kind, warmup_updates=warmup, updates=updates, final_rate=final)


def begun(schedule: Schedule, learning_rate: float = LARGEST) -> LearningRate:
    config = TrainerConfig(model_path="m", learning_rate=learning_rate, schedule=schedule)
    return LearningRate.of(config)


def resumed(before: LearningRate, done: int, **changes: Any) -> LearningRate:
    """Continue from a checkpoint after `done` updates, with a changed schedule."""
    stored = json.loads(json.dumps(dataclasses.asdict(before)))
    return begun(dataclasses.replace(before.schedule, **changes)).continuing(stored, done)


def rates(rate: LearningRate, first: int = 0) -> list[float]:
    """Return the rates of the updates after the first ones, to one update beyond the end."""
    assert rate.schedule.updates is not None
    return [rate.after(updates) for updates in range(first, rate.schedule.updates + 1)]


def scheduled(make: Callable[[torch.optim.Optimizer], LambdaLR], count: int) -> list[float]:
    """Return the rates of the first updates under a scheduler of torch's form."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LARGEST)
    scheduler = make(optimizer)
    expected = []
    for _ in range(count):
        expected.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return expected


@settings(max_examples=60)
@given(schedules())
def test_rates_equal_those_of_transformers_schedulers(schedule: Schedule) -> None:
    """Leave out the first update of transformers' warm-up, whose rate is 0."""
    assert schedule.updates is not None
    warmup, updates = schedule.warmup_updates + 1, schedule.updates + 1
    final = schedule.final_rate
    if schedule.kind == "constant":
        expected = scheduled(lambda o: hf.get_constant_schedule_with_warmup(o, warmup), updates + 1)
    elif schedule.kind == "linear":
        whole = scheduled(
            lambda o: hf.get_linear_schedule_with_warmup(o, warmup, updates), updates + 1
        )
        fallen = [final * LARGEST + (1 - final) * rate for rate in whole[warmup:]]
        expected = whole[:warmup] + fallen
    else:
        cosine = hf.get_cosine_with_min_lr_schedule_with_warmup
        expected = scheduled(lambda o: cosine(o, warmup, updates, min_lr_rate=final), updates + 1)
    assert expected[0] == 0
    assert rates(begun(schedule)) == pytest.approx(expected[1:], rel=0, abs=ROUNDED)


@settings(max_examples=200)
@given(schedules(), st.data())
def test_resumed_run_has_the_rates_of_an_uninterrupted_one(
    schedule: Schedule, data: st.DataObject
) -> None:
    assert schedule.updates is not None
    straight = begun(schedule)
    seams = sorted(data.draw(st.lists(st.integers(0, schedule.updates), max_size=3)))
    rate = straight
    for done in seams:
        rate = resumed(rate, done)
    assert rates(rate, seams[-1] if seams else 0) == rates(straight, seams[-1] if seams else 0)


@settings(max_examples=300)
@given(schedules(), st.data())
def test_rate_never_jumps_when_a_resumed_run_has_another_end(
    schedule: Schedule, data: st.DataObject
) -> None:
    """Resume up to three times, each time with another end, in warm-up and after it."""
    assert schedule.updates is not None
    warmup, final = schedule.warmup_updates, LARGEST * schedule.final_rate
    rate, done, last = begun(schedule), 0, 0.0
    for _ in range(data.draw(st.integers(1, 3))):
        assert rate.schedule.updates is not None
        seam = data.draw(st.integers(done, rate.schedule.updates))
        last = rate.after(seam - 1) if seam else 0.0
        end = max(seam, warmup) + data.draw(st.integers(1, 12))
        rate, done = resumed(rate, seam, updates=end), seam
        fallen_from = max(done, warmup)
        after_seam = rates(rate, done)
        # A cosine is steepest in its middle, with pi / 2 times the mean slope.
        steepest = math.pi / 2 * (LARGEST - final) / (end - fallen_from) + ROUNDED
        for updates, (before, after) in enumerate(pairwise([last, *after_seam]), start=done):
            if updates <= warmup:
                assert after == LARGEST * (updates + 1) / (warmup + 1)
            else:
                assert before - steepest <= after <= before
        assert after_seam[-1] == (LARGEST if schedule.kind == "constant" else final)


@settings(max_examples=50)
@given(schedules(), st.integers(0, 12), st.data())
def test_changed_rate_or_kind_replaces_the_stored_schedule(
    schedule: Schedule, done: int, data: st.DataObject
) -> None:
    before = begun(schedule)
    stored = json.loads(json.dumps(dataclasses.asdict(before)))
    other = data.draw(schedules().filter(lambda other: other.kind != schedule.kind))
    for now in (begun(other), begun(schedule, 2 * LARGEST)):
        assert now.continuing(stored, done) == now
    assert before.continuing(None, done) == before  # a checkpoint without a schedule


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "square"}, "kind='square': use one of constant, linear, cosine"),
        ({"kind": "linear"}, "updates=None: must be set for kind='linear'"),
        ({"updates": 0}, "updates=0: must be at least 1"),
        ({"warmup_updates": -1}, "warmup_updates=-1: must not be negative"),
        ({"warmup_updates": 3, "updates": 3}, "warmup_updates=3: must be less than updates=3"),
        ({"final_rate": 0.5}, "final_rate=0.5: needs kind='linear' or 'cosine'"),
        ({"kind": "cosine", "updates": 2, "final_rate": 1.0}, r"final_rate=1.0: must be in \[0, 1"),
        ({"kind": "cosine", "updates": 2, "final_rate": math.nan}, "final_rate=nan: must be in"),
    ],
)
def test_schedule_with_bad_field_is_refused_with_its_value(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"Schedule\.{message}"):
        Schedule(**fields)
