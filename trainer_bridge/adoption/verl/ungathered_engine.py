"""verl's FSDP2 engine, whose weights can be read without gathering them."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from verl.utils.device import get_device_name
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead


class TrainerWeights:
    """The weights of an engine, as verl passes them from the engine to the rollout.

    Iterating over them gathers one parameter after the other, as verl's own engine does.
    """

    def __init__(self, engine: Any, gather: Callable[[], Any]) -> None:
        self._engine = engine
        self._gather = gather

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._gather())

    def module(self) -> nn.Module:
        """Return the module with this rank's shards, after loading offloaded ones to the device.

        A ValueError says that FSDP2 itself keeps the shards on the host.
        """
        engine = self._engine
        if engine.engine_config.offload_policy:
            raise ValueError(
                "in-place sync reads parameters on the GPU; set "
                "actor_rollout_ref.actor.fsdp_config.offload_policy=False (param_offload works), "
                "or use rollout.name=vllm"
            )
        if engine.is_param_offload_enabled:
            engine.to(get_device_name(), model=True, optimizer=False, grad=False)
        module: nn.Module = engine.module
        return module


class UngatheredEngine(FSDPEngineWithLMHead):
    """verl's engine for language models, which passes its shards on with its weights."""

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> tuple[TrainerWeights, Any]:
        """Return the weights, and the configuration of adapters as verl's own engine does."""
        export = partial(super().get_per_tensor_param, *args, **kwargs)
        if not hasattr(self.module, "peft_config"):
            # The export begins with the module's state dict, which takes milliseconds.
            return TrainerWeights(self, lambda: export()[0]), None
        gathered, adapters = export()
        return TrainerWeights(self, lambda: gathered), adapters
