"""In-place weight sync for verl with colocated vLLM (`rollout.name=memsaver_vllm`).

verl imports the modules in its own processes: `ungathered_engine` and `in_place_rollout` in those
of the trainer, `replica` in its driver and in the actor of vLLM's server, `worker_extension` in
vLLM's workers.
"""

from __future__ import annotations

import os
from typing import Any

from trainer_bridge.verl.names import ROLLOUT


def register(vendor: str) -> None:
    """Add the rollout to this process of verl, and its engine if the process has a trainer's rank.

    Other processes never build an engine, and importing verl's engines takes seconds.

    Args:
        vendor: Value of `VERL_ENGINE_VENDOR` that chooses the engine.
    """
    from verl.workers.rollout import base, replica

    base._ROLLOUT_REGISTRY[ROLLOUT, "async"] = "trainer_bridge.verl.in_place_rollout.InPlaceRollout"
    replica.RolloutReplicaRegistry.register(ROLLOUT, load_replica)
    if "RANK" in os.environ:
        from verl.workers.engine import EngineRegistry

        from trainer_bridge.verl.ungathered_engine import UngatheredEngine

        EngineRegistry.register("language_model", "fsdp2", "cuda", vendor)(UngatheredEngine)


def load_replica() -> Any:
    """Return the class of the rollout's servers."""
    from trainer_bridge.verl.replica import InPlaceReplica

    return InPlaceReplica
