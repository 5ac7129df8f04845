"""verl's vLLM server, whose workers take weight updates in place."""

from collections.abc import Sequence
from typing import Any

import ray
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from trainer_bridge.adoption.verl.names import ROLLOUT, UPDATE
from trainer_bridge.adoption.verl.updated_server import Outcome, UpdatedServer


class InPlaceServer(vLLMHttpServer, UpdatedServer):
    """verl's vLLM server, which refuses requests after a failed weight update."""

    _kv_sleeps = False

    def _get_worker_extension_cls(self) -> str:
        return "trainer_bridge.adoption.verl.worker_extension.InPlaceWorkerExtension"

    async def serve_update(self, secret: str) -> Sequence[Outcome]:
        outcomes: list[Outcome] = await self.engine.collective_rpc(UPDATE, args=(secret,))
        await self.clear_kv_cache()
        return outcomes

    async def sleep(self) -> None:
        """Sleep as verl's server does. vLLM clears all caches when it falls asleep."""
        await super().sleep()
        self._kv_sleeps = self.rollout_mode == RolloutMode.HYBRID and self.config.free_cache_engine

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Wake up as verl's server does."""
        if not tags or "kv_cache" in tags:
            self._kv_sleeps = False
        await super().wake_up(tags)

    async def resume_kv_cache(self) -> None:
        """Wake the KV cache up as verl's server does."""
        self._kv_sleeps = False
        await super().resume_kv_cache()

    async def clear_kv_cache(self) -> None:
        """Forget keys and values, unless the cache sleeps and has none.

        vLLM visits each of its blocks, which takes 10 ms for 100,000 of them.
        """
        if not self._kv_sleeps:
            await super().clear_kv_cache()

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
