"""Two engines that serve the same, and pairs of trainer ranks that sync into them."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from memsaver import StateError
from rollout import Engine, SamplingParams
from rollout.tag_names import WEIGHTS, WEIGHTS_SHADOW
from tests.helpers.memory import memfd_bytes, process_bytes
from tests.helpers.models import build_tiny, greedy, save_tiny
from tests.helpers.peers import Gone
from tests.helpers.trainer_bridge.trainers import Order, TrainerRank, weights

PROMPT, TOKENS, SEEDS = [5, 3, 8, 1], 6, 7
TINY = {"head_dim": 16, "tie_word_embeddings": True}


class Pair:
    """Two replicas in this process, each with a trainer rank of its own.

    Version v: the weights of seed v % SEEDS.
    """

    def __init__(self, path: Path) -> None:
        save_tiny(path, "qwen3", **TINY)
        self.engines = [Engine.from_pretrained(path, kv_tokens=64) for _ in range(2)]
        self.locks = [threading.Lock() for _ in self.engines]
        pieces = self.engines[0].manifest.slices
        self.shapes = {piece.name: piece.global_shape for piece in pieces}
        self.answers = [self._expected(seed) for seed in range(SEEDS)]
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.trainers: list[TrainerRank] = []
        self._pairs = itertools.count()
        gc.collect()
        # transformers and what it brings: every look at memory would go through all of it
        gc.freeze()

    def _expected(self, seed: int) -> list[int]:
        model = copy.deepcopy(build_tiny("qwen3", **TINY))
        for name, value in weights(self.shapes, seed).items():
            model.get_parameter(name).data.copy_(value)
        return greedy(model, PROMPT, TOKENS)

    # ---------------------------------------------------------------- trainers

    def start(self) -> None:
        """A new pair of trainers; they connect."""
        prefix, count = f"pair {next(self._pairs)}", len(self.engines)
        for rank, (engine, lock) in enumerate(zip(self.engines, self.locks, strict=True)):
            place = engine.weight_layout().place
            setting = {
                "rank": rank,
                "size": count,
                "port": self.store.port,
                "prefix": prefix,
                "place": place,
            }
            self.trainers.append(TrainerRank(engine, lock, shapes=self.shapes, **setting))
        for trainer in self.trainers:
            assert trainer.hear(60) is None

    def order(self, version: int, dies: int | None = None, **how: Any) -> None:
        """Tell both to sync. how: of an `Order`; its death is that of rank `dies`."""
        death = how.pop("death", None)
        for rank, trainer in enumerate(self.trainers):
            mine = death if rank == dies else None
            trainer.tell(Order(version=version, seed=version % SEEDS, death=mine, **how))

    def busy(self) -> bool:
        """Has one of them not answered yet?"""
        return not all(trainer.pipe.poll() for trainer in self.trainers)

    def results(self) -> list[Any]:
        """Of both: a receipt, an exception, or `Gone`."""
        found: list[Any] = []
        for trainer in self.trainers:
            try:
                found.append(trainer.hear(60))
            except Gone as gone:
                found.append(gone)
        return found

    def stop(self) -> None:
        """Until both have ended, with all that they held."""
        while self.trainers:
            self.trainers.pop().end()

    def end(self) -> None:
        for trainer in self.trainers:  # of a test that failed
            trainer.kill()
        self.stop()
        gc.unfreeze()
        for engine in self.engines:
            engine.saver.close()

    # ---------------------------------------------------------------- engines

    def serves(self, number: int) -> int | None:
        """The version an engine answers with, token for token; None: it refuses, and says why."""
        engine = self.engines[number]
        with self.locks[number]:
            reason = engine.unavailable_reason()
            try:
                [[answer]] = engine.generate(
                    [PROMPT], SamplingParams(max_tokens=TOKENS, temperature=0)
                )
            except StateError as error:
                assert reason is not None and reason in str(error), (
                    "it gives another reason than it has"
                )
                return None
        assert reason is None
        (version,) = set(answer.weight_versions)
        assert answer.token_ids == self.answers[version % SEEDS], (
            f"engine {number} answers with no version's weights"
        )
        return version

    def held(self) -> dict[str, int]:
        """Memory of this process, and behind the weights of each engine."""
        found = {"memfds": memfd_bytes([os.getpid()]), "RssShmem": process_bytes("cpu")}
        for number, engine in enumerate(self.engines):
            tags = engine.report().tags
            found |= {
                f"{tag} {number}": tags[tag].committed_bytes
                for tag in (WEIGHTS, WEIGHTS_SHADOW)
                if tag in tags
            }
        return found

    def wait_unleased(self, seconds: float = 5.0) -> None:
        """What the dead had mapped is let go of by the kernel."""
        deadline = time.monotonic() + seconds
        while leased := {
            n: t for n, e in enumerate(self.engines) for t, s in e.report().tags.items() if s.leases
        }:
            assert time.monotonic() < deadline, (
                f"leases that outlive their holder, by engine: {leased}"
            )
            time.sleep(0.005)
