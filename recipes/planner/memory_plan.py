"""`planning`: what a recipe takes at every stage, whether that fits, and what to change if not;
`plan_switch` decides what stays on the device over the switch: the cheapest choice that fits.
"""

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, islice
from typing import Any, NamedTuple

from pydantic import ValidationError

from memsaver.errors import format_bytes
from memsaver.memory import pinned_arena
from memsaver.system.host_memory import RAY_KEEPS
from recipes.config.load import explain
from recipes.config.models import SAVED
from recipes.config.recipe import Recipe, switching
from recipes.errors import RecipeError, shown
from recipes.planner.dry_run import DryRun, dry_run, planned_trainer
from recipes.planner.sizes import GIB, MIB, Gpu, engine_sizes, find_gpu, outside_of
from recipes.planner.tracing import PAGE, EngineSizes
from recipes.setup.models import meta_model
from recipes.setup.preparation import check_context, pool_fault, request_tokens
from rollout.tag_names import KV_CACHE, WEIGHTS
from trainer_bridge.tags import ADAPTERS, CRITIC_OPTIM, MODELS, OPTIM, PARAMS, TRAINED

GUESSED_PROMPT = 64  # tokens, where the tokenizer is not at hand
PROCESS_HOST = 2 * GIB  # of a process's own: interpreter, libraries, CUDA
# Of a GPU: what the driver has not cleared yet, and what torch cannot use of a segment.
_SPARE = 256 * MIB
_WORTH = 0.01  # of a shortage: what is less is no remedy
_SAID = 3  # ways out of a shortage, at most
_LARGER = "take more or larger GPUs (--gpu)"


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """The most in one stage, in bytes. used: of the device, without contexts. processes: tags and
    torch's own, by owner, each at its most; tags, torch: the parts of it. contexts: of both
    processes. host: saved content on one machine.
    """

    stage: str
    used: int
    processes: dict[str, int]
    torch: dict[str, int]
    tags: dict[str, int]
    contexts: int
    host: int

    @property
    def device_bytes(self) -> int:
        return self.used + self.contexts

    def as_json(self) -> dict[str, Any]:
        held = {"device_bytes": self.processes, "used_bytes": self.device_bytes, "tags": self.tags}
        return {"stage": self.stage, **held, "host_bytes": self.host}


class Switch(NamedTuple):
    """resident: tags that stay on the device. overlap: those that leave and come back beside work.
    hand_over: whether what leaves goes to the other side. seconds: of a step in which nothing else
    runs because of the switch. lines: the same for a reader, with reasons.
    """

    resident: Sequence[str]
    overlap: Sequence[str]
    hand_over: bool
    seconds: float
    lines: Sequence[str]


Change = tuple[str, Any]
"""A key and its new value."""


class Shortage(NamedTuple):
    """Bytes, or a request's tokens, that are missing. text: where, and how many. remedy: what to
    change; ways: what else may help (`remedied`).
    """

    missing: int
    text: str
    remedy: str
    ways: Sequence[Change] = ()


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Holds what a recipe takes of one GPU, the fullest. host_bytes: of one machine, all its
    processes; host_room: the most that they may take there, None: not known. kv_tokens: of one
    engine rank's pool, of token_bytes each; most_kv_tokens: so many would still fit at every stage.
    grows: whether the pool may begin small. shortages: by kind (`remedied`). notes: what was
    assumed. handed_over: bytes of a step that go to the other side, where the recipe wants that.
    outside: bytes of a hosted engine and of contexts that are on no tag, as "assumed" and
    as "measured"; None: native.
    """

    name: str
    gpu: Gpu
    devices: int
    stages: tuple[StagePlan, ...]
    host_bytes: int
    kv_tokens: int
    most_kv_tokens: int
    notes: tuple[str, ...]
    shortages: Mapping[str, Shortage] = dataclasses.field(default_factory=dict)
    token_bytes: int = 0
    grows: bool = False
    handed_over: int = 0
    switch: Switch | None = None
    host_room: float | None = None
    outside: dict[str, int | None] | None = None

    @property
    def peak(self) -> StagePlan:
        return _fullest(self.stages)

    @property
    def fits(self) -> bool:
        return not self.shortages

    @property
    def needs(self) -> list[str]:
        """Say what does not fit, and what to change: a line each."""
        return [f"{each.text}; {each.remedy}" for each in self.shortages.values()]

    @property
    def room(self) -> int:
        """Bytes of the GPU that a stage may take."""
        return self.gpu.total - _SPARE

    def as_json(self) -> dict[str, Any]:
        """For plan.json. device_bytes are without contexts, used_bytes with them."""
        names = ("devices", "fits", "needs", "kv_tokens", "most_kv_tokens", "outside")
        facts = {name: getattr(self, name) for name in names}
        facts |= {"gpu": self.gpu.name, "gpu_bytes": self.gpu.total}
        stages = [stage.as_json() for stage in self.stages]
        switch = None if self.switch is None else self.switch._asdict()
        return {**facts, "stages": stages, "switch": switch}


@contextlib.contextmanager
def planning(
    recipe: Recipe,
    name: str,
    card: Gpu,
    *,
    staged: bool = True,
    prompt_tokens: int | None = None,
    fields: Mapping[str, Any] | None = None,
    outside: int | None = None,
) -> Iterator[Callable[[Recipe], MemoryPlan]]:
    """Give what plans the recipe with a switch that is decided (`switching`), in any number.

    Args:
        recipe: Its `cycle.alias` is decided.
        name: Of the recipe.
        card: What each process of it is on.
        staged: False wakes all of the engine before the sync, as others do.
        prompt_tokens: Of the longest prompt, in place of a guess.
        fields: Of the model's config, in place of the recipe's own.
        outside: What a run measured (`outside_of`).

    Raises:
        RecipeError: No plan can be made of the recipe.
        ValueError: This process is part of a torch.distributed group.
    """
    model = dict(fields or recipe.model.random_fields())
    notes = [] if card.measured else [f"contexts on {card.name} are taken to be those of the H100"]
    found = None
    if recipe.engine.hosted:
        found = {"assumed": outside_of(card, None), "measured": outside}
        card, note = _with_outside(card, recipe.engine.kind, outside)
        notes = [note]
    if prompt_tokens is None:
        prompt_tokens = GUESSED_PROMPT
        notes.append(f"prompts are taken to have {prompt_tokens} tokens")
    context = getattr(meta_model(model).config, "max_position_embeddings", None)
    check_context(recipe, prompt_tokens, context)
    sizes, kv_tokens, per_token = engine_sizes(recipe, model, card, prompt_tokens)
    per_machine = min(recipe.cluster.n_gpus_per_node, recipe.cluster.size)
    given = {"prompt_tokens": prompt_tokens, "workspace_bytes": card.workspace}
    with planned_trainer(recipe, model, **given) as (setup, trainer):

        def plan(decided: Recipe) -> MemoryPlan:
            room = card.total - card.contexts
            run = dry_run(decided, sizes, setup, trainer, room=room, staged=staged)
            stages, host_bytes = _of_device_and_host(run, decided, card, sizes)
            most = _most_tokens(stages, card, kv_tokens, per_token, recipe.engine.page_size)
            plan = MemoryPlan(
                name=name,
                gpu=card,
                devices=recipe.cluster.size,
                stages=stages,
                host_bytes=host_bytes,
                kv_tokens=kv_tokens,
                most_kv_tokens=most,
                token_bytes=per_token,
                grows=sizes.grows,
                notes=tuple(notes),
                handed_over=run.handed_over,
                host_room=_host_room(recipe, per_machine),
                outside=found,
            )
            return dataclasses.replace(plan, shortages=_shortages(plan, decided, prompt_tokens))

        yield plan


def _of_device_and_host(
    run: DryRun, recipe: Recipe, card: Gpu, engine: EngineSizes
) -> tuple[tuple[StagePlan, ...], int]:
    """Return the stages, and the bytes of a machine's host memory."""
    per_machine = min(recipe.cluster.n_gpus_per_node, recipe.cluster.size)
    stay = {*recipe.cycle.resident, *([PARAMS] if recipe.cycle.alias == "always" else [])}
    saved = {tag: nbytes for tag, nbytes in run.tags.items() if tag not in stay}
    stages = []
    for stage, entry in run.stages.items():
        held = {name: dict(entry[name]) for name in ("processes", "torch", "tags")}
        away = sum(nbytes for tag, nbytes in saved.items() if not held["tags"].get(tag))
        host = per_machine * (away + run.host)
        used, contexts = entry["device_bytes"], card.contexts
        stages.append(StagePlan(stage=stage, used=used, contexts=contexts, host=host, **held))
    tier = int(recipe.engine.host_to_device_ratio * engine.kv_cache)
    asleep = engine.weights if recipe.engine.sleep_level == 1 else 0
    host = sum(saved.values()) + run.host + asleep + tier + 2 * PROCESS_HOST
    return tuple(stages), per_machine * host


def _with_outside(card: Gpu, kind: str, measured: int | None) -> tuple[Gpu, str]:
    """Returns the card, whose contexts are all that lies outside of tags, and the plan's note."""
    card = card._replace(contexts=outside_of(card, measured))
    how = "assumed: a run measures it" if measured is None else "as the run measured it"
    return card, f"{kind} and contexts hold {card.contexts / GIB:.2f} GiB outside of tags, {how}"


def _host_room(recipe: Recipe, per_machine: int) -> float | None:
    """Bytes that processes may take of a machine: their own, and the share that may be pinned."""
    if recipe.cluster.host_gib is None:
        return None
    own, usable = 2 * PROCESS_HOST * per_machine, (1 - RAY_KEEPS) * recipe.cluster.host_gib * GIB
    return own + pinned_arena.SHARE * (usable - own)


def placed(recipe: Recipe, gpu: str | Gpu | None) -> tuple[Recipe, Gpu]:
    """Returns the recipe on these GPUs, and one of them: a known card, or as h100-80gb or
    h100-80gb:8, in place of what the recipe's `cluster` says.
    """
    if isinstance(gpu, Gpu):
        return recipe, gpu
    card, count = find_gpu(gpu or recipe.cluster.gpu)
    return (recipe if count is None else _on(recipe, count)), card


def _on(recipe: Recipe, devices: int) -> Recipe:
    """The recipe on so many devices, in machines of at most eight."""
    per_node = min(devices, 8)
    if devices % per_node:
        raise RecipeError(
            f"--gpu :{devices}: machines have 8 GPUs each; give a multiple of 8, or fewer"
        )
    cluster = dataclasses.replace(
        recipe.cluster, nnodes=devices // per_node, n_gpus_per_node=per_node
    )
    driver = "ray" if devices > 1 else recipe.driver
    try:
        return dataclasses.replace(recipe, cluster=cluster, driver=driver)
    except ValidationError as error:
        faults = explain(error, dataclasses.asdict(recipe))
        raise RecipeError(f"--gpu :{devices}: {'; '.join(line for _, line in faults)}") from None


def _most_tokens(
    stages: Sequence[StagePlan], gpu: Gpu, tokens: int, per_token: int, page: int
) -> int:
    """Tokens of the pool if it took all that is left in every stage where it is there."""
    there = [stage.device_bytes for stage in stages if stage.tags.get("kv_cache")]
    left = (gpu.total - _SPARE - max(there, default=0)) // PAGE * PAGE  # the pool takes whole pages
    return max(0, tokens + math.floor(left / per_token / page) * page)


def _shortages(plan: MemoryPlan, recipe: Recipe, prompt_tokens: int) -> dict[str, Shortage]:
    """Return what does not fit, by kind: the stages with a KV pool, the others, the host, and the
    longest request.
    """
    found = {}
    short = [stage for stage in plan.stages if stage.device_bytes > plan.room]
    for kind, with_kv in (("engine", True), ("trainer", False)):
        if stages := [stage for stage in short if bool(stage.tags.get(KV_CACHE)) == with_kv]:
            # the engine is fullest when it answers, the trainer when it learns
            worst = _fullest(stages[::-1] if with_kv else stages)
            missing = worst.device_bytes - plan.room
            text = f"{worst.stage} is short of {missing / GIB:.1f} GiB on each {plan.gpu.name}"
            found[kind] = Shortage(missing, text, _LARGER, _ways(plan, recipe, worst, missing))
    if plan.host_room is not None and plan.host_bytes > plan.host_room:
        missing = plan.host_bytes - math.floor(plan.host_room)
        machine = f"a machine of {recipe.cluster.host_gib:g} GiB"
        text = f"the host is short of {missing / GIB:.1f} GiB on {machine}"
        machines = "take machines with more memory (cluster.host_gib)"
        found["host"] = Shortage(missing, text, machines, _ways_of_host(recipe))
    if fault := pool_fault(recipe, prompt_tokens, plan.kv_tokens):
        need, (text, remedy) = request_tokens(recipe, prompt_tokens), fault
        remedy = remedy if need <= plan.most_kv_tokens else _LARGER
        found["request"] = Shortage(need - plan.kv_tokens, text, remedy)
    return found


def _ways(plan: MemoryPlan, recipe: Recipe, stage: StagePlan, missing: int) -> list[Change]:
    """Return changes of what the stage holds; of what is next to nothing there none. Last are those
    that change what is learned.
    """
    cycle, trainer, answer = recipe.cycle, recipe.trainer, recipe.sampling.max_tokens
    held = Counter({**stage.tags, "torch": stage.torch.get("trainer", 0)})  # 0 of other tags
    of_a_step = recipe.loop.prompts_per_step * recipe.loop.samples_per_prompt
    batch = min(trainer.micro_batch_size, math.ceil(of_a_step / recipe.cluster.size))
    # of which so many would fit if they were all that torch holds
    fitting = max(1, int(batch * (1 - missing / max(held["torch"], missing))))
    ranks = recipe.engine.tensor_parallel_size
    moments = (OPTIM, CRITIC_OPTIM)
    ways: list[tuple[Collection[str], str, Any]] = [
        ([KV_CACHE], *_less_kv(plan, recipe)),
        (cycle.named, "cycle.resident", []),
        ([] if cycle.overlap == "auto" else cycle.overlap, "cycle.overlap", []),
        (["torch"], "trainer.micro_batch_size", min(batch // 2, 1 << fitting.bit_length() - 1)),
        (["torch"], "trainer.activation_checkpointing", "layers"),
        ([OPTIM], "trainer.optimizer_offload", True),
        ([WEIGHTS], "engine.tensor_parallel_size", 2 * ranks),
        (["torch"], "sampling.max_tokens", answer // 2),
        (moments, "lora.rank", recipe.lora.rank or 32),
    ]
    worth = _WORTH * missing
    return [(key, new) for tags, key, new in ways if sum(map(held.__getitem__, tags)) > worth]


def _ways_of_host(recipe: Recipe) -> list[Change]:
    ways: list[Change] = [("trainer.optimizer_offload", False)]
    ways += [("engine.host_to_device_ratio", 0.0), ("engine.sleep_level", 2)]
    return ways if recipe.cycle.resident == "auto" else [("cycle.resident", [PARAMS]), *ways]


def _less_kv(plan: MemoryPlan, recipe: Recipe) -> Change:
    most, fraction = plan.most_kv_tokens, recipe.engine.mem_fraction_static
    if fraction is None:
        return "engine.kv_tokens", most
    fraction += (most - plan.kv_tokens) * plan.token_bytes / plan.gpu.total
    return "engine.mem_fraction_static", math.floor(fraction * 100) / 100


def remedied(
    plan: MemoryPlan, recipe: Recipe, replan: Callable[[Recipe], MemoryPlan]
) -> MemoryPlan:
    """Return the plan with the first ways that help in the remedies of its shortages.

    Each way is planned, which takes seconds: it leaves less missing there, and nowhere more.

    Args:
        recipe: As asked for, its switch perhaps undecided.
        replan: Plans a changed recipe; a ValueError refuses it.
    """
    tried: dict[str, Mapping[str, Shortage]] = {}

    def missing(shortages: Mapping[str, Shortage], kind: str) -> int:
        return shortages[kind].missing if kind in shortages else 0

    def helps(kind: str, change: Change) -> bool:
        text = _set(change)
        if text not in tried:
            tried[text] = plan.shortages
            with contextlib.suppress(ValueError):  # of a recipe that cannot be
                changed = _changed(recipe, *change)
                if changed != recipe:
                    tried[text] = replan(_with_switch(changed, plan.switch)).shortages
        left = tried[text]
        worse = any(missing(left, name) > missing(plan.shortages, name) for name in left)
        return not worse and missing(left, kind) < missing(plan.shortages, kind)

    found = {}
    for kind, shortage in plan.shortages.items():
        ways = islice((_set(change) for change in shortage.ways if helps(kind, change)), _SAID)
        found[kind] = shortage._replace(remedy=", or ".join([*ways, shortage.remedy]))
    return dataclasses.replace(plan, shortages=found)


def _set(change: Change) -> str:
    key, value = change
    return f"set {key}={shown(value)}"


def _changed(recipe: Recipe, key: str, value: Any) -> Recipe:
    section, _, name = key.partition(".")
    inside = dataclasses.replace(getattr(recipe, section), **{name: value})
    return dataclasses.replace(recipe, **{section: inside})


def _with_switch(recipe: Recipe, switch: Switch | None) -> Recipe:
    """Return the recipe with what auto decided before it was changed."""
    assert switch is not None
    decided = {"resident": switch.resident, "overlap": switch.overlap}
    absent = recipe.absent_tags()
    for name, tags in decided.items():
        if getattr(recipe.cycle, name) == "auto":
            there = [tag for tag in tags if tag not in absent]
            recipe = _changed(recipe, f"cycle.{name}", there)
    return recipe


def _fullest(stages: Sequence[StagePlan]) -> StagePlan:
    """Return the fullest stage, of several the last."""
    return max(reversed(stages), key=lambda stage: stage.device_bytes)


_ERROR = 0.03  # of the GPU: how far a plan may be off
# Seconds, as measured on H100 (docs/benchmarks.md): to unmap, clear and map a GiB again, and to
# cast, copy and compare a GiB of weights; and what every sync takes in messages.
_REMAPPED, _SYNCED, _MESSAGES = 1.6e-3 / GIB, 1.7e-3 / GIB, 8e-3
# Bytes handed over and the seconds that they gained in place of the driver, measured at two shapes
# (docs/benchmarks.md); of other bytes what lies on the line through both.
_SMALL, _LARGE = (3.42 * GIB, -0.019), (42.56 * GIB, 0.167)
_GAINED = (_LARGE[1] - _SMALL[1]) / (_LARGE[0] - _SMALL[0])  # 4.75 ms a GiB
_BREAK_EVEN = _SMALL[0] - _SMALL[1] / _GAINED  # 7.4 GiB


def plan_switch(
    recipe: Recipe, name: str = "recipe", *, gpu: str | Gpu | None = None, **how: Any
) -> MemoryPlan:
    """Return the plan of a recipe, its switch decided where `cycle.resident`, `cycle.overlap` and
    `cycle.hand_over` are auto.

    Args:
        recipe: As of `planning`.
        name: As of `planning`.
        gpu: As of `placed`.
        how: As of `planning`.
    """
    recipe, card = placed(recipe, gpu)
    with planning(recipe, name, card, **how) as plan:
        return _decided(recipe, plan)


def _decided(recipe: Recipe, make_plan: Callable[[Recipe], MemoryPlan]) -> MemoryPlan:
    wish, hand_over = recipe.cycle, recipe.cycle.hand_over
    may = hand_over != "never"
    offloaded = make_plan(switching(recipe, (), hand_over=may))
    resident = decide(offloaded, recipe) if wish.resident == "auto" else wish.resident
    beside: Sequence[str] = [] if hand_over == "always" else wish.overlap
    if beside == "auto":
        leaving = _leaving(offloaded, resident) if offloaded.grows else []
        beside = [tag for tag in leaving if tag in TRAINED]
    if beside and (offloaded.fits or wish.overlap == beside):
        at_once = make_plan(switching(recipe, resident, beside))
        if wish.overlap == beside or at_once.peak.device_bytes <= _most(at_once):
            # an engine makes its pool whole, whatever it grows to later
            whole = {kind: each for kind, each in offloaded.shortages.items() if kind == "engine"}
            return dataclasses.replace(
                at_once,
                switch=describe(offloaded, recipe, resident, beside),
                most_kv_tokens=offloaded.most_kv_tokens,
                shortages=whole | dict(at_once.shortages),
            )
    plan = make_plan(switching(recipe, resident, hand_over=may)) if resident else offloaded
    switch = describe(offloaded, recipe, resident, handed_over=plan.handed_over)
    return dataclasses.replace(plan, switch=switch)


def decide(plan: MemoryPlan, recipe: Recipe) -> tuple[str, ...]:
    """Returns the tags to resident for the cheapest switch that fits, where all goes through the
    driver. plan: of the recipe with `cycle.resident` empty.
    """
    tags = list(_sizes(plan))
    most = _most(plan)
    choices = chain.from_iterable(combinations(tags, count) for count in range(len(tags) + 1))
    fitting = [resident for resident in choices if _peak(plan, resident)[1] <= most]
    # the larger of two that cost the same: fewer calls
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
    """Returns what a switch with these tags resident, and these beside work, costs. plan: as of
    `decide`. handed_over: bytes that can go to the other side in place of the driver.
    """
    sizes = _sizes(plan)
    leaves = _leaving(plan, resident)
    stays = [tag for tag in sizes if tag not in leaves]
    overlap = tuple(tag for tag in leaves if tag in overlap)
    seconds = _seconds(plan, recipe, resident, overlap)
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
    resident = tuple(tag for tag in sizes if tag in resident)
    return Switch(resident, overlap, hand_over, seconds, tuple(lines))


def _handing(nbytes: int, gain: float, hand_over: bool) -> str:
    size, change = format_bytes(nbytes), f"{1000 * abs(gain):.0f} ms"
    if hand_over:
        less = f"{change} {'less' if gain > 0 else 'more'}"
        return f"handed over: {size} of one side to the other, not through the driver: {less}"
    least = f"it gains from {_BREAK_EVEN / GIB:.1f} GiB on"
    return f"through the driver: handing {size} over would take {change} more; {least}"


def _most(plan: MemoryPlan) -> int:
    return plan.room - int(_ERROR * plan.gpu.total)


def _leaving(plan: MemoryPlan, resident: Collection[str]) -> list[str]:
    return [tag for tag in _sizes(plan) if tag not in resident and not _always(plan, tag)]


def _ahead(recipe: Recipe, overlap: Collection[str]) -> list[str]:
    """Returns what comes back before it is needed (`Cycle`)."""
    return [tag for tag in overlap if tag not in MODELS and recipe.algorithm != "ppo"]


def _listed(tags: Iterable[str], sizes: dict[str, int]) -> str:
    named = [f"{tag} {format_bytes(sizes[tag])}" for tag in tags]
    return ", ".join(named) or "nothing"


def _sizes(plan: MemoryPlan) -> dict[str, int]:
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


def _always(plan: MemoryPlan, tag: str) -> bool:
    return all(_tags(stage).get(tag) for stage in plan.stages)


def _peak(plan: MemoryPlan, resident: Collection[str]) -> tuple[str, int]:
    """The fullest stage, and its bytes if these tags stayed; torch's cache goes with a tag only."""
    sizes, cache = _sizes(plan), _torch(plan)
    whole = not sizes.keys() - set(resident)
    found = []
    for stage in plan.stages:
        tags = _tags(stage)
        more = sum(sizes[tag] - tags.get(tag, 0) for tag in resident)
        more += cache - sum(stage.torch.values()) if whole else 0
        found.append((stage.stage, stage.device_bytes + more))
    return max(reversed(found), key=lambda each: each[1])  # the last: training's own stage


def _torch(plan: MemoryPlan) -> int:
    """The most that torch holds in every process."""
    most: Counter[str] = Counter()
    for stage in plan.stages:
        most |= Counter(stage.torch)  # the larger of each
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
    """Seconds in the driver if all that leaves goes through it, torch's cache with it."""
    sizes = _sizes(plan)
    return _REMAPPED * (sum(sizes[tag] for tag in leaves) + (_torch(plan) if leaves else 0))
