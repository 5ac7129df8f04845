"""Recipes: what loads, and the one line that every mistake gets."""

import dataclasses
from pathlib import Path

import pytest

import recipes
from recipes.cli import main
from recipes.config import TAGS
from recipes.loading import save_recipe
from trainer_bridge.cycle import KEEPABLE

TINY = Path(recipes.__file__).parent / "tiny.yaml"

MISTAKES = {
    "unknown key": (["stepz=3"], ["stepz", "did you mean steps?"]),
    "unknown nested key": (["sampling.max_token=3"], ["sampling.max_token", "did you mean sampling.max_tokens?"]),
    "unknown key, nothing close": (["qqq=1"], ["qqq", "known here", "sampling"]),
    "not an override": (["steps"], ["steps", "key=value"]),
    "empty part of a key": (["sampling..top_k=1"], ["sampling..top_k=1", "key=value"]),
    "bad YAML": (["steps=[1"], ["steps=[1", "quote it"]),
    "word for an integer": (["steps=abc"], ["steps=abc", "an integer"]),
    "fraction for an integer": (["steps=1.5"], ["steps=1.5", "an integer"]),
    "nothing for an integer": (["steps=null"], ["steps=null", "an integer"]),
    "word for a number": (["trainer.learning_rate=fast"], ["trainer.learning_rate=fast", "a number"]),
    "word for a flag": (["grpo.normalize_std=perhaps"], ["grpo.normalize_std=perhaps", "true or false"]),
    "word for an optional": (["engine.kv_tokens=many"], ["engine.kv_tokens=many", "an integer or null"]),
    "value for a section": (["sampling=3"], ["sampling=3", "max_tokens"]),
    "section for a value": (["steps.x=3"], ["steps", "an integer"]),
    "unresolved interpolation": (["steps=${stepps}"], ["steps=${stepps}", "an integer"]),
    "no steps": (["steps=0"], ["steps=0", "at least 1", "steps=3"]),
    "bad driver": (["driver=slurm"], ["driver=slurm", "inprocess or ray"]),
    "bad device": (["device=tpu"], ["device=tpu", "device=auto"]),
    "no such GPU": (["device=cuda:99"], ["device=cuda:99", "device=auto"]),
    "negative seed": (["seed=-1"], ["seed=-1", "seed=0"]),
    "two models": (["model.path=x"], ["model.path=x", "excludes model.random_init=true", "model.random_init=false"]),
    "no model": (["model.random_init=false"], ["model.path=null", "smollm2-135m", "model.random_init=true"]),
    "shape for a flag": (["model.random_init={model_type: qwen3}"], ["model.random_init", "true or false"]),
    "random model without shape": (["model.config=null"], ["model.config=null", "model.config.model_type=qwen3"]),
    "random model without type": (["model.config.model_type=null"], ["model.config", "no model_type"]),
    "unknown model type": (["model.config.model_type=qwenty"], ["model.config", "qwenty"]),
    "model of bad sizes": (["model.config.num_key_value_heads=0"], ["model.config", "is no model", "correct"]),
    "model the engine does not compute": (["model.config={model_type: gpt2}"], ["model.config", "GPT2LMHeadModel"]),
    "vocabulary too small": (["model.config.vocab_size=5"], ["model.config.vocab_size=5", "17 words"]),
    "bad dtype": (["model.dtype=int8"], ["model.dtype=int8", "float32 or bfloat16"]),
    "bad dtype of masters": (["trainer.dtype=fp32"], ["trainer.dtype=fp32", "trainer.dtype=float32"]),
    "word for the graphs": (["engine.cuda_graphs=maybe"], ["engine.cuda_graphs=maybe", "true or false"]),
    "unknown tag": (
        ["cycle.keep=[params,wieghts]"],
        ["cycle.keep", "unknown tags wieghts", "weights", "cycle.keep=[]"],
    ),
    "tags that are no list": (["cycle.keep=params"], ["cycle.keep=params", "a list of words, as [params, optim]"]),
    "digits that are no numbers": (["eval.also_digits=[two]"], ["eval.also_digits=['two']", "a list of integers"]),
    "digits of another task": (["eval.also_digits=[2]"], ["eval.also_digits=[2]", "task.name=toy"]),
    "trained digits of another task": (
        ["task.also_train_digits=[2]"],
        ["task.also_train_digits=[2]", "task.name=toy", "task.also_train_digits=[]"],
    ),
    "no digits": (["eval.also_digits=[0]"], ["eval.also_digits=[0]", "at least 1", "eval.also_digits=[2]"]),
    "two pool sizes": (["engine.mem_fraction_static=0.5"], ["engine.mem_fraction_static=0.5", "engine.kv_tokens=null"]),
    "no pool size": (["engine.kv_tokens=null"], ["engine.kv_tokens=null", "mem_fraction_static"]),
    "share of no GPU": (
        ["engine.kv_tokens=null", "engine.mem_fraction_static=0.5"],
        ["engine.mem_fraction_static=0.5", "only on a GPU", "engine.kv_tokens=4096"],
    ),
    "share above 1": (
        ["engine.kv_tokens=null", "engine.mem_fraction_static=1.5"],
        ["engine.mem_fraction_static=1.5", "between 0 and 1"],
    ),
    "pool not in pages": (["engine.kv_tokens=100"], ["engine.kv_tokens=100", "engine.kv_tokens=112"]),
    "pool below one request": (["engine.kv_tokens=0"], ["engine.kv_tokens=0", "engine.kv_tokens=16"]),
    "pool too small": (
        ["engine.page_size=1", "engine.kv_tokens=10"],
        ["engine.kv_tokens=10", "one request of 9 + 3 tokens", "engine.kv_tokens=12"],
    ),
    "answer beyond the context": (["sampling.max_tokens=60"], ["sampling.max_tokens=60", "sampling.max_tokens=55"]),
    "greedy training": (["sampling.temperature=0"], ["sampling.temperature=0", "sampling.temperature=1.0"]),
    "not a temperature": (["sampling.temperature=.nan"], ["sampling.temperature=nan", "positive"]),
    "top_p": (["sampling.top_p=0"], ["sampling.top_p=0", "sampling.top_p=1.0"]),
    "one sample": (["grpo.samples_per_prompt=1"], ["grpo.samples_per_prompt=1", "at least 2"]),
    "too many prompts": (["grpo.prompts_per_step=4000"], ["grpo.prompts_per_step=4000", "at most 48"]),
    "clip": (["grpo.clip_low=1"], ["grpo.clip_low=1", "grpo.clip_low=0.2"]),
    "learning rate": (["trainer.learning_rate=-1"], ["trainer.learning_rate=-1", "1e-5"]),
    "unknown task": (["task.name=chess"], ["task.name=chess", "toy, chain_sum"]),
    "task without tokenizer": (
        ["task.name=chain_sum", "task.partial_credit=0"],
        ["model.random_init=true", "task.name=toy"],
    ),
    "partial credit": (["task.name=chain_sum"], ["task.partial_credit=0.5", "task.partial_credit=0"]),
    "all held out": (["task.held_out_fraction=0.999999"], ["task.held_out_fraction", "training"]),
    "no directory": (["model.random_init=false", "model.path=/nowhere"], ["model.path=/nowhere", "smollm2-135m"]),
    "model misspelt": (
        ["model.random_init=false", "model.path=smolm2-135m"],
        ["model.path=smolm2-135m", "did you mean smollm2-135m?"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_that_names_the_key_and_exits_2(mistake, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    overrides, words = MISTAKES[mistake]
    status = main(["run", str(TINY), *overrides, "--run-dir", str(tmp_path / "run")])
    message = capsys.readouterr().err
    assert status == 2
    assert message.count("\n") == 1, message
    for word in words:
        assert word in message
    assert not (tmp_path / "run").exists()


def test_an_unfetched_model_names_the_command_that_brings_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert main(["run", "smollm2-135m", "driver=inprocess"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "model.path=smollm2-135m" in message
    assert "memsaver fetch smollm2-135m" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps: [1", ["not readable as YAML"]),
        ("- steps\n", ["must be a mapping"]),
        ("steps: 3\n", ["engine", "required"]),
        ("steps: 3\nmodle: {}\n", ["modle", "did you mean model?"]),
    ],
)
def test_a_bad_file_is_one_line(text, words, tmp_path):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(recipes.RecipeError) as caught:
        recipes.load(tmp_path / "mine.yaml")
    assert "\n" not in str(caught.value)
    for word in ["mine.yaml", *words]:
        assert word in str(caught.value)


PACKAGED = ["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "smollm2-135m", "smollm2-135m-2digits", "tiny"]


@pytest.mark.parametrize("name", ["tiny.yaml", "recipes/tiny.yaml", str(TINY), "qwen2.5-0.5b.yaml", *PACKAGED])
def test_packaged_recipes_load_by_any_name(name):
    assert recipes.load(name).steps > 0


def test_a_recipe_of_the_working_directory_wins_over_a_packaged_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY.read_text().replace("steps: 50", "steps: 7"))
    assert recipes.load("tiny").steps == 7


def test_a_misspelt_recipe_is_told_what_there_is():
    for wrong, right in (("tinny", "tiny"), ("qwen2.5-0.5", "qwen2.5-0.5b"), ("qwen2.5-1.5b.yml", "qwen2.5-1.5b")):
        with pytest.raises(recipes.RecipeError, match=rf"did you mean {right}\?.*{', '.join(PACKAGED)}"):
            recipes.load(wrong)


def test_overrides_apply_in_order_and_keep_the_rest():
    recipe = recipes.load("tiny", ["steps=3", "steps=4", "sampling.top_k=5", "trainer.learning_rate=1e-4"])
    assert (recipe.steps, recipe.sampling.top_k, recipe.trainer.learning_rate) == (4, 5, 1e-4)
    assert recipe.sampling.max_tokens == recipes.load("tiny").sampling.max_tokens


def test_a_recipe_is_frozen():
    recipe = recipes.load("tiny")
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.steps = 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.sampling.max_tokens = 5


def test_lists_are_replaced_whole():
    assert recipes.load("qwen2.5-0.5b", ["cycle.keep=[kv_cache]"]).cycle.keep == ["kv_cache"]
    assert recipes.load("smollm2-135m", ["eval.also_digits=[3,2]"]).eval.also_digits == [3, 2]
    assert recipes.load("tiny").cycle.keep == recipes.load("tiny").eval.also_digits == []


@pytest.mark.parametrize("digits", ["[1]", "[2,2]", "[0]"])
def test_other_digits_to_train_on_are_others(digits):
    with pytest.raises(recipes.RecipeError, match=r"task.also_train_digits=.* other than task.num_digits=1; set"):
        recipes.load("smollm2-135m", [f"task.also_train_digits={digits}"])


def test_the_trained_digits_cannot_stand_beside_themselves():
    with pytest.raises(recipes.RecipeError, match=r"eval.also_digits=\[2\]: has task.num_digits=2.*drop 2"):
        recipes.load("smollm2-135m", ["task.num_digits=2", "task.also_train_digits=[]"])


@pytest.mark.parametrize("name", PACKAGED)
def test_a_real_model_takes_the_place_of_a_random_one(name):
    words = ["model.path=x", "model.random_init=false", "task.name=chain_sum", "task.partial_credit=0"]
    model = recipes.load(name, words).model
    assert (model.path, model.random_init) == ("x", False)


@pytest.mark.parametrize("name", PACKAGED)
def test_the_resolved_recipe_loads_as_the_same(name, tmp_path):
    recipe = recipes.load(name, ["seed=9", "trainer.weight_decay=0.01"])
    save_recipe(recipe, tmp_path / "recipe.yaml")
    assert recipes.load(tmp_path / "recipe.yaml") == recipe


def test_interpolation_resolves():
    assert recipes.load("tiny", ["seed=${steps}"]).seed == recipes.load("tiny").steps


def test_the_tags_that_may_be_kept_are_the_cycles() -> None:
    assert TAGS == KEEPABLE
