"""`make_plan`: what a recipe takes at every stage, whether that fits, and what to change if not;
`plan_switch` decides what stays on the device over the switch: the cheapest choice that fits.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any, NamedTuple

from memsaver.common.machine import RAY_KEEPS
from memsaver.errors import format_bytes
from memsaver.vmm import pinned_memory
from recipes.errors import RecipeError
from recipes.planner.dry_run import dry_run
from recipes.planner.sizes import GIB, MIB, Gpu, engine_sizes, find_gpu, outside_of
from recipes.planner.tracing import PAGE
from recipes.recipe import SAVED, FieldError, Recipe, switching
from recipes.setup.models import meta_model
from recipes.setup.preparation import pool_grows
from trainer_bridge.tags import ADAPTERS, MODELS, PARAMS, TRAINED

GUESSED_PROMPT = 64  # tokens, where the tokenizer is not at hand
PROCESS_HOST = 2 * GIB  # of a process's own: interpreter, libraries, CUDA
# Of a GPU: what the driver has not cleared yet, and what torch cannot use of a segment.
_SPARE = 256 * MIB


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
    """keep: tags that stay on the device. overlap: those that leave and come back beside work.
    hand_over: whether what leaves goes to the other side. seconds: of a step in which nothing else
    runs because of the switch. lines: the same for a reader, with reasons.
    """

    keep: Sequence[str]
    overlap: Sequence[str]
    hand_over: bool
    seconds: float
    lines: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Holds what a recipe takes of one GPU, the fullest. host_bytes: of one machine, all its
    processes; host_room: the most that they may take there, None: not known. kv_tokens: of one
    engine rank's pool; most_kv_tokens: so many would still fit at every stage. notes: what was
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
    needs: tuple[str, ...]
    notes: tuple[str, ...]
    handed_over: int = 0
    switch: Switch | None = None
    host_room: float | None = None
    outside: dict[str, int | None] | None = None

    @property
    def peak(self) -> StagePlan:
        return max(self.stages, key=lambda stage: stage.device_bytes)

    @property
    def fits(self) -> bool:
        return not self.needs

    @property
    def room(self) -> int:
        """Bytes of the GPU that a stage may take."""
        return self.gpu.total - _SPARE

    def as_json(self) -> dict[str, Any]:
        """For plan.json. device_bytes are without contexts, used_bytes with them."""
        names = ("devices", "fits", "kv_tokens", "most_kv_tokens", "outside")
        facts = {name: getattr(self, name) for name in names}
        facts |= {"gpu": self.gpu.name, "gpu_bytes": self.gpu.total}
        stages = [stage.as_json() for stage in self.stages]
        switch = None if self.switch is None else self.switch._asdict()
        return {**facts, "stages": stages, "switch": switch}


def make_plan(
    recipe: Recipe,
    name: str = "recipe",
    *,
    gpu: str | Gpu | None = None,
    staged: bool = True,
    prompt_tokens: int | None = None,
    fields: Mapping[str, Any] | None = None,
    outside: int | None = None,
) -> Plan:
    """recipe: its switch decided (`plan_switch`). gpu: as of `placed`. staged: False wakes all of
    the engine before the sync, as others do. prompt_tokens: of the longest prompt. fields: of the
    model's config, in place of the recipe's own. outside: what a run measured (`outside_of`).

    Raises RecipeError for a recipe that no plan can be made of, and ValueError in a process that is
    part of a torch.distributed group.
    """
    recipe, card = placed(recipe, gpu)
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
    sizes, kv_tokens, per_token = engine_sizes(recipe, model, card, prompt_tokens)
    given: dict[str, Any] = {"prompt_tokens": prompt_tokens, "workspace_bytes": card.workspace}
    room = card.total - card.contexts
    run = dry_run(recipe, model, sizes, **given, room=room, staged=staged)
    stay = {*recipe.cycle.keep, *([PARAMS] if recipe.cycle.alias == "always" else [])}
    saved = {tag: nbytes for tag, nbytes in run.tags.items() if tag not in stay}
    per_machine = min(recipe.cluster.n_gpus_per_node, recipe.cluster.size)
    stages = []
    for stage, entry in run.stages.items():
        held = {name: dict(entry[name]) for name in ("processes", "torch", "tags")}
        away = sum(nbytes for tag, nbytes in saved.items() if not held["tags"].get(tag))
        host = per_machine * (away + run.host)
        used, contexts = entry["device_bytes"], card.contexts
        stages.append(StagePlan(stage=stage, used=used, contexts=contexts, host=host, **held))
    tier = int(recipe.engine.host_to_device_ratio * sizes.kv_cache)
    asleep = sizes.weights if recipe.engine.sleep_level == 1 else 0
    host = per_machine * (sum(saved.values()) + run.host + asleep + tier + 2 * PROCESS_HOST)
    most = _most_tokens(stages, card, kv_tokens, per_token, recipe.engine.page_size)
    plan = Plan(
        name=name,
        gpu=card,
        devices=recipe.cluster.size,
        stages=tuple(stages),
        host_bytes=host,
        kv_tokens=kv_tokens,
        most_kv_tokens=most,
        needs=(),
        notes=tuple(notes),
        handed_over=run.handed_over,
        host_room=_host_room(recipe, per_machine),
        outside=found,
    )
    return dataclasses.replace(plan, needs=tuple(_needs(plan, recipe)))


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
    return own + pinned_memory.SHARE * (usable - own)


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
    except FieldError as error:
        raise RecipeError(f"--gpu :{devices}: {error}") from None


def _most_tokens(
    stages: Sequence[StagePlan], gpu: Gpu, tokens: int, per_token: int, page: int
) -> int:
    """Tokens of the pool if it took all that is left in every stage where it is there."""
    there = [stage.device_bytes for stage in stages if stage.tags.get("kv_cache")]
    left = (gpu.total - _SPARE - max(there, default=0)) // PAGE * PAGE  # the pool takes whole pages
    return max(0, tokens + math.floor(left / per_token / page) * page)


def _needs(plan: Plan, recipe: Recipe) -> list[str]:
    """Says what to change, a line for each kind of stage that does not fit; none where all do."""
    short = [stage for stage in plan.stages if stage.device_bytes > plan.room]
    with_kv = [stage for stage in short if stage.tags.get("kv_cache")]
    others = [stage for stage in short if not stage.tags.get("kv_cache")]
    found = []
    for stages, remedy in ((with_kv, _less_kv(plan, recipe)), (others, _less_training(recipe))):
        if stages:
            worst = max(stages, key=lambda stage: stage.device_bytes)
            missing = (worst.device_bytes - plan.room) / GIB
            found.append(
                f"{worst.stage} is short of {missing:.1f} GiB on each {plan.gpu.name}; {remedy}"
            )
    if plan.host_room is not None and plan.host_bytes > plan.host_room:
        missing = (plan.host_bytes - plan.host_room) / GIB
        machine = f"a machine of {recipe.cluster.host_gib:g} GiB"
        found.append(f"the host is short of {missing:.1f} GiB on {machine}; {_less_host(recipe)}")
    page = recipe.engine.page_size
    longest = recipe.sampling.max_tokens + page
    if not found and plan.kv_tokens < longest:
        text = f"holds no answer of {recipe.sampling.max_tokens}; {_less_kv(plan, recipe)}"
        found.append(f"the KV pool of {plan.kv_tokens} tokens {text}")
    return found


def _less_host(recipe: Recipe) -> str:
    ways = []
    if recipe.cycle.keep != "auto" and "params" not in recipe.cycle.keep:
        ways.append("set cycle.keep=[params]")
    if recipe.trainer.optimizer_offload:
        ways.append("set trainer.optimizer_offload=false")
    if recipe.engine.host_to_device_ratio:
        ways.append("set engine.host_to_device_ratio=0")
    return ", or ".join([*ways, "take machines with more memory (cluster.host_gib)"])


def _less_kv(plan: Plan, recipe: Recipe) -> str:
    if plan.most_kv_tokens < recipe.sampling.max_tokens:
        return "set engine.tensor_parallel_size higher, or take more or larger GPUs"
    if recipe.engine.mem_fraction_static is None:
        return f"set engine.kv_tokens={plan.most_kv_tokens}"
    over = (plan.kv_tokens - plan.most_kv_tokens) / max(plan.kv_tokens, 1)
    kv = max(stage.tags.get("kv_cache", 0) for stage in plan.stages)
    fraction = recipe.engine.mem_fraction_static - over * kv / plan.gpu.total
    return f"set engine.mem_fraction_static={math.floor(fraction * 100) / 100}"


def _less_training(recipe: Recipe) -> str:
    ways = []
    if recipe.cycle.named:
        ways.append("set cycle.keep=[]")
    if recipe.trainer.micro_batch_size > 1:
        ways.append(f"set trainer.micro_batch_size={recipe.trainer.micro_batch_size // 2}")
    if recipe.trainer.activation_checkpointing != "layers":
        ways.append("set trainer.activation_checkpointing=layers")
    if not recipe.lora.rank:
        if not recipe.trainer.optimizer_offload:
            ways.append("set trainer.optimizer_offload=true")
        ways.append("set lora.rank=32")
    return ", or ".join([*ways, "take more or larger GPUs (--gpu)"])


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
    return Switch(kept, overlap, hand_over, seconds, tuple(lines))


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
