"""The processes of the native engine under verl, one per GPU of a replica.

They import neither verl nor Ray. The server's process starts them, and they end with it.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from memsaver import MemorySaver
from rollout import Engine
from rollout.loop import LoopActor, RankProcesses
from rollout.pool_size import PoolSizeError
from rollout.process_group import RankAddress
from trainer_bridge.adoption.verl.names import socket_name
from trainer_bridge.adoption.verl.update_side import UpdateSide
from trainer_bridge.adoption.verl.updated_server import Outcome


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


class EngineRank(LoopActor, UpdateSide):
    """One rank of the engine, in its own process; from `build` on, `held` is the engine."""

    held: Engine

    def __init__(self, settings: RankSettings, rank: int) -> None:
        super().__init__()
        self._settings, self._rank = settings, rank

    def build(self, address: RankAddress | None) -> None:
        """Build the engine, with all ranks."""
        given = self._settings
        gpu = given.device == "cuda"
        device = torch.device(f"cuda:{self._rank}" if gpu else given.device)
        group = self._join(address, str(device))
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
        self.own()

    def serve_update(self, secret: str) -> Outcome:
        """Serve one weight update by this rank's trainer rank; return `outcome`."""
        # The loop's thread makes this call, so no step runs during an update.
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


def start_ranks(settings: RankSettings) -> RankProcesses:
    """Start a process per rank, and build the engine; an error of a rank is raised here.

    The GPUs are set in this process's environment, which the ranks inherit.
    """
    if settings.device == "cuda":  # set here, as imports of a rank might initialize CUDA
        os.environ["CUDA_VISIBLE_DEVICES"] = settings.visible
    return RankProcesses(partial(EngineRank, settings), len(settings.pairs))
