"""Two replicas of an engine, and pairs of trainer ranks that sync into them."""

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
    """Two replicas in this process, each with a trainer rank in another process.

    Version v has the weights of seed v % SEEDS.
    """

    def __init__(self, path: Path) -> None:
        save_tiny(path, "qwen3", **TINY)
        gc.collect()
        # Exclude imported modules from later collections, which every memory check runs.
        gc.freeze()
        self.engines = [Engine.from_pretrained(path, kv_tokens=64) for _ in range(2)]
        self.locks = [threading.Lock() for _ in self.engines]
        pieces = self.engines[0].manifest.slices
        self.shapes = {piece.name: piece.global_shape for piece in pieces}
        self.answers = [self._expected(seed) for seed in range(SEEDS)]
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.trainers: list[TrainerRank] = []
        self._pairs = itertools.count()

    def _expected(self, seed: int) -> list[int]:
        model = copy.deepcopy(build_tiny("qwen3", **TINY))
        for name, value in weights(self.shapes, seed).items():
            model.get_parameter(name).data.copy_(value)
        return greedy(model, PROMPT, TOKENS)

    # ---------------------------------------------------------------- trainers

    def start(self) -> None:
        """Start a new pair of trainers, and connect them."""
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
        """Order both trainers to sync, with fields of `Order`; `death` is for rank `dies`."""
        death = how.pop("death", None)
        for rank, trainer in enumerate(self.trainers):
            own = death if rank == dies else None
            trainer.tell(Order(version=version, seed=version % SEEDS, death=own, **how))

    def busy(self) -> bool:
        """Return whether a trainer has not answered yet."""
        return not all(trainer.pipe.poll() for trainer in self.trainers)

    def results(self) -> list[Any]:
        """Wait for both trainers' results: a receipt, an exception, or `Gone`."""
        answers: list[Any] = []
        for trainer in self.trainers:
            try:
                answers.append(trainer.hear(60))
            except Gone as gone:
                answers.append(gone)
        return answers

    def stop(self) -> None:
        """Wait until both trainers have ended and released everything."""
        while self.trainers:
            self.trainers.pop().end()

    def end(self) -> None:
        for trainer in self.trainers:  # left by a failed test
            trainer.kill()
        self.stop()
        for engine in self.engines:
            engine.saver.close()

    # ---------------------------------------------------------------- engines

    def serves(self, number: int) -> int | None:
        """Return the version whose tokens an engine generates; None if it refuses with a reason."""
        engine = self.engines[number]
        with self.locks[number]:
            reason = engine.unavailable_reason()
            try:
                [[answer]] = engine.generate(
                    [PROMPT], SamplingParams(max_tokens=TOKENS, temperature=0)
                )
            except StateError as error:
                assert reason is not None and reason in str(error), (
                    "the error has another reason than the engine"
                )
                return None
        assert reason is None
        (version,) = set(answer.weight_versions)
        assert answer.token_ids == self.answers[version % SEEDS], (
            f"engine {number} answers with no version's weights"
        )
        return version

    def held(self) -> dict[str, int]:
        """Return the memory of this process, and the committed bytes of each engine's weights."""
        sizes = {"memfds": memfd_bytes([os.getpid()]), "RssShmem": process_bytes("cpu")}
        for number, engine in enumerate(self.engines):
            tags = engine.report().tags
            sizes |= {
                f"{tag} {number}": tags[tag].committed_bytes
                for tag in (WEIGHTS, WEIGHTS_SHADOW)
                if tag in tags
            }
        return sizes

    def wait_unleased(self, seconds: float = 5.0) -> None:
        """Wait until the kernel has unmapped the pages of dead processes."""
        deadline = time.monotonic() + seconds
        while leased := {
            n: t for n, e in enumerate(self.engines) for t, s in e.report().tags.items() if s.leases
        }:
            assert time.monotonic() < deadline, (
                f"leases that outlive their holder, by engine: {leased}"
            )
            time.sleep(0.005)
