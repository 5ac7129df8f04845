"""Loading of recipes, the page of all keys, and the tags that recipes share with the cycle."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import recipes
from recipes.cli import main
from recipes.config.recipe import FIELDS
from recipes.config.sections import TAGS, TRAINED, LoopSection
from recipes.errors import RecipeError
from trainer_bridge import tag_names
from trainer_bridge.cycle import RESIDENT_TAGS

TINY = Path(recipes.__file__).parent / "tiny.yaml"
DOCS = Path(recipes.__file__).parents[1] / "docs"


def test_run_of_an_unfetched_model_names_the_fetch_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["run", "smollm2-135m", "driver=inprocess"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "model.path=smollm2-135m" in message
    assert "memsaver fetch smollm2-135m" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps: [1", ["while parsing a flow sequence"]),
        ("- steps\n", ["must be a mapping of keys to values"]),
        ("steps: 3\n", ["model: is required and has no value; set model.KEY=VALUE", "task: is"]),
        (
            "modle: {}\ntask: {name: toy}\nsteps: 3",
            ["model: is required", "modle: unknown key; did"],
        ),
    ],
)
def test_bad_file_is_refused_with_a_line_for_each_fault(
    text: str, words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(recipes.RecipeError) as caught:
        recipes.load(tmp_path / "mine.yaml")
    lines = str(caught.value).splitlines()
    for line, start in zip(lines, words, strict=True):
        assert line.startswith(f"mine.yaml: {start}")


@pytest.mark.parametrize(
    "name", ["tiny", "tiny.yaml", "recipes/tiny.yaml", str(TINY), "qwen2.5-0.5b.yaml"]
)
def test_packaged_recipe_loads_by_any_name(name: str) -> None:
    assert recipes.load(name).steps > 0


def test_recipe_in_working_directory_takes_precedence_over_packaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY.read_text().replace("steps: 50", "steps: 7"))
    assert recipes.load("tiny").steps == 7


def test_misspelled_recipe_is_answered_with_the_closest_name() -> None:
    for wrong, right in (
        ("tinny", "tiny"),
        ("qwen2.5-0.5", "qwen2.5-0.5b"),
        ("qwen2.5-1.5b.yml", "qwen2.5-1.5b"),
    ):
        with pytest.raises(
            recipes.RecipeError, match=rf"did you mean {right}\?.*`memsaver recipes` lists"
        ):
            recipes.load(wrong)


def test_overrides_apply_in_order_and_keep_other_keys(tmp_path: Path) -> None:
    plain = recipes.load("tiny")
    recipe = recipes.load("tiny", ["steps=3", "steps=4", "sampling.max_tokens=5"])
    assert (recipe.steps, recipe.sampling.max_tokens) == (4, 5)
    assert recipe.sampling.temperature == plain.sampling.temperature
    assert plain.cycle.resident == plain.task.mixture == []  # lists are replaced whole
    assert recipes.load("tiny", ["cycle.resident=[kv_cache]"]).cycle.resident == ["kv_cache"]
    assert recipes.load("tiny", ["cycle.resident=auto"]).cycle.resident == "auto"
    assert recipes.load("tiny", ["task.rewards=own.py:brief"]).task.rewards == ["own.py:brief"]
    sets = recipes.load("smollm2-135m", ["eval.sets=[{name: toy}]", "eval.sets[0].label=easy"])
    assert [part.label for part in sets.eval.sets] == ["easy"]
    assert recipes.load("smollm2-135m", ["task.mixture[0].weight=3"]).task.mixture[0].weight == 3
    (tmp_path / "own.yaml").write_text(f"{TINY.read_text()}\nloss: {{kind: 'own.py:loss'}}")
    assert recipes.load(tmp_path / "own.yaml", ["loss.kind=ppo"]).loss.kind == "ppo"
    for frozen in (recipe, recipe.sampling):
        with pytest.raises(dataclasses.FrozenInstanceError):
            frozen.max_tokens = 5


def test_figure_of_before_is_read_under_its_present_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert recipes.load("tiny", ["eval.best=exact_match_sums"]).eval.best == "correct_sums"
    older = ["sampling.top_k=0", "sampling.top_p=1.0", "trainer.batch_invariant=false"]
    assert recipes.load("tiny", older) == recipes.load("tiny")
    rule = r"^command line: trainer\.batch_invariant: is gone, and .*; leave the key out$"
    with pytest.raises(RecipeError, match=rule):
        recipes.load("tiny", ["trainer.batch_invariant=true"])
    line = "memsaver: eval.best=exact_match_sums: is called correct_sums now and read so\n"
    assert capsys.readouterr().err == line


def test_keys_of_a_step_in_sections_of_before_are_read_as_keys_of_the_loop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The algorithm's section counts, and what is typed wins over the file in either form."""
    file = tmp_path / "older.yaml"
    values = yaml.safe_load(TINY.read_text())
    values.pop("loop")
    values |= {"grpo": {"epochs": 2, "scale": "none"}, "ppo": {"epochs": 3, "prompts_per_step": 5}}
    file.write_text(yaml.safe_dump(values))
    grpo = recipes.load(file, ["loop.mini_batches=2"])
    assert (grpo.loop, grpo.grpo.scale) == (LoopSection(epochs=2, mini_batches=2), "none")
    assert (grpo.prompts_per_step, grpo.samples_per_prompt) == (8, 8)
    stated = ["loop.mini_batches=2", "loop.prompts_per_step=8", "loop.samples_per_prompt=8"]
    assert grpo != recipes.load(file, stated) == grpo.loop_now()
    ppo = recipes.load(file, ["algorithm=ppo", "ppo.prompts_per_step=6"])
    assert ppo.loop == LoopSection(epochs=3, prompts_per_step=6)
    assert (ppo.prompts_per_step, ppo.samples_per_prompt) == (6, 2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "memsaver: grpo.epochs: keys of loop now, and read so"
    assert recipes.load("tiny", ["grpo.epochs=2"]) == recipes.load("tiny", ["loop.epochs=2"])
    with pytest.raises(RecipeError, match=r"ppo\.epochs=2: has no effect with algorithm=grpo"):
        recipes.load("tiny", ["ppo.epochs=2"])


def test_model_path_replaces_a_random_model() -> None:
    assert recipes.load("qwen2.5-0.5b", ["model.path=x"]).model.path == "x"
    random = recipes.load("smollm2-135m", ["model.path=null", "model.shape=qwen2.5-0.5b"])
    assert random.model.random_init


def test_keys_page_equals_generated_output_and_every_key_is_described(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Update the page with `memsaver keys > docs/reference/keys.md`."""
    assert main(["keys"]) == 0
    assert capsys.readouterr().out == (DOCS / "reference" / "keys.md").read_text()
    assert all(field.description for field in FIELDS.values())


def test_keys_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert {*schema["properties"]} == {key for key in FIELDS if "." not in key}
    dtype = schema["$defs"]["ModelSection"]["properties"]["dtype"]
    assert (dtype["enum"], dtype["default"]) == (["float32", "bfloat16", "float16"], "bfloat16")


@pytest.mark.parametrize("words", [["recipes"], ["keys", "--schema"]], ids=["short", "long"])
def test_command_ends_silently_when_its_output_pipe_is_closed(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "recipes.cli", *words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, cwd=DOCS.parent)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_recipe_tags_equal_those_of_the_cycle() -> None:
    assert RESIDENT_TAGS == TAGS and TRAINED == tag_names.TRAINED
