"""Loads that are late: a layer is computed after its own rows came, and waits for no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache.ops.host_copy import copy_rows
from kvcache.tiers import HostKVCache, Transfer
from rollout import Engine, SamplingParams
from rollout.model.mixers.attention import Attention
from tests.helpers.tiers import blocks_of, tiered
from tests.rollout.test_greedy import random_prompts
from tests.rollout.test_prefix_cache import GREEDY, assert_same, make, path, run

__all__ = ["path"]  # a fixture


class Late(Transfer):
    """A copy to the device that does nothing before it is waited for. Until then its target holds NaN."""

    def __init__(self, copies: LateCopies, host_slots: Any, device_slots: torch.Tensor) -> None:
        super().__init__(range(copies.host.num_layers), {})
        self._plan = copies.host._plan
        self._rows, self._slots = copies.host._host_rows(host_slots), device_slots  # free, maybe, when it is late
        self.came = 0  # layers
        for part in copies.host.pool.stored.values():
            part[:, device_slots] = float("nan")

    @property
    def done(self) -> bool:
        return self.came == len(self.layers)

    def wait(self, layer: int | None = None) -> None:
        last = self.layers[-1] if layer is None else layer
        while self.came <= last:
            copy_rows(self._plan, self._rows, self._slots, range(self.came, self.came + 1), to_host=False)
            self.came += 1

    def synchronize(self) -> None:
        self.wait()


class LateCopies:
    """Stands in for the stream of an engine's host tier: in order, and as late as possible."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host: HostKVCache = blocks_of(engine).tiers.lower.host
        self.loads: list[Late] = []
        self._backup = self.host.backup_from_device_all_layer
        monkeypatch.setattr(self.host, "load_to_device", self._load)
        monkeypatch.setattr(self.host, "backup_from_device_all_layer", self._after_loads)

    def _load(self, host_slots: Any, device_slots: torch.Tensor) -> Transfer:
        self.loads.append(Late(self, host_slots, device_slots))
        return self.loads[-1]

    def _after_loads(self, host_slots: Any, device_slots: torch.Tensor) -> Transfer:
        for load in self.loads:  # a page that was read may be written now
            load.wait()
        return self._backup(host_slots, device_slots)


def test_a_layer_waits_for_its_own_rows_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, (prompt, other) = tiered(path), random_prompts((80, 120))
    expected = run(engine, [prompt])
    run(engine, [other])
    copies = LateCopies(engine, monkeypatch)
    came: list[int] = []
    compute = Attention.__call__

    def spy(mixer: Attention, *args: Any) -> torch.Tensor:
        came.append(copies.loads[0].came)
        return compute(mixer, *args)

    monkeypatch.setattr(Attention, "__call__", spy)
    assert_same(run(engine, [prompt]), expected)
    layers = engine.model.num_layers
    assert len(copies.loads) == 1 and engine.stats.loaded_tokens == 76
    assert came[:layers] == [1, 2] and set(came[layers:]) == {layers}


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_late_loads_change_no_answer(path: Path, preemption: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, plain = tiered(path, 104, preemption=preemption), make(path, prefix_cache=False, kv_tokens=1024)
    copies = LateCopies(engine, monkeypatch)
    roots = random_prompts((40, 30, 35))
    prompts = [root[: 20 + 5 * i] + tail for i, tail in enumerate(random_prompts((5, 3, 9))) for root in roots]
    for params in (GREEDY, SamplingParams(max_tokens=30, temperature=0, n=2)):
        for _ in range(2):
            assert_same(run(engine, prompts, params), run(plain, prompts, params))
    assert len(copies.loads) > 10


def test_loads_of_a_step_that_failed_come_before_their_pages_are_used_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, (prompt, other) = tiered(path), random_prompts((80, 120))
    expected = run(engine, [prompt])
    run(engine, [other])
    copies = LateCopies(engine, monkeypatch)

    def fail(*args: Any) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(engine.runner, "forward", fail)
        engine.generate([prompt], GREEDY)
    assert [load.came for load in copies.loads] == [engine.model.num_layers]
    assert_same(run(engine, [prompt]), expected)
