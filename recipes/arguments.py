"""Says what trainer, engine and cycle take, from a recipe that can run."""

import dataclasses
from contextlib import AbstractContextManager
from typing import Any

from recipes.config import SAVED, Recipe
from recipes.grpo import GrpoLoop
from recipes.loop import Loop
from recipes.ppo import PpoLoop
from recipes.setup.preparation import Setup
from rollout import KVTiers
from rollout.serving import Preemption
from trainer_bridge import LoraConfig, TrainerConfig, open_inprocess, open_ray

LOOPS: dict[str, type[Loop]] = {"grpo": GrpoLoop, "ppo": PpoLoop}


def open_pair(setup: Setup) -> AbstractContextManager[Any]:
    """Trainer and rollout of this recipe, alive inside the block."""
    config = trainer_config(setup)
    arguments = engine_arguments(setup)
    cluster, alias = setup.recipe.cluster, setup.recipe.cycle.alias == "always"
    if setup.recipe.driver == "inprocess":
        return open_inprocess(config, arguments, alias=alias)
    # One machine's cluster can be started here, larger ones are there.
    address = "auto" if cluster.nnodes > 1 else None
    places: Any = {"devices": cluster.n_gpus_per_node, "nodes": cluster.nnodes, "address": address}
    return open_ray(config, arguments, **places, timeout=cluster.call_timeout, alias=alias)


def cycle_arguments(recipe: Recipe) -> dict[str, Any]:
    """Returns what `Cycle` takes besides the two sides; the recipe's switch is decided."""
    return {
        "sleep_level": recipe.engine.sleep_level,
        "resident": recipe.cycle.resident,
        "overlap": recipe.cycle.overlap,
        "alias": recipe.cycle.alias == "always",
        "hand_over": recipe.cycle.hand_over == "always",
        "critic": recipe.algorithm == "ppo",
        "reference": recipe.loop.kl_coef > 0
        and not recipe.lora.rank,  # the base of adapters is there already
    }


def leaving_tags(recipe: Recipe) -> tuple[str, ...]:
    """Returns the trainer's tags that leave the device; none while that is to be decided yet."""
    if recipe.cycle.resident == "auto":
        return ()
    stays = {*recipe.cycle.resident, *(["params"] if recipe.cycle.alias == "always" else [])}
    return tuple(tag for tag in SAVED if tag not in stays | recipe.absent_tags().keys())


def trainer_config(setup: Setup) -> TrainerConfig:
    section, loop, lora = setup.recipe.trainer, LOOPS[setup.recipe.algorithm], setup.recipe.lora
    return TrainerConfig(
        model_path=str(setup.model_dir),
        device=setup.device,
        random_init=setup.recipe.model.random_init,
        dtype=section.dtype,
        param_dtype=setup.recipe.model.dtype,
        learning_rate=section.learning_rate,
        weight_decay=section.weight_decay,
        betas=(section.beta1, section.beta2),
        max_grad_norm=section.max_grad_norm,
        router_aux_loss_coef=section.router_aux_loss_coef,
        fp32_router=setup.recipe.model.fp32_router,
        micro_batch_size=section.micro_batch_size,
        activation_checkpointing=section.activation_checkpointing,
        threads=section.threads,
        seed=setup.recipe.seed,
        lora=LoraConfig(**dataclasses.asdict(lora)) if lora.rank else None,
        optimizer_offload=section.optimizer_offload,
        leaving=leaving_tags(setup.recipe),
        **loop.trainer_fields(setup.recipe),
    )


def engine_arguments(setup: Setup) -> dict[str, Any]:
    """Returns what `Engine.from_pretrained` takes beside the trainer's model and device."""
    section = setup.recipe.engine
    own = {
        "kind": section.kind,
        "dtype": setup.recipe.model.dtype,
        "kv_tokens": setup.kv_tokens,
        "page_size": section.page_size,
        "max_running": section.max_running,
        "max_prefill_tokens": section.max_prefill_tokens,
        "max_context_len": setup.max_request_tokens,
        "cuda_graphs": section.cuda_graphs,
        "seed": setup.recipe.seed,
    }
    tensor, ratio = section.tensor_parallel_size, section.host_to_device_ratio
    if section.kind == "vllm":
        own["tensor_parallel_size"] = tensor
    if section.hosted:
        return {**own, **(section.options or {})}
    # Tensor-parallel ranks decide alike.
    preemption: Preemption = "cheapest" if tensor == 1 else "swap"
    return {
        **own,
        "prefix_states": section.prefix_states,
        "return_routed_experts": setup.recipe.loop.router_replay,
        "fp32_router": setup.recipe.model.fp32_router,
        "elastic": setup.recipe.cycle.overlap != [],
        "kv_cache_dtype": section.kv_cache_dtype,
        "tiers": KVTiers(host_ratio=ratio, preemption=preemption) if ratio else None,
        "tensor_parallel_size": tensor,
        "expert_parallel": section.expert_parallel,
    }
