"""Decisions of a plan: recomputation, micro batch, tags that stay, what the trainer keeps, graphs.

`plan_switch` decides in this order, for each way of recomputation (`recomputation.py`). First the
micro batch (`micro_batch.py`), as if all tags left that may and the trainer gathered parameters for
each micro batch. For a larger one, only tags can leave that an update does not need, such as the
engine's, and more micro batches cost more time. Then the tags: the cheapest switch that fits. Then
`trainer.keep_unsharded`. If it is false, passes that are large enough for kernels may become
larger, if that saves more gathers than it costs. Last, whether updates have CUDA graphs.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations
from typing import Any

from memsaver.errors import format_bytes
from recipes.config.decisions import Decisions
from recipes.config.recipe import Recipe
from recipes.config.sections import SAVED
from recipes.planner.memory_plan import MemoryPlan, Planning, PlanRequest
from recipes.planner.micro_batch import choose_size, reason, sizes_to_try
from recipes.planner.recomputation import Work, with_graphs, with_recomputation
from recipes.planner.sizes import GIB
from recipes.planner.stage_plan import StagePlan
from recipes.setup.model_decisions import ALIASED, without_moves
from rollout.tag_names import ADAPTER_SLOTS
from trainer_bridge.tag_names import ADAPTERS, MODELS, OPTIM, PARAMS, TRAINED

# Seconds, measured on H100: to unmap, clear and map a GiB again; to cast, copy and compare a GiB of
# weights; and for the messages of a sync.
_REMAPPED, _SYNCED, _MESSAGES = 1.6e-3 / GIB, 1.7e-3 / GIB, 8e-3
# Seconds of kernels to gather and reduce a GiB of fp32 parameters, of all ranks, in a micro batch.
_GATHERED = 3.5e-3 / GIB
# Seconds to bring a GiB back through the driver, and from the other side: 84.4 and 5.8 ms for the
# 14.2 GiB of the 7B shape's weights. The messages of a step's hand-overs take the rest of what they
# cost at the 0.5B shape.
_DRIVEN, _HANDED, _AGREED = 5.9e-3 / GIB, 0.4e-3 / GIB, 38e-3
_BREAK_EVEN = _AGREED / (_DRIVEN - _HANDED)  # 6.9 GiB


def plan_switch(recipe: Recipe, decisions: Decisions, request: PlanRequest) -> MemoryPlan:
    """Plan a recipe and make the decisions that are open.

    Args:
        recipe: The recipe.
        decisions: Decisions, of which `exact` is made.
        request: What to plan for.
    """
    if request.gpu.on_host:
        decisions = without_moves(decisions, recipe)
    if "alias" in decisions.open:
        whole = decisions.decided({"alias": ALIASED}, alias=True)
        plan = plan_switch(recipe, whole, request)
        line = "alias: off, because whole weights do not fit each device"
        shards = decisions.decided({"alias": line}, alias=False)
        return plan if plan.fits else plan_switch(recipe, shards, request)
    planning = Planning(recipe, decisions, request)

    def planned(decided: Decisions) -> MemoryPlan:
        with planning.begun(decided) as make_plan:
            if request.gpu.on_host:
                return make_plan(decided)
            planner = _SwitchPlanner(recipe, make_plan)
            if "micro_batch_size" in decided.open:
                return planner.with_size(decided, planning.elements)
            return planner.decided(decided)

    work = None
    if not decisions.open.isdisjoint(("activation_checkpointing", "cuda_graphs")):
        work = Work.of(recipe, request.directory, planning.longest)
    if work is None:
        return planned(decisions.decided(activation_checkpointing="layers", cuda_graphs=False))

    def graphed(decided: Decisions) -> MemoryPlan:
        plan = planned(decided)
        if "cuda_graphs" not in decided.open:
            return plan
        sized = decided.taking(plan.decisions, "micro_batch_size", "keep_unsharded")
        return with_graphs(plan, lambda line: planned(sized.decided(line, cuda_graphs=True)), work)

    if "activation_checkpointing" not in decisions.open:
        return graphed(decisions)
    return with_recomputation(
        lambda way, line: graphed(decisions.decided(line, activation_checkpointing=way)),
        lambda plan: plan.exposed + _gathering(recipe, plan),
        work,
    )


def _gathering(recipe: Recipe, plan: MemoryPlan) -> float:
    """Return the seconds of a step in which the trainer gathers and reduces again."""
    if plan.decisions.keep_unsharded:
        return 0.0
    params = recipe.cluster.size * Switch(plan, recipe).sizes.get(PARAMS, 0)
    return _GATHERED * params * recipe.regathers(plan.decisions.micro_batch_size)


@dataclass(frozen=True)
class _SwitchPlanner:
    """Makes the open decisions of a recipe by plans with one choice after the other.

    Attributes:
        recipe: The recipe.
        make_plan: Returns the plan of decisions.
    """

    recipe: Recipe
    make_plan: Callable[[Decisions], MemoryPlan]

    def with_size(self, decisions: Decisions, elements: int) -> MemoryPlan:
        """Decide the micro batch and the rest; `elements` are those of the longest sequence."""
        answers = self.recipe.answers_per_update

        def planned(size: int) -> MemoryPlan:
            gathers = decisions.decided(micro_batch_size=size, keep_unsharded=False)
            return self._switched(gathers, decisions.resident, decisions.overlap)

        def decided(size: int, sizes: list[int]) -> tuple[float, MemoryPlan]:
            """Return the plan, and its seconds that depend on the size."""
            line = {"micro_batch_size": reason(size, sizes, answers)}
            plan = self.decided(decisions.decided(line, micro_batch_size=size))
            return plan.exposed + _gathering(self.recipe, plan), plan

        sizes = sizes_to_try(answers, elements)
        size = choose_size(sizes, planned)
        seconds, plan = decided(size, sizes)
        if size == sizes[-1] < answers and not plan.decisions.keep_unsharded:
            sizes = [size, *(more for more in sizes_to_try(answers) if more > size)]
            cost, other = decided(choose_size(sizes, planned), sizes)
            if other.fits and cost <= seconds:
                return other
        return plan

    def decided(self, decisions: Decisions) -> MemoryPlan:
        """Decide what is open besides the micro batch."""
        if "keep_unsharded" not in decisions.open:
            return self._with_tags(decisions)
        plan = self._with_tags(decisions.decided(keep_unsharded=False))
        gain = _gathering(self.recipe, plan)
        if not gain or not self._may_keep(plan):
            return plan
        line = "kept from micro batch to micro batch: unsharded parameters and gradients"
        kept = self._with_tags(decisions.decided({"keep_unsharded": line}, keep_unsharded=True))
        fits = kept.fits and kept.peak.device_bytes <= kept.sure_room
        return kept if fits and kept.exposed < plan.exposed + gain else plan

    def _may_keep(self, plan: MemoryPlan) -> bool:
        """Return whether an update has room for half the parameters' bytes; unsharded take more.

        This saves large models the time of a second plan.
        """
        gathered = self.recipe.cluster.size * Switch(plan, self.recipe).sizes.get(PARAMS, 0) // 2
        update = next(stage for stage in plan.stages if stage.stage == "update_actor")
        tags = update.tags.get(PARAMS, 0) + update.tags.get(OPTIM, 0)
        return tags + update.torch["trainer"] + update.contexts + gathered <= plan.sure_room

    def _switched(
        self, decisions: Decisions, resident: Collection[str], overlap: Collection[str] = ()
    ) -> MemoryPlan:
        """Plan a switch; overlapped moves exclude a hand-over, and so do engines on other GPUs."""
        may = decisions.hand_over or "hand_over" in decisions.open
        hand_over = may and not overlap and self.recipe.cluster.colocate
        switch: dict[str, Any] = {"resident": tuple(resident), "overlap": tuple(overlap)}
        return self.make_plan(replace(decisions, **switch, hand_over=hand_over))

    def _with_tags(self, decisions: Decisions) -> MemoryPlan:
        """Decide which tags stay, which moves are overlapped, and the hand-over."""
        offloaded = self._switched(decisions, ())
        switch = Switch(offloaded, self.recipe)
        resident = switch.cheapest() if "resident" in decisions.open else decisions.resident
        overlap, chosen = decisions.overlap, "overlap" in decisions.open
        if chosen and offloaded.grows and not decisions.hand_over:
            overlap = [tag for tag in switch.leaving(resident) if tag in TRAINED]
        if overlap and (offloaded.fits or not chosen):
            overlapped = self._switched(decisions, resident, overlap)
            if not chosen or overlapped.peak.device_bytes <= overlapped.sure_room:
                # The engine allocates its whole pool at the start, so the whole pool must fit.
                kinds = offloaded.shortages.items()
                whole = {kind: shortage for kind, shortage in kinds if kind == "engine"}
                return replace(
                    switch.described(overlapped, decisions, resident, overlap),
                    most_kv_tokens=offloaded.most_kv_tokens,
                    shortages=whole | dict(overlapped.shortages),
                )
        plan = self._switched(decisions, resident) if resident else offloaded
        return switch.described(plan, decisions, resident)


@dataclass(frozen=True)
class Switch:
    """What leaves the device at a switch, and what that costs.

    Attributes:
        plan: The plan with no resident tags.
        recipe: The recipe.
    """

    plan: MemoryPlan
    recipe: Recipe

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Return the bytes of every tag while it has memory."""
        sizes: dict[str, int] = {}
        for tag, nbytes in chain.from_iterable(_tags(stage).items() for stage in self.plan.stages):
            sizes[tag] = max(nbytes, sizes.get(tag, 0))
        return {tag: nbytes for tag, nbytes in sizes.items() if nbytes}

    @cached_property
    def torch(self) -> int:
        """Return the sum of torch's peaks in all processes."""
        most: Counter[str] = Counter()
        for stage in self.plan.stages:
            most |= Counter(stage.torch)  # keeps the larger value of each process
        return most.total()

    def cheapest(self) -> tuple[str, ...]:
        """Return the resident tags of the cheapest switch that fits.

        It is without hand-over and overlap.
        """
        counts = range(len(self.sizes) + 1)
        choices = chain.from_iterable(combinations(self.sizes, count) for count in counts)
        fitting = [tags for tags in choices if self._peak(tags)[1] <= self.plan.sure_room]
        # Among choices of the same cost, more resident tags mean fewer calls.
        return min(fitting, key=lambda tags: (self._seconds(tags), -len(tags)), default=())

    def described(
        self,
        plan: MemoryPlan,
        decisions: Decisions,
        resident: Collection[str],
        overlap: Collection[str] = (),
    ) -> MemoryPlan:
        """Return a plan with its decisions, their reasons, and its cost."""
        leaves = self.leaving(resident)
        overlap = tuple(tag for tag in leaves if tag in overlap)
        seconds = self._seconds(resident, overlap)
        # A hand-over cannot gain more than the driver takes.
        nbytes = plan.handed_over
        gain = min((_DRIVEN - _HANDED) * nbytes - _AGREED, self._remapping(leaves))
        hand_over = nbytes > 0 and (gain > 0 or decisions.hand_over)
        seconds -= gain if hand_over else 0
        reasons = {"resident": self._staying(leaves)}
        if self.recipe.cluster.colocate:  # else the sync goes over links whose speed is unknown
            reasons["resident"] += f"\nexposed: {1000 * seconds:.0f} ms a step"
        if overlap:
            back = ", ".join(self._ahead(overlap)) or "nothing"
            leave = f"overlapped: {', '.join(overlap)} leave during generation"
            reasons["overlap"] = f"{leave}; back during scoring: {back}"
        if nbytes:
            reasons["hand_over"] = _handing(nbytes, gain, hand_over)
        made = replace(
            decisions,
            resident=tuple(tag for tag in self.sizes if tag in resident),
            overlap=overlap,
            hand_over=hand_over,
            reasons={**decisions.reasons, **reasons},
            open=frozenset(),
        )
        return replace(plan, decisions=made, exposed=seconds)

    def leaving(self, resident: Collection[str]) -> list[str]:
        """Return the tags that leave if the given ones stay; some always have memory."""
        return [tag for tag in self.sizes if tag not in resident and not self._always(tag)]

    def _always(self, tag: str) -> bool:
        return all(_tags(stage).get(tag) for stage in self.plan.stages)

    def _staying(self, leaves: Collection[str]) -> str:
        """Return lines about the tags that stay and leave."""
        gpu = self.plan.gpu
        line = f"stays: {self._listed([tag for tag in self.sizes if tag not in leaves])}"
        if not self.recipe.cluster.colocate:
            line += "; engines stay awake on GPUs of their own"
        line += f"\nleaves: {self._listed(leaves)}"
        if leaves:
            stage, peak = self._peak(self.sizes)
            whole = f"if all tags stayed, {stage} would take {peak / GIB:.1f} GiB"
            line += f"; {whole} of {gpu.name}'s {gpu.total / GIB:.1f}"
        return line

    def _listed(self, tags: Iterable[str]) -> str:
        return ", ".join([f"{tag} {format_bytes(self.sizes[tag])}" for tag in tags]) or "nothing"

    def _peak(self, resident: Collection[str]) -> tuple[str, int]:
        """Return the fullest stage and its bytes if the given tags stayed.

        torch's cache is emptied only if some tag leaves.
        """
        whole = not self.sizes.keys() - set(resident)
        peaks = []
        for stage in self.plan.stages:
            tags = _tags(stage)
            more = sum(self.sizes[tag] - tags.get(tag, 0) for tag in resident)
            more += self.torch - sum(stage.torch.values()) if whole else 0
            peaks.append((stage.stage, stage.device_bytes + more))
        return max(reversed(peaks), key=lambda peak: peak[1])  # Among equals the last: training.

    def _seconds(self, resident: Collection[str], overlap: Collection[str] = ()) -> float:
        sizes, leaves = self.sizes, self.leaving(resident)
        copied = sum(2 * sizes[tag] for tag in leaves if tag in SAVED)
        copied -= sum(sizes[tag] for tag in [*overlap, *self._ahead(overlap)])
        written = 0 if self.plan.decisions.alias else sizes.get("weights", 0)
        if self.recipe.served_adapter and "weights" in resident:
            written = 0  # The base never changes.
        return copied / self.plan.gpu.link + self._remapping(leaves) + written * _SYNCED + _MESSAGES

    def _remapping(self, leaves: Collection[str]) -> float:
        """Return the seconds in the driver if all leaving tags and torch's cache go through it."""
        cache = self.torch if leaves else 0
        return _REMAPPED * (sum(map(self.sizes.__getitem__, leaves)) + cache)

    def _ahead(self, overlap: Collection[str]) -> list[str]:
        """Return the overlapped tags that `Cycle` also brings back early."""
        return [tag for tag in overlap if tag not in MODELS and self.recipe.algorithm != "ppo"]


def _tags(stage: StagePlan) -> dict[str, int]:
    """Return the bytes by tag, with adapters counted as parameters, because they move together.

    The slots of the engine's adapters are left out: they move with the weights, or not at all.
    """
    tags = dict(stage.tags)
    tags.pop(ADAPTER_SLOTS, None)
    tags[PARAMS] = tags.get(PARAMS, 0) + tags.pop(ADAPTERS, 0)
    return tags


def _handing(nbytes: int, gain: float, hand_over: bool) -> str:
    size, change = format_bytes(nbytes), f"{1000 * abs(gain):.0f} ms"
    if hand_over:
        less = f"{change} {'less' if gain > 0 else 'more'}"
        return f"handed over: {size} to the other side, {less} than through the driver"
    least = f"a hand-over gains above {_BREAK_EVEN / GIB:.1f} GiB"
    return f"through the driver: handing {size} over would take {change} more; {least}"
