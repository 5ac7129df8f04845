"""Recipes in the package and under examples/plans: heads, shapes, loading."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from kvcache import layout
from recipes.config.load import find_recipe, load, packaged_recipes, recipe_text
from recipes.config.recipe import Recipe
from recipes.config.sections import shapes
from rollout.model.decoder import parameter_groups
from rollout.model.loading import load_model_config
from tests.helpers.docs.pages import ROOT
from tests.helpers.recipes.model_folders import describe_shapes

GIB = 2**30
NAMES = packaged_recipes()
PLANS = {file.stem: file for file in sorted((ROOT / "examples" / "plans").glob("*.yaml"))}
PUBLISHED = {  # parameters, and bytes of a token in the KV cache in bf16
    "smollm2-135m": (134_515_008, 23_040),
    "qwen2.5-0.5b": (494_032_768, 12_288),
    "qwen2.5-1.5b": (1_543_714_304, 28_672),
    "qwen2.5-7b": (7_615_616_512, 57_344),
    "qwen2.5-32b": (32_763_876_352, 262_144),
    "llama-3.1-8b": (8_030_261_248, 131_072),
    "llama-3.1-70b": (70_553_706_496, 327_680),
    "qwen3-30b-a3b": (30_532_122_624, 98_304),
    "qwen3-235b-a22b": (235_093_634_560, 192_512),
    "deepseek-v3": (671_026_419_200, 70_272),
}


@pytest.fixture(scope="module")
def all_recipes() -> dict[str, Recipe]:
    """Load all recipes by name, packaged ones and plans."""
    return {name: load(PLANS.get(name, name)) for name in (*NAMES, *PLANS)}


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return describe_shapes(tmp_path_factory.mktemp("shapes"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_shape_has_published_parameters_and_kv_bytes(name: str, described: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    assert set(shapes()) == set(PUBLISHED)
    parameters, kv_bytes = PUBLISHED[name]
    config = AutoConfig.from_pretrained(described / name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    bias = "e_score_correction_bias"  # of DeepSeek-V3
    biases = sum(buffer.numel() for key, buffer in model.named_buffers() if key.endswith(bias))
    assert sum(param.numel() for param in model.parameters()) + biases == parameters
    assert layout(config, dtype=torch.bfloat16).bytes_per_token == kv_bytes
    groups = parameter_groups(load_model_config(described / name))
    params = itertools.chain.from_iterable(group.params for group in groups)
    assert sum(torch.Size(param.shape).numel() for param in params) + biases == parameters


def test_recipe_is_short_and_begins_with_its_purpose_and_command() -> None:
    commands = {name: f"run {name}" for name in NAMES}
    commands |= {name: f"plan examples/plans/{name}.yaml" for name in PLANS}
    for name, command in commands.items():
        lines = find_recipe(PLANS.get(name, name)).read_text().splitlines()
        head = next(number for number, line in enumerate(lines) if not line.startswith("#"))
        assert 2 <= head <= 9 and len(lines) - head <= 34, name
        assert any(f"{line} ".startswith(f"#   memsaver {command} ") for line in lines[:head]), name


def test_docs_page_names_every_packaged_recipe() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert [name for name in NAMES if f"\n| `{name}` |" not in page] == []


def test_resolved_recipe_loads_as_equal_and_takes_another_model_path(
    all_recipes: dict[str, Recipe], tmp_path: Path
) -> None:
    for name, recipe in all_recipes.items():
        (tmp_path / "recipe.yaml").write_text(recipe_text(recipe))
        assert load(tmp_path / "recipe.yaml") == recipe, name
        assert load(PLANS.get(name, name), ["model.path=x"]).model.path == "x"


def test_text_that_looks_like_a_reference_survives_saving_and_loading(tmp_path: Path) -> None:
    for text in ("costs \\${5}", "\\${steps} of them", "a \\\\\\${b}"):
        recipe = load("tiny", [f"task.system_prompt='{text}'"])
        assert "${" in str(recipe.task.system_prompt)
        (tmp_path / "recipe.yaml").write_text(recipe_text(recipe))
        assert load(tmp_path / "recipe.yaml") == recipe
