"""`load`: a YAML file and dotlist overrides become a checked `Recipe`, or one line that says what
to change: keys, their types in a user's words, and a value that each takes.
"""

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes.config import Recipe
from recipes.config.rules import FieldError, default_of, shown
from recipes.errors import RecipeError, one_line

_WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    type(None): "null",
    list[int]: "a list of integers, as [2, 3]",
    Any: "auto, or a list of words, as [params, optim]",
    list[str]: "a list of words, as [params, optim]",
}
_GOOD = {
    "steps": "steps=3",
    "task.name": "task.name=toy",
    "model.config": "model.config.model_type=qwen3",
    "engine.options": "engine.options.attention_backend=triton",
}


@cache
def section_fields(cls: type) -> dict[str, Any]:
    """Name -> type of a section's fields."""
    return typing.get_type_hints(cls)


@cache
def leaves() -> dict[str, Any]:
    """Full key -> its type, of every key that takes a value, in order."""
    return dict(_keys(Recipe, ""))


def _keys(cls: type, prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, hint in section_fields(cls).items():
        key = f"{prefix}{name}"
        section = dataclasses.is_dataclass(hint) and isinstance(hint, type)
        found += _keys(hint, f"{key}.") if section else [(key, hint)]
    return found


def in_words(key: str) -> str:
    """Says what a key takes."""
    hint = leaves().get(key)
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else [hint]
    return " or ".join(_WORDS.get(part, "a section of keys") for part in parts)


def remedy_of(key: str) -> str:
    """`set key=value`, with the default where there is one."""
    if key not in leaves():
        return f"set {key}.KEY=VALUE"
    return f"set {_GOOD.get(key) or f'{key}={shown(_default(key))}'}"


def _default(key: str) -> Any:
    hint: Any = Recipe
    for part in key.split("."):
        owner, name = hint, part
        hint = section_fields(owner)[part]
    default = default_of(owner, name)
    assert default is not MISSING, f"{key} has no default; name a value in _GOOD"
    return default


PACKAGE = Path(__file__).parent.parent


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe and applies `key=value` overrides.

    `path` is a YAML file, with or without its ending; a name that is no file is looked up among the
    packaged recipes. Every mistake raises RecipeError with one line: file, key, value, rule,
    remedy.
    """
    file = find_recipe(path)
    merged = OmegaConf.create({})
    for layer, source in _layers(file, overrides):
        _check_keys(OmegaConf.to_container(layer, resolve=False), Recipe, "", source)
        merged = _merge(merged, layer, source)

    def source_of(key: str) -> str:
        """Return where a key's value was written."""
        typed = [f"{override.partition('=')[0]}." for override in overrides]
        either = (f"{key}.".startswith(one) or one.startswith(f"{key}.") for one in typed)
        return "command line" if any(either) else file.name

    recipe = _construct(Recipe, _typed(merged, source_of), "", source_of)
    _check_effect(recipe, overrides)
    return recipe


def find_recipe(path: str | Path) -> Path:
    """The YAML file meant by `path`: itself, with `.yaml` added, or a packaged recipe's."""
    given = Path(path)
    yaml = given.name + ".yaml"
    for candidate in (given, given.parent / yaml, PACKAGE / given.name, PACKAGE / yaml):
        if candidate.is_file():
            return candidate
    packaged = packaged_recipes()
    close = difflib.get_close_matches(given.name.removesuffix(".yaml"), packaged, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise RecipeError(f"recipe={path}: no such file; {hint}memsaver recipes lists the packaged")


def packaged_recipes() -> list[str]:
    """Names that `load` takes without a file."""
    return sorted(file.stem for file in PACKAGE.glob("*.yaml"))


def first_sentence(packaged: str) -> str:
    """Return what the comment on top of a packaged recipe says first."""
    lines = (PACKAGE / f"{packaged}.yaml").read_text().splitlines()
    told = takewhile(lambda line: re.match(r"# \S", line), lines)
    return " ".join(line[2:] for line in told).partition(". ")[0].rstrip(".")


def recipe_text(recipe: Recipe) -> str:
    """The recipe as resolved, in YAML; `load` of a file with this text gives an equal recipe."""
    return OmegaConf.to_yaml(OmegaConf.create(_literal(dataclasses.asdict(recipe))))


def _literal(value: Any) -> Any:
    """Texts with `${` in them are what they are, no references to other keys."""
    if isinstance(value, dict):
        return {key: _literal(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_literal(each) for each in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)(\$\{)", r"\1\1\\\2", value)
    return value


def _layers(file: Path, overrides: Sequence[str]) -> list[tuple[DictConfig, str]]:
    """The file, then each override, as untyped mappings with the words to call them by."""
    try:
        text = file.read_text(encoding="utf-8")
        scalar = isinstance(yaml.compose(text, yaml.SafeLoader), yaml.ScalarNode)
        content = None if scalar else OmegaConf.load(file)
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            f"{file.name}: is not readable as YAML: {one_line(error)}; correct the file"
        ) from None
    if not isinstance(content, DictConfig):
        raise RecipeError(
            f"{file.name}: must be a mapping of keys to values; write it as 'key: value' lines"
        )
    layers = [(content, file.name)]
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key or not all(key.split(".")):
            rule = "is not an override; write it as key=value, for example steps=3"
            raise RecipeError(f"{shown(override)}: {rule}")
        try:
            layers.append((OmegaConf.from_dotlist([override]), "command line"))
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            text = f"{shown(override)}: bad value: {one_line(error)}; quote it"
            raise RecipeError(f"command line: {text}") from None
    return layers


def _merge(base: Any, layer: DictConfig, source: str) -> Any:
    try:
        return OmegaConf.unsafe_merge(base, layer)
    except (OmegaConfBaseException, TypeError) as error:
        raise RecipeError(f"{source}: {one_line(error)}; correct the value") from None


def _check_keys(values: Any, cls: type, prefix: str, source: str) -> None:
    """Every key is a field of `cls`, every section a mapping."""
    known = section_fields(cls)
    for key, value in values.items():
        full = f"{prefix}{key}"
        if key not in known:
            remedy = _suggest(str(key), list(known), prefix)
            raise RecipeError(f"{source}: {shown(full)}: unknown key; {remedy}")
        if dataclasses.is_dataclass(known[key]):
            if not isinstance(value, Mapping):
                names = ", ".join(section_fields(known[key]))
                rule = f"must be a section; set {full}.KEY, KEY one of {names}"
                raise RecipeError(f"{source}: {full}={shown(value)}: {rule}")
            _check_keys(value, known[key], f"{full}.", source)


def _suggest(key: str, known: list[str], prefix: str) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    return f"known here: {', '.join(prefix + name for name in known)}"


@cache
def _template() -> Any:
    """Keys, types and defaults; slow to make."""
    return OmegaConf.structured(Recipe)


def _typed(merged: DictConfig, source_of: Callable[[str], str]) -> Any:
    """The values as the schema's types, interpolations resolved."""
    kinds = section_fields(Recipe).items()
    sections = [name for name, kind in kinds if name in merged and dataclasses.is_dataclass(kind)]
    try:
        typed: Any = OmegaConf.merge(_template(), {name: {} for name in sections})
        for name in sections:  # frozen, and omegaconf 2.3 puts no list or mapping into such a one
            OmegaConf.set_readonly(typed[name], False)
        typed = OmegaConf.merge(typed, merged)
        missing = sorted(OmegaConf.missing_keys(typed))
        values = OmegaConf.to_container(typed, resolve=True)
    except OmegaConfBaseException as error:
        key = (error.full_key or "?").partition("[")[0]  # of a list: the whole list
        while key not in leaves() and "." in key:  # of a free mapping: the whole mapping
            key = key.rpartition(".")[0]
        text = f"{key}={_written(merged, key)}: must be {in_words(key)}; {remedy_of(key)}"
        raise RecipeError(f"{source_of(key)}: {text}") from None
    except (RecursionError, OverflowError) as error:
        raise RecipeError(
            f"{source_of('')}: {one_line(error)}; write plain values, without ${{...}}"
        ) from None
    if missing:
        key, rule = missing[0], "is required and has no value"
        raise RecipeError(f"{source_of(key)}: {key}: {rule}; {remedy_of(key)}")
    return values


def _written(merged: DictConfig, key: str) -> str:
    """The value as written, interpolations unresolved."""
    value: Any = OmegaConf.to_container(merged, resolve=False)
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return shown(value)


def _construct(cls: type, values: Any, prefix: str, source_of: Callable[[str], str]) -> Any:
    """Builds the dataclasses from the inside out, giving a broken rule its full key."""
    hints = section_fields(cls)
    assert isinstance(values, Mapping)
    built = {
        key: _construct(hints[key], value, f"{prefix}{key}.", source_of)
        if dataclasses.is_dataclass(hints[key])
        else value
        for key, value in values.items()
    }
    try:
        return cls(**built)
    except FieldError as error:
        key = f"{prefix}{error.name}"
        text = f"{key}={shown(error.value)}: {error.rule}; {error.remedy}"
        raise RecipeError(f"{source_of(key)}: {text}") from None


def _check_effect(recipe: Recipe, overrides: Sequence[str]) -> None:
    """Checks that what is typed for this run has an effect; removing a value, by null, need not."""
    idle = _idle_keys(recipe)
    for override in overrides:
        key, _, value = override.partition("=")
        for prefix, (why, remedy) in idle.items():
            if value != "null" and f"{key}.".startswith(f"{prefix}."):
                ways = f"{remedy}, or drop {key}" if remedy else f"drop {key}"
                rule = f"has no effect with {why}; {ways}"
                raise RecipeError(f"command line: {shown(override)}: {rule}")


def _idle_keys(recipe: Recipe) -> dict[str, tuple[str, str]]:
    """Keys that a recipe has, but does not look at: key, or section -> with what it has no effect,
    and what would make it count, if anything.

    In a file they do no harm: one recipe serves with and without PPO, adapters or a checkpoint.
    """
    other = "ppo" if recipe.algorithm == "grpo" else "grpo"
    idle = {other: (f"algorithm={recipe.algorithm}", f"set algorithm={other}")}
    # An answer is never off the policy that sampled it: ratios are 1, and values are the old ones.
    if recipe.algorithm == "grpo":
        beside = ("algorithm=grpo, which makes one update a step", "")
        idle |= dict.fromkeys(("grpo.clip_low", "grpo.clip_high"), beside)
    elif recipe.ppo.epochs * recipe.ppo.mini_batches == 1:
        beside = ("one update a step (ppo.epochs=1, ppo.mini_batches=1)", "set ppo.mini_batches=2")
        idle |= dict.fromkeys(("ppo.clip_low", "ppo.clip_high", "ppo.value_clip"), beside)
    if recipe.lora.rank == 0:
        beside = ("lora.rank=0", "set lora.rank=16")
        idle |= dict.fromkeys(("lora.alpha", "lora.target_modules"), beside)
    if recipe.model.path is not None:
        beside = (f"model.path={recipe.model.path}", "set model.path=null")
        idle |= dict.fromkeys(("model.shape", "model.config"), beside)
    if recipe.task.name == "toy":
        beside = ("task.name=toy", "set task.name=chain_sum")
        idle |= dict.fromkeys(("task.num_terms", "task.num_digits"), beside)
    return idle
