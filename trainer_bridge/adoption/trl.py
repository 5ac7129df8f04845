"""In-place weight sync for TRL with colocated vLLM (`vllm_mode="colocate"`).

The trainer's parameters or FSDP2 shards are written into vLLM's weights, and verified.
"""

from collections.abc import Mapping
from itertools import count
from typing import Any

from torch import Tensor

from memsaver.memory import empty_torch_cache
from memsaver.system.torch_defaults import torch_defaults
from rollout.hosted import HostedRollout, VllmEngine
from trainer_bridge.adoption.peft_model import PeftAdapters
from trainer_bridge.sync.module_tensors import named_tensors
from trainer_bridge.sync.weight_sync import SyncReceipt, WeightSync, module_sync


class InPlaceSync:
    """Replacement for the method `VLLMGeneration.sync_weights` of one trainer.

    Attributes:
        receipt: Receipt of the last sync; None before the first.
        rollout: The trainer's vLLM.
    """

    def __init__(self, generation: Any) -> None:
        self.receipt: SyncReceipt | None = None
        self._generation = generation
        adapted = hasattr(generation.model, "peft_config")
        self._adapters = PeftAdapters(generation.model) if adapted else None
        self.rollout = HostedRollout(VllmEngine(generation.llm), generation.model.name_or_path)
        self._versions = count(1)
        self._ids: list[int] = []
        self._sync: WeightSync | None = None

    @torch_defaults()
    def __call__(self) -> None:
        """Wake vLLM's weights and replace them; call again after an error.

        Adapters are merged while the weights are written: each weight is rounded once, and the
        trainer's own weights keep their bits. If vLLM still holds the last sync, only weights that
        an update can change are written.
        """
        generation = self._generation
        empty_torch_cache(self.rollout.saver.device)
        generation.llm.wake_up(tags=["weights"])
        params, names, factors = self._params(), None, None
        sync = self._connected(params)
        if self._adapters is not None:
            factors = self._adapters.factors()
            names = self._adapters.trained(params) if sync.holds() else None
        self.receipt = sync.sync(next(self._versions), names=names, derived=factors)
        generation._llm_weights_sleeping = False

    def _params(self) -> dict[str, Tensor]:
        if self._adapters is None:
            return named_tensors(self._generation.model)
        return self._adapters.tensors()

    def _connected(self, params: Mapping[str, Tensor]) -> WeightSync:
        """Return a sync of the current parameters, rebuilt if they are new objects.

        accelerate replaces the parameters when training begins.
        """
        ids = [id(param) for param in params.values()]
        if self._sync is None or ids != self._ids:
            _check_sharding(self._generation.accelerator)
            self._check_devices(params)
            if self._sync is not None:
                self._sync.close()
            self._sync, self._ids = module_sync(params, [self.rollout]), ids
        return self._sync

    def _check_devices(self, params: Mapping[str, Tensor]) -> None:
        device = self.rollout.saver.device
        if away := [name for name, param in params.items() if param.device != device]:
            raise ValueError(
                f"{away[0]} is not on {device}, where vLLM is; set fsdp_offload_params: false, or "
                "use TRL's own sync"
            )


def use(trainer: Any) -> InPlaceSync:
    """Replace the weight sync of a TRL trainer with an in-place sync.

    Call it on every rank, before `train()`.

    Args:
        trainer: A TRL trainer with a `vllm_generation` (GRPO, RLOO, distillation).

    Returns:
        The new sync, whose `receipt` describes the last one.

    Raises:
        ValueError: The trainer does not run a colocated vLLM with sleep mode, or trains adapters
            that are not merged as base + scale B A (DoRA, embeddings, experts).
        StateError: vLLM's memory is not on our tags.
    """
    generation = getattr(trainer, "vllm_generation", None)
    if generation is None or generation.mode != "colocate" or not generation.enable_sleep_mode:
        raise ValueError(
            'in-place sync needs use_vllm=True, vllm_mode="colocate" and '
            "vllm_enable_sleep_mode=True in the trainer's config"
        )
    generation.sync_weights = sync = InPlaceSync(generation)
    return sync


def _check_sharding(accelerator: Any) -> None:
    kind = accelerator.distributed_type
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM") and not accelerator.is_fsdp2:
        raise ValueError(
            f"{kind.value}: in-place sync needs whole parameters or FSDP2 shards; set "
            "fsdp_version: 2, or use TRL's own sync"
        )
