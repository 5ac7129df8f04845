"""A cycle of a trainer and a hosted rollout in two processes, one of which kills itself."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from transformers import AutoConfig

from memsaver import MemorySaver
from rollout import SamplingParams
from rollout.hosted import VllmRollout
from rollout.tag_names import WEIGHTS
from tests.helpers.peers import Peer, server
from tests.helpers.rollout.fused import FusedEngine
from tests.helpers.trainer_bridge.sync_hooks import half_written
from tests.helpers.trainer_bridge.trainers import serve
from trainer_bridge import Cycle, Trainer, TrainerConfig
from trainer_bridge.errors import ActorDied

STAGES = {
    "wake_weights": "wake_weights",
    "begin_update": "sync_weights",
    "write": "sync_weights",
    "verify_update": "sync_weights",
    "commit_update": "sync_weights",
    "wake_kv_cache": "wake_kv_cache",
    "generate": "generate",
    "sleep": "sleep",
}
"""The moments of a cycle in order, with the stage of each."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _Silent(FusedEngine):
    """An engine whose requests end without an answer."""

    def run(self, prompts: Any, params: Any, on_step: Any) -> None:
        pass


def make_rollout(path: str) -> VllmRollout:
    rollout = VllmRollout(_Silent(AutoConfig.from_pretrained(path), "cpu"), path)  # type: ignore[arg-type]
    rollout.sleep(2)
    return rollout


class Remote:
    """A rollout in the process behind `calls`; `at` receives each call's moment, once sent."""

    weights_version = 0

    def __init__(self, calls: Connection, at: Callable[[str], None]) -> None:
        self._calls, self._at = calls, at

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                self._calls.send((name, args, kwargs))
                self._at(_moment(name, args))
                answer = self._calls.recv()
            except (EOFError, ConnectionError):
                raise ActorDied("rollout", name, "died") from None
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


def _moment(name: str, args: tuple[Any, ...]) -> str:
    if name != "wake_up":
        return name
    return "wake_weights" if args[0] == [WEIGHTS] else "wake_kv_cache"


class MortalTrainer(Trainer):
    """A trainer that calls `on_write` while a sync is half written."""

    on_write: Callable[[], None] = staticmethod(lambda: None)

    def sync_weights(self, version: int, **how: Any) -> Any:
        with half_written(lambda: self.on_write()):
            return super().sync_weights(version, **how)


def make_trainer(path: str) -> MortalTrainer:
    config = TrainerConfig(model_path=path, device="cpu", random_init=True, threads=1)
    return MortalTrainer(config, MemorySaver("cpu"))


def run_cycle(cycle: Cycle, rollout: Any, version: int) -> Any:
    receipt = cycle.to_rollout(version)
    rollout.generate([[1, 2]], SamplingParams(max_tokens=1))
    cycle.to_train()
    return receipt


class CyclingTrainer(Peer):
    """A trainer process that runs cycles with a rollout of this process.

    It receives (version, moment to die or None) and answers with the digests.
    """

    def __init__(self, path: str, rollout: VllmRollout) -> None:
        calls, theirs = server.Pipe()
        super().__init__(_cycle, theirs, path)
        theirs.close()
        given = calls, rollout, threading.Lock()
        self._served = threading.Thread(target=serve, args=given, daemon=True)
        self._served.start()

    def gone(self) -> None:
        """Wait for the end of the process and of its last call."""
        assert self.dies_within(30)
        self._served.join(30)
        assert not self._served.is_alive()


def _cycle(pipe: Connection, calls: Connection, path: str) -> None:
    due: list[str | None] = [None]

    def at(moment: str) -> None:
        if moment == due[0]:
            die()

    trainer, remote = make_trainer(path), Remote(calls, at)
    trainer.on_write = lambda: at("write")  # type: ignore[method-assign]
    trainer.connect([remote])  # type: ignore[list-item]
    cycle = Cycle(trainer, remote)  # type: ignore[arg-type]
    while True:
        version, due[0] = pipe.recv()
        pipe.send(run_cycle(cycle, remote, version).digests)


class HostedWorker(Peer):
    """A process with a hosted rollout that answers `calls`.

    It dies at the second `dies_at` moment, after executing the call and before answering it.
    """

    def __init__(self, path: str, dies_at: str) -> None:
        self.calls, theirs = server.Pipe()
        super().__init__(_work, theirs, path, dies_at)
        theirs.close()


def _work(_: Connection, calls: Connection, path: str, dies_at: str) -> None:
    rollout, arrivals = make_rollout(path), 0
    while True:
        name, args, kwargs = calls.recv()
        answer = getattr(rollout, name)(*args, **kwargs)
        arrivals += _moment(name, args) == dies_at
        if arrivals == 2:
            die()
        calls.send(answer)
