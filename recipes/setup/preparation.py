"""Preparation of a run: resolve and check device, model, tokenizer, task and pool size."""

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from recipes.config import rules
from recipes.config.decisions import Decisions, why_ray
from recipes.config.recipe import Recipe
from recipes.errors import RecipeError, counted, one_line, refused, shown, writable
from recipes.importing import import_function
from recipes.setup.conversations import (
    Conversations,
    conversations,
    with_tools,
)
from recipes.setup.model_decisions import first_decisions, with_adapters
from recipes.setup.model_files import (
    describe_random_model,
    find_model,
    load_tokenizer,
    toy_tokenizer,
)
from recipes.setup.operations import Operations, count_operations
from recipes.setup.pool import Shorter, demanded_tokens, pool_fault, pool_tokens
from recipes.setup.prompt_digests import first_change, prompt_digests
from recipes.setup.prompts import PromptFormat, encode_prompts, prompt_format, without_long
from recipes.tasks import Problem, Tasks, make_tasks
from recipes.tasks.schedule import shares_of
from recipes.tasks.scoring import try_rewards
from recipes.tasks.task_sources import no_problem, with_problems
from rollout.model import (
    ModelConfig,
    load_hf_config,
    load_model_config,
    longest_context,
    open_tensors,
)
from trainer_bridge.config import INSTALL_OPTIM


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A recipe that can run on this machine.

    Attributes:
        recipe: The recipe.
        decisions: What is decided where its keys say auto. `recipes.planner.decide` makes the last.
        tasks: The sets of problems, without those whose prompts are too long.
        tokenizer: The model's tokenizer.
        model_dir: Folder of the model.
        device: Either cpu or cuda:N.
        kv_tokens: Tokens of the KV pool on each device.
        max_request_tokens: Tokens of the longest prompt and answer.
        template: Chat template of the prompts; None: they are plain text.
        started: Start of the run, the present of chat templates.
        operations: Operations of updates; None if the model's configuration does not tell.
        conversations: What conversations with environments need; None: there are none.
    """

    recipe: Recipe
    decisions: Decisions
    tasks: Tasks
    tokenizer: Any
    model_dir: Path
    device: str
    kv_tokens: int
    max_request_tokens: int
    template: str | None = None
    started: datetime = field(default_factory=datetime.now)
    operations: Operations | None = None
    conversations: Conversations | None = None

    @contextmanager
    def opened(self) -> Iterator["Setup"]:
        """Yield the run with processes for its environments, which end with the block."""
        if self.conversations is None:
            yield self
            return
        with self.conversations.opened(self.recipe, self.max_request_tokens) as found:
            yield replace(self, conversations=found)

    @property
    def longest_prompt(self) -> int:
        """Return the tokens of the longest prompt."""
        return self.max_request_tokens - self.recipe.sampling.max_tokens

    @property
    def scores_in_update(self) -> bool:
        """Return whether the step's update computes the log-probabilities that it compares with.

        True for a step with one update, unless a correction or a KL penalty in the rewards needs
        them before it. In an exact run, the rollout's serve for the penalty.
        """
        recipe = self.recipe
        penalized = recipe.loss.kl_coef and recipe.kl_in == "reward" and not self.decisions.exact
        needed = recipe.correction_mode != "none" or penalized
        return recipe.updates_per_step == 1 and not needed

    @property
    def scores_before_update(self) -> bool:
        """Return whether a pass before the updates computes the trainer's log-probabilities."""
        return self.recipe.correction_mode != "bypass" and not self.scores_in_update

    @property
    def logprobs_field(self) -> Literal["old_logprobs", "rollout_logprobs"]:
        """Return the field of the update's batch that has the answers' log-probabilities."""
        return "rollout_logprobs" if self.scores_in_update else "old_logprobs"

    def prompt_digests(self) -> dict[str, int]:
        """Return digests of what decides a run's prompts and rewards."""
        return prompt_digests(self.recipe, self.tasks, self.template)

    def other_prompts(self, saved: Mapping[str, int]) -> str:
        """Describe the first change since the digests `saved`, for a message; empty if none."""
        return first_change(self.recipe, self.tasks, self.prompt_digests(), saved)


def prepare(
    recipe: Recipe,
    run_dir: Path,
    started: datetime | None = None,
    before: Decisions | None = None,
    tasks: Tasks | None = None,
) -> Setup:
    """Check a recipe against this machine; write a random model's files to `run_dir`/model.

    Args:
        recipe: The recipe.
        run_dir: Folder of the run.
        started: Start of the run, which a chat template may write; None: now.
        before: Decisions of the run's earlier steps, if there are any.
        tasks: The sets of problems; None: those of the recipe.

    Returns:
        The prepared run.

    Raises:
        RecipeError: The recipe cannot run here. Nothing has been written.
    """
    rules.checked(recipe)
    device, started = resolve_device(recipe), started or datetime.now()
    _check_packages(recipe)
    check_training(recipe)
    tasks = tasks or make_tasks(recipe.task, recipe.eval.sets)
    tasks, kinds = with_tools(recipe, tasks)
    try_rewards(tasks, recipe.task)
    with described_model(recipe, tasks) as (model_dir, tokenizer):
        recipe = with_adapters(recipe, model_dir)
        tasks, form = encoded_tasks(recipe, tasks, tokenizer, started)
        talks = conversations(form, kinds)
        longest = max(map(_length, tasks.problems()))
        _check_prompts(recipe, tasks)
        kv_tokens, context = _pool_and_context(recipe, device, model_dir, longest)
        _check_weights(recipe, model_dir)
        decisions = first_decisions(recipe, model_dir, device, before)
        _check_longest(recipe, tasks, kv_tokens, context)
        if recipe.model.path is None:
            with writable(f"--run-dir {run_dir}"):
                model_dir = Path(shutil.copytree(model_dir, run_dir / "model", dirs_exist_ok=True))
    return Setup(
        recipe=recipe,
        decisions=decisions,
        tasks=tasks,
        tokenizer=tokenizer,
        model_dir=model_dir,
        device=device,
        kv_tokens=kv_tokens,
        max_request_tokens=longest + recipe.sampling.max_tokens,
        template=form.template,
        started=started,
        operations=count_operations(recipe, model_dir),
        conversations=talks,
    )


def encoded_tasks(
    recipe: Recipe, tasks: Tasks, tokenizer: Any, started: datetime
) -> tuple[Tasks, PromptFormat]:
    """Encode the prompts of all sets; return the sets and the format of the prompts.

    A prompt is its token ids: training leaves out evaluated prompts, also in another spelling.
    Prompts beyond `task.max_prompt_tokens` are left out.

    Raises:
        RecipeError: The format does not suit the model, the chat template refuses the system turn
            or a prompt, or no problem is left to train or to evaluate on.
    """
    form = prompt_format(recipe.task, tokenizer, started)
    tasks = encode_prompts(tasks, form)
    tasks = with_problems(tasks.separated(lambda p: p.prompt_ids.tobytes(), "tokens"), recipe.task)
    if (limit := recipe.task.max_prompt_tokens) is None:
        return tasks, form
    short = without_long(tasks, limit)
    for before, after in zip(tasks.all, short.all, strict=True):
        if (before.train and not after.train) or (before.held_out and not after.held_out):
            key, need = "task.max_prompt_tokens", max(map(_length, tasks.problems()))
            raise no_problem(after, f"{key}={limit}", f"set {key}={need}")
    return short, form


def _length(problem: Problem) -> int:
    return len(problem.prompt_ids)


@contextmanager
def described_model(
    recipe: Recipe, tasks: Tasks, *, weights: bool = True
) -> Iterator[tuple[Path, Any]]:
    """Yield the model's directory and tokenizer; download its weights only if `weights`.

    The directory of a random model is temporary and ends with the block.
    """
    if recipe.model.path is not None:
        directory = find_model(recipe.model.path, weights=weights)
        yield directory, load_tokenizer(directory)
        return
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = toy_tokenizer([*tasks.words, *recipe.task.system_prompt.split()])
        directory = Path(folder, "model")  # A copy has its mode, and the one of `folder` is 700.
        directory.mkdir()
        describe_random_model(recipe.model.random_fields(), tokenizer, directory)
        yield directory, tokenizer


def _pool_and_context(
    recipe: Recipe, device: str, model_dir: Path, longest: int
) -> tuple[int, int | None]:
    """Return the tokens of the KV pool and of the model's context; None: unknown."""
    if recipe.engine.hosted:
        config = load_hf_config(model_dir)
        if config.num_attention_heads % (size := recipe.engine.tensor_parallel_size):
            rule = f"does not divide the model's {config.num_attention_heads} heads"
            raise refused("engine.tensor_parallel_size", size, rule, 1)
        kv_tokens = recipe.engine.kv_tokens or demanded_tokens(recipe, longest)
        return kv_tokens, longest_context(config)
    model = _model_config(recipe, model_dir)
    _check_routers(recipe, model)
    return pool_tokens(recipe, device, model, longest), model.max_position_embeddings


def _check_longest(recipe: Recipe, tasks: Tasks, kv_tokens: int, context: int | None) -> None:
    """Refuse a longest prompt and answer that exceed the model's context or the KV pool."""
    widest, lengths = max(tasks.problems(), key=_length), list(map(_length, tasks.problems()))
    whose = f" ({shown(repr(widest.text), 60)})"
    named: Any = {"whose": whose, "shorter": partial(_leaving_out, lengths)}
    check_context(recipe, _length(widest), context, **named)
    if fault := pool_fault(recipe, _length(widest), kv_tokens, **named):
        raise RecipeError("; ".join(fault))


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
        open_tensors(model_dir)
    except ValueError as error:
        raise RecipeError(f"model.path={recipe.model.path}: {one_line(error)}") from None


def _check_routers(recipe: Recipe, model: ModelConfig) -> None:
    for key in ("loop.router_replay", "model.fp32_router"):
        if recipe.value(key) and not model.has_experts:
            raise refused(key, True, "the model has no experts to choose", False)


def resolve_device(recipe: Recipe) -> str:
    """Return `cpu` or `cuda:N`; `auto` takes the first GPU, if there is one.

    Raises:
        RecipeError: The GPUs that the recipe needs are missing.
    """
    count = torch.cuda.device_count() if recipe.device != "cpu" else 0
    cluster = recipe.cluster
    rule = f"torch sees {counted(count, 'GPU')} here" if count else "torch sees no GPU here"
    if 0 < count < cluster.n_gpus_per_node:  # Without a GPU, a device is one or two processes.
        raise refused("cluster.n_gpus_per_node", cluster.n_gpus_per_node, rule, count)
    if 0 < count < cluster.per_node:
        rule += f", and cluster.n_gpus_per_node={cluster.n_gpus_per_node} of them train"
        remedy = "" if cluster.colocate else " cluster.colocate=true"
        fits = count - cluster.n_gpus_per_node if cluster.colocate else 0
        raise refused("cluster.rollout_gpus", cluster.rollout_gpus, rule, f"{fits}{remedy}")
    if not count and recipe.engine.hosted:
        raise refused("engine.kind", recipe.engine.kind, rule, "native")
    if recipe.device in ("auto", "cpu"):
        return "cuda:0" if count else "cpu"
    index = int(recipe.device.partition(":")[2] or 0)
    if index >= count:
        raise refused("device", recipe.device, rule, "auto")
    return f"cuda:{index}"


def check_training(recipe: Recipe) -> None:
    """Import what the algorithm's keys name, and refuse an optimizer whose package is missing.

    The first update needs them, and so does a plan.
    """
    name = recipe.trainer.optimizer
    if name == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        rule = f"needs the package bitsandbytes; run: {INSTALL_OPTIM}"
        raise RecipeError(f"trainer.optimizer={name}: {rule}, or set trainer.optimizer=adamw")
    keys = ["loss.kind", *(["grpo.baseline", "grpo.scale"] if recipe.algorithm == "grpo" else [])]
    for key in keys:
        if ":" in (name := recipe.value(key)):
            import_function(f"{key}={name}", name)


def _check_packages(recipe: Recipe) -> None:
    kind, ray = recipe.engine.kind, why_ray(recipe)
    if ray and (rule := rules.needs_more_gpus(recipe)):  # A rule of recipes knows driver=ray alone.
        raise RecipeError(f"{ray}: {rule}; set driver=inprocess")
    for key, needed, module, package in (
        (ray, ray, "ray", "'memsaver[ray]'"),
        (f"engine.kind={kind}", recipe.engine.hosted, kind, kind),
        ("model", True, "transformers", "'memsaver[models]'"),
    ):
        if needed and importlib.util.find_spec(module) is None:
            raise RecipeError(f"{key}: needs the package {module}; run: pip install {package}")


def _check_prompts(recipe: Recipe, tasks: Tasks) -> None:
    """Refuse a step that would need a problem twice."""
    prompts, key = recipe.prompts_per_step, "loop.prompts_per_step"
    shares = shares_of(tuple(task.weight for task in tasks.trained))
    for index, task in enumerate(tasks.trained):
        most, size = shares.most(index, prompts), len(task.train)
        if most > size:
            rule = (
                f"{task.name} has {counted(size, 'training problem')}, and its share can be {most}"
            )
            fits = (n for n in range(prompts, 0, -1) if shares.most(index, n) <= size)
            raise refused(key, prompts, rule, next(fits))


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


def _leaving_out(lengths: Sequence[int], limit: int) -> list[str]:
    """Return the setting that leaves longer prompts out; none if no problem would remain."""
    over = sum(length > limit for length in lengths)
    setting = (
        f"task.max_prompt_tokens={limit} (leaves out {over} of {counted(len(lengths), 'problem')})"
    )
    return [setting] if over < len(lengths) else []
