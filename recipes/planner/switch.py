"""Decides what stays on the device over the switch: the cheapest choice that fits the plan."""

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import chain, combinations
from typing import Any

from memsaver.errors import format_bytes
from recipes.planner.plan import Plan, StagePlan, Switch, make_plan
from recipes.planner.sizes import GIB
from recipes.recipe import SAVED, Recipe, switching
from recipes.setup.models import meta_model
from recipes.setup.pool import pool_grows
from trainer_bridge.tags import ADAPTERS, MODELS, PARAMS, TRAINED

_ERROR = 0.03  # of the GPU: how far a plan may be off
# Seconds, as measured on H100 (docs/benchmarks.md): to unmap, clear and map a GiB again, and to
# cast, copy and compare a GiB of weights; and what every sync takes in messages.
_REMAPPED, _SYNCED, _MESSAGES = 1.6e-3 / GIB, 1.7e-3 / GIB, 8e-3
# Bytes handed over and the seconds that they gained in place of the driver, measured at two shapes
# (docs/benchmarks.md); of other bytes what lies on the line through both.
_SMALL, _LARGE = (3.42 * GIB, -0.019), (42.56 * GIB, 0.167)
_GAINED = (_LARGE[1] - _SMALL[1]) / (_LARGE[0] - _SMALL[0])  # 4.75 ms a GiB
_BREAK_EVEN = _SMALL[0] - _SMALL[1] / _GAINED  # 7.4 GiB


def plan_switch(recipe: Recipe, name: str = "recipe", **how: Any) -> Plan:
    """Returns the plan of a recipe, its switch decided where `cycle.keep`, `cycle.overlap` and
    `cycle.hand_over` are auto.

    how: as of `make_plan`. `cycle.alias` is decided already.
    """
    wish, hand_over = recipe.cycle, recipe.cycle.hand_over
    may = hand_over != "never"
    parked = make_plan(switching(recipe, (), hand_over=may), name, **how)
    keep = decide(parked, recipe) if wish.keep == "auto" else wish.keep
    beside = [] if hand_over == "always" else wish.overlap
    if beside == "auto":
        fields = how.get("fields") or recipe.model.random_fields()
        grows = pool_grows(recipe, meta_model(fields).config)
        beside = [tag for tag in _leaving(parked, keep) if tag in TRAINED] if grows else []
    if beside and parked.fits:  # an engine makes its pool whole, whatever it grows to later
        at_once = make_plan(switching(recipe, keep, beside), name, **how)
        if wish.overlap == beside or at_once.peak.device_bytes <= _most(at_once):
            switch = describe(parked, recipe, keep, beside)
            most = parked.most_kv_tokens
            return dataclasses.replace(at_once, switch=switch, most_kv_tokens=most)
    plan = make_plan(switching(recipe, keep, hand_over=may), name, **how) if keep else parked
    switch = describe(parked, recipe, keep, handed_over=plan.handed_over)
    return dataclasses.replace(plan, switch=switch)


def decide(plan: Plan, recipe: Recipe) -> tuple[str, ...]:
    """Returns the tags to keep for the cheapest switch that fits, where all goes through the
    driver. plan: of the recipe with `cycle.keep` empty.
    """
    tags = list(_sizes(plan))
    most = _most(plan)
    choices = chain.from_iterable(combinations(tags, count) for count in range(len(tags) + 1))
    fitting = [keep for keep in choices if _peak(plan, keep)[1] <= most]
    # the larger of two that cost the same: fewer calls
    return min(fitting, key=lambda keep: (_seconds(plan, recipe, keep), -len(keep)), default=())


def describe(
    plan: Plan,
    recipe: Recipe,
    keep: Collection[str],
    overlap: Collection[str] = (),
    handed_over: int = 0,
) -> Switch:
    """Returns what a switch with these tags kept, and these beside work, costs. plan: as of
    `decide`. handed_over: bytes that can go to the other side in place of the driver.
    """
    sizes = _sizes(plan)
    leaves = _leaving(plan, keep)
    stays = [tag for tag in sizes if tag not in leaves]
    overlap = tuple(tag for tag in leaves if tag in overlap)
    seconds = _seconds(plan, recipe, keep, overlap)
    lines = [f"stays: {_listed(stays, sizes)}"]
    if recipe.cycle.alias == "always":
        lines[0] += "; weights are the trainer's own pages"
    lines.append(f"leaves: {_listed(leaves, sizes)}")
    if leaves:
        stage, peak = _peak(plan, tuple(sizes))
        all_of_it = f"kept whole, {stage} would take {peak / GIB:.1f} GiB"
        lines[-1] += f"; {all_of_it} of {plan.gpu.name}'s {plan.gpu.total / GIB:.1f}"
    if overlap:
        back = ", ".join(_ahead(recipe, overlap)) or "nothing"
        lines.append(
            f"beside work: {', '.join(overlap)} while answers are made, back while they are "
            f"scored: {back}"
        )
    # no more than the driver takes
    gain = min(_GAINED * (handed_over - _BREAK_EVEN), _remapping(plan, leaves))
    hand_over = handed_over > 0 and (gain > 0 or recipe.cycle.hand_over == "always")
    if handed_over:
        lines.append(_handing(handed_over, gain, hand_over))
    seconds -= gain if hand_over else 0
    lines.append(f"exposed: {1000 * seconds:.0f} ms a step")
    kept = tuple(tag for tag in sizes if tag in keep)
    decided: dict[str, Any] = {"keep": kept, "overlap": overlap, "hand_over": hand_over}
    return Switch(**decided, seconds=seconds, lines=tuple(lines))


def _handing(nbytes: int, gain: float, hand_over: bool) -> str:
    size, change = format_bytes(nbytes), f"{1000 * abs(gain):.0f} ms"
    if hand_over:
        less = f"{change} {'less' if gain > 0 else 'more'}"
        return f"handed over: {size} of one side to the other, not through the driver: {less}"
    least = f"it gains from {_BREAK_EVEN / GIB:.1f} GiB on"
    return f"through the driver: handing {size} over would take {change} more; {least}"


def _most(plan: Plan) -> int:
    return plan.room - int(_ERROR * plan.gpu.total)


def _leaving(plan: Plan, keep: Collection[str]) -> list[str]:
    return [tag for tag in _sizes(plan) if tag not in keep and not _always(plan, tag)]


def _ahead(recipe: Recipe, overlap: Collection[str]) -> list[str]:
    """Returns what comes back before it is needed (`Cycle`)."""
    return [tag for tag in overlap if tag not in MODELS and recipe.algorithm != "ppo"]


def _listed(tags: Iterable[str], sizes: dict[str, int]) -> str:
    named = [f"{tag} {format_bytes(sizes[tag])}" for tag in tags]
    return ", ".join(named) or "nothing"


def _sizes(plan: Plan) -> dict[str, int]:
    """Bytes of every tag while it has memory."""
    sizes: dict[str, int] = {}
    for tag, nbytes in chain.from_iterable(_tags(stage).items() for stage in plan.stages):
        sizes[tag] = max(nbytes, sizes.get(tag, 0))
    return {tag: nbytes for tag, nbytes in sizes.items() if nbytes}


def _tags(stage: StagePlan) -> dict[str, int]:
    """Bytes by tag; adapters go where the parameters go."""
    tags = dict(stage.tags)
    tags[PARAMS] = tags.get(PARAMS, 0) + tags.pop(ADAPTERS, 0)
    return tags


def _always(plan: Plan, tag: str) -> bool:
    return all(_tags(stage).get(tag) for stage in plan.stages)


def _peak(plan: Plan, keep: Collection[str]) -> tuple[str, int]:
    """The fullest stage, and its bytes if these tags stayed; torch's cache goes with a tag only."""
    sizes, cache = _sizes(plan), _torch(plan)
    whole = not sizes.keys() - set(keep)
    found = []
    for stage in plan.stages:
        tags = _tags(stage)
        more = sum(sizes[tag] - tags.get(tag, 0) for tag in keep)
        more += cache - sum(stage.torch.values()) if whole else 0
        found.append((stage.stage, stage.device_bytes + more))
    return max(reversed(found), key=lambda each: each[1])  # the last: training's own stage


def _torch(plan: Plan) -> int:
    """The most that torch holds in every process."""
    most: Counter[str] = Counter()
    for stage in plan.stages:
        most |= Counter(stage.torch)  # the larger of each
    return most.total()


def _seconds(
    plan: Plan, recipe: Recipe, keep: Collection[str], overlap: Collection[str] = ()
) -> float:
    sizes, leaves = _sizes(plan), _leaving(plan, keep)
    copied = sum(2 * sizes[tag] for tag in leaves if tag in SAVED)
    copied -= sum(sizes[tag] for tag in [*overlap, *_ahead(recipe, overlap)])
    written = 0 if recipe.cycle.alias == "always" else sizes.get("weights", 0)
    mapping = _remapping(plan, leaves)
    return copied / plan.gpu.link + mapping + written * _SYNCED + _MESSAGES


def _remapping(plan: Plan, leaves: Collection[str]) -> float:
    """Seconds in the driver if all that leaves goes through it, torch's cache with it."""
    sizes = _sizes(plan)
    return _REMAPPED * (sum(sizes[tag] for tag in leaves) + (_torch(plan) if leaves else 0))
