"""memsaver in verl: in-place weight sync with its vLLM, and the native engine as a rollout.

`rollout.name=memsaver_vllm` is verl's vLLM, `rollout.name=memsaver` the native engine. verl imports
the modules in its own processes: `ungathered_engine`, `in_place_rollout` and `engine_rollout` in
those of the trainer, `replica` and `engine_server` in its driver and in the servers' actors,
`worker_extension` in vLLM's workers. `engine_rank` runs in the native engine's processes.
"""

import os
from typing import Any

from trainer_bridge.adoption.verl.names import ENGINE_ROLLOUT, ROLLOUT

# Classes of the rollouts in the trainer's processes.
CLIENTS = {
    ROLLOUT: "trainer_bridge.adoption.verl.in_place_rollout.InPlaceRollout",
    ENGINE_ROLLOUT: "trainer_bridge.adoption.verl.engine_rollout.EngineRollout",
}


def register(vendor: str) -> None:
    """Add the rollouts to this process of verl, and its engine if the process has a trainer's rank.

    Other processes never build an engine, and importing verl's engines takes seconds.

    Args:
        vendor: Value of `VERL_ENGINE_VENDOR` that chooses the engine.
    """
    from verl.workers.rollout import base, replica

    for name, client in CLIENTS.items():
        base._ROLLOUT_REGISTRY[name, "async"] = client
    replica.RolloutReplicaRegistry.register(ROLLOUT, load_replica)
    replica.RolloutReplicaRegistry.register(ENGINE_ROLLOUT, load_engine_replica)
    if "RANK" in os.environ:
        from verl.workers.engine import EngineRegistry

        from trainer_bridge.adoption.verl.ungathered_engine import UngatheredEngine

        EngineRegistry.register("language_model", "fsdp2", "cuda", vendor)(UngatheredEngine)


def load_replica() -> Any:
    """Return the class of vLLM's servers."""
    from trainer_bridge.adoption.verl.replica import InPlaceReplica

    return InPlaceReplica


def load_engine_replica() -> Any:
    """Return the class of the native engine's servers."""
    from trainer_bridge.adoption.verl.engine_server import EngineReplica

    return EngineReplica
