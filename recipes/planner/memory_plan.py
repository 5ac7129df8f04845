"""Memory plans: the bytes of every stage, whether they fit, and what to change if not.

`Planning` plans a recipe with given decisions (`switch_plan.py` makes them).
"""

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from memsaver.errors import format_bytes
from memsaver.memory import pinned_arena
from memsaver.report import PAGE_POOL
from memsaver.system.host_memory import RAY_KEEPS
from recipes.config.decisions import Decisions
from recipes.config.recipe import Recipe
from recipes.config.rules import broken_rules
from recipes.errors import RecipeError
from recipes.logs.peaks import ROLLOUT_GPU
from recipes.planner.dry_run import DryRun, dry_run, planned_trainer
from recipes.planner.planned_device import PAGE
from recipes.planner.planned_sides import NO_ENGINE, EngineSizes
from recipes.planner.sizes import GIB, MIB, Gpu, engine_sizes, find_gpu, of_host
from recipes.planner.stage_plan import StagePlan, always_awake
from recipes.setup.pool import pool_fault, request_tokens
from recipes.setup.preparation import check_context
from rollout.hosted import OUTSIDE
from rollout.model import load_hf_config, longest_context
from rollout.parallel import GROUP_BYTES
from rollout.tag_names import KV_CACHE, WEIGHTS
from trainer_bridge.models import group_bytes
from trainer_bridge.sync import RELAY_BYTES
from trainer_bridge.tag_names import ADAPTERS, CRITIC_OPTIM, OPTIM, PARAMS, TRAINED

WRITTEN_AT_ONCE = "steps wait for checkpoints: the host has no room for a copy of them"
"""Note of a plan."""
GUESSED_PROMPT = 64  # tokens of a prompt without a tokenizer at hand
PROCESS_HOST = 2 * GIB  # host memory of a process itself: interpreter, libraries, CUDA
# Bytes of a GPU left free for memory that the driver has not cleared and torch cannot use.
_SPARE = 256 * MIB
_ERROR = 0.03  # share of a GPU by which a plan may be off
_WORTH = 0.01  # share of a shortage that a change must be able to free
_LARGER = {False: "take more or larger GPUs (--gpu)", True: "take a machine with more memory"}
"""Remedies of a shortage by whether the device is a CPU."""


Outside = dict[str, int | None]
"""Bytes of a hosted engine and of contexts outside of tags, as "assumed" and as "measured"."""
Change = tuple[str, Any]
"""A key and its new value."""


class Shortage(NamedTuple):
    """Memory that is missing.

    Attributes:
        missing: Missing bytes, or tokens of a request.
        text: Place and amount, for a message.
        remedy: What to change, for a message.
        ways: Changes that may help, which `remedied` tries.
    """

    missing: int
    text: str
    remedy: str
    ways: Sequence[Change] = ()


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The memory that a recipe takes of its fullest GPU and of a host.

    Attributes:
        name: Name of the recipe.
        decisions: Decisions of the run; `switch_plan.py` makes those that are open.
        gpu: The GPU.
        devices: Number of GPUs with a trainer rank, all alike.
        stages: Peak bytes of every stage on a GPU with a trainer rank.
        rollout_devices: Number of GPUs with an engine rank only, all alike.
        machines: Number of machines.
        rollout_stages: Peak bytes of stages on such a GPU.
        host_bytes: Bytes of one machine, in all its processes.
        host_room: Bytes that these processes may take; None: unknown.
        kv_tokens: Tokens of one engine rank's KV pool.
        most_kv_tokens: Largest pool, in tokens, that fits in every stage.
        notes: Assumptions of the plan.
        shortages: Shortages by kind: engine, trainer, host, request.
        token_bytes: Bytes of a token in the pool.
        grows: Whether the pool can begin small.
        handed_over: Bytes of a step that go to the other side, if the recipe allows it.
        exposed: Seconds of a step in which only the switch runs.
        outside: Bytes outside of tags; None: the native engine.
    """

    name: str
    decisions: Decisions
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
    exposed: float = 0.0
    host_room: float | None = None
    outside: Outside | None = None
    rollout_devices: int = 0
    machines: int = 1
    rollout_stages: tuple[StagePlan, ...] = ()

    @property
    def peak(self) -> StagePlan:
        return _fullest(self.stages)

    @property
    def rows(self) -> list[StagePlan]:
        """Return all stages; those of a GPU with an engine rank only say so in their names."""
        named = (
            dataclasses.replace(stage, stage=stage.stage + ROLLOUT_GPU)
            for stage in self.rollout_stages
        )
        return [*self.stages, *named]

    @property
    def fits(self) -> bool:
        return not self.shortages

    @property
    def needs(self) -> list[str]:
        """Return amount and remedy of each shortage."""
        return [f"{shortage.text}; {shortage.remedy}" for shortage in self.shortages.values()]

    @property
    def unfit(self) -> list[str]:
        """Return a line about each shortage."""
        return [f"does not fit: {need}" for need in self.needs]

    @property
    def room(self) -> int:
        """Return the bytes of the GPU that a stage may take."""
        return self.gpu.total - _SPARE

    @property
    def sure_room(self) -> int:
        """Return the bytes that a stage may take by a decision, although a plan is not exact."""
        return self.room - int(_ERROR * self.gpu.total)

    def as_json(self) -> dict[str, Any]:
        """Return the content of plan.json; only used_bytes include contexts."""
        names = ("devices", "fits", "needs", "kv_tokens", "most_kv_tokens", "outside", "exposed")
        facts = {name: getattr(self, name) for name in names}
        facts |= {"gpu": self.gpu.name, "gpu_bytes": self.gpu.total}
        stages = [stage.as_json() for stage in self.rows]
        return {**facts, "stages": stages, "decisions": self.decisions.as_json()}


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a plan is made for, besides its recipe.

    Attributes:
        name: Title of the plan.
        gpu: The GPU.
        directory: Folder of the model.
        prompt_tokens: Tokens of the longest prompt; None: a guess.
        staged: Whether only the weights wake before the sync, and the rest of the engine after it.
        outside: Bytes outside of tags that a run with a hosted engine measured.
    """

    name: str
    gpu: Gpu
    directory: Path
    prompt_tokens: int | None = None
    staged: bool = True
    outside: int | None = None


class Planning:
    """Plans of a recipe with further decisions.

    Args:
        recipe: The recipe.
        decisions: Decisions, of which `exact` and `alias` are made.
        request: What to plan for.

    Raises:
        RecipeError: The recipe cannot be planned.

    Attributes:
        elements: Elements of the longest sequence's hidden states: its tokens times their width.
        longest: Tokens of the longest sequence.
    """

    def __init__(self, recipe: Recipe, decisions: Decisions, request: PlanRequest) -> None:
        self._recipe, self._request = recipe, request
        self._prompt = prompt = request.prompt_tokens or GUESSED_PROMPT
        own, self._engine_contexts, self._outside = _contexts(recipe, request)
        self._gpu = request.gpu._replace(contexts=own)
        config = load_hf_config(request.directory)
        check_context(recipe, prompt, longest_context(config))
        self._engine, self._tokens, self._token_bytes = engine_sizes(
            recipe, request.directory, request.gpu, prompt, bool(decisions.exact)
        )
        self.longest = prompt + recipe.sampling.max_tokens
        self.elements = config.get_text_config().hidden_size * self.longest

    @contextlib.contextmanager
    def begun(self, decisions: Decisions) -> Iterator[Callable[[Decisions], MemoryPlan]]:
        """Yield a function that plans with further decisions, inside the block.

        Args:
            decisions: Decisions, of which those that a model is built with are made.

        Raises:
            ValueError: This process is part of a torch.distributed group.
        """
        card, recipe = self._gpu, self._recipe
        given: dict[str, Any] = {"prompt_tokens": self._prompt, "caches": not card.on_host}
        given["workspace_bytes"] = card.workspace
        # What shares a GPU with the trainer.
        beside = self._engine if recipe.cluster.colocate else NO_ENGINE
        how: dict[str, Any] = {"room": card.total - card.contexts, "staged": self._request.staged}
        with planned_trainer(recipe, decisions, self._request.directory, **given) as pair:
            yield lambda decided: self._plan(decided, dry_run(decided, beside, *pair, **how))

    def _plan(self, decided: Decisions, run: DryRun) -> MemoryPlan:
        recipe, cluster, engine = self._recipe, self._recipe.cluster, self._engine
        stages, host_bytes = _of_device_and_host(run, recipe, decided, self._gpu, engine)
        room, copies = _host_room(recipe, self._gpu), _checkpoint_copies(run, recipe)
        copied = not self._gpu.on_host and (room is None or host_bytes + copies <= room)
        host_bytes += copies if copied else 0
        awake = always_awake(engine, self._engine_contexts) if cluster.apart else ()
        plan = MemoryPlan(
            name=self._request.name,
            decisions=decided,
            gpu=self._gpu,
            devices=cluster.size,
            stages=stages,
            rollout_devices=cluster.apart,
            machines=cluster.machines,
            rollout_stages=awake,
            host_bytes=host_bytes,
            host_room=room,
            kv_tokens=self._tokens,
            most_kv_tokens=0,
            token_bytes=self._token_bytes,
            grows=cluster.colocate and engine.grows,
            notes=(
                *_notes(recipe, self._request, self._outside),
                *([WRITTEN_AT_ONCE] if copies and not copied else []),
            ),
            handed_over=run.handed_over,
            outside=self._outside,
        )
        tier = recipe.engine.host_to_device_ratio if plan.gpu.on_host else 0.0
        most = _most_tokens(plan, recipe.engine.page_size, tier)
        plan = dataclasses.replace(plan, most_kv_tokens=most)
        return dataclasses.replace(plan, shortages=_shortages(plan, recipe, self._prompt))


def _of_device_and_host(
    run: DryRun, recipe: Recipe, decisions: Decisions, card: Gpu, engine: EngineSizes
) -> tuple[tuple[StagePlan, ...], int]:
    """Return the stages and the bytes of host memory on one machine.

    On a CPU, saved content takes the memory of the device, which keeps it for the next time.
    """
    cluster = recipe.cluster
    tier = int(recipe.engine.host_to_device_ratio * engine.kv_cache)
    asleep = engine.weights if recipe.engine.sleep_level == 1 and cluster.colocate else 0
    stay = {*decisions.resident, *([PARAMS] if decisions.alias else [])}
    saved = {tag: nbytes for tag, nbytes in run.tags.items() if tag not in stay}
    kept = sum(saved.values()) + run.host + asleep
    stages = []
    for stage, entry in run.stages.items():
        held = {name: dict(entry[name]) for name in ("processes", "torch", "tags")}
        held["tags"].pop(PAGE_POOL, None)  # pages that are about to be a tag's
        absent = sum(nbytes for tag, nbytes in saved.items() if not held["tags"].get(tag))
        host, used = cluster.n_gpus_per_node * (absent + run.host), entry["device_bytes"]
        if card.on_host:
            host, used = kept + tier, used + kept + tier
        stages.append(StagePlan(stage=stage, used=used, contexts=card.contexts, host=host, **held))
    host = cluster.n_gpus_per_node * kept + cluster.engines_per_node * tier
    return tuple(stages), host + cluster.ranks_per_node * PROCESS_HOST


def _checkpoint_copies(run: DryRun, recipe: Recipe) -> int:
    """Return the bytes on one machine of the copies from which checkpoints are written."""
    if not recipe.checkpoint.every:
        return 0
    elsewhere = {PARAMS} if recipe.lora.rank or recipe.trainer.optimizer_offload else set()
    saved = sum(run.tags.get(tag, 0) for tag in {*TRAINED, ADAPTERS} - elsewhere)
    masters = run.host if recipe.trainer.optimizer_offload else 0
    return recipe.cluster.n_gpus_per_node * (saved + masters)


def _notes(recipe: Recipe, request: PlanRequest, outside: Outside | None) -> Iterator[str]:
    """Yield the assumptions of a plan, and what it leaves out."""
    if outside is not None:
        measured = request.outside is not None
        held = outside["measured" if measured else "assumed"] or 0
        how = "as the run measured it" if measured else "assumed until a run measures it"
        yield f"{recipe.engine.kind} and contexts hold {held / GIB:.2f} GiB outside of tags, {how}"
    elif not request.gpu.measured:
        yield f"contexts on {request.gpu.name} are assumed to be those of the H100"
    if recipe.cluster.apart and not (recipe.engine.hosted or request.gpu.on_host):
        yield "a single process on a GPU is assumed to have half of the contexts of two"
    if recipe.cluster.machines > 1:
        yield "NCCL's memory for syncs between machines is not in the plan"
    if request.prompt_tokens is None:
        yield f"prompts are assumed to have {GUESSED_PROMPT} tokens"


def _contexts(recipe: Recipe, request: PlanRequest) -> tuple[int, int, Outside | None]:
    """Return the bytes of contexts and of NCCL on a trainer's GPU, and on an engine's alone.

    With a hosted engine, they hold all its memory outside of tags, which is the third result.
    """
    cluster, both, outside = recipe.cluster, request.gpu.contexts, None
    if request.gpu.on_host:
        return both if cluster.colocate else both // 2, both // 2, None
    trainer = group_bytes(cluster.size, bool(recipe.checkpoint.every))
    engine = GROUP_BYTES if recipe.engine.tensor_parallel_size > 1 else 0
    groups = trainer + engine
    if recipe.engine.hosted:
        assumed, measured = both // 2 + groups + OUTSIDE, request.outside
        outside = {"assumed": assumed, "measured": measured}
        both, groups = assumed if measured is None else measured, 0
    messages = RELAY_BYTES if cluster.machines > 1 else 0
    single = both // 2 + messages  # of one process
    own = both + messages + groups if cluster.colocate else single + trainer
    return own, single + engine, outside


def _host_room(recipe: Recipe, card: Gpu) -> float | None:
    """Return the bytes that processes may take of a machine: their own and the pinnable share."""
    if recipe.cluster.host_gib is None or card.on_host:
        return None
    own = PROCESS_HOST * recipe.cluster.ranks_per_node
    usable = (1 - RAY_KEEPS) * recipe.cluster.host_gib * GIB
    return own + pinned_arena.SHARE * (usable - own)


def placed(recipe: Recipe, gpu: str | None) -> tuple[Recipe, Gpu]:
    """Return the recipe placed on the given GPUs (h100-80gb, h100-80gb:8), and one of the GPUs.

    Without `gpu`, the device is the CPU of a recipe with device=cpu, else a GPU of its cluster.
    """
    if recipe.device == "cpu" and gpu is None:
        engine = dataclasses.replace(recipe.engine, cuda_graphs=False)
        return dataclasses.replace(recipe, engine=engine), of_host(recipe)
    if recipe.device == "cpu":
        recipe = dataclasses.replace(recipe, device="auto")
    card, count = find_gpu(gpu or recipe.cluster.gpu)
    return (recipe if count is None else _on(recipe, count)), card


def _on(recipe: Recipe, devices: int) -> Recipe:
    """Return the recipe on this number of devices, in machines of up to eight."""
    if recipe.cluster.apart:
        rule = "cluster.rollout_gpus or cluster.rollout_nodes divides the GPUs into two kinds"
        raise RecipeError(f"--gpu :{devices}: {rule}; set cluster.n_gpus_per_node instead")
    per_node = min(devices, 8)
    if devices % per_node:
        raise RecipeError(
            f"--gpu :{devices}: machines have 8 GPUs each; give a multiple of 8, or fewer"
        )
    cluster = dataclasses.replace(
        recipe.cluster, nnodes=devices // per_node, n_gpus_per_node=per_node
    )
    several = devices > 1 and recipe.driver == "inprocess"
    driver = "auto" if several else recipe.driver
    placed = dataclasses.replace(recipe, cluster=cluster, driver=driver)
    if faults := broken_rules(placed):
        raise RecipeError(f"--gpu :{devices}: {'; '.join(line for _, line in faults)}")
    return placed


def _most_tokens(plan: MemoryPlan, page: int, tier: float) -> int:
    """Return the tokens of a pool that takes all memory left in the stages that have a pool.

    A device that is the host also has `tier` bytes for each of the pool, in every stage.
    """
    left = [
        (plan.room - stage.device_bytes) // PAGE * PAGE / (has_pool + tier)  # in whole pages
        for stage in plan.rows
        if (has_pool := bool(stage.tags.get(KV_CACHE))) or tier
    ]
    more = min(left, default=plan.room) / plan.token_bytes
    return max(0, plan.kv_tokens + math.floor(more / page) * page)


def _shortages(plan: MemoryPlan, recipe: Recipe, prompt_tokens: int) -> dict[str, Shortage]:
    """Return the shortages by kind.

    "engine" is about stages with a KV pool, "trainer" about all other stages, "host" about the
    host's memory, and "request" about the longest request.
    """
    shortages, larger = {}, _LARGER[plan.gpu.on_host]
    where = "of host memory" if plan.gpu.on_host else f"on each {plan.gpu.name}"
    short = [stage for stage in plan.rows if stage.device_bytes > plan.room]
    for kind, with_kv in (("engine", True), ("trainer", False)):
        if stages := [stage for stage in short if bool(stage.tags.get(KV_CACHE)) == with_kv]:
            # Among equally full stages, name the first with a KV pool, else the last: training.
            worst = _fullest(stages[::-1] if with_kv else stages)
            missing = worst.device_bytes - plan.room
            text = f"{worst.stage} is short of {_rounded(missing)} {where}"
            shortages[kind] = Shortage(missing, text, larger, _ways(plan, recipe, worst, missing))
    if plan.host_room is not None and plan.host_bytes > plan.host_room:
        missing = plan.host_bytes - math.floor(plan.host_room)
        machine = f"a machine of {recipe.cluster.host_gib:g} GiB"
        text = f"the host is short of {_rounded(missing)} on {machine}"
        machines = "take machines with more memory (cluster.host_gib)"
        shortages["host"] = Shortage(missing, text, machines, _ways_of_host(recipe))
    if fault := pool_fault(recipe, prompt_tokens, plan.kv_tokens):
        need, (text, remedy) = request_tokens(recipe, prompt_tokens), fault
        remedy = remedy if need <= plan.most_kv_tokens else larger
        shortages["request"] = Shortage(need - plan.kv_tokens, text, remedy)
    return shortages


def _rounded(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else format_bytes(nbytes)


def _ways(plan: MemoryPlan, recipe: Recipe, stage: StagePlan, missing: int) -> list[Change]:
    """Return changes that reduce the memory of a stage.

    Changes of parts that are too small to help are left out. Changes that affect learning come
    last.
    """
    decisions, answer = plan.decisions, recipe.sampling.max_tokens
    held = Counter({**stage.tags, "torch": stage.torch.get("trainer", 0)})  # 0 for absent tags
    batch = min(decisions.micro_batch_size, recipe.answers_per_rank)
    # The batch that would fit if torch held nothing else.
    fitting = max(1, int(batch * (1 - missing / max(held["torch"], missing))))
    moments = (OPTIM, CRITIC_OPTIM)
    ways: list[tuple[Collection[str], str, Any]] = [
        ([KV_CACHE], *_less_kv(plan, recipe)),
        (decisions.resident, "cycle.resident", []),
        (decisions.overlap, "cycle.overlap", []),
        (["torch"] if decisions.keep_unsharded else [], "trainer.keep_unsharded", False),
        (["torch"], "trainer.micro_batch_size", min(batch // 2, 1 << fitting.bit_length() - 1)),
        (["torch"], "trainer.activation_checkpointing", "layers"),
        ([OPTIM], "trainer.optimizer_offload", True),
        ([WEIGHTS], "engine.tensor_parallel_size", 2 * recipe.engine.tensor_parallel_size),
        (moments, "trainer.optimizer", "adamw_8bit"),
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


def _fullest(stages: Sequence[StagePlan]) -> StagePlan:
    """Return the fullest stage; among equal stages, the last."""
    return max(reversed(stages), key=lambda stage: stage.device_bytes)
