"""Decisions of a plan: the micro batch, which tags stay on the device, what the trainer keeps.

`plan_switch` decides in this order. First the micro batch (`micro_batch.py`), as if all tags left
that may and the trainer gathered parameters for each micro batch. For a larger one, only tags can
leave that an update does not need, such as the engine's, and more micro batches cost more time.
Then the tags: the cheapest switch that fits. Then `trainer.keep_unsharded`. If it is false, passes
that are large enough for kernels may become larger, if that saves more gathers than it costs.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain, combinations
from typing import Any

from memsaver.errors import format_bytes
from recipes.config.recipe import UNPLANNED_SIZE, Recipe, batching, keeping, switching
from recipes.config.sections import SAVED
from recipes.planner.memory_plan import MemoryPlan, Switch, placed, planning
from recipes.planner.micro_batch import UNPLANNED, choose_size, reason, sizes_to_try
from recipes.planner.sizes import GIB, Gpu
from recipes.planner.stage_plan import StagePlan
from trainer_bridge.tag_names import ADAPTERS, MODELS, OPTIM, PARAMS, TRAINED

# Seconds, measured on H100 (docs/benchmarks.md): to unmap, clear and map a GiB again; to cast, copy
# and compare a GiB of weights; and for the messages of a sync.
_REMAPPED, _SYNCED, _MESSAGES = 1.6e-3 / GIB, 1.7e-3 / GIB, 8e-3
# Seconds of kernels to gather and reduce a GiB of fp32 parameters, of all ranks, in a micro batch.
_GATHERED = 3.5e-3 / GIB
# Bytes handed over and the seconds gained over the driver, measured at two shapes
# (docs/benchmarks.md). The gain of other sizes lies on the line through both.
_SMALL, _LARGE = (3.42 * GIB, -0.019), (42.56 * GIB, 0.167)
_GAINED = (_LARGE[1] - _SMALL[1]) / (_LARGE[0] - _SMALL[0])  # 4.75 ms a GiB
_BREAK_EVEN = _SMALL[0] - _SMALL[1] / _GAINED  # 7.4 GiB


def plan_switch(
    recipe: Recipe, name: str = "recipe", *, gpu: str | Gpu | None = None, **how: Any
) -> MemoryPlan:
    """Plan a recipe and decide its keys that are auto.

    They are `cycle.resident`, `cycle.overlap`, `cycle.hand_over`, `trainer.micro_batch_size` and
    `trainer.keep_unsharded`.

    Args:
        recipe: A recipe whose `cycle.alias` is decided.
        name: Name of the recipe.
        gpu: The GPU, as in `placed`.
        **how: Options of `planning`.
    """
    recipe, card = placed(recipe, gpu)
    with planning(recipe, name, card, **how) as (make_plan, elements):
        if recipe.trainer.micro_batch_size != "auto":
            return _decided(recipe, make_plan)
        if recipe.engine.hosted:
            return _with_line(_decided(batching(recipe, UNPLANNED_SIZE), make_plan), UNPLANNED)
        return _with_size_decided(recipe, make_plan, elements)


def _with_size_decided(
    recipe: Recipe, make_plan: Callable[[Recipe], MemoryPlan], elements: int
) -> MemoryPlan:
    answers = recipe.answers_per_update

    def planned(size: int) -> MemoryPlan:
        return make_plan(_with_named_tags(batching(keeping(recipe, False), size)))

    def decided(size: int) -> tuple[float, MemoryPlan]:
        """Return the plan, and its seconds that depend on the size."""
        sized = batching(recipe, size)
        plan = _decided(sized, make_plan)
        assert plan.switch is not None
        repeated = 0 if plan.switch.keep_unsharded else _gathering(plan, sized)
        return plan.switch.seconds + repeated, plan

    sizes = sizes_to_try(answers, elements)
    size = choose_size(sizes, planned)
    seconds, plan = decided(size)
    line = reason(size, sizes, answers)
    assert plan.switch is not None
    if size == sizes[-1] < answers and not plan.switch.keep_unsharded:
        sizes = [size, *(more for more in sizes_to_try(answers) if more > size)]
        larger = choose_size(sizes, planned)
        cost, other = decided(larger)
        if other.fits and cost <= seconds:
            plan, line = other, reason(larger, sizes, answers)
    return _with_line(plan, line)


def _with_line(plan: MemoryPlan, line: str) -> MemoryPlan:
    assert plan.switch is not None
    return dataclasses.replace(plan, switch=plan.switch._replace(lines=(*plan.switch.lines, line)))


def _with_named_tags(recipe: Recipe) -> Recipe:
    """Return the recipe with its switch decided: tags stay and overlap only if keys name them."""
    cycle = recipe.cycle
    overlap = [] if cycle.overlap == "auto" else cycle.overlap
    return switching(recipe, cycle.named, overlap, hand_over=cycle.hand_over != "never")


def _decided(recipe: Recipe, make_plan: Callable[[Recipe], MemoryPlan]) -> MemoryPlan:
    if recipe.trainer.keep_unsharded != "auto":
        return _with_switch_decided(recipe, make_plan)
    plan = _with_switch_decided(keeping(recipe, False), make_plan)
    if not (gain := _gathering(plan, recipe)) or not _may_keep(plan, recipe):
        return plan
    kept = _with_switch_decided(keeping(recipe, True), make_plan)
    assert plan.switch is not None and kept.switch is not None
    fits = kept.fits and kept.peak.device_bytes <= kept.sure_room
    return kept if fits and kept.switch.seconds < plan.switch.seconds + gain else plan


def _gathering(plan: MemoryPlan, recipe: Recipe) -> float:
    """Return the seconds of a step in which the trainer gathers and reduces again."""
    params = recipe.cluster.size * _sizes(plan).get(PARAMS, 0)
    return _GATHERED * params * recipe.regathers


def _may_keep(plan: MemoryPlan, recipe: Recipe) -> bool:
    """Return whether an update has room for half the parameters' bytes; unsharded ones take more.

    This saves large models the time of a second plan.
    """
    gathered = recipe.cluster.size * _sizes(plan).get(PARAMS, 0) // 2
    update = next(stage for stage in plan.stages if stage.stage == "update_actor")
    tags = update.tags.get(PARAMS, 0) + update.tags.get(OPTIM, 0)
    return tags + update.torch["trainer"] + update.contexts + gathered <= plan.sure_room


def _with_switch_decided(recipe: Recipe, make_plan: Callable[[Recipe], MemoryPlan]) -> MemoryPlan:
    wish, hand_over = recipe.cycle, recipe.cycle.hand_over
    may = hand_over != "never"
    offloaded = make_plan(switching(recipe, (), hand_over=may))
    resident = decide(offloaded, recipe) if wish.resident == "auto" else wish.resident
    overlap: Sequence[str] = [] if hand_over == "always" else wish.overlap
    if overlap == "auto":
        leaving = _leaving(offloaded, resident) if offloaded.grows else []
        overlap = [tag for tag in leaving if tag in TRAINED]
    if overlap and (offloaded.fits or wish.overlap == overlap):
        overlapped = make_plan(switching(recipe, resident, overlap))
        if wish.overlap == overlap or overlapped.peak.device_bytes <= overlapped.sure_room:
            # The engine allocates its whole pool at the start, so the whole pool must fit.
            kinds = offloaded.shortages.items()
            whole = {kind: shortage for kind, shortage in kinds if kind == "engine"}
            return dataclasses.replace(
                overlapped,
                switch=describe(offloaded, recipe, resident, overlap),
                most_kv_tokens=offloaded.most_kv_tokens,
                shortages=whole | dict(overlapped.shortages),
            )
    plan = make_plan(switching(recipe, resident, hand_over=may)) if resident else offloaded
    switch = describe(offloaded, recipe, resident, handed_over=plan.handed_over)
    return dataclasses.replace(plan, switch=switch)


def decide(plan: MemoryPlan, recipe: Recipe) -> tuple[str, ...]:
    """Return the resident tags of the cheapest switch that fits, without hand-over and overlap.

    The plan is that of the recipe with `cycle.resident` empty.
    """
    tags = list(_sizes(plan))
    most = plan.sure_room
    choices = chain.from_iterable(combinations(tags, count) for count in range(len(tags) + 1))
    fitting = [resident for resident in choices if _peak(plan, resident)[1] <= most]
    # Among choices of the same cost, more resident tags mean fewer calls.
    return min(
        fitting, key=lambda resident: (_seconds(plan, recipe, resident), -len(resident)), default=()
    )


def describe(
    plan: MemoryPlan,
    recipe: Recipe,
    resident: Collection[str],
    overlap: Collection[str] = (),
    handed_over: int = 0,
) -> Switch:
    """Return a switch with its cost and its lines for a reader.

    The plan is that of the recipe with `cycle.resident` empty. `handed_over` is the bytes that can
    go to the other side instead of the driver.
    """
    sizes = _sizes(plan)
    leaves = _leaving(plan, resident)
    stays = [tag for tag in sizes if tag not in leaves]
    overlap = tuple(tag for tag in leaves if tag in overlap)
    seconds = _seconds(plan, recipe, resident, overlap)
    lines = [f"stays: {_listed(stays, sizes)}"]
    if not recipe.cluster.colocate:
        lines[0] += "; engines stay awake on GPUs of their own"
    if recipe.cycle.alias == "always":
        lines[0] += "; weights are the trainer's own pages"
    lines.append(f"leaves: {_listed(leaves, sizes)}")
    if leaves:
        stage, peak = _peak(plan, tuple(sizes))
        whole = f"if all tags stayed, {stage} would take {peak / GIB:.1f} GiB"
        lines[-1] += f"; {whole} of {plan.gpu.name}'s {plan.gpu.total / GIB:.1f}"
    if overlap:
        back = ", ".join(_ahead(recipe, overlap)) or "nothing"
        lines.append(
            f"overlapped: {', '.join(overlap)} leave during generation; back during scoring: {back}"
        )
    # A hand-over cannot gain more than the driver takes.
    gain = min(_GAINED * (handed_over - _BREAK_EVEN), _remapping(plan, leaves))
    hand_over = handed_over > 0 and (gain > 0 or recipe.cycle.hand_over == "always")
    if handed_over:
        lines.append(_handing(handed_over, gain, hand_over))
    if keeps := recipe.trainer.keep_unsharded is True:
        lines.append("kept from micro batch to micro batch: unsharded parameters and gradients")
    seconds -= gain if hand_over else 0
    if recipe.cluster.colocate:  # else the sync goes over links whose speed is unknown
        lines.append(f"exposed: {1000 * seconds:.0f} ms a step")
    resident = tuple(tag for tag in sizes if tag in resident)
    size = recipe.micro_batch_size
    return Switch(resident, overlap, hand_over, seconds, keeps, size, tuple(lines))


def _handing(nbytes: int, gain: float, hand_over: bool) -> str:
    size, change = format_bytes(nbytes), f"{1000 * abs(gain):.0f} ms"
    if hand_over:
        less = f"{change} {'less' if gain > 0 else 'more'}"
        return f"handed over: {size} to the other side, {less} than through the driver"
    least = f"a hand-over gains above {_BREAK_EVEN / GIB:.1f} GiB"
    return f"through the driver: handing {size} over would take {change} more; {least}"


def _leaving(plan: MemoryPlan, resident: Collection[str]) -> list[str]:
    return [tag for tag in _sizes(plan) if tag not in resident and not _always(plan, tag)]


def _ahead(recipe: Recipe, overlap: Collection[str]) -> list[str]:
    """Return the overlapped tags that `Cycle` also brings back early."""
    return [tag for tag in overlap if tag not in MODELS and recipe.algorithm != "ppo"]


def _listed(tags: Iterable[str], sizes: dict[str, int]) -> str:
    named = [f"{tag} {format_bytes(sizes[tag])}" for tag in tags]
    return ", ".join(named) or "nothing"


def _sizes(plan: MemoryPlan) -> dict[str, int]:
    """Return the bytes of every tag while it has memory."""
    sizes: dict[str, int] = {}
    for tag, nbytes in chain.from_iterable(_tags(stage).items() for stage in plan.stages):
        sizes[tag] = max(nbytes, sizes.get(tag, 0))
    return {tag: nbytes for tag, nbytes in sizes.items() if nbytes}


def _tags(stage: StagePlan) -> dict[str, int]:
    """Return the bytes by tag, with adapters counted as parameters, because they move together."""
    tags = dict(stage.tags)
    tags[PARAMS] = tags.get(PARAMS, 0) + tags.pop(ADAPTERS, 0)
    return tags


def _always(plan: MemoryPlan, tag: str) -> bool:
    return all(_tags(stage).get(tag) for stage in plan.stages)


def _peak(plan: MemoryPlan, resident: Collection[str]) -> tuple[str, int]:
    """Return the fullest stage and its bytes if the given tags stayed.

    torch's cache is emptied only if some tag leaves.
    """
    sizes, cache = _sizes(plan), _torch(plan)
    whole = not sizes.keys() - set(resident)
    peaks = []
    for stage in plan.stages:
        tags = _tags(stage)
        more = sum(sizes[tag] - tags.get(tag, 0) for tag in resident)
        more += cache - sum(stage.torch.values()) if whole else 0
        peaks.append((stage.stage, stage.device_bytes + more))
    return max(reversed(peaks), key=lambda peak: peak[1])  # Among equals the last: training.


def _torch(plan: MemoryPlan) -> int:
    """Return the sum of torch's peaks in all processes."""
    most: Counter[str] = Counter()
    for stage in plan.stages:
        most |= Counter(stage.torch)  # keeps the larger value of each process
    return most.total()


def _seconds(
    plan: MemoryPlan, recipe: Recipe, resident: Collection[str], overlap: Collection[str] = ()
) -> float:
    sizes, leaves = _sizes(plan), _leaving(plan, resident)
    copied = sum(2 * sizes[tag] for tag in leaves if tag in SAVED)
    copied -= sum(sizes[tag] for tag in [*overlap, *_ahead(recipe, overlap)])
    written = 0 if recipe.cycle.alias == "always" else sizes.get("weights", 0)
    mapping = _remapping(plan, leaves)
    return copied / plan.gpu.link + mapping + written * _SYNCED + _MESSAGES


def _remapping(plan: MemoryPlan, leaves: Collection[str]) -> float:
    """Return the seconds in the driver if all leaving tags and torch's cache go through it."""
    sizes = _sizes(plan)
    return _REMAPPED * (sum(sizes[tag] for tag in leaves) + (_torch(plan) if leaves else 0))
