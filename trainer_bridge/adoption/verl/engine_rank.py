"""The processes of the native engine under verl, one per GPU of a replica, and calls to them.

They import neither verl nor Ray. The server's process starts them, and they end with it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from kvcache import layout
from memsaver import MemorySaver, StateError
from memsaver.ops.layout import round_up
from rollout import EngineConfig, StreamingEngine, channel
from rollout.model import ModelConfig, load_model_config, rank_groups, rank_layout, resolve_model
from rollout.process_group import Ports, RankAddress, open_store
from rollout.weights import arena_nbytes
from trainer_bridge.adoption.verl.names import socket_name
from trainer_bridge.adoption.verl.update_side import UpdateSide
from trainer_bridge.adoption.verl.updated_server import Outcome

_HOST = "127.0.0.1"  # all ranks of a replica run on one machine
_SECONDS = 600.0


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

    held: StreamingEngine

    def __init__(self, settings: RankSettings, rank: int) -> None:
        self._settings, self._rank = settings, rank

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
        path, options = resolve_model(given.path), dict(given.engine)
        if "kv_tokens" not in options:
            total = torch.cuda.get_device_properties(device).total_memory if gpu else None
            model = load_model_config(path)
            options["kv_tokens"] = pool_tokens(model, options, dtype, total, given.share)
        self.held = StreamingEngine.from_pretrained(
            path,
            device,
            dtype,
            saver=MemorySaver(device=device),
            load_weights=given.load_weights,
            group=group,
            **options,
        )
        return self.held.max_context_len

    def serve_update(self, secret: str) -> Outcome:
        """Serve one weight update by this rank's trainer rank; return `outcome`."""
        self.serve(socket_name(self._settings.pairs[self._rank], secret))
        return self.outcome()


def pool_tokens(
    model: ModelConfig,
    options: dict[str, Any],
    dtype: torch.dtype,
    total: int | None,
    share: float,
) -> int:
    """Return the tokens of a KV pool that shares part of a GPU with weights and steps.

    The pool has at most the tokens that running requests of the greatest length can fill.

    Args:
        model: The model's configuration.
        options: Fields of `EngineConfig`, without `kv_tokens`.
        dtype: Dtype of weights and computation.
        total: Bytes of the GPU; None on the CPU, where the pool has room for two requests.
        share: Share of the GPU.

    Raises:
        ValueError: The pool would not hold one request of the greatest length.
    """
    config = EngineConfig(**options)
    longest = options.get("max_context_len") or model.max_position_embeddings
    page, size = config.page_size, config.tensor_parallel_size
    if total is None:
        return round_up(2 * longest, page)
    weights = arena_nbytes(rank_groups(model, 0, size, config.expert_parallel), dtype)
    kv_layout = rank_layout(layout(model.hf_config, config.kv_cache_dtype, dtype), size)
    states = (config.state_slots + 1) * kv_layout.state_bytes
    widths = [
        sum(mlp.widths(model.hidden_size, size, config.expert_parallel)) for mlp in model.mlps
    ]
    rows = config.max_prefill_tokens * (max(widths) + 8 * model.hidden_size) * dtype.itemsize
    logits = 3 * config.max_running * model.vocab_size * 4
    left = int(share * total) - weights - states - max(rows, logits)
    pages = left // (kv_layout.bytes_per_token * page) - 1  # One page is padding.
    if pages * page < longest:
        raise ValueError(
            f"actor_rollout_ref.rollout.gpu_memory_utilization={share}: weights, states and steps "
            f"leave {left} bytes of the GPU's {total} for keys and values, a request of {longest} "
            f"tokens takes {longest * kv_layout.bytes_per_token}; raise it, or lower "
            "rollout.max_model_len, rollout.max_num_seqs or rollout.max_num_batched_tokens"
        )
    return min(pages * page, round_up(config.max_running * longest, page))


class EngineRanks:
    """The processes of an engine, which make the same calls in the same order.

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
        try:
            for calls in self._channels:
                channel.send_call(calls, (method, args, kwargs))
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
