"""Decisions of a run that need no plan: its driver, whether it is exact, and aliases weights."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from recipes.config.decisions import OF_THE_TRAINER, UNPLANNED_SIZE, Decisions, why_ray
from recipes.config.recipe import Recipe
from recipes.config.rules import excludes_exact
from recipes.config.sections import LORA_MODULES
from recipes.errors import RecipeError, counted, one_line, refused
from rollout.model import adaptable, load_model_config, whole_manifest
from rollout.tag_names import WEIGHTS
from trainer_bridge import LoraConfig, TrainerConfig
from trainer_bridge.exact import why_not_exact
from trainer_bridge.models import FLASH, check_layout, lora_target_names

ALIASED = "alias: weights are the trainer's own pages"
"""Line about weights that are aliased."""
UNPLANNED = {
    "micro_batch_size": f"micro batch: {UNPLANNED_SIZE} sequences; auto needs a plan before the "
    "trainer starts",
    "alias": "alias: off; on several devices, auto needs a plan",
}
"""Lines about decisions that no plan made."""
OUTCOMES = {"warn": "differences are counted", True: "a difference ends the run"}
"""Words about exact runs."""


def first_decisions(
    recipe: Recipe, model_dir: Path, device: str | None = None, before: Decisions | None = None
) -> Decisions:
    """Return the decisions of a run, of which a plan may still have to make some.

    `driver=auto` becomes ray if `why_ray` names a reason. `exact=auto` becomes warn if device, keys
    and model allow exact runs. `cycle.alias=auto` becomes always if the engine can serve the
    trainer's own pages; it stays open where each of several devices needs whole ones for that.

    Args:
        recipe: The recipe.
        model_dir: Folder of the model.
        device: Either cpu or cuda:N; None: a GPU of a plan.
        before: Decisions that were made before, such as those of a checkpoint.

    Raises:
        RecipeError: `cycle.alias=always`, and the engine cannot serve the trainer's pages.
    """
    decisions = _with_driver(Decisions.named(recipe), recipe)
    if before is not None:
        decisions = decisions.taking(before)
    decisions = _with_alias(_with_exact(decisions, recipe, model_dir, device), recipe, model_dir)
    if recipe.engine.hosted:  # The trainer is built before there is a plan.
        decisions = unplanned(decisions, "overlap", *OF_THE_TRAINER)
    if decisions.overlap or not recipe.cluster.colocate:
        decisions = unplanned(decisions, "hand_over")
    size = decisions.micro_batch_size
    if "micro_batch_size" not in decisions.open and not recipe.regathers(size):
        decisions = unplanned(decisions, "keep_unsharded")
    return decisions


def unplanned(decisions: Decisions, *names: str) -> Decisions:
    """Return the decisions with defaults for open ones among `names`, or for all without names."""
    return decisions.taking(Decisions(reasons=UNPLANNED), *names)


def _with_driver(decisions: Decisions, recipe: Recipe) -> Decisions:
    why = why_ray(recipe)
    line = f"driver: ray ({why})" if why else "driver: inprocess (one device and no Ray cluster)"
    return decisions.decided({"driver": line}, driver="ray" if why else "inprocess")


def without_moves(decisions: Decisions, recipe: Recipe) -> Decisions:
    """Return the decisions of a run on a CPU, where all tags stay unless the recipe names some."""
    stays = [tag for tag in recipe.present_tags() if not (decisions.alias and tag == WEIGHTS)]
    why = "a CPU uses host memory, so moving tags gains nothing"
    if not recipe.cluster.colocate:
        why = "no engine shares a device with the trainer (cluster.colocate=false)"
    line = f"stays: {', '.join(stays)}; {why}"
    return unplanned(decisions.decided({"resident": line}, resident=tuple(stays)))


def _with_exact(
    decisions: Decisions, recipe: Recipe, model_dir: Path, device: str | None
) -> Decisions:
    if "exact" in decisions.open:
        why = _why_not_exact(recipe, model_dir, device)
        off = f"exact: off, because auto {why}"
        decisions = decisions.decided({"exact": off}, exact=False if why else "warn")
    if not decisions.exact:
        return decisions
    line = f"exact: {OUTCOMES[decisions.exact]}"
    return replace(decisions, reasons={**decisions.reasons, "exact": line})


def _why_not_exact(recipe: Recipe, model_dir: Path, device: str | None) -> str:
    if "cpu" in (device, recipe.device):
        return "needs a GPU"
    if setting := excludes_exact(recipe):
        return f"excludes {setting}"
    # The backward pass of exact runs is FlashAttention's.
    if device and torch.cuda.get_device_capability(device) < FLASH:
        return f"needs a GPU of compute capability {FLASH[0]}.{FLASH[1]}"
    try:
        return why_not_exact(load_model_config(model_dir))
    except ValueError as error:
        return f"needs a model that the native engine supports: {one_line(error)}"


def _with_alias(decisions: Decisions, recipe: Recipe, model_dir: Path) -> Decisions:
    if recipe.cycle.alias == "never":
        return decisions
    why = _why_not_alias(recipe, model_dir)
    if why and recipe.cycle.alias == "always":
        raise RecipeError(f"cycle.alias=always: {why}; set cycle.alias=auto")
    if not why and recipe.cluster.size > 1 and recipe.cycle.alias == "auto":
        return decisions  # whole pages on each device: if they fit
    line = f"alias: off, because {why}" if why else ALIASED
    return decisions.decided({"alias": line}, alias=not why)


def with_adapters(recipe: Recipe, model_dir: Path) -> Recipe:
    """Return a recipe that states whether the adapters of this model are merged, if it has any.

    Raises:
        RecipeError: `lora.target_modules` names layers that the model does not have, or
            `lora.merge=false` a model whose adapters must be merged.
    """
    section = recipe.lora
    if not section.rank:
        return recipe
    names = lora_target_names(str(model_dir))
    if missing := [name for name in section.target_modules if name not in names]:
        rule = f"the model has no layers {', '.join(missing)}"
        present = [name for name in LORA_MODULES if name in names]
        raise refused("lora.target_modules", section.target_modules, rule, present)
    with contextlib.suppress(ValueError):  # raised for a model of hosted engines alone
        if recipe.served_adapter is None or adaptable(load_model_config(model_dir)):
            return recipe
    if section.merge is False:
        raise refused("lora.merge", False, "needs a model with plain attention", "auto")
    return replace(recipe, lora=replace(section, merge=True))


def lora_config(recipe: Recipe) -> LoraConfig | None:
    """Return the adapters of the trainer; None if all parameters are trained."""
    section = recipe.lora
    if not section.rank:
        return None
    names = ("rank", "alpha", "target_modules")
    own: dict[str, Any] = {name: getattr(section, name) for name in names}
    return LoraConfig(**own, served_as=recipe.served_adapter)


def _why_not_alias(recipe: Recipe, model_dir: Path) -> str:
    if recipe.engine.hosted:
        return f"engine.kind={recipe.engine.kind} has buffers among its weights"
    alone = recipe.engine.tensor_parallel_size == 1 and recipe.algorithm != "ppo"
    if recipe.cluster.size > 1 and not (recipe.served_adapter and alone):
        return f"the trainer's pages are shards on {recipe.cluster.size} devices"
    if recipe.cluster.apart:
        return f"other devices have {counted(recipe.cluster.apart, 'engine rank')}"
    if recipe.lora.rank and not recipe.served_adapter:
        return "the engine serves merged adapters, not the trainer's pages"
    if recipe.stored_dtype != recipe.model.dtype:
        return f"the trainer's pages are {recipe.stored_dtype}, model.dtype={recipe.model.dtype}"
    if "weights" in recipe.cycle.named and not recipe.served_adapter:
        return "cycle.resident names weights, whose pages go back to the trainer"
    config = TrainerConfig(
        model_path=str(model_dir),
        dtype=recipe.trainer.dtype,
        param_dtype=recipe.model.dtype,
        optimizer_offload=recipe.trainer.optimizer_offload,
        lora=lora_config(recipe),
    )
    try:
        manifest = whole_manifest(load_model_config(model_dir), config.torch_model_dtype)
        check_layout(config, manifest)
    except ValueError as error:
        return one_line(error)
    return ""
