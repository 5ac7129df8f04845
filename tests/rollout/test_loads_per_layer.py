"""Late loads from the host: each layer waits for its own rows, and for no other rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache.pools import TokenPool
from kvcache.tiers import HostKVCache, HostTransfer
from rollout import Engine, SamplingParams
from rollout.model.mixers.attention import Attention
from tests.helpers.rollout.answers import GREEDY, check, random_prompts, run
from tests.helpers.rollout.poison import fill
from tests.helpers.rollout.tiers import blocks_of, failing, tiered
from tests.helpers.rollout.updates import tiny


class Late(HostTransfer):
    """A copy to the device whose rows arrive only when a layer waits for them.

    The copy has already written its rows to the slots. They are saved and replaced by NaN until
    then.
    """

    def __init__(self, pool: TokenPool, slots: torch.Tensor) -> None:
        super().__init__()
        self._layers = next(iter(pool.stored.values())).shape[0]
        self._pool, self._slots = pool, slots
        self._rows = {name: part[:, slots] for name, part in pool.stored.items()}
        self.arrived = 0  # layers
        fill(pool, slots)

    @property
    def done(self) -> bool:
        return self.arrived == self._layers

    def wait(self, layer: int = -1) -> None:
        while self.arrived <= layer % self._layers:
            for name, part in self._pool.stored.items():
                part[self.arrived, self._slots] = self._rows[name][self.arrived]
            self.arrived += 1

    def synchronize(self) -> None:
        self.wait()


class LateCopies:
    """Stand-in for the stream of a host tier: copies run in order and as late as possible."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host: HostKVCache = blocks_of(engine).tiers.lower.host
        self.loads: list[Late] = []
        self._load_now = self.host.load_to_device
        self._backup = self.host.backup_from_device_all_layer
        monkeypatch.setattr(self.host, "load_to_device", self._load)
        monkeypatch.setattr(self.host, "backup_from_device_all_layer", self._after_loads)

    def _load(self, host_slots: Any, device_slots: torch.Tensor) -> HostTransfer:
        self._load_now(host_slots, device_slots).wait()
        self.loads.append(Late(self.host.pool, device_slots))
        return self.loads[-1]

    def _after_loads(self, host_slots: Any, device_slots: torch.Tensor) -> HostTransfer:
        for load in self.loads:  # a page that a load reads may be overwritten now
            load.wait()
        return self._backup(host_slots, device_slots)


def test_layer_waits_for_its_own_rows_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, (prompt, other) = tiered(path), random_prompts((80, 120))
    run(engine, [prompt])
    run(engine, [other])
    copies = LateCopies(engine, monkeypatch)
    arrived: list[int] = []
    compute = Attention.__call__

    def spy(mixer: Attention, *args: Any) -> torch.Tensor:
        arrived.append(copies.loads[0].arrived)
        return compute(mixer, *args)

    monkeypatch.setattr(Attention, "__call__", spy)
    check(tiny(0), [prompt], [run(engine, [prompt])])
    layers = engine.model.num_layers
    assert len(copies.loads) == 1 and engine.stats.loaded_tokens == 76
    assert arrived[:layers] == [1, 2] and set(arrived[layers:]) == {layers}


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_late_loads_change_no_answer(
    path: Path, preemption: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiered(path, 104, preemption=preemption)
    copies = LateCopies(engine, monkeypatch)
    roots = random_prompts((40, 30, 35))
    prompts = [
        root[: 20 + 5 * i] + tail
        for i, tail in enumerate(random_prompts((5, 3, 9)))
        for root in roots
    ]
    for params in (GREEDY, SamplingParams(max_tokens=20, temperature=0, n=2)):
        check(tiny(0), prompts, [[answer] for answer in run(engine, prompts, params)])
    assert len(copies.loads) > 5


def test_loads_of_a_failed_step_finish_before_their_pages_are_reused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, (prompt, other) = tiered(path), random_prompts((80, 120))
    run(engine, [prompt])
    run(engine, [other])
    copies = LateCopies(engine, monkeypatch)

    with failing(engine.runner, "forward", 0, monkeypatch):
        engine.generate([prompt], GREEDY)
    assert [load.arrived for load in copies.loads] == [engine.model.num_layers]
    check(tiny(0), [prompt], [run(engine, [prompt])])
