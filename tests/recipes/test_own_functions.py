"""Functions of the user in every key that takes one, by module and by file."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import recipes
from recipes.errors import RecipeError
from recipes.importing import NamedFunction, absolute_name, import_named
from recipes.loops.advantages import compare_answers
from recipes.run import start_run
from recipes.setup.preparation import prepare
from tests.helpers.peers import Peer
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

def half(group):
    return 0.5

def nothing(group):
    return None

class Note:
    def __init__(self, number):
        self.number = number

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
        if name.startswith(("own", "memsaver_file_")):
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
        ("other.py:clip", r"cannot import other\.py: FileNotFoundError: .*; give its path by the"),
        ("other:clip", "cannot import other: ModuleNotFoundError: .*; run in the folder of the"),
    ],
)
def test_function_that_cannot_be_imported_is_refused_before_the_run(
    key: str, name: str, rule: str, folder: Path
) -> None:
    with pytest.raises(RecipeError, match=f"{key}={name}: {rule}"):
        words = ["grpo.scale=none", f"{key}={name}", "driver=inprocess"]
        prepare(recipes.load("tiny", words), folder / "run")


def test_own_baseline_and_scale_give_finite_numbers_or_are_named(folder: Path) -> None:
    with pytest.raises(RecipeError, match="grpo.scale=group: would divide by 0 where all rewards"):
        recipes.load("tiny", ["grpo.baseline=own.py:mean"])
    half, spread = NamedFunction("own.py:half"), NamedFunction("own.py:spread")
    assert compare_answers([1.0, 1.0], 2, half, "none") == [0.5, 0.5]
    with pytest.raises(ValueError, match=r"scale .*own\.py:spread.* returned nan"):
        compare_answers([1.0], 1, half, spread)
    with pytest.raises(ValueError, match=r"baseline .*own\.py:nothing.* returned no finite"):
        compare_answers([1.0, 0.0], 2, NamedFunction("own.py:nothing"), "none")


def send_number(pipe: Connection, pickled: bytes) -> None:
    pipe.send(pickle.loads(pickled).number)


def test_objects_of_a_file_pickle_into_a_process_without_it(folder: Path) -> None:
    peer = Peer(send_number, pickle.dumps(import_named("own.py:Note")(3)))
    assert peer.hear() == 3
    peer.bury()


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
