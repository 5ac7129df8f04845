"""Memory plans: the bytes of every stage, whether they fit, and what to change if not.

`planning` plans a recipe with given decisions (`switch_plan.py` makes them).
"""

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from recipes.planner.sizes import (
    GIB,
    MESSAGES,
    MIB,
    Gpu,
    engine_group,
    engine_sizes,
    find_gpu,
    outside_of,
    trainer_group,
)
from recipes.planner.stage_plan import StagePlan, always_awake
from recipes.setup.model_files import meta_model
from recipes.setup.pool import pool_fault, request_tokens
from recipes.setup.preparation import check_context
from rollout.model import longest_context
from rollout.tag_names import KV_CACHE, WEIGHTS
from trainer_bridge.tag_names import CRITIC_OPTIM, OPTIM, PARAMS

GUESSED_PROMPT = 64  # tokens of a prompt without a tokenizer at hand
PROCESS_HOST = 2 * GIB  # host memory of a process itself: interpreter, libraries, CUDA
# Bytes of a GPU left free for memory that the driver has not cleared and torch cannot use.
_SPARE = 256 * MIB
_ERROR = 0.03  # share of a GPU by which a plan may be off
_WORTH = 0.01  # share of a shortage that a change must be able to free
_LARGER_GPUS = "take more or larger GPUs (--gpu)"


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
        outside: Bytes of a hosted engine and of contexts outside of tags, as "assumed" and as
            "measured"; None: the native engine.
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
    outside: dict[str, int | None] | None = None
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


@contextlib.contextmanager
def planning(
    recipe: Recipe,
    decisions: Decisions,
    name: str,
    card: Gpu,
    *,
    staged: bool = True,
    prompt_tokens: int | None = None,
    fields: Mapping[str, Any] | None = None,
    outside: int | None = None,
) -> Iterator[tuple[Callable[[Decisions], MemoryPlan], int]]:
    """Yield a function that plans a recipe with further decisions.

    The number beside the function is the elements of the longest sequence's hidden states: its
    tokens times their width.

    Args:
        recipe: The recipe.
        decisions: Decisions, of which `exact` and `alias` are made.
        name: Name of the recipe.
        card: The GPU.
        staged: Whether only the weights wake before the sync, and the rest of the engine after it.
        prompt_tokens: Tokens of the longest prompt; None: a guess.
        fields: Fields of the model's config; None: those of the recipe's random model.
        outside: Bytes outside of tags that a run measured (`outside_of`).

    Raises:
        RecipeError: The recipe cannot be planned.
        ValueError: This process is part of a torch.distributed group.
    """
    model = dict(fields or recipe.model.random_fields())
    notes, outside_sizes = _notes(recipe, card, prompt_tokens, outside), None
    if recipe.engine.hosted:
        outside_sizes = {"assumed": outside_of(recipe, card, None), "measured": outside}
        card = card._replace(contexts=outside_of(recipe, card, outside))
    half, cluster = card.contexts // 2, recipe.cluster
    if cluster.machines > 1:
        half, card = half + MESSAGES, card._replace(contexts=card.contexts + MESSAGES)
    own = _trainer_gpu(recipe, card, half)
    if prompt_tokens is None:
        prompt_tokens = GUESSED_PROMPT
    config = meta_model(model).config
    check_context(recipe, prompt_tokens, longest_context(config))
    exact = bool(decisions.exact)
    sizes, kv_tokens, per_token = engine_sizes(recipe, model, card, prompt_tokens, exact)
    beside = sizes if cluster.colocate else NO_ENGINE  # what shares a GPU with the trainer
    given = {"prompt_tokens": prompt_tokens, "workspace_bytes": card.workspace}
    with planned_trainer(recipe, decisions, model, **given) as (make_setup, trainer):

        def plan(decided: Decisions) -> MemoryPlan:
            room = own.total - own.contexts
            run = dry_run(decided, beside, make_setup, trainer, room=room, staged=staged)
            stages, host_bytes = _of_device_and_host(run, recipe, decided, own, sizes)
            awake = () if not cluster.apart else always_awake(sizes, half + engine_group(recipe))
            pools = [*stages, *awake]
            most = _most_tokens(pools, own, kv_tokens, per_token, recipe.engine.page_size)
            plan = MemoryPlan(
                name=name,
                decisions=decided,
                gpu=own,
                devices=cluster.size,
                stages=stages,
                rollout_devices=cluster.apart,
                machines=cluster.machines,
                rollout_stages=awake,
                host_bytes=host_bytes,
                kv_tokens=kv_tokens,
                most_kv_tokens=most,
                token_bytes=per_token,
                grows=beside.grows,
                notes=tuple(notes),
                handed_over=run.handed_over,
                host_room=_host_room(recipe),
                outside=outside_sizes,
            )
            return dataclasses.replace(plan, shortages=_shortages(plan, recipe, prompt_tokens))

        width = config.get_text_config().hidden_size
        yield plan, width * (prompt_tokens + recipe.sampling.max_tokens)


def _of_device_and_host(
    run: DryRun, recipe: Recipe, decisions: Decisions, card: Gpu, engine: EngineSizes
) -> tuple[tuple[StagePlan, ...], int]:
    """Return the stages and the bytes of host memory on one machine."""
    cluster = recipe.cluster
    stay = {*decisions.resident, *([PARAMS] if decisions.alias else [])}
    saved = {tag: nbytes for tag, nbytes in run.tags.items() if tag not in stay}
    stages = []
    for stage, entry in run.stages.items():
        held = {name: dict(entry[name]) for name in ("processes", "torch", "tags")}
        held["tags"].pop(PAGE_POOL, None)  # pages that are about to be a tag's
        absent = sum(nbytes for tag, nbytes in saved.items() if not held["tags"].get(tag))
        host = cluster.n_gpus_per_node * (absent + run.host)
        used, contexts = entry["device_bytes"], card.contexts
        stages.append(StagePlan(stage=stage, used=used, contexts=contexts, host=host, **held))
    tier = int(recipe.engine.host_to_device_ratio * engine.kv_cache)
    asleep = engine.weights if recipe.engine.sleep_level == 1 and cluster.colocate else 0
    host = cluster.n_gpus_per_node * (sum(saved.values()) + run.host + asleep)
    host += cluster.engines_per_node * tier
    return tuple(stages), host + cluster.ranks_per_node * PROCESS_HOST


def _notes(recipe: Recipe, card: Gpu, prompt_tokens: int | None, outside: int | None) -> list[str]:
    """Return the assumptions of a plan, and what it leaves out; arguments as of `planning`."""
    notes = []
    if recipe.engine.hosted:
        held = outside_of(recipe, card, outside) / GIB
        how = "assumed until a run measures it" if outside is None else "as the run measured it"
        notes.append(
            f"{recipe.engine.kind} and contexts hold {held:.2f} GiB outside of tags, {how}"
        )
    else:
        if not card.measured:
            notes.append(f"contexts on {card.name} are assumed to be those of the H100")
        if recipe.cluster.apart:
            notes.append("a single process on a GPU is assumed to have half of the contexts of two")
    if recipe.cluster.machines > 1:
        notes.append("NCCL's memory for syncs between machines is not in the plan")
    if prompt_tokens is None:
        notes.append(f"prompts are assumed to have {GUESSED_PROMPT} tokens")
    return notes


def _trainer_gpu(recipe: Recipe, card: Gpu, half: int) -> Gpu:
    """Return the GPU of a trainer rank, whose contexts include those of NCCL's groups.

    `half` are the contexts of a single process.
    """
    if not recipe.cluster.colocate:
        return card._replace(contexts=half + trainer_group(recipe))
    if recipe.engine.hosted:
        return card
    both = trainer_group(recipe) + engine_group(recipe)
    return card._replace(contexts=card.contexts + both)


def _host_room(recipe: Recipe) -> float | None:
    """Return the bytes that processes may take of a machine: their own and the pinnable share."""
    if recipe.cluster.host_gib is None:
        return None
    own = PROCESS_HOST * recipe.cluster.ranks_per_node
    usable = (1 - RAY_KEEPS) * recipe.cluster.host_gib * GIB
    return own + pinned_arena.SHARE * (usable - own)


def placed(recipe: Recipe, gpu: str | Gpu | None) -> tuple[Recipe, Gpu]:
    """Return the recipe placed on the given GPUs (h100-80gb, h100-80gb:8), and one of the GPUs.

    Without `gpu`, the GPUs are those of the recipe's cluster.
    """
    if isinstance(gpu, Gpu):
        return recipe, gpu
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
    driver = "ray" if devices > 1 else recipe.driver
    placed = dataclasses.replace(recipe, cluster=cluster, driver=driver)
    if faults := broken_rules(placed):
        raise RecipeError(f"--gpu :{devices}: {'; '.join(line for _, line in faults)}")
    return placed


def _most_tokens(
    stages: Sequence[StagePlan], gpu: Gpu, tokens: int, per_token: int, page: int
) -> int:
    """Return the tokens of a pool that takes all memory left in the stages that have a pool."""
    used = [stage.device_bytes for stage in stages if stage.tags.get("kv_cache")]
    left = (gpu.total - _SPARE - max(used, default=0)) // PAGE * PAGE  # The pool takes whole pages.
    return max(0, tokens + math.floor(left / per_token / page) * page)


def _shortages(plan: MemoryPlan, recipe: Recipe, prompt_tokens: int) -> dict[str, Shortage]:
    """Return the shortages by kind.

    "engine" is about stages with a KV pool, "trainer" about all other stages, "host" about the
    host's memory, and "request" about the longest request.
    """
    shortages = {}
    short = [stage for stage in plan.rows if stage.device_bytes > plan.room]
    for kind, with_kv in (("engine", True), ("trainer", False)):
        if stages := [stage for stage in short if bool(stage.tags.get(KV_CACHE)) == with_kv]:
            # Among equally full stages, name the first with a KV pool, else the last: training.
            worst = _fullest(stages[::-1] if with_kv else stages)
            missing = worst.device_bytes - plan.room
            text = f"{worst.stage} is short of {missing / GIB:.1f} GiB on each {plan.gpu.name}"
            ways = _ways(plan, recipe, worst, missing)
            shortages[kind] = Shortage(missing, text, _LARGER_GPUS, ways)
    if plan.host_room is not None and plan.host_bytes > plan.host_room:
        missing = plan.host_bytes - math.floor(plan.host_room)
        machine = f"a machine of {recipe.cluster.host_gib:g} GiB"
        text = f"the host is short of {missing / GIB:.1f} GiB on {machine}"
        machines = "take machines with more memory (cluster.host_gib)"
        shortages["host"] = Shortage(missing, text, machines, _ways_of_host(recipe))
    if fault := pool_fault(recipe, prompt_tokens, plan.kv_tokens):
        need, (text, remedy) = request_tokens(recipe, prompt_tokens), fault
        remedy = remedy if need <= plan.most_kv_tokens else _LARGER_GPUS
        shortages["request"] = Shortage(need - plan.kv_tokens, text, remedy)
    return shortages


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
    ranks = recipe.engine.tensor_parallel_size
    moments = (OPTIM, CRITIC_OPTIM)
    ways: list[tuple[Collection[str], str, Any]] = [
        ([KV_CACHE], *_less_kv(plan, recipe)),
        (decisions.resident, "cycle.resident", []),
        (decisions.overlap, "cycle.overlap", []),
        (["torch"] if decisions.keep_unsharded else [], "trainer.keep_unsharded", False),
        (["torch"], "trainer.micro_batch_size", min(batch // 2, 1 << fitting.bit_length() - 1)),
        (["torch"], "trainer.activation_checkpointing", "layers"),
        ([OPTIM], "trainer.optimizer_offload", True),
        ([WEIGHTS], "engine.tensor_parallel_size", 2 * ranks),
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
