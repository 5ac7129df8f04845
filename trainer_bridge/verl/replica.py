"""verl's vLLM server, whose workers take weight updates in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from trainer_bridge.verl.names import ROLLOUT, UPDATE
from trainer_bridge.verl.updated_server import Outcome, UpdatedServer


class InPlaceServer(vLLMHttpServer, UpdatedServer):
    """verl's vLLM server, which refuses requests after a failed weight update."""

    def _get_worker_extension_cls(self) -> str:
        return "trainer_bridge.verl.worker_extension.InPlaceWorkerExtension"

    async def serve_update(self) -> Sequence[Outcome]:
        outcomes: list[Outcome] = await self.engine.collective_rpc(UPDATE)
        return outcomes

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a request as verl's server does; a StateError says why it cannot."""
        self.require_defined()
        return await super().generate(*args, **kwargs)


class InPlaceReplica(vLLMReplica):
    """verl's replica of vLLM with an `InPlaceServer` on each node."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(InPlaceServer)

    def _get_server_name_prefix(self) -> str:
        return f"{ROLLOUT}_"  # `InPlaceRollout` looks for servers of its rollout's name
