"""Remedies of a plan that does not fit: changes of the recipe that were planned, too."""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from itertools import chain, islice
from typing import Any

from recipes.config.decisions import Decisions
from recipes.config.recipe import Recipe
from recipes.config.rules import checked
from recipes.errors import shown
from recipes.planner.memory_plan import Change, MemoryPlan, PlanRequest, Shortage
from recipes.planner.switch_plan import plan_switch
from recipes.setup.model_decisions import first_decisions, with_adapters
from recipes.setup.preparation import check_training

_MOST = 3  # largest number of changes that a remedy names


def plan_with_remedies(recipe: Recipe, decisions: Decisions, request: PlanRequest) -> MemoryPlan:
    """Plan a recipe, make its open decisions, and try remedies of a shortage.

    Args:
        recipe: The recipe.
        decisions: Decisions, of which `exact` is made.
        request: What to plan for.
    """

    def planned(recipe: Recipe, decisions: Decisions) -> MemoryPlan:
        check_training(recipe)
        return plan_switch(recipe, decisions, request)

    def replanned(recipe: Recipe, made: Decisions) -> MemoryPlan:
        recipe = with_adapters(recipe, request.directory)
        present = recipe.present_tags()
        made = dataclasses.replace(
            made,
            resident=tuple(tag for tag in made.resident if tag in present),
            overlap=tuple(tag for tag in made.overlap if tag in present),
            open=frozenset({"exact", "alias", "hand_over"}),
        )
        return planned(recipe, first_decisions(recipe, request.directory, before=made))

    return remedied(planned(recipe, decisions), recipe, replanned)


def remedied(
    plan: MemoryPlan, recipe: Recipe, replan: Callable[[Recipe, Decisions], MemoryPlan]
) -> MemoryPlan:
    """Return the plan with remedies that were tried out.

    The ways out of a shortage are planned one after the other, which takes seconds each, until
    `_MOST` of them reduce the shortage and increase no other. `replan` plans another recipe
    with decisions for its keys that are auto, and raises ValueError for an impossible recipe.
    """
    before = _missing(plan.shortages)
    ways = chain.from_iterable(shortage.ways for shortage in plan.shortages.values())
    changes = {_set(change): change for change in ways}

    @cache
    def after(text: str) -> Counter[str]:
        """Return what is missing after a change; as before if the changed recipe is impossible."""
        with contextlib.suppress(ValueError):
            changed = _changed(recipe, *changes[text])
            if changed != recipe:
                return _missing(replan(changed, plan.decisions).shortages)
        return before

    def remedy_of(kind: str, shortage: Shortage) -> str:
        texts = map(_set, shortage.ways)
        helps = (t for t in texts if after(t) <= before and after(t)[kind] < before[kind])
        return ", or ".join([*islice(helps, _MOST), shortage.remedy])

    shortages = {
        kind: shortage._replace(remedy=remedy_of(kind, shortage))
        for kind, shortage in plan.shortages.items()
    }
    return dataclasses.replace(plan, shortages=shortages)


def _missing(shortages: Mapping[str, Shortage]) -> Counter[str]:
    return Counter({kind: shortage.missing for kind, shortage in shortages.items()})


def _set(change: Change) -> str:
    key, value = change
    return f"set {key}={shown(value)}"


def _changed(recipe: Recipe, key: str, value: Any) -> Recipe:
    section, _, name = key.partition(".")
    inside = dataclasses.replace(getattr(recipe, section), **{name: value})
    return checked(dataclasses.replace(recipe, **{section: inside}))
