"""Sequences of syncs over random layouts: written pages, link traffic, versions after faults."""

from __future__ import annotations

import dataclasses
import threading
import traceback
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.weights import ParamSlice
from rollout.weights.params import shard_groups
from tests.helpers.case_selection import rounds
from tests.helpers.rollout.tp_splits import decoder_splits
from tests.helpers.trainer_bridge.layouts import EMBED, HEAD, HEAD_DIM, box_of, digest_of
from tests.helpers.trainer_bridge.stored_weights import StoredWeights
from tests.helpers.trainer_bridge.sync_cases import (
    SCALE,
    Fault,
    Layout,
    Step,
    Whole,
    layouts,
    steps,
    whole,
)
from tests.helpers.trainer_bridge.sync_hooks import HookedAgreement
from tests.helpers.trainer_bridge.targets import Rank, in_ranks
from tests.helpers.trainer_bridge.tolerance import assert_merged
from trainer_bridge.errors import SyncError
from trainer_bridge.sync.shards import SourceShard
from trainer_bridge.sync.weight_sync import SyncReceipt
from trainer_bridge.sync.writer import LowRank

PATIENCE = 60.0  # seconds that ranks wait for each other


@dataclasses.dataclass
class Trainer:
    """A trainer rank and its shards."""

    rank: Rank
    shards: list[SourceShard]

    def load(self, values: Whole) -> None:
        lora = {}
        for shard in self.shards:
            index = box_of(shard)
            self.rank.sources[shard.name].copy_(values.base[shard.name][index])
            if shard.name in values.a:
                a, b = values.a[shard.name][:, index[1]], values.b[shard.name][index[0]]
                lora[shard.name] = LowRank(a=a, b=b, scale=SCALE)
        self.rank.derived = lora


@dataclasses.dataclass
class Engine:
    """A target and the state it should have.

    Attributes:
        target: The target.
        rank: Rank that owns it.
        version: Version that it should serve; None if it should refuse.
        values: Parameters that it should store, by the trainer's names.
    """

    target: StoredWeights
    rank: int
    version: int | None
    values: dict[str, Whole]


class World:
    """Trainer ranks and engines of one layout, with their expected state after each sync."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        first = whole(layout, 0)
        aliases = {HEAD: EMBED} if layout.tied else {}
        initial = {name: first.base[source] for name, source in layout.stored.items()}
        self.engines = []
        for size, experts, dtype, where in layout.engines:
            for number, (place, rank) in enumerate(where):
                splits = decoder_splits(HEAD_DIM, size, experts)
                groups = shard_groups(layout.groups, splits, number, size)
                target = StoredWeights(groups, aliases, dtype, place, initial)
                self.engines.append(Engine(target, rank, 0, dict.fromkeys(layout.shapes, first)))
        self.trainers = [self._trainer(number) for number in range(len(layout.places))]
        self.engines.sort(key=lambda engine: engine.rank)  # the plan's order
        self.version = 0

    def _trainer(self, number: int) -> Trainer:
        shards = [shard for shard in self.layout.shards if shard.rank == number]
        sources = {
            shard.name: torch.empty(shard.shape, dtype=self.layout.source_dtype) for shard in shards
        }
        targets = [engine.target for engine in self.engines if engine.rank == number]
        return Trainer(
            Rank(sources=sources, targets=targets, place=self.layout.places[number]), shards
        )

    # ---------------------------------------------------------------- running

    def run(self, steps: Sequence[Step]) -> None:
        gate, results = threading.Barrier(len(self.trainers)), [None] * len(self.trainers)
        problems: list[BaseException] = []

        def body(number: int, rank: Rank) -> None:
            for step in steps:
                step = self.possible(step)
                values = whole(self.layout, step.seed, step.lora)
                self.trainers[number].load(values)
                results[number] = self.sync(number, step)
                if gate.wait(PATIENCE) == 0:  # one of the ranks checks for all
                    try:
                        self.after(step, values, results)
                    except BaseException as problem:
                        problems.append(problem)
                gate.wait(PATIENCE)
                if problems:
                    return

        ranks = [trainer.rank for trainer in self.trainers]
        outcomes = in_ranks(ranks, body, self.layout.shards, PATIENCE, HookedAgreement)
        for problem in (*problems, *outcomes):
            if problem is not None:
                # Frames keep tensors alive, and the tensors keep savers alive.
                traceback.clear_frames(problem.__traceback__)
                raise problem

    def possible(self, step: Step) -> Step:
        """Turn a partial sync into a full one if an engine's weights are undefined."""
        defined = all(engine.version is not None for engine in self.engines)
        return step if defined else dataclasses.replace(step, some=None)

    def sync(self, number: int, step: Step) -> Any:
        rank, fault = self.trainers[number].rank, step.fault
        assert rank.sync is not None

        def strike(stage: str, moment: str) -> None:
            if (
                fault is not None
                and (stage, moment) == (fault.stage, fault.moment)
                and self.struck(fault) == number
            ):
                raise OSError("cosmic ray")

        rank.agreement.hook = strike
        try:
            how: Any = {"shadow": step.shadow, "names": step.some, "derived": rank.derived}
            return rank.sync.sync(self.version + 1, **how)
        except Exception as error:
            return error

    def struck(self, fault: Fault) -> int:
        return fault.rank % len(self.trainers)

    # ---------------------------------------------------------------- checks

    def after(self, step: Step, values: Whole, results: Sequence[Any]) -> None:
        self.version += 1
        if step.fault is None:
            self.check_receipts(step, results)
            for engine in self.engines:
                engine.version = self.version
                engine.values |= dict.fromkeys(step.some or self.layout.shapes, values)
        else:
            self.check_errors(step.fault, results)
            for engine in self.engines:
                if self.loses(engine, step, step.fault):
                    engine.version = None
        for trainer in self.trainers:
            for shard in trainer.shards:
                assert torch.equal(
                    trainer.rank.sources[shard.name], values.base[shard.name][box_of(shard)]
                )
        for engine in self.engines:
            assert engine.target.store.version == engine.version
            assert (
                engine.version is not None or "cosmic ray" in engine.target.store.undefined_reason
            )
            engine.target.check_bytes()
            if engine.version is not None:
                for piece in engine.target.store.manifest.slices:
                    self.check_slice(engine, piece)

    def check_errors(self, fault: Fault, results: Sequence[Any]) -> None:
        struck = self.struck(fault)
        for number, error in enumerate(results):
            if number == struck:
                assert isinstance(error, OSError) and str(error) == "cosmic ray"
            else:
                assert isinstance(error, SyncError) and error.stage == fault.stage
                assert error.reason == f"rank {struck}: OSError: cosmic ray"

    def loses(self, engine: Engine, step: Step, fault: Fault) -> bool:
        """Return whether the fault poisons the engine."""
        # Whether the engine's rank completed its step of the stage.
        went = fault.moment == "done" or engine.rank != self.struck(fault)
        if fault.stage == "prepare" or (fault.stage == "open" and not went):
            return False
        return not step.shadow or (fault.stage == "commit" and went)

    def check_receipts(self, step: Step, results: Sequence[Any]) -> None:
        sync = self.trainers[0].rank.sync
        assert sync is not None
        names = set(step.some or self.layout.shapes)
        link = sum(
            self.far(engine, piece)
            for engine in self.engines
            for piece in self.pieces(engine, names)
        )
        digests = tuple(self.digest(engine, step, names) for engine in self.engines)
        nbytes = sum(sum(self.nbytes(engine, names)) for engine in self.engines)
        for result in results:
            assert isinstance(result, SyncReceipt), result
            assert result.version == self.version
            assert (result.nbytes, result.link_bytes) == (nbytes, link)
            assert result.digests == digests
        if step.some is None:
            assert (nbytes, link) == (sum(sync.plan.nbytes), sum(sync.plan.link_bytes.values()))

    def far(self, engine: Engine, piece: ParamSlice) -> int:
        """Return the bytes of a slice that must cross links: no rank on its device holds them."""
        name = self.layout.stored[piece.name]
        held = torch.zeros(self.layout.shapes[name], dtype=torch.bool)
        for shard in self.layout.shards:
            if shard.name == name and self.layout.places[shard.rank] == engine.target.place:
                held[box_of(shard)] = True
        return int((~held[box_of(piece)]).sum()) * engine.target.read(piece).element_size()

    def nbytes(self, engine: Engine, names: set[str]) -> list[int]:
        return [engine.target.read(piece).nbytes for piece in self.pieces(engine, names)]

    def pieces(self, engine: Engine, names: set[str]) -> list[ParamSlice]:
        return [
            p for p in engine.target.store.manifest.slices if self.layout.stored[p.name] in names
        ]

    def digest(self, engine: Engine, step: Step, names: set[str]) -> int:
        """Compute the digest of expected values; of derived parameters, that of the stored ones."""
        values, total = whole(self.layout, step.seed, step.lora), 0
        for piece in self.pieces(engine, names):
            name, stored = self.layout.stored[piece.name], engine.target.read(piece)
            full = values.base[name].to(stored.dtype)
            if name in step.lora:
                full[box_of(piece)] = stored
            total += digest_of(piece, full[box_of(piece)])
        return total % 2**64

    def check_slice(self, engine: Engine, piece: ParamSlice) -> None:
        name, stored = self.layout.stored[piece.name], engine.target.read(piece)
        values = engine.values[name]
        if name not in values.a:
            assert torch.equal(stored, values.base[name][box_of(piece)].to(stored.dtype)), piece
            return
        rows, columns = box_of(piece)
        assert_merged(
            stored,
            values.base[name][rows, columns],
            values.a[name][:, columns],
            values.b[name][rows],
            SCALE,
        )

    def close(self) -> None:
        for engine in self.engines:
            engine.target.saver.close()
        self.engines.clear()
        self.trainers.clear()


@pytest.mark.soak
@settings(max_examples=rounds(9, 500))
@given(st.data())
def test_syncs_write_all_slices_and_a_fault_fails_on_all_ranks(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    world = World(layout)
    try:
        with mock.patch("trainer_bridge.sync.writer.SCRATCH_BYTES", layout.scratch):
            world.run(data.draw(st.lists(steps(layout), min_size=1, max_size=4)))
    finally:
        world.close()
