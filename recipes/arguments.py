"""Arguments of trainer, engine and cycle, from a prepared recipe."""

import dataclasses
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from recipes.config.decisions import OF_THE_TRAINER
from recipes.config.recipe import Recipe
from recipes.config.sections import SAVED
from recipes.importing import NamedFunction, absolute_name
from recipes.loops.grpo import GrpoLoop
from recipes.loops.loop import Loop
from recipes.loops.ppo import PpoLoop
from recipes.setup.model_decisions import lora_config
from recipes.setup.pool import SIZES, adapter_slots
from recipes.setup.preparation import Setup
from rollout import KVTiers
from rollout.tag_names import TAGS as ENGINE_TAGS
from trainer_bridge import PolicyLoss, TrainerConfig, open_inprocess, open_ray
from trainer_bridge.coordinator import OnReplaced, Stage

LOOPS: dict[str, type[Loop]] = {"grpo": GrpoLoop, "ppo": PpoLoop}


def open_pair(
    setup: Setup, stage: Stage, on_replaced: OnReplaced, mismatch_dir: Path | None = None
) -> AbstractContextManager[Any]:
    """Open the recipe's trainer and rollout, which live inside the block.

    Each part of the opening runs in a block of `stage`. `on_replaced` is called for each engine
    that is lost and replaced. `mismatch_dir` is `TrainerConfig.mismatch_dir`.
    """
    config = trainer_config(setup)
    if mismatch_dir is not None:
        config = dataclasses.replace(config, mismatch_dir=str(mismatch_dir))
    arguments = engine_arguments(setup)
    cluster, alias = setup.recipe.cluster, setup.decisions.alias
    if setup.decisions.driver == "inprocess":
        return open_inprocess(config, arguments, alias=alias, stage=stage)
    # Start the cluster of one machine here; a larger one must be running.
    address = cluster.address or ("auto" if cluster.machines > 1 else None)
    places: Any = {"devices": cluster.n_gpus_per_node, "nodes": cluster.nnodes, "address": address}
    places |= {"rollout_devices": cluster.rollout_gpus, "rollout_nodes": cluster.rollout_nodes}
    places |= {"colocate": cluster.colocate, "ports": cluster.port_range}
    places |= {"object_store_bytes": int(cluster.object_store_gib * 2**30)}
    places |= {"timeout": cluster.call_timeout, "alias": alias, "stage": stage}
    # A replaced engine would get weights that are newer than those of the step's other answers.
    ends = setup.recipe.engine.hosted or setup.recipe.loop.max_staleness
    restarts = 0 if ends else cluster.max_engine_restarts
    places |= {"max_engine_restarts": restarts, "on_replaced": on_replaced}
    return open_ray(config, arguments, **places)


def cycle_arguments(setup: Setup) -> dict[str, Any]:
    """Return the keyword arguments of `Cycle`."""
    recipe, decisions = setup.recipe, setup.decisions
    apart = [] if recipe.cluster.colocate else ENGINE_TAGS  # these engines never sleep
    served = ["weights"] if decisions.alias and recipe.served_adapter else []  # they never change
    return {
        "sleep_level": recipe.engine.sleep_level,
        "resident": {*decisions.resident, *apart, *served},
        "overlap": decisions.overlap,
        "alias": decisions.alias,
        "hand_over": decisions.hand_over,
        "critic": recipe.algorithm == "ppo",
        "reference": "reference" not in recipe.absent_tags(),
        "in_flight": "keep" if recipe.loop.max_staleness else "refuse",
    }


def leaving_tags(setup: Setup) -> tuple[str, ...]:
    """Return the trainer's tags that leave the device; none while that is undecided."""
    decisions = setup.decisions
    if "resident" in decisions.open:
        return ()
    stays = {*decisions.resident, *(["params"] if decisions.alias else [])}
    return tuple(tag for tag in SAVED if tag not in stays | setup.recipe.absent_tags().keys())


def trainer_config(setup: Setup) -> TrainerConfig:
    """Return the trainer's options, from its own section and from other keys of the recipe."""
    recipe = setup.recipe
    section = dataclasses.asdict(recipe.trainer)
    betas = (section.pop("beta1"), section.pop("beta2"))
    for name in OF_THE_TRAINER:
        section[name] = getattr(setup.decisions, name)
    section["micro_batch_tokens"] = setup.decisions.micro_batch_size * setup.max_request_tokens
    for key in ("schedule", "warmup_steps", "final_rate"):
        del section[key]  # The loop turns them into a schedule of updates.
    return TrainerConfig(
        **section,
        betas=betas,
        model_path=str(setup.model_dir),
        device=setup.device,
        random_init=recipe.model.random_init,
        param_dtype=recipe.model.dtype,
        fp32_router=recipe.model.fp32_router,
        exact=setup.decisions.exact,
        exact_ranks=recipe.engine.tensor_parallel_size,
        exact_expert_parallel=recipe.engine.expert_parallel,
        seed=recipe.seed,
        lora=lora_config(recipe),
        replicate=setup.decisions.alias and recipe.cluster.size > 1,
        leaving=leaving_tags(setup),
        loss=policy_loss(recipe),
        reference=recipe.loss.kl_coef > 0,
        **LOOPS[recipe.algorithm].trainer_fields(recipe),
    )


def policy_loss(recipe: Recipe) -> PolicyLoss:
    """Return the loss of the policy's updates."""
    names = ("aggregation", "clip_low", "clip_high", "dual_clip", "entropy_coef")
    fields: dict[str, Any] = {name: getattr(recipe.loss, name) for name in names}
    kind = recipe.loss.kind
    # Actors have another working directory.
    fields["kind"] = NamedFunction(absolute_name(kind)) if ":" in kind else kind
    if recipe.loss.aggregation == "constant":
        fields["max_tokens"] = recipe.sampling.max_tokens
    if recipe.kl_in == "loss" and recipe.kl_estimator != "k1":
        fields |= {"kl_coef": recipe.loss.kl_coef, "kl_estimator": recipe.kl_estimator}
    return PolicyLoss(**fields)


def engine_arguments(setup: Setup) -> dict[str, Any]:
    """Return the arguments of `Engine.from_pretrained` besides model and device."""
    recipe, section = setup.recipe, setup.recipe.engine
    names = ["kind", *SIZES]
    if section.hosted:
        names = ["kind", "page_size", "max_running", "max_prefill_tokens", "cuda_graphs"]
        names += ["tensor_parallel_size"] if section.kind == "vllm" else []
    options = {name: getattr(section, name) for name in names} | {
        "dtype": recipe.model.dtype,
        "kv_tokens": setup.kv_tokens,
        "max_context_len": setup.max_request_tokens,
        "seed": recipe.seed,
    }
    if section.hosted:
        return options | (section.options or {})
    ratio = section.host_to_device_ratio
    return options | {
        "return_routed_experts": recipe.loop.router_replay,
        "fp32_router": recipe.model.fp32_router,
        "exact": setup.decisions.exact,
        "elastic": bool(setup.decisions.overlap),
        "adapters": adapter_slots(recipe),
        "tiers": KVTiers(host_ratio=ratio, preemption=section.preemption) if ratio else None,
        # A random model's tokenizer has only its task's words: a draw among them would end soon.
        "sample_all_ids": recipe.model.random_init,
    }
