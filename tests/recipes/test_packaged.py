"""The packaged recipes: short, of the real shapes, and no smaller GPU than their training state
needs.
"""

from __future__ import annotations

import itertools
import math
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvcache import layout
from memsaver.ops.layout import round_up
from recipes.config.load import PACKAGE, load, recipe_text
from recipes.config.models import shapes
from recipes.config.recipe import Recipe
from recipes.setup.models import describe_random_model, toy_tokenizer
from recipes.setup.preparation import prepare
from recipes.tasks import TOY_WORDS
from rollout.model.decoder import parameter_groups
from rollout.model.loading import load_model_config
from tests.helpers.recipes.tiny_runs import SMALL, MakeRun

GIB = 2**30
NAMES = sorted(file.stem for file in PACKAGE.glob("*.yaml"))
# What the driver calls total.
GPU_BYTES = {"h100-80gb": 79.6 * GIB, "h200-141gb": 140.4 * GIB, "b200-192gb": 179 * GIB}
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
def packaged() -> dict[str, Recipe]:
    return {name: load(name) for name in NAMES}


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of each shape's config, and of a checkpoint without tensors."""
    folder, tokenizer = tmp_path_factory.mktemp("shapes"), toy_tokenizer(TOY_WORDS)
    for name, fields in shapes().items():
        describe_random_model(fields, tokenizer, folder / name)
        save_file({}, folder / name / "model.safetensors")  # a run looks whether it is there
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_is_the_published_one(name: str, described: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    assert set(shapes()) == set(PUBLISHED)
    parameters, kv_bytes = PUBLISHED[name]
    config = AutoConfig.from_pretrained(described / name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    own = "e_score_correction_bias"  # DeepSeek-V3's
    biases = sum(each.numel() for key, each in model.named_buffers() if key.endswith(own))
    assert sum(each.numel() for each in model.parameters()) + biases == parameters
    assert layout(config, dtype=torch.bfloat16).bytes_per_token == kv_bytes
    groups = parameter_groups(load_model_config(described / name))
    params = itertools.chain.from_iterable(group.params for group in groups)
    assert sum(torch.Size(each.shape).numel() for each in params) + biases == parameters


def test_a_recipe_is_short_and_begins_with_what_it_is_for_and_its_command(
    packaged: dict[str, Recipe],
) -> None:
    for name in packaged:
        lines = (PACKAGE / f"{name}.yaml").read_text().splitlines()
        head = next(number for number, line in enumerate(lines) if not line.startswith("#"))
        assert 2 <= head <= 9 and len(lines) - head <= 28, name
        assert any(f"{line} ".startswith(f"#   memsaver run {name} ") for line in lines[:head]), (
            name
        )


def test_the_page_names_every_recipe() -> None:
    page = (PACKAGE.parent / "docs" / "recipes.md").read_text()
    assert [name for name in NAMES if f"\n| `{name}` |" not in page] == []


def test_a_resolved_recipe_loads_as_the_same_and_a_real_model_takes_the_place_of_its_own(
    packaged: dict[str, Recipe], tmp_path: Path
) -> None:
    for name, recipe in packaged.items():
        (tmp_path / "recipe.yaml").write_text(recipe_text(recipe))
        assert load(tmp_path / "recipe.yaml") == recipe, name
        assert load(name, ["model.path=x"]).model.path == "x"


def test_a_text_that_looks_like_a_reference_comes_back_as_it_is(tmp_path: Path) -> None:
    for text in ("costs \\${5}", "\\${steps} of them", "a \\\\\\${b}"):
        recipe = load("tiny", [f"task.system_prompt='{text}'"])
        assert "${" in str(recipe.task.system_prompt)
        (tmp_path / "recipe.yaml").write_text(recipe_text(recipe))
        assert load(tmp_path / "recipe.yaml") == recipe


def test_the_pool_holds_all_requests_that_run_at_once(
    packaged: dict[str, Recipe], described: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs of the size it names. Nothing is fetched."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr("recipes.setup.preparation.find_model", lambda name, **_: described / name)
    for name, recipe in packaged.items():
        gpu = types.SimpleNamespace(total_memory=int(GPU_BYTES[recipe.cluster.gpu]))
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda device, gpu=gpu: gpu)
        setup = prepare(recipe, tmp_path)
        request = round_up(setup.max_request_tokens, recipe.engine.page_size)
        engines = recipe.cluster.size // recipe.engine.tensor_parallel_size
        prompts = math.ceil(recipe.loop.prompts_per_step / engines)
        at_once = min(recipe.engine.max_running, prompts * recipe.loop.samples_per_prompt)
        assert setup.kv_tokens >= at_once * request, name
        if recipe.cluster.size == 1 and recipe.model.config is None:
            samples = recipe.loop.prompts_per_step * recipe.loop.samples_per_prompt
            assert recipe.engine.max_running == samples, name


@pytest.mark.parametrize("status", ["run", "planned"])
def test_a_run_of_a_planned_recipe_says_that_nobody_has_run_it(
    status: str, make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run("tiny", *SMALL, "steps=1", "eval.every=0", f"status={status}")
    assert capsys.readouterr().out.count("nobody has run it yet") == (status == "planned")
