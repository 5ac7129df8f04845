"""Preparation of a run: resolve and check device, model, tokenizer, task and pool size."""

import dataclasses
import importlib.util
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from kvcache import KVLayout, layout
from memsaver.ops.hash import hash_text
from memsaver.ops.layout import round_up
from recipes.config.models import LORA_MODULES, LoraSection
from recipes.config.recipe import Recipe
from recipes.errors import RecipeError, ScorerError, one_line, shown, writable
from recipes.setup.models import (
    TemplateError,
    describe_random_model,
    encode_prompt,
    encode_prompts,
    find_model,
    load_tokenizer,
    toy_tokenizer,
)
from recipes.tasks import Problem, Task, check_sides, make_task, score_answer
from rollout.config import why_one_size
from rollout.model import (
    ModelConfig,
    checkpoint_files,
    load_model_config,
    open_checkpoint,
    rank_groups,
    rank_layout,
    whole_manifest,
)
from rollout.weights import arena_nbytes
from trainer_bridge import TrainerConfig
from trainer_bridge.training import check_layout, lora_target_names


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A recipe that can run on this machine.

    Attributes:
        recipe: The recipe, with `cycle.alias` decided.
        task: The task, without problems whose prompts are too long.
        tokenizer: The model's tokenizer.
        model_dir: Folder of the model.
        device: Either cpu or cuda:N.
        kv_tokens: Tokens of the KV pool on each device.
        max_request_tokens: Tokens of the longest prompt and answer.
        left_out: Number of problems whose prompts exceed `task.max_prompt_tokens`.
    """

    recipe: Recipe
    task: Task
    tokenizer: Any
    model_dir: Path
    device: str
    kv_tokens: int
    max_request_tokens: int
    left_out: int = 0

    def prompt_ids(self, problem: Problem) -> list[int]:
        return encode_prompt(self.tokenizer, problem.question, self.recipe.task.system_prompt)

    def prompt_digests(self) -> dict[str, int]:
        """Return digests of the sources of a run's prompts, by section of the recipe."""
        sides = (*self.task.kinds, self.task.held_out)
        texts = [(problem.question, problem.answer) for problem in chain(*sides)]
        ids = self.prompt_ids(self.task.train[0])
        task = json.dumps([list(map(len, sides)), texts], default=repr)
        return {"task": hash_text(task), "model": hash_text(json.dumps(ids))}

    def other_prompts(self, saved: Mapping[str, int]) -> str:
        """Describe the first saved digest that differs, for a message; empty if none does."""
        path, now = self.recipe.model.path, self.prompt_digests()
        if saved.get("task", now["task"]) != now["task"]:
            return f"task.name={self.recipe.task.name}: has other problems, or in another order,"
        if saved.get("model", now["model"]) != now["model"]:
            return f"model.path={path}: tokenizer and chat template make other prompts"
        return ""


def prepare(recipe: Recipe, run_dir: Path) -> Setup:
    """Check a recipe against this machine; write a random model's files to `run_dir`/model.

    Args:
        recipe: The recipe.
        run_dir: Folder of the run.

    Returns:
        The prepared run.

    Raises:
        RecipeError: The recipe cannot run here. Nothing has been written.
    """
    device = resolve_device(recipe)
    _check_packages(recipe)
    task = make_task(recipe.task, recipe.eval.also_digits)
    _check_scorer(task)
    with described_model(recipe, task) as (model_dir, tokenizer):
        check_lora(recipe.lora, model_dir)
        lengths = prompt_lengths(recipe, task, tokenizer)
        full_task, longest = task, max(lengths.values())
        task = task.only(lengths)
        _check_prompts(recipe, [len(kind) for kind in task.kinds])
        if not recipe.engine.hosted:
            model = _model_config(recipe, model_dir)
            _check_routers(recipe, model)
            kv_tokens = pool_tokens(recipe, device, model, longest)
            context = model.max_position_embeddings
        else:
            kv_tokens = recipe.engine.kv_tokens or demanded_tokens(recipe, longest)
            config = json.loads((model_dir / "config.json").read_text())
            context = config["max_position_embeddings"]
            _check_heads(recipe, config["num_attention_heads"])
        _check_weights(recipe, model_dir)
        recipe = with_alias_decided(recipe, model_dir)
        question = max(lengths, key=lengths.__getitem__)
        whose = f" ({shown(repr(question), 60)})"
        named: Any = {"whose": whose, "shorter": partial(_leaving_out, task, lengths)}
        check_context(recipe, longest, context, **named)
        if fault := pool_fault(recipe, longest, kv_tokens, **named):
            raise RecipeError("; ".join(fault))
        if recipe.model.path is None:
            with writable(f"--run-dir {run_dir}"):
                model_dir = Path(shutil.copytree(model_dir, run_dir / "model", dirs_exist_ok=True))
    return Setup(
        recipe=recipe,
        task=task,
        tokenizer=tokenizer,
        model_dir=model_dir,
        device=device,
        kv_tokens=kv_tokens,
        max_request_tokens=longest + recipe.sampling.max_tokens,
        left_out=len([*full_task.problems()]) - len([*task.problems()]),
    )


def with_alias_decided(recipe: Recipe, model_dir: Path) -> Recipe:
    """Return the recipe with `cycle.alias` decided.

    auto becomes always if the engine can serve the trainer's own pages.

    Raises:
        RecipeError: The recipe says always, and the engine cannot serve them.
    """
    wish = recipe.cycle.alias
    why_not = None if wish == "never" else _why_not_alias(recipe, model_dir)
    if wish == "always" and why_not is not None:
        raise RecipeError(f"cycle.alias=always: {why_not}; set cycle.alias=auto")
    never = wish == "never" or why_not is not None
    cycle = dataclasses.replace(recipe.cycle, alias="never" if never else "always")
    return dataclasses.replace(recipe, cycle=cycle)


def _why_not_alias(recipe: Recipe, model_dir: Path) -> str | None:
    if recipe.engine.hosted:
        return f"engine.kind={recipe.engine.kind} has buffers among its weights"
    if recipe.cluster.size > 1:
        return f"the trainer's pages are shards on {recipe.cluster.size} devices"
    if recipe.lora.rank:
        return "the engine serves merged adapters, not the trainer's pages"
    own = recipe.model.dtype if recipe.trainer.optimizer_offload else recipe.trainer.dtype
    if own != recipe.model.dtype:
        return f"the trainer's pages are {own}, model.dtype={recipe.model.dtype}"
    if "weights" in recipe.cycle.named:
        return "cycle.resident names weights, whose pages go back to the trainer"
    config = TrainerConfig(model_path=str(model_dir), dtype=own)
    try:
        manifest = whole_manifest(load_model_config(model_dir), config.torch_dtype)
        check_layout(config, manifest)
    except ValueError as error:
        return one_line(error)
    return None


def prompt_lengths(recipe: Recipe, task: Task, tokenizer: Any) -> dict[str, int]:
    """Return the prompt length in tokens of each question within `task.max_prompt_tokens`.

    Raises:
        RecipeError: The chat template refuses the system turn or a question, or no problem is left
            to train or to evaluate on.
    """
    section = recipe.task
    questions = list(dict.fromkeys(problem.question for problem in task.problems()))
    try:
        prompts = encode_prompts(tokenizer, questions, section.system_prompt)
    except TemplateError as error:
        raise _template_error(recipe, questions, tokenizer, error) from error
    if section.system_prompt:
        with suppress(TemplateError):  # The template requires a system turn.
            if prompts[0] == encode_prompt(tokenizer, questions[0]):
                raise _no_system_turn(recipe, "ignores a system turn")
    lengths = dict(zip(questions, map(len, prompts), strict=True))
    if (limit := section.max_prompt_tokens) is None:
        return lengths
    short = {question: tokens for question, tokens in lengths.items() if tokens <= limit}
    key = "task.max_prompt_tokens"
    check_sides(task.only(short), f"{key}={limit}", f"set {key}={max(lengths.values())}")
    return short


def _template_error(
    recipe: Recipe, questions: list[str], tokenizer: Any, error: TemplateError
) -> RecipeError:
    """Return the error of a refused question, or of the system turn if no question is refused."""
    for question in questions:
        try:
            encode_prompt(tokenizer, question)
        except TemplateError as alone:
            rule = f"its chat template refuses the question {shown(repr(question), 60)}: {alone}"
            return RecipeError(f"model.path={recipe.model.path}: {rule}; correct the template")
    return _no_system_turn(recipe, f"refuses a system turn: {error}")


def _no_system_turn(recipe: Recipe, how: str) -> RecipeError:
    setting = f"task.system_prompt={shown(recipe.task.system_prompt, 60)}"
    return RecipeError(f"{setting}: the model's chat template {how}; drop it")


@contextmanager
def described_model(
    recipe: Recipe, task: Task, *, weights: bool = True
) -> Iterator[tuple[Path, Any]]:
    """Yield the model's directory and tokenizer; download its weights only if `weights`.

    The directory of a random model is temporary and ends with the block.
    """
    if recipe.model.path is not None:
        directory = find_model(recipe.model.path, weights=weights)
        yield directory, load_tokenizer(directory)
        return
    if not task.words:
        rule = "a random model has no tokenizer for this task"
        remedy = "set `words` of its Task, or set model.path=DIRECTORY"
        raise RecipeError(f"task.name={recipe.task.name}: {rule}; {remedy}")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = toy_tokenizer(list(task.words))
        describe_random_model(recipe.model.random_fields(), tokenizer, Path(folder))
        yield Path(folder), tokenizer


def _model_config(recipe: Recipe, model_dir: Path) -> ModelConfig:
    try:
        return load_model_config(model_dir)
    except ValueError as error:
        model = recipe.model
        named = "model.config" if model.shape is None else f"model.shape={model.shape}"
        key = named if model.path is None else f"model.path={model.path}"
        text = one_line(error).removeprefix(f"{model_dir}: ")
        raise RecipeError(f"{key}: is no model that the rollout supports: {text}") from None


def _check_weights(recipe: Recipe, model_dir: Path) -> None:
    """Open the checkpoint's files, which fails if a file is damaged."""
    if recipe.model.random_init:
        return
    try:
        for file in checkpoint_files(model_dir):
            open_checkpoint(file)
    except ValueError as error:
        raise RecipeError(f"model.path={recipe.model.path}: {one_line(error)}") from None


def _refused(key: str, value: Any, rule: str, instead: Any) -> RecipeError:
    return RecipeError(f"{key}={shown(value)}: {rule}; set {key}={shown(instead)}")


def _check_routers(recipe: Recipe, model: ModelConfig) -> None:
    keys = {f"{recipe.algorithm}.router_replay": recipe.loop.router_replay}
    keys["model.fp32_router"] = recipe.model.fp32_router
    for key, value in keys.items():
        if value and not model.has_experts:
            raise _refused(key, True, "the model has no experts to choose", False)


def _check_heads(recipe: Recipe, heads: int) -> None:
    if heads % (size := recipe.engine.tensor_parallel_size):
        rule = f"does not divide the model's {heads} heads"
        raise _refused("engine.tensor_parallel_size", size, rule, 1)


def check_lora(section: LoraSection, model_dir: Path) -> None:
    """Refuse layers in `lora.target_modules` that the model does not have."""
    if not section.rank:
        return
    names = lora_target_names(str(model_dir))
    if missing := [name for name in section.target_modules if name not in names]:
        rule = f"the model has no layers {', '.join(missing)}"
        present = [name for name in LORA_MODULES if name in names]
        raise _refused("lora.target_modules", section.target_modules, rule, present)


def resolve_device(recipe: Recipe) -> str:
    """Return `cpu` or `cuda:N`; `auto` takes the first GPU, if there is one.

    Raises:
        RecipeError: The GPUs that the recipe needs are missing.
    """
    count = torch.cuda.device_count() if recipe.device != "cpu" else 0
    per_node = recipe.cluster.n_gpus_per_node
    rule = f"torch sees {count} GPUs here" if count else "torch sees no GPU here"
    if 0 < count < per_node:  # Without a GPU, a device is a pair of processes.
        raise _refused("cluster.n_gpus_per_node", per_node, rule, count)
    if not count and recipe.engine.hosted:
        raise _refused("engine.kind", recipe.engine.kind, rule, "native")
    if recipe.device in ("auto", "cpu"):
        return "cuda:0" if count else "cpu"
    index = int(recipe.device.partition(":")[2] or 0)
    if index >= count:
        raise _refused("device", recipe.device, rule, "auto")
    return f"cuda:{index}"


def _check_packages(recipe: Recipe) -> None:
    kind = recipe.engine.kind
    for key, needed, module, package in (
        ("driver=ray", recipe.driver == "ray", "ray", "'memsaver[ray]'"),
        (f"engine.kind={kind}", recipe.engine.hosted, kind, kind),
        ("model", True, "transformers", "'memsaver[models]'"),
    ):
        if needed and importlib.util.find_spec(module) is None:
            raise RecipeError(f"{key}: needs the package {module}; run: pip install {package}")


def _check_prompts(recipe: Recipe, kinds: Sequence[int]) -> None:
    """Refuse a step that would repeat a problem or miss a kind; `kinds` are their sizes."""
    prompts, key = recipe.loop.prompts_per_step, f"{recipe.algorithm}.prompts_per_step"
    if prompts > (available := len(kinds) * min(kinds)):
        raise _refused(key, prompts, f"the task has {available} training problems", available)
    if prompts < len(kinds):
        rule = f"a step has prompts of each of the task's {len(kinds)} kinds"
        raise _refused(key, prompts, rule, len(kinds))


def _check_scorer(task: Task) -> None:
    """Try the scorer on a correct answer before the run generates any."""
    try:
        for kind in task.kinds:
            score_answer(task, kind[0], kind[0].answer, True)
    except ScorerError as error:
        raise RecipeError(str(error)) from error


def request_tokens(recipe: Recipe, longest_prompt: int) -> int:
    """Return the pool tokens of the longest prompt and answer, in whole pages."""
    return round_up(longest_prompt + recipe.sampling.max_tokens, recipe.engine.page_size)


Shorter = Callable[[int], list[str]]
"""Maps a number of tokens to the settings that leave longer prompts out."""


def check_context(
    recipe: Recipe,
    longest: int,
    context: int | None,
    whose: str = "",
    shorter: Shorter = lambda limit: [],
) -> None:
    """Refuse a recipe whose longest prompt and answer exceed the model's context, in tokens.

    A `context` of None is unknown. For the message, `whose` is the prompt in brackets, and
    `shorter` returns the settings that leave longer prompts out.
    """
    answer = recipe.sampling.max_tokens
    if context is None or longest + answer <= context:
        return
    rule = f"prompt of {longest}{whose} + answer exceed the model's context of {context} tokens"
    ways = [f"sampling.max_tokens={context - longest}"] if longest < context else []
    ways += shorter(context - answer)
    remedy = f"set {', or '.join(ways)}" if ways else "shorten prompts"
    raise RecipeError(f"sampling.max_tokens={answer}: {rule}; {remedy}")


def pool_fault(
    recipe: Recipe,
    longest: int,
    kv_tokens: int,
    whose: str = "",
    shorter: Shorter = lambda limit: [],
) -> tuple[str, str] | None:
    """Return the fault and the remedy of a pool that cannot hold the longest request, else None.

    Other arguments are as in `check_context`.
    """
    answer, page = recipe.sampling.max_tokens, recipe.engine.page_size
    need = request_tokens(recipe, longest)
    if need <= kv_tokens:
        return None
    share = recipe.engine.mem_fraction_static is not None
    key = "mem_fraction_static" if share else "kv_tokens"
    rule = f"the KV pool of {kv_tokens} tokens is too small for one request of "
    rule += f"{longest} + {answer} tokens in pages of {page}{whose}"
    ways = [f"{in_tokens(recipe, need)} or more", *shorter(kv_tokens // page * page - answer)]
    fault = f"engine.{key}={shown(getattr(recipe.engine, key))}: {rule}"
    return fault, f"set {', or '.join(ways)}"


def _leaving_out(task: Task, lengths: dict[str, int], limit: int) -> list[str]:
    """Return the setting that leaves longer prompts out; none if no problem would remain."""
    counts = [lengths[problem.question] for problem in task.problems()]
    over = sum(count > limit for count in counts)
    setting = f"task.max_prompt_tokens={limit} (leaves out {over} of {len(counts)} problems)"
    return [setting] if over < len(counts) else []


SHARE = 0.9  # Largest share of a GPU for weights and pool, unless the recipe sets one.


def pool_tokens(recipe: Recipe, device: str, model: ModelConfig, longest_prompt: int) -> int:
    """Return the tokens of one device's KV pool.

    `engine.kv_tokens` sets them. With `engine.mem_fraction_static`, weights, states and pool fill
    that share of the GPU. Without either, the pool holds the requests that run together, as far as
    0.9 of the GPU allows.

    Raises:
        RecipeError: The engine cannot serve this model, or the pool does not fit.
    """
    dtype: torch.dtype = getattr(torch, recipe.model.dtype)
    weights = rank_weights(recipe, model, dtype)
    kv_layout = rank_kv_layout(recipe, model.hf_config, dtype)
    tokens = recipe.engine.kv_tokens
    if tokens is None and recipe.engine.mem_fraction_static is None and device == "cpu":
        tokens = demanded_tokens(recipe, longest_prompt)
    elif tokens is None:
        tokens = _share(recipe, device, kv_layout, weights, longest_prompt)
    check_overlap(recipe, kv_layout)
    _check_host_tier(recipe, kv_layout, tokens)
    return tokens


def demanded_tokens(recipe: Recipe, longest_prompt: int) -> int:
    """Return the tokens that one engine's running requests fill if all are as long as allowed."""
    engines = recipe.cluster.size // recipe.engine.tensor_parallel_size
    prompts = math.ceil(recipe.loop.prompts_per_step / engines)
    requests = prompts * recipe.loop.samples_per_prompt
    if recipe.eval.every:
        kinds = 1 + len(recipe.eval.also_digits)
        requests = max(requests, math.ceil(kinds * recipe.eval.problems / engines))
    return min(recipe.engine.max_running, requests) * request_tokens(recipe, longest_prompt)


def in_tokens(recipe: Recipe, tokens: int) -> str:
    """Return the overrides that set the pool to this number of tokens."""
    free = "" if recipe.engine.mem_fraction_static is None else "engine.mem_fraction_static=null "
    return f"{free}engine.kv_tokens={tokens}"


def rank_kv_layout(recipe: Recipe, config: Any, dtype: torch.dtype) -> KVLayout:
    """Return the KV layout of one rank.

    Raises:
        RecipeError: `engine.kv_cache_dtype` does not suit the model.
    """
    stored = recipe.engine.kv_cache_dtype
    try:
        kv_layout = layout(config, stored, dtype)
    except ValueError as error:
        raise _refused("engine.kv_cache_dtype", stored, one_line(error), "auto") from None
    return rank_layout(kv_layout, recipe.engine.tensor_parallel_size)


def pool_grows(recipe: Recipe, kv_layout: KVLayout) -> bool:
    """Return whether the engine's KV pool can begin small and grow."""
    return not recipe.engine.hosted and _why_one_size(recipe, kv_layout) is None


def _why_one_size(recipe: Recipe, kv_layout: KVLayout) -> str | None:
    engine = recipe.engine
    tiers = engine.host_to_device_ratio > 0
    return why_one_size(kv_layout.pages_tell_all, engine.tensor_parallel_size, tiers)


def check_overlap(recipe: Recipe, kv_layout: KVLayout) -> None:
    """Refuse tags of `cycle.overlap` if the KV pool cannot grow while they leave."""
    named = recipe.cycle.overlap
    if named not in ("auto", []) and (why := _why_one_size(recipe, kv_layout)):
        rule = f"needs a KV cache that grows, and this one does not: {why}"
        raise _refused("cycle.overlap", named, rule, "auto")


def rank_weights(recipe: Recipe, model: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of the weights of rank 0, which has the most.

    Raises:
        RecipeError: The model cannot be divided among these ranks.
    """
    size, experts = recipe.engine.tensor_parallel_size, recipe.engine.expert_parallel
    if experts > 1 and not model.has_experts:
        rule = "the model has no experts to divide"
        raise _refused("engine.expert_parallel", experts, rule, 1)
    try:
        return arena_nbytes(rank_groups(model, 0, size, experts), dtype)
    except ValueError as error:
        raise _refused("engine.tensor_parallel_size", size, one_line(error), 1) from None


def state_bytes(recipe: Recipe, kv_layout: KVLayout) -> int:
    """Return the bytes of a rank's states: of running requests, kept prefixes and padding."""
    return (recipe.engine.max_running + recipe.engine.prefix_states + 1) * kv_layout.state_bytes


def tokens_in_share(
    recipe: Recipe, kv_layout: KVLayout, weights: int, total: int, longest_prompt: int
) -> int:
    """Return the tokens of a pool that shares part of a GPU with weights and states.

    With `engine.mem_fraction_static` the pool fills that share of `total` bytes. Without it, the
    pool takes the tokens that running requests can fill, within 0.9 of the GPU. A result of less
    than one page means that the pool does not fit.
    """
    fraction = recipe.engine.mem_fraction_static
    left = int((fraction or SHARE) * total) - weights - state_bytes(recipe, kv_layout)
    pages = left // kv_layout.bytes_per_token // recipe.engine.page_size - 1  # One page is padding.
    tokens = pages * recipe.engine.page_size
    return tokens if fraction else min(tokens, demanded_tokens(recipe, longest_prompt))


def _share(
    recipe: Recipe, device: str, kv_layout: KVLayout, weights: int, longest_prompt: int
) -> int:
    engine = recipe.engine
    key = f"engine.mem_fraction_static={engine.mem_fraction_static or SHARE}"
    if device == "cpu":
        rule = "is a share of a GPU's memory, and the device is a CPU"
        raise RecipeError(
            f"{key}: {rule}; set {in_tokens(recipe, round_up(4096, engine.page_size))}"
        )
    total = torch.cuda.get_device_properties(device).total_memory
    tokens = tokens_in_share(recipe, kv_layout, weights, total, longest_prompt)
    states = state_bytes(recipe, kv_layout)
    if tokens >= engine.page_size:
        return tokens
    holders = "the weights and states" if states else "the weights alone"
    least = (weights + states + 2 * engine.page_size * kv_layout.bytes_per_token) / total
    remedy = f"set engine.mem_fraction_static={math.ceil(least * 100 + 0.01) / 100}"
    if least >= 0.98:
        remedy = "set engine.tensor_parallel_size higher, or take a smaller model"
    need = f"{holders} take {weights + states} bytes of the GPU's {total}"
    raise RecipeError(f"{key}: {need}; {remedy}")


def _check_host_tier(recipe: Recipe, kv_layout: KVLayout, tokens: int) -> None:
    ratio, page = recipe.engine.host_to_device_ratio, recipe.engine.page_size
    if not ratio:
        return
    key = "engine.host_to_device_ratio"
    if kv_layout.pool not in ("mha", "mla") or kv_layout.sliding_window is not None:
        rule = "its pages do not hold a whole sequence (sliding windows or linear layers)"
        raise _refused(key, ratio, rule, 0)
    if int(ratio * tokens) < page:
        raise _refused(key, ratio, f"of {tokens} tokens is less than a page of {page} tokens", 1)
