"""Rules between the keys of a recipe, each stated once: what contradicts, and what has no effect.

Checks that need the disk or the machine are in `recipes.setup.preparation`.
"""

import difflib
from collections.abc import Iterator
from pathlib import Path

from recipes.config import sections
from recipes.config.recipe import Recipe, default_of, keys_of, remedy_of
from recipes.config.sections import (
    DATA_ENDINGS,
    WITHIN_GROUPS,
    CorrectionSection,
    TaskSection,
    shapes,
)
from recipes.errors import RecipeError, counted, shown

HOSTED = {"vllm": "vLLM", "sglang": "SGLang"}
"""Other projects' engines, by `engine.kind`."""

COLDEST = 1e-6
"""Lowest temperature above 0, as in `SamplingParams`."""

VLLM_COLDEST = 0.01
"""Lowest temperature that vLLM uses; it raises lower temperatures to this one."""

Faults = Iterator[tuple[str, str] | tuple[str, str, str]]
"""Key, broken rule and, unless the key's default is the remedy, the remedy."""


def checked(recipe: Recipe) -> Recipe:
    """Return a recipe that breaks no rule.

    Raises:
        RecipeError: The recipe breaks rules; the message has a line for each.
    """
    if faults := broken_rules(recipe):
        raise RecipeError("\n".join(line for _, line in faults))
    return recipe


def broken_rules(recipe: Recipe) -> list[tuple[str, str]]:
    """Return a key and a line for each rule that the recipe breaks."""

    def line(key: str, rule: str, remedy: str = "") -> tuple[str, str]:
        return key, f"{key}={shown(recipe.value(key))}: {rule}; {remedy or remedy_of(key)}"

    return [line(*fault) for fault in _faults(recipe)]


def excludes_exact(recipe: Recipe) -> str:
    """Return the setting with which exact=auto is false; empty if there is none."""
    excluding = [key for key, *_ in _of_exact(recipe)]
    if recipe.model.dtype == "float32":
        excluding.append("model.dtype")
    if recipe.engine.tensor_parallel_size > 2:  # to add in order, ranks gather all sums
        excluding.append("engine.tensor_parallel_size")
    return next((f"{key}={shown(recipe.value(key))}" for key in excluding), "")


def _faults(recipe: Recipe) -> Faults:
    if recipe.model.random_init:
        yield from _of_random_model(recipe)
    yield from _of_sets(recipe)
    if len({*recipe.trackers}) < len(recipe.trackers):
        yield "trackers", "names a tracker twice"
    yield from _of_engine(recipe)
    yield from _of_exact(recipe) if recipe.exact in (True, "warn") else ()
    yield from _of_training(recipe)
    yield from _of_sampling(recipe)
    yield from _of_devices(recipe)
    yield from _of_cycle(recipe)
    yield from _of_staleness(recipe) if recipe.loop.max_staleness else ()
    if recipe.engine.kind in HOSTED:
        yield from _of_hosted(recipe, HOSTED[recipe.engine.kind])


def _of_random_model(recipe: Recipe) -> Faults:
    shape, config = recipe.model.shape, recipe.model.config
    if shape is None and config is None:
        remedy = "set model.path=DIRECTORY, or model.shape=qwen2.5-0.5b for random weights"
        yield "model.path", "no model is named", remedy
    elif shape is None:
        if not isinstance((config or {}).get("model_type"), str):
            remedy = "set model.config.model_type=qwen3"
            yield "model.config", "has no model_type", remedy
    elif config is not None:
        remedy = "set model.config=null, or model.shape=null"
        yield "model.shape", "excludes model.config", remedy
    elif shape not in shapes():
        close = difflib.get_close_matches(shape, shapes(), n=1) or ["qwen2.5-0.5b"]
        yield "model.shape", f"must be one of {', '.join(shapes())}", f"set model.shape={close[0]}"


def _of_sets(recipe: Recipe) -> Faults:
    keys: dict[str, str] = {}
    for key, part in sections.sets_by_key(recipe.task, recipe.eval.sets).items():
        file = part.name == "file"
        if file and part.data is None:
            remedy = f"set {key}.data=FILE, or ORG/NAME of a data set on the Hub"
            yield f"{key}.data", "names no data for name=file", remedy
        if part.environment == {}:
            yield f"{key}.environment", "names no class"
        if part.environment and part.agent:
            yield f"{key}.agent", "takes the place of an environment; name one of both"
        if part.data is not None and not file:
            yield f"{key}.data", f"needs {key}.name=file", f"set {key}.name=file"
        if file and part.answer_column is None and not (part.rewards or part.environments):
            remedy = f"set {key}.answer_column=answer, or {key}.rewards=[MODULE:FUNCTION]"
            yield f"{key}.answer_column", "without answers, nothing scores", remedy
        if (other := keys.setdefault(part.set_name, key)) != key:
            rule = f"{other} has the name {part.set_name}, too, which figures need apart"
            yield f"{key}.label", rule, f"set {key}.label={part.set_name}_2"
        for name in ("weight", "held_out_fraction") if key.startswith("eval") else ():
            if getattr(part, name) != default_of(f"task.{name}"):
                yield f"{key}.{name}", "has no effect on a set that is only evaluated"
    trained = [recipe.task, *recipe.task.mixture]
    if recipe.eval.every and not recipe.eval.sets and not any(p.held_out_fraction for p in trained):
        rule = f"leaves eval.every={recipe.eval.every} no problem"
        remedy = "set task.held_out_fraction=0.2, eval.every=0, or eval.sets"
        yield "task.held_out_fraction", rule, remedy


def _of_engine(recipe: Recipe) -> Faults:
    engine, tokens, page = recipe.engine, recipe.engine.kv_tokens, recipe.engine.page_size
    size = engine.tensor_parallel_size
    if engine.options is not None and not engine.hosted:
        yield "engine.options", "need engine.kind=vllm or sglang"
    if tokens is not None and engine.mem_fraction_static is not None:
        remedy = "set engine.kv_tokens=null, or engine.mem_fraction_static=null"
        yield "engine.mem_fraction_static", f"excludes engine.kv_tokens={tokens}", remedy
    if tokens is not None and (tokens < 1 or tokens % page):
        rule = f"must be a positive multiple of engine.page_size={page}"
        nearest = max(1, -(-tokens // page)) * page
        yield "engine.kv_tokens", rule, f"set engine.kv_tokens={nearest}"
    if size > 1 and engine.kv_cache_dtype == "fp4_e2m1":
        yield "engine.kv_cache_dtype", f"excludes engine.tensor_parallel_size={size}"
    if size % engine.expert_parallel:
        yield "engine.expert_parallel", f"must divide engine.tensor_parallel_size={size}"


def _of_exact(recipe: Recipe) -> Faults:
    rounds = f"rounds, and exact={shown(recipe.exact)} compares bits"
    if recipe.engine.hosted:
        yield "engine.kind", f"computes other bits than exact={shown(recipe.exact)} promises"
    if recipe.engine.kv_cache_dtype != "auto":
        yield "engine.kv_cache_dtype", rounds
    if recipe.lora.rank and not recipe.served_adapter:
        yield "lora.rank", f"{rounds}: the engine serves merged adapters"
    if recipe.loop.max_staleness:
        rule = f"samples by older weights, and exact={shown(recipe.exact)} compares bits"
        yield "loop.max_staleness", rule
    if recipe.correction_mode != "none":
        yield "correction.mode", f"has nothing to correct with exact={shown(recipe.exact)}"
    if recipe.updates_per_step > 1:
        key = "epochs" if recipe.loop.epochs > 1 else "mini_batches"
        rule = f"excludes exact={shown(recipe.exact)}, which compares in a step's only update"
        yield f"loop.{key}", rule


def _of_training(recipe: Recipe) -> Faults:
    offload, rank = recipe.trainer.optimizer_offload, recipe.lora.rank
    layers = recipe.lora.target_modules
    if offload and recipe.trainer.dtype != "float32":
        yield "trainer.dtype", "trainer.optimizer_offload=true keeps float32 masters"
    if recipe.model.dtype == "float16" and recipe.trainer.dtype != "float32":
        yield "trainer.dtype", "model.dtype=float16 needs float32 masters"
    if offload and recipe.trainer.optimizer != "adamw":
        yield "trainer.optimizer", "excludes trainer.optimizer_offload=true"
    if offload and rank:
        rule = f"is not needed for adapters, which are small (lora.rank={rank})"
        yield "trainer.optimizer_offload", rule
    if rank % 8 and "experts" in layers:
        rule = "must be a multiple of 8 for adapters of experts"
        yield "lora.rank", rule, f"set lora.rank={rank + -rank % 8}"
    if len({*layers}) < len(layers):
        yield "lora.target_modules", "names a layer twice"
    if rank and recipe.lora.merge is False and (key := recipe.merged_because):
        rule = f"adapters must be merged with {key}={shown(recipe.value(key))}"
        yield "lora.merge", rule, "set lora.merge=auto"
    if recipe.checkpoint.max_restarts and not recipe.checkpoint.every:
        rule = "needs checkpoints to continue from, and checkpoint.every=0"
        yield "checkpoint.max_restarts", rule
    yield from _of_schedule(recipe)
    yield from _of_evaluation(recipe)
    yield from _of_loss(recipe)
    yield from _of_correction(recipe)
    yield from _of_ppo(recipe) if recipe.algorithm == "ppo" else _of_grpo(recipe)


def _of_schedule(recipe: Recipe) -> Faults:
    first = recipe.ppo.critic_warmup_steps if recipe.algorithm == "ppo" else 0
    if 0 < recipe.steps - first <= recipe.trainer.warmup_steps:
        after = f" after ppo.critic_warmup_steps={first}" if first else ""
        rule = f"leaves none of steps={recipe.steps}{after} to the whole learning rate"
        yield "trainer.warmup_steps", rule


def _of_sampling(recipe: Recipe) -> Faults:
    most, window = recipe.sampling.max_tokens, recipe.sampling.penalized_tokens
    if recipe.sampling.length_penalty and window > most:
        key = "sampling.length_penalty_tokens"
        yield key, f"exceeds sampling.max_tokens={most}", f"set {key}={most}"


def _of_evaluation(recipe: Recipe) -> Faults:
    section, temperature = recipe.eval, recipe.eval.temperature
    if section.samples > 1 and not temperature:
        rule = "would all be the same greedy answer with eval.temperature=0"
        yield "eval.samples", rule, "set eval.samples=1, or eval.temperature=1.0"
    if 0 < temperature < COLDEST:
        yield "eval.temperature", f"must be 0 (greedy) or at least {COLDEST:g}"
    if section.patience and not section.every:
        yield "eval.patience", "needs evaluations, and eval.every=0"
    if section.patience and section.best is None:
        yield "eval.patience", "needs a figure to improve, and eval.best=null"


def _of_loss(recipe: Recipe) -> Faults:
    answers = recipe.answers_per_step
    if recipe.loop.mini_batches > answers:
        yield "loop.mini_batches", f"exceeds the step's {answers} answers"
    if recipe.loss.dual_clip is not None and recipe.loss.kind == "cispo":
        yield "loss.dual_clip", "excludes loss.kind=cispo, which limits all ratios"
    if recipe.reference_every and recipe.lora.rank:
        rule = "excludes adapters, whose frozen base is the reference"
        yield "loss.reference_every", f"{rule} (lora.rank={recipe.lora.rank})"
    if recipe.loss.kl_coef and recipe.kl_in == "loss" and recipe.kl_estimator == "k1":
        rule = "teaches nothing in a loss, because its expected gradient is 0"
        yield "loss.kl_estimator", rule, "set loss.kl_estimator=k3, or loss.kl_in=reward"


def _of_correction(recipe: Recipe) -> Faults:
    section = recipe.correction
    if section.how == "mask" and section.low >= section.high:
        yield "correction.low", f"must be below correction.high={section.high}"
    if section.reject is not None and section.reject_above is None:
        rule = f"is the limit that correction.reject={section.reject} needs"
        yield "correction.reject_above", rule, "set correction.reject_above=0.1"
    if section.reject is None and section.reject_above is not None:
        yield "correction.reject_above", "needs correction.reject"
    if section.mode == "bypass" and recipe.loss.kl_coef and recipe.kl_in == "reward":
        rule = "lacks log-probabilities of the trainer for the KL divergence in the rewards"
        yield "correction.mode", rule, "set correction.mode=decoupled, or loss.kl_in=loss"


def _of_grpo(recipe: Recipe) -> Faults:
    grpo = recipe.grpo
    if grpo.baseline == "batch" and grpo.scale == "group":
        yield "grpo.scale", "excludes grpo.baseline=batch", "set grpo.scale=batch"
    if ":" in grpo.baseline and grpo.scale in ("group", "batch"):
        rule = "would divide by 0 where all rewards are equal, which your grpo.baseline may compare"
        yield "grpo.scale", rule, "set grpo.scale=none, or a function of yours"
    if grpo.baseline not in WITHIN_GROUPS and grpo.sampling_rounds > 1:
        rule = f"needs advantages within groups, not grpo.baseline={grpo.baseline}"
        yield "grpo.sampling_rounds", rule
    if grpo.baseline == "batch" and recipe.answers_per_step == 1:
        rule = "leaves grpo.baseline=batch a single answer"
        yield "loop.prompts_per_step", rule, "set loop.prompts_per_step=8"
    if grpo.baseline in WITHIN_GROUPS and recipe.samples_per_prompt == 1:
        rule = f"leaves grpo.baseline={grpo.baseline} nothing to compare an answer with"
        yield "loop.samples_per_prompt", rule, "set loop.samples_per_prompt=8"


def _of_ppo(recipe: Recipe) -> Faults:
    if recipe.ppo.critic_warmup_steps >= recipe.steps:
        yield "ppo.critic_warmup_steps", f"leaves none of steps={recipe.steps} to the policy"


def _of_devices(recipe: Recipe) -> Faults:
    cluster, size = recipe.cluster, recipe.engine.tensor_parallel_size
    devices = cluster.machines * cluster.per_node
    if devices > 1 and recipe.driver == "inprocess":
        yield "driver", f"cannot drive {devices} devices", "set driver=ray"
    if devices > 1 and ":" in recipe.device:
        yield "device", f"names one of the {devices} devices of cluster"
    if cluster.size > 1 and recipe.trainer.cuda_graphs is True:
        yield "trainer.cuda_graphs", f"is for one device, and the trainer has {cluster.size}"
    if cluster.address is not None and recipe.driver == "inprocess":
        yield "cluster.address", "excludes driver=inprocess", "set driver=ray"
    if (ports := cluster.port_range) and not 1024 <= ports[0] <= ports[1] <= 65535:
        yield "cluster.ports", "is not a range of ports from 1024 to 65535"
    if not cluster.colocate and not cluster.apart:
        yield "cluster.colocate", "leaves no device to the engines (cluster.rollout_gpus=0)"
    kinds = {"rollout_gpus": cluster.rollout_gpus}
    if cluster.colocate:
        kinds = {"n_gpus_per_node": cluster.n_gpus_per_node, **kinds}
    if cluster.rollout_nodes and cluster.per_node % size:
        rule = f"does not divide the {counted(cluster.per_node, 'device')} of a machine"
        yield "engine.tensor_parallel_size", f"{rule} of cluster.rollout_nodes"
    for name, count in kinds.items():
        if count % size:
            rule = f"does not divide cluster.{name}={count}, the devices of one machine"
            yield "engine.tensor_parallel_size", rule


def _of_staleness(recipe: Recipe) -> Faults:
    """Refuse what excludes answers that are sampled while the trainer learns."""
    if recipe.cluster.colocate:
        rule = "needs engines on devices of their own"
        yield "loop.max_staleness", rule, "set cluster.rollout_gpus=1 and cluster.colocate=false"
    if recipe.grpo.sampling_rounds > 1:
        rule = "leaves the next prompts open until all answers of a step are scored"
        yield "grpo.sampling_rounds", rule, "set loop.max_staleness=0"
    if recipe.engine.hosted:
        yield "engine.kind", "takes no new weights while requests run", "set engine.kind=native"


def _of_cycle(recipe: Recipe) -> Faults:
    """Refuse absent tags. Whether the KV cache can grow is checked once the model is known."""
    cycle, absent = recipe.cycle, recipe.absent_tags()
    overlap = [] if cycle.overlap == "auto" else cycle.overlap
    for key, named in (("cycle.resident", cycle.named), ("cycle.overlap", overlap)):
        present = shown([tag for tag in named if tag not in absent])
        for tag in (tag for tag in absent if tag in named):
            yield key, f"{tag} exists only with {absent[tag]}", f"set {key}={present}"
    if overlap and cycle.hand_over == "always":
        yield "cycle.hand_over", f"excludes cycle.overlap={shown(overlap)}"
    if not recipe.cluster.colocate:
        rule = "needs trainer and engine on one device (cluster.colocate=true)"
        for name, value in (("alias", cycle.alias), ("hand_over", cycle.hand_over)):
            if value == "always":
                yield f"cycle.{name}", rule
        if overlap:
            yield "cycle.overlap", rule


def _of_hosted(recipe: Recipe, name: str) -> Faults:
    """Refuse settings that a hosted engine cannot follow, or that change log-probabilities."""
    native, kind = "needs the native engine", recipe.engine.kind
    usual = {
        "engine.mem_fraction_static": f"does not account for {name}'s workspaces and graphs",
        "engine.kv_cache_dtype": "is untested",
        "engine.host_to_device_ratio": native,
        "model.fp32_router": native,
        "loop.router_replay": native,
        "cluster.nnodes": "is untested above one machine",
        "cluster.rollout_gpus": "is untested",
        "cluster.rollout_nodes": "is untested",
    }
    if kind == "sglang":
        usual["engine.tensor_parallel_size"] = (
            "counts trainer ranks that share an engine; SGLang starts its own processes, set "
            "engine.options.tp_size"
        )
        usual["cluster.n_gpus_per_node"] = "is untested above one engine"
        if recipe.driver == "ray" and (rule := needs_more_gpus(recipe)):
            yield "driver", rule, "set driver=inprocess"
    faults = {key: rule for key, rule in usual.items() if recipe.value(key) != default_of(key)}
    if recipe.device == "cpu":
        faults["device"] = f"cannot run {name}'s kernels"
    if recipe.cycle.alias == "always":
        faults["cycle.alias"] = f"excludes {name}, whose buffers lie among its weights"
    if recipe.cycle.overlap not in ("auto", []):
        faults["cycle.overlap"] = f"needs a KV cache that grows, and {name}'s does not"
    for key in ("sampling.temperature", "eval.temperature"):
        if kind == "vllm" and 0 < recipe.value(key) < VLLM_COLDEST:
            faults[key] = f"is raised to {VLLM_COLDEST} by vLLM"
    for key, rule in faults.items():
        yield key, f"{rule}, with engine.kind={kind}"


def needs_more_gpus(recipe: Recipe) -> str:
    """Return why an actor cannot hold SGLang's engine, which starts its ranks; empty if it can."""
    size = (recipe.engine.options or {}).get("tp_size", 1) if recipe.engine.kind == "sglang" else 1
    return f"cannot run engine.options.tp_size={size}: an actor sees one GPU" if size != 1 else ""


def idle_keys(recipe: Recipe) -> dict[str, str]:
    """Return the keys and sections that this recipe ignores, each with the reason.

    Only overrides of them are refused. In a file they may stand, so that one file serves with and
    without PPO, adapters or a checkpoint.
    """
    unused = "ppo" if recipe.algorithm == "grpo" else "grpo"
    idle = {unused: f"algorithm={recipe.algorithm}"}
    idle |= _idle_of_loss(recipe)
    if not recipe.sampling.length_penalty:
        idle["sampling.length_penalty_tokens"] = "sampling.length_penalty=0"
    idle |= _idle_of_correction(recipe.correction)
    idle |= _idle_of_task(recipe.task)
    if recipe.trainer.schedule == "constant":
        idle["trainer.final_rate"] = "trainer.schedule=constant"
    if recipe.lora.rank == 0:
        keys = ("lora.alpha", "lora.target_modules", "lora.merge")
        idle |= dict.fromkeys(keys, "lora.rank=0")
    if recipe.model.path is not None:
        named = f"model.path={recipe.model.path}"
        idle |= {"model.shape": named, "model.config": named}
    return idle


def _idle_of_loss(recipe: Recipe) -> dict[str, str]:
    idle = {}
    if recipe.updates_per_step == 1:
        # Values have not moved, so clipping them does nothing. Unless ratios compare with the
        # rollout's probabilities, they are 1, and the gradients of all packaged kinds are equal.
        keys = ["ppo.value_clip"]
        if recipe.correction_mode != "bypass" and ":" not in recipe.loss.kind:
            keys += ["loss.kind", "loss.clip_low", "loss.clip_high", "loss.dual_clip"]
        idle = dict.fromkeys(keys, "one update a step (loop.epochs=1, loop.mini_batches=1)")
    if not recipe.loss.kl_coef:
        of_kl = ("loss.kl_in", "loss.kl_estimator", "loss.reference_every")
        idle |= dict.fromkeys(of_kl, "loss.kl_coef=0")
    elif recipe.steps <= recipe.reference_every:
        idle["loss.reference_every"] = f"steps={recipe.steps}"
    elif recipe.reference_every == 1 and (recipe.kl_in == "reward" or recipe.updates_per_step == 1):
        why = "loss.reference_every=1, by which the policy is its own reference"
        idle |= {"loss.kl_coef": why, "loss.reference_every": why}
    return idle


def _idle_of_correction(section: CorrectionSection) -> dict[str, str]:
    if section.mode != "decoupled":
        keys = [key for key in keys_of("correction") if key != "correction.mode"]
        return dict.fromkeys(keys, f"correction.mode={section.mode}")
    return {"correction.low": "correction.how=truncate"} if section.how == "truncate" else {}


def _idle_of_task(task: TaskSection) -> dict[str, str]:
    named = f"task.name={task.name}"
    if task.name == "file":
        idle = {"task.parameters": named}
        if Path(str(task.data)).suffix in DATA_ENDINGS:
            idle |= dict.fromkeys(("task.subset", "task.split"), f"task.data={task.data}, a file")
    else:
        columns = ("subset", "split", "prompt_column", "answer_column")
        idle = {f"task.{name}": named for name in columns}
    if task.name == "toy" and not task.rewards:
        idle["task.extract"] = named
    if not task.mixture:
        idle["task.weight"] = "task.mixture=[]"
    return idle
