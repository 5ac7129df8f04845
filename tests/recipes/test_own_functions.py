"""Functions of the user in every key that takes one, by module and by file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import recipes
from recipes.errors import RecipeError
from recipes.importing import absolute_name, import_named
from recipes.run import start_run
from recipes.setup.preparation import prepare
from tests.helpers.recipes.tiny_runs import SMALL, MakeRun, rows

# Loss, baseline and scale compute what GRPO's defaults do. The file imports one beside it.
OWN = """
from own_numbers import EPSILON
from trainer_bridge.learning.policy_loss import ppo_clip

def clip(loss, log_ratio, logprobs, advantages, micro):
    return ppo_clip(loss, log_ratio, advantages)

def bare(loss, log_ratio, logprobs, advantages, micro):
    return ppo_clip(loss, log_ratio, advantages).loss

def short(loss, log_ratio, logprobs, advantages, micro):
    return log_ratio[:1]

def mean(group):
    return group.mean()

def spread(group, batch):
    return group.std(ddof=1) + EPSILON

def length(completion):
    return len(completion) / 100
"""
KEYS = {"loss.kind": "own.py:clip", "grpo.baseline": "own:mean", "grpo.scale": "own.py:spread"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "own_numbers.py").write_text("EPSILON = 1e-6\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - before:
        if name.startswith(("own", str(tmp_path))):
            del sys.modules[name]


def test_run_with_functions_that_compute_the_defaults_equals_the_default_run(
    folder: Path, make_run: MakeRun
) -> None:
    """Only the mean of a group may be rounded elsewhere, in fp64."""
    own = [f"{key}={name}" for key, name in KEYS.items()]
    common = [*SMALL, "eval.every=0", "steps=2", "task.workers=0"]
    reward = "task.rewards=[tests.helpers.recipes.reward_functions:kept]"
    start_run("tiny", [*common, *own, "task.rewards=[own.py:length]"], folder / "run")
    for mine, usual in zip(
        rows(folder / "run", "train"), rows(make_run("tiny", *common, reward), "train"), strict=True
    ):
        for figure in ("loss", "grad_norm", "reward", "clip_fraction"):
            assert mine[figure] == pytest.approx(usual[figure], rel=1e-5, abs=1e-6), figure
        assert usual["grad_norm"] > 0


def test_loss_alone_clips_nothing_and_one_of_another_shape_is_refused(folder: Path) -> None:
    common = [*SMALL, "eval.every=0", "steps=1", "task.workers=0"]
    start_run("tiny", [*common, "loss.kind=own.py:bare"], folder / "run")
    assert rows(folder / "run", "train")[0]["clip_fraction"] == 0
    with pytest.raises(Exception, match=r"own\.py:short.* returned \[1\] as loss, and there are"):
        start_run("tiny", [*common, "loss.kind=own.py:short"], folder / "short")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("own.py:absent", r"own\.py has no function absent; define it"),
        ("other.py:clip", r"cannot import other\.py: FileNotFoundError: .*; correct it"),
        ("other:clip", "cannot import other: ModuleNotFoundError: .*; run in the folder of the"),
    ],
)
def test_function_that_cannot_be_imported_is_refused_before_the_run(
    key: str, name: str, rule: str, folder: Path
) -> None:
    with pytest.raises(RecipeError, match=f"{key}={name}: {rule}"):
        prepare(recipes.load("tiny", [f"{key}={name}", "driver=inprocess"]), folder / "run")


def test_files_of_one_stem_are_two_modules_and_a_name_holds_in_another_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "own.py").write_text("def mean(group):\n    return 7\n")
    name = absolute_name("sub/own.py:mean")
    assert import_named("sub/own.py:mean")([1]) == 7 != import_named("own.py:mean")
    monkeypatch.chdir(folder / "sub")
    assert import_named(name) is import_named("own.py:mean")
    assert absolute_name("own:mean") == "own:mean" and absolute_name("ppo") == "ppo"
