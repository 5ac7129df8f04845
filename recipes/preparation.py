"""From a recipe to what a run needs: device, model, tokenizer, task, pool size, checked against each other."""

from __future__ import annotations

import importlib.util
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.config import Recipe
from recipes.errors import RecipeError
from recipes.fetch import find_model
from recipes.models import encode_prompt, load_tokenizer, toy_tokenizer, write_random_model
from recipes.tasks import TOY_WORDS, Problem, Task, make_task


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
    """Checks the recipe against this machine, then writes its random model, if it has one, to `run_dir`/model.

    Raises RecipeError before anything is written.
    """
    device = resolve_device(recipe)
    _check_packages(recipe)
    task = make_task(recipe.task)
    wanted, there = recipe.grpo.prompts_per_step, len(task.train)
    if wanted > there:
        raise RecipeError(
            f"grpo.prompts_per_step={wanted}: the task has {there} training problems; set at most {there}"
        )
    if recipe.model.path is not None:
        model_dir = find_model(recipe.model.path)
        tokenizer = load_tokenizer(model_dir)
        config = json.loads((model_dir / "config.json").read_text())
    else:
        model_dir = run_dir / "model"
        tokenizer = toy_tokenizer(TOY_WORDS)
        config = recipe.model.random_init or {}
    questions = [problem.question for problem in task.train + task.held_out]
    longest = max(len(encode_prompt(tokenizer, question, recipe.task.system_prompt)) for question in questions)
    kv_tokens = _kv_tokens(recipe, device, model_dir, config)
    _check_request(recipe, longest, kv_tokens, config.get("max_position_embeddings"))
    if recipe.model.path is None and not (model_dir / "config.json").is_file():
        write_random_model(config, tokenizer, recipe.seed, model_dir)
    return Setup(
        recipe=recipe,
        task=task,
        tokenizer=tokenizer,
        model_dir=model_dir,
        device=device,
        kv_tokens=kv_tokens,
        max_request_tokens=longest + recipe.sampling.max_tokens,
    )


def resolve_device(recipe: Recipe) -> str:
    """`cpu` or `cuda:N`; `auto` takes the first GPU where there is one."""
    import torch

    count = torch.cuda.device_count()
    if recipe.device == "auto":
        return "cuda:0" if count else "cpu"
    if recipe.device == "cpu":
        return "cpu"
    index = int(recipe.device.partition(":")[2] or 0)
    if index >= count:
        raise RecipeError(f"device={recipe.device}: torch sees {count} GPUs here; set device=auto")
    return f"cuda:{index}"


def _check_packages(recipe: Recipe) -> None:
    needed = [("driver=ray", "ray", "ray")] if recipe.driver == "ray" else []
    needed.append(("model", "transformers", "models"))
    for key, module, extra in needed:
        if importlib.util.find_spec(module) is None:
            raise RecipeError(f"{key}: needs the package {module}; run: pip install 'memsaver[{extra}]'")


def _check_request(recipe: Recipe, longest_prompt: int, kv_tokens: int, context: int | None) -> None:
    answer = recipe.sampling.max_tokens
    need = longest_prompt + answer
    page = recipe.engine.page_size
    rounded = -(-need // page) * page
    if rounded > kv_tokens:
        key = "kv_tokens" if recipe.engine.kv_tokens is not None else "mem_fraction_static"
        remedy = f"set engine.kv_tokens={rounded} or more"
        rule = f"the KV pool of {kv_tokens} tokens is too small for one request of {longest_prompt} + {answer} tokens"
        raise RecipeError(f"engine.{key}={getattr(recipe.engine, key)}: {rule} in pages of {page}; {remedy}")
    if context is not None and need > context:
        rule = f"prompt of {longest_prompt} + answer exceed the model's context of {context} tokens"
        room = max(1, context - longest_prompt)
        raise RecipeError(f"sampling.max_tokens={answer}: {rule}; set sampling.max_tokens={room}")


def _kv_tokens(recipe: Recipe, device: str, model_dir: Path, config: dict[str, Any]) -> int:
    """The pool's tokens: as given, or what (weights + pool) = fraction x the GPU's total bytes leaves."""
    fraction = recipe.engine.mem_fraction_static
    if fraction is None:
        assert recipe.engine.kv_tokens is not None
        return recipe.engine.kv_tokens
    key = f"engine.mem_fraction_static={fraction}"
    if device == "cpu" or recipe.model.path is None:
        raise RecipeError(f"{key}: is a share of a GPU's memory, only on a GPU; set engine.kv_tokens=4096 instead")
    import torch

    total = torch.cuda.get_device_properties(device).total_memory
    width = 4 if recipe.model.dtype == "float32" else 2
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    row = config.get("num_key_value_heads", heads) * (config.get("head_dim") or hidden // heads)
    left = int(fraction * total) - count_parameters(model_dir) * width
    page = recipe.engine.page_size
    tokens = left // (2 * config["num_hidden_layers"] * row * width) // page * page
    if tokens < page:
        raise RecipeError(f"{key}: the weights alone take more of the GPU's {total} bytes; raise it")
    return tokens


def count_parameters(model_dir: Path) -> int:
    """Elements in the safetensors files of a directory, from their headers alone."""
    elements = 0
    for file in sorted(model_dir.glob("*.safetensors")):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                size = 1
                for extent in entry["shape"]:
                    size *= extent
                elements += size
    return elements
