"""Makes of a recipe what a run needs: device, model, tokenizer, task, pool size; all checked."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memsaver.common.layout import round_up
from recipes.errors import RecipeError, one_line, writable
from recipes.recipe import LoraSection, Recipe
from recipes.recipe.rules import shown
from recipes.recipe.sides import LORA_MODULES
from recipes.setup.fetch import find_model
from recipes.setup.models import describe_random_model, encode_prompt, load_tokenizer, toy_tokenizer
from recipes.setup.pool import demanded_tokens, in_tokens, pool_tokens
from recipes.tasks import Problem, Task, make_task

if TYPE_CHECKING:
    from rollout.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A recipe that can run here."""

    recipe: Recipe
    task: Task
    tokenizer: Any
    model_dir: Path
    device: str  # cpu or cuda:N
    kv_tokens: int
    max_request_tokens: int  # longest prompt and answer

    def prompt_ids(self, problem: Problem) -> list[int]:
        return encode_prompt(self.tokenizer, problem.question, self.recipe.task.system_prompt)


def prepare(recipe: Recipe, run_dir: Path) -> Setup:
    """Checks the recipe against this machine, then describes a random model in `run_dir`/model.

    Raises RecipeError before anything is written.
    """
    device = resolve_device(recipe)
    _check_packages(recipe)
    task = make_task(recipe.task, recipe.eval.also_digits)
    _check_prompts(recipe, len(task.kinds) * min(map(len, task.kinds)))
    with described_model(recipe, task) as (model_dir, tokenizer):
        _check_lora(recipe.lora, model_dir)
        longest = longest_prompt(recipe, task, tokenizer)
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
        recipe = with_alias_decided(recipe, model_dir)
        _check_request(recipe, longest, kv_tokens, context)
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
    )


def with_alias_decided(recipe: Recipe, model_dir: Path) -> Recipe:
    """Returns the recipe with `cycle.alias` decided: always, where the engine can serve the
    trainer's own pages. RecipeError where that is wished and cannot be.
    """
    wish = recipe.cycle.alias
    why_not = None if wish == "never" else _why_not_alias(recipe, model_dir)
    if wish == "always" and why_not is not None:
        raise RecipeError(f"cycle.alias=always: {why_not}; set cycle.alias=auto")
    decided = "never" if wish == "never" or why_not is not None else "always"
    return dataclasses.replace(recipe, cycle=dataclasses.replace(recipe.cycle, alias=decided))


def _why_not_alias(recipe: Recipe, model_dir: Path) -> str | None:
    from rollout.model import load_model_config, whole_manifest
    from trainer_bridge import TrainerConfig
    from trainer_bridge.training import check_layout

    if recipe.engine.hosted:
        return f"engine.kind={recipe.engine.kind} has buffers among its weights"
    if recipe.cluster.size > 1:
        return f"the trainer's pages are shards on {recipe.cluster.size} devices"
    if recipe.lora.rank:
        return "adapters are merged into what an engine serves"
    own = recipe.model.dtype if recipe.trainer.optimizer_offload else recipe.trainer.dtype
    if own != recipe.model.dtype:
        return f"the trainer's pages are {own}, model.dtype={recipe.model.dtype}"
    if "weights" in recipe.cycle.named:
        return "cycle.keep names weights, pages that the trainer gets back"
    config = TrainerConfig(model_path=str(model_dir), dtype=own)
    try:
        manifest = whole_manifest(load_model_config(model_dir), config.torch_dtype)
        check_layout(config, manifest)
    except ValueError as error:
        return one_line(error)
    return None


def longest_prompt(recipe: Recipe, task: Task, tokenizer: Any) -> int:
    """Tokens."""
    return max(
        len(encode_prompt(tokenizer, each.question, recipe.task.system_prompt))
        for each in task.problems()
    )


@contextmanager
def described_model(recipe: Recipe, task: Task) -> Iterator[tuple[Path, Any]]:
    """The model's directory and tokenizer; a random one's directory ends with the block."""
    if recipe.model.path is not None:
        directory = find_model(recipe.model.path)
        yield directory, load_tokenizer(directory)
        return
    if not task.words:
        rule = "a random model has no tokenizer for it"
        remedy = "give its Task `words`, or set model.path=DIRECTORY"
        raise RecipeError(f"task.name={recipe.task.name}: {rule}; {remedy}")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = toy_tokenizer(list(task.words))
        describe_random_model(recipe.model.random_fields(), tokenizer, Path(folder))
        yield Path(folder), tokenizer


def _model_config(recipe: Recipe, model_dir: Path) -> ModelConfig:
    from rollout.model import load_model_config

    try:
        return load_model_config(model_dir)
    except ValueError as error:
        model = recipe.model
        named = "model.config" if model.shape is None else f"model.shape={model.shape}"
        key = named if model.path is None else f"model.path={model.path}"
        text = one_line(error).removeprefix(f"{model_dir}: ")
        raise RecipeError(f"{key}: is no model that the rollout computes: {text}") from None


def _check_routers(recipe: Recipe, model: ModelConfig) -> None:
    keys = {f"{recipe.algorithm}.router_replay": recipe.loop.router_replay}
    keys["model.fp32_router"] = recipe.model.fp32_router
    for key, wanted in keys.items():
        if wanted and not model.has_experts:
            raise RecipeError(f"{key}=true: the model has no experts to choose; set {key}=false")


def _check_heads(recipe: Recipe, heads: int) -> None:
    if heads % (size := recipe.engine.tensor_parallel_size):
        key = "engine.tensor_parallel_size"
        raise RecipeError(f"{key}={size}: does not divide the model's {heads} heads; set {key}=1")


def _check_lora(section: LoraSection, model_dir: Path) -> None:
    """Its layers are the model's."""
    if not section.rank:
        return
    from trainer_bridge.training import lora_target_names

    there = lora_target_names(str(model_dir))
    if missing := [name for name in section.target_modules if name not in there]:
        key, rule = "lora.target_modules", f"the model has no layers {', '.join(missing)}"
        has = shown([name for name in LORA_MODULES if name in there])
        raise RecipeError(f"{key}={shown(section.target_modules)}: {rule}; set {key}={has}")


def resolve_device(recipe: Recipe) -> str:
    """`cpu` or `cuda:N`; `auto` takes the first GPU where there is one."""
    import torch

    count = torch.cuda.device_count() if recipe.device != "cpu" else 0
    each, key = recipe.cluster.n_gpus_per_node, "cluster.n_gpus_per_node"
    if 0 < count < each:  # without a GPU, a device is two processes
        raise RecipeError(f"{key}={each}: torch sees {count} GPUs here; set {key}={count}")
    if not count and (kind := recipe.engine.kind) != "native":
        raise RecipeError(f"engine.kind={kind}: torch sees no GPU here; set engine.kind=native")
    if recipe.device in ("auto", "cpu"):
        return "cuda:0" if count else "cpu"
    index = int(recipe.device.partition(":")[2] or 0)
    if index >= count:
        raise RecipeError(f"device={recipe.device}: torch sees {count} GPUs here; set device=auto")
    return f"cuda:{index}"


def _check_packages(recipe: Recipe) -> None:
    needed = [("driver=ray", "ray", "ray")] if recipe.driver == "ray" else []
    kind = recipe.engine.kind
    needed += [(f"engine.kind={kind}", kind, "")] if recipe.engine.hosted else []
    for key, module, extra in [*needed, ("model", "transformers", "models")]:
        if importlib.util.find_spec(module) is None:
            remedy = (
                f"run: pip install 'memsaver[{extra}]'" if extra else f"run: pip install {module}"
            )
            raise RecipeError(f"{key}: needs the package {module}; {remedy}")


def _check_prompts(recipe: Recipe, there: int) -> None:
    """A step's prompts are different problems."""
    wanted, key = recipe.loop.prompts_per_step, f"{recipe.algorithm}.prompts_per_step"
    if wanted > there:
        raise RecipeError(
            f"{key}={wanted}: the task has {there} training problems; set {key}={there}"
        )


def _check_request(
    recipe: Recipe, longest_prompt: int, kv_tokens: int, context: int | None
) -> None:
    answer = recipe.sampling.max_tokens
    need = longest_prompt + answer
    if context is not None and need > context:
        rule = f"prompt of {longest_prompt} + answer exceed the model's context of {context} tokens"
        left = context - longest_prompt
        remedy = f"set sampling.max_tokens={left}" if left > 0 else "shorten prompts"
        raise RecipeError(f"sampling.max_tokens={answer}: {rule}; {remedy}")
    page = recipe.engine.page_size
    rounded = round_up(need, page)
    if rounded > kv_tokens:
        share = recipe.engine.mem_fraction_static is not None
        key = "mem_fraction_static" if share else "kv_tokens"
        rule = f"the KV pool of {kv_tokens} tokens is too small for one request of "
        rule += f"{longest_prompt} + {answer} tokens in pages of {page}"
        remedy = f"set {in_tokens(recipe, rounded)} or more"
        raise RecipeError(f"engine.{key}={getattr(recipe.engine, key)}: {rule}; {remedy}")
