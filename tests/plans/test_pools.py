"""KV pools of every recipe, packaged or under examples/plans, on its own GPUs."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
from pathlib import Path
from typing import Any

import pytest

from memsaver.ops.layout import round_up
from recipes.config.load import load
from recipes.setup.model_files import toy_tokenizer
from recipes.setup.preparation import prepare
from recipes.tasks.toy import TOY_WORDS
from rollout.model.loading import load_model_config
from tests.helpers.docs.pages import ROOT
from tests.helpers.recipes.model_folders import describe_shapes

GIB = 2**30
FILES = sorted((ROOT / "recipes").glob("*.yaml")) + sorted((ROOT / "examples/plans").glob("*.yaml"))
# Total memory as the driver reports it.
GPU_BYTES = {"h100-80gb": 79.6 * GIB, "h200-141gb": 140.4 * GIB, "b200-192gb": 179 * GIB}


def test_kv_pool_holds_all_requests_that_run_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use GPUs of the size that the recipe names, without fetching a model.

    Each config is observed once, however many recipes have it.
    """
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    rows = [json.dumps({"question": f"{number}?", "answer": "1"}) for number in range(1000)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    local: dict[str, Any] = {"data": str(tmp_path / "data.jsonl"), "subset": None}
    local["environment"] = None  # whose tools the tokenizer's template does not take
    # Prompts of equal tokens are one prompt, so the tokenizer must know their words.
    words = [*TOY_WORDS, "+", "-", *map(str, range(1000)), *(f"{n}?" for n in range(1000))]
    monkeypatch.setattr("recipes.setup.preparation.load_tokenizer", lambda _: toy_tokenizer(words))
    observed = functools.cache(lambda config: load_model_config(places[config]))
    places: dict[str, Path] = {}

    def load_once(folder: Path) -> Any:
        config = (folder / "config.json").read_text()
        places.setdefault(config, folder)
        return observed(config)

    for user in ("preparation", "model_decisions"):
        monkeypatch.setattr(f"recipes.setup.{user}.load_model_config", load_once)
    monkeypatch.setattr("recipes.setup.preparation.count_operations", lambda *_: None)  # unused
    described = describe_shapes(tmp_path / "shapes")
    for file in FILES:
        name, recipe = file.stem, load(file)
        if recipe.task.data is not None:  # on the Hub
            recipe = dataclasses.replace(recipe, task=dataclasses.replace(recipe.task, **local))
        total = int(GPU_BYTES[recipe.cluster.gpu])
        gpu = types.SimpleNamespace(total_memory=total, major=9, minor=0)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda device, gpu=gpu: gpu)
        model = described / str(recipe.model.shape)
        monkeypatch.setattr(
            "recipes.setup.preparation.find_model", lambda _, model=model, **__: model
        )
        setup = prepare(recipe, tmp_path)
        assert setup.decisions.exact == ("warn" if recipe.exact else False), name
        request = round_up(setup.max_request_tokens, recipe.engine.page_size)
        engines = recipe.cluster.size // recipe.engine.tensor_parallel_size
        prompts = math.ceil(recipe.prompts_per_step / engines)
        running = min(recipe.engine.max_running, prompts * recipe.samples_per_prompt)
        assert setup.kv_tokens >= running * request, name
        if recipe.cluster.size == 1 and recipe.model.config is None:
            samples = recipe.prompts_per_step * recipe.samples_per_prompt
            assert recipe.engine.max_running == samples, name
