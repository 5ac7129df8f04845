"""The processes of the native engine under verl, one per GPU of a replica, and calls to them.

They import neither verl nor Ray. The server's process starts them, and they end with it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from memsaver import MemorySaver, StateError
from rollout import Completion, Engine, SamplingParams, channel
from rollout.pool_size import PoolSizeError
from rollout.process_group import Ports, RankAddress, open_store
from trainer_bridge.adoption.verl.names import socket_name
from trainer_bridge.adoption.verl.update_side import UpdateSide
from trainer_bridge.adoption.verl.updated_server import Outcome

_HOST = "127.0.0.1"  # all ranks of a replica run on one machine
_SECONDS = 600.0
Ended = dict[str, Completion | Exception]
"""The sample of each request that has ended, by key, or why it has none."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A new request for one sample; `key` is unique among the unfinished ones."""

    key: str
    prompt: Sequence[int]
    params: SamplingParams


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """How each rank builds its engine.

    Attributes:
        path: Model directory, or ORG/NAME of the Hub.
        device: "cpu", or "cuda" for the GPU with the rank's number.
        visible: Value of CUDA_VISIBLE_DEVICES; the replica's GPUs by rank.
        dtype: Name of the dtype of weights and computation.
        load_weights: Whether to load the checkpoint, as version 0.
        share: Share of the GPU's memory for weights, KV pool and steps, unless the engine's
            arguments have `kv_tokens`.
        engine: Fields of `EngineConfig`.
        pairs: Name of each rank's pair with a rank of the trainer.
    """

    path: str
    device: str
    visible: str
    dtype: str
    load_weights: bool
    share: float
    engine: dict[str, Any]
    pairs: Sequence[str]


class EngineRank(UpdateSide):
    """One rank of the engine, in its own process; from `build` on, `held` is the engine."""

    held: Engine

    def __init__(self, settings: RankSettings, rank: int) -> None:
        self._settings, self._rank = settings, rank
        self._keys: dict[int, str] = {}  # of the unfinished requests, by the engine's numbers

    def meet(self, ports: Ports | None = None) -> tuple[str, int]:
        """Open the group's store on rank 0; return the host and port where other ranks join."""
        self._store = open_store(_HOST, ports)
        return _HOST, self._store.port

    def build(self, places: Sequence[RankAddress | None]) -> int:
        """Build the engine, with all ranks; return the maximum tokens of prompt and answer."""
        given = self._settings
        gpu = given.device == "cuda"
        device = torch.device(f"cuda:{self._rank}" if gpu else given.device)
        group = self._join(places[self._rank], str(device))
        dtype: torch.dtype = getattr(torch, given.dtype)
        options = dict(given.engine)
        if gpu and options.get("kv_tokens") is None:
            options.setdefault("gpu_share", given.share)
        try:
            self.held = Engine.from_pretrained(
                given.path,
                device,
                dtype,
                saver=MemorySaver(device=device),
                load_weights=given.load_weights,
                group=group,
                **options,
            )
        except PoolSizeError as error:
            raise in_verls_words(error) from None
        return self.held.max_context_len

    def advance(
        self, arrivals: Sequence[Arrival] = (), *, cancelled: Collection[str] = (), steps: int = 1
    ) -> Ended:
        """Submit and cancel requests, then run at most `steps` steps until a request ends.

        A cancelled request ends with its present answer; an unknown key is ignored. After an error
        of the engine, no request is left. The other ranks follow.
        """
        with self.held.leading():
            return self._lead(arrivals, cancelled, steps)

    def follow(self) -> None:
        """Follow a call of `advance` on the first rank."""
        self.held.follow()

    def _lead(self, arrivals: Sequence[Arrival], cancelled: Collection[str], steps: int) -> Ended:
        ended: Ended = {}
        for arrival in arrivals:
            try:
                id = self.held.submit(arrival.prompt, arrival.params, stream=False)
            except ValueError as error:
                ended[arrival.key] = error
            else:
                self._keys[id] = arrival.key
        try:
            for id in [id for id, key in self._keys.items() if key in cancelled]:
                self.held.abort(id)
            for _ in range(steps):
                if ended or not self._keys:
                    break
                for output in self.held.step():
                    answer = output.error or Completion.joined([output])
                    ended[self._keys.pop(output.id)] = answer
        except BaseException:
            self._drop_all()
            raise
        return ended

    def _drop_all(self) -> None:
        self._keys.clear()
        for id in self.held.unfinished:
            self.held.abort(id)
        self.held.step()  # tells the ends, and runs nothing

    def serve_update(self, secret: str) -> Outcome:
        """Serve one weight update by this rank's trainer rank; return `outcome`."""
        # The server's only thread for calls waits for this one, so no step runs during an update.
        self.serve(socket_name(self._settings.pairs[self._rank], secret))
        return self.outcome()


def in_verls_words(error: PoolSizeError) -> ValueError:
    """Return the error of a KV pool that is too small with the names of verl's keys."""
    key = "actor_rollout_ref.rollout.gpu_memory_utilization"
    remedy = f"set it to {error.least}, or lower" if error.least <= 1 else "lower"
    return ValueError(
        f"{key}={error.share:.3g}: {error.why}; {remedy} "
        "rollout.max_model_len, rollout.max_num_seqs or rollout.max_num_batched_tokens"
    )


class EngineRanks:
    """The processes of an engine, of which the first runs its steps and the others follow.

    It is not thread-safe: one call at a time.
    """

    def __init__(self, settings: RankSettings) -> None:
        """Start a process per rank, and build the engine; an error of a rank is raised here.

        The GPUs are set in this process's environment, which the ranks inherit.
        """
        if settings.device == "cuda":  # set here, as imports of a rank might initialize CUDA
            os.environ["CUDA_VISIBLE_DEVICES"] = settings.visible
        context = multiprocessing.get_context("spawn")
        self._channels: list[Connection] = []
        self._processes: list[Any] = []
        size = len(settings.pairs)
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=run_rank, args=(theirs, settings, rank), daemon=True, name=f"engine-{rank}"
            )
            process.start()
            theirs.close()
            self._channels.append(ours)
            self._processes.append(process)
        try:
            places: list[RankAddress | None] = [None]
            if size > 1:
                channel.send_call(self._channels[0], ("meet", (), {}))
                host, port = self._answers(self._channels[:1])[0]
                fixed = {"host": host, "port": port, "size": size, "seconds": _SECONDS}
                places = [RankAddress(rank=rank, **fixed) for rank in range(size)]
            self.max_context_len: int = self.call("build", places)[0]
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of all ranks, and return the results by rank.

        The first error of a rank is raised once all ranks have answered.

        Raises:
            StateError: A rank has ended. The others are ended, too, because they would wait for it.
        """
        return self._sent([(method, args, kwargs)] * len(self._channels))

    def advance(self, *args: Any, **kwargs: Any) -> Ended:
        """Call `EngineRank.advance` of the first rank, which the other ranks follow."""
        others: list[Any] = [("follow", (), {})] * (len(self._channels) - 1)
        return self._sent([("advance", args, kwargs), *others])[0]

    def _sent(self, calls: Sequence[tuple[str, Any, Any]]) -> list[Any]:
        try:
            for rank, call in zip(self._channels, calls, strict=True):
                channel.send_call(rank, call)
        except OSError as error:
            raise self._ended() from error
        return self._answers(self._channels)

    def _answers(self, channels: Sequence[Connection]) -> list[Any]:
        answers = []
        ends = [process.sentinel for process in self._processes]
        for calls in channels:
            try:
                if calls not in wait([calls, *ends]):
                    raise EOFError
                answers.append(channel.receive_answer(calls))
            except (EOFError, OSError) as error:
                raise self._ended() from error
        for good, answer in answers:
            if not good:
                raise answer
        return [answer for _, answer in answers]

    def _ended(self) -> StateError:
        codes = [process.exitcode for process in self._processes]
        self.close()
        return StateError(
            f"a process of the engine has ended (exit codes by rank: {codes}), and its weights "
            "with it; its log says why; start the run again"
        )

    def close(self) -> None:
        """End the processes, which releases their memory."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for calls in self._channels:
            calls.close()


def run_rank(calls: Connection, settings: RankSettings, rank: int) -> None:
    """Answer the server's calls, as one rank, until the server's process ends."""
    channel.serve(calls, EngineRank(settings, rank))
