"""verl's vLLM server, whose workers take weight updates in place."""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from memsaver import StateError
from trainer_bridge.verl.names import ROLLOUT, UPDATE


class InPlaceServer(vLLMHttpServer):
    """verl's vLLM server, which refuses requests after a failed weight update."""

    _undefined: str | None = None

    def _get_worker_extension_cls(self) -> str:
        return "trainer_bridge.verl.worker_extension.InPlaceWorkerExtension"

    async def update_in_place(self, version: int) -> None:
        """Let the workers serve one update, then forget keys and values of the old weights.

        A StateError says that a worker does not serve `version` afterwards. From any error on,
        `generate` refuses requests until an update succeeds.
        """
        try:
            outcomes = await self.engine.collective_rpc(UPDATE)
            if wrong := [outcome for outcome in outcomes if outcome[0] != version]:
                raise StateError(f"vLLM serves (version, reason) {wrong}, not version {version}")
            await self.clear_kv_cache()
        except BaseException as error:
            self._undefined = f"the last weight update failed: {type(error).__name__}: {error}"
            raise
        self._undefined = None
        await self.set_global_steps(version)

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a request as verl's server does; a StateError says why it cannot."""
        if self._undefined is not None:
            raise StateError(f"cannot generate: {self._undefined}")
        return await super().generate(*args, **kwargs)


class InPlaceReplica(vLLMReplica):
    """verl's replica of vLLM with an `InPlaceServer` on each node."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(InPlaceServer)

    def _get_server_name_prefix(self) -> str:
        return f"{ROLLOUT}_"  # `InPlaceRollout` looks for servers of its rollout's name
