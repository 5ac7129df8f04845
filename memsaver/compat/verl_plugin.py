"""Plugin that verl imports in each of its processes (entry point ``verl.plugins``).

It does nothing unless ``VERL_ENGINE_VENDOR``, verl's own variable, is ``memsaver``. Like the
command ``memsaver``, it stands above all packages.
"""

from __future__ import annotations

import logging
import os
from typing import Any

NAME = "memsaver"


def register() -> None:
    """Add the rollout ``memsaver_vllm`` to verl, and the engine of its trainers' processes."""
    from verl.workers.rollout import base, replica

    from trainer_bridge.verl.names import ROLLOUT

    base._ROLLOUT_REGISTRY[ROLLOUT, "async"] = "trainer_bridge.verl.in_place_rollout.InPlaceRollout"
    replica.RolloutReplicaRegistry.register(ROLLOUT, load_replica)
    # Other processes never build an engine, and importing verl's engines takes seconds.
    if "RANK" in os.environ:
        from verl.workers.engine import EngineRegistry

        from trainer_bridge.verl.sharded_engine import ShardedEngine

        EngineRegistry.register("language_model", "fsdp2", "cuda", NAME)(ShardedEngine)


def load_replica() -> Any:
    """Return the class of the rollout's servers."""
    from trainer_bridge.verl.replica import InPlaceReplica

    return InPlaceReplica


if os.environ.get("VERL_ENGINE_VENDOR") == NAME:
    try:
        register()
    except Exception:  # verl itself reports it at level DEBUG only
        logging.getLogger(__name__).exception("memsaver could not register with verl")
        raise
