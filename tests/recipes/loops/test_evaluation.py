"""Evaluations: figures of sets and samples, the best checkpoint, early ends, and their rules."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import types
from array import array
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import recipes
from memsaver.ops.hash import hash_text
from recipes.cli import main
from recipes.errors import RecipeError
from recipes.logs.checkpoints import Checkpoints
from recipes.logs.run_folder import at_work
from recipes.loops.evaluation import (
    Evaluation,
    check_best,
    evaluate,
    pass_at,
    powers_of_two,
    standing,
)
from recipes.rewards import Scored
from recipes.run import continue_run, start_run
from recipes.setup.model_files import toy_tokenizer
from recipes.setup.pool import demanded_tokens, request_tokens
from recipes.tasks import Problem, Task, Tasks
from rollout import Completion, SamplingParams
from tests.helpers.recipes.fake_sides import fake_runs
from tests.helpers.recipes.scored_answers import scored
from tests.helpers.recipes.tiny_runs import SMALL, MakeRun, rows, same_rows

END = 3  # of the toy tokenizer
LETTERS = "abcdefgh"


@pytest.mark.parametrize("count", range(1, 8))
def test_pass_at_k_equals_the_share_of_subsets_with_a_right_answer(count: int) -> None:
    """Compare with the definition: every subset of k of the answers, as exact fractions."""
    for right, k in itertools.product(range(count + 1), range(1, count + 1)):
        answers = [True] * right + [False] * (count - right)
        hits = [any(subset) for subset in itertools.combinations(answers, k)]
        assert pass_at(k, count, right) == pytest.approx(float(Fraction(sum(hits), len(hits))))


def test_pass_at_k_is_reported_for_powers_of_two_and_all_samples() -> None:
    ks = {1: [1], 2: [1, 2], 3: [1, 2, 3], 4: [1, 2, 4], 6: [1, 2, 4, 6], 8: [1, 2, 4, 8]}
    assert {count: powers_of_two(count) for count in ks} == ks


class Guesser:
    """Rollout that answers with one of the prompt's letters, by a hash of prompt and seed.

    Every fifth answer is cut off.

    Attributes:
        calls: Parameters of each call of `generate`.
    """

    def __init__(self) -> None:
        self.calls: list[list[SamplingParams]] = []

    def generate(
        self, prompts: list[list[int]], params: list[SamplingParams]
    ) -> list[list[Completion]]:
        self.calls.append(params)
        return [
            [self._answer(prompt, f"{prompt}/{param.seed}/{sample}") for sample in range(param.n)]
            for prompt, param in zip(prompts, params, strict=True)
        ]

    def _answer(self, prompt: list[int], key: str) -> Completion:
        draw = hash_text(key)
        ids = [prompt[draw % len(prompt)], *([END] if draw % 5 else [prompt[0]] * 2)]
        return Completion(
            token_ids=ids,
            logprobs=[0.0] * len(ids),
            finish_reason="stop" if draw % 5 else "length",
            weight_versions=[1] * len(ids),
        )


class FakeRewards:
    """Rewards of half a point for each word, for which `a` is the only right answer.

    Args:
        refused: Letters with which an answer begins that gets no reward, c as a fault.
    """

    def __init__(self, refused: str = "") -> None:
        self._refused = refused

    def submit(self, answers: Sequence[Any]) -> Callable[[], list[Scored]]:
        return lambda: [self._score(answer.text, answer.ended) for answer in answers]

    def _score(self, text: str, ended: bool) -> Scored:
        if text[0] in self._refused:
            return scored(reward=None, correct=True, fault="refused" if text[0] == "c" else "")
        reward = len(text.split()) / 2
        return scored(reward=reward, correct=ended and text == "a", figures={"words": 2 * reward})


def judge(setup: Any, refused: str = "") -> tuple[Evaluation, list[list[SamplingParams]]]:
    """Return an evaluation, and the parameters of the calls that it made."""
    rollout, rewards = Guesser(), FakeRewards(refused)
    return evaluate(rollout, setup, rewards), rollout.calls  # type: ignore[arg-type]


def problems(count: int) -> tuple[Problem, ...]:
    pairs = itertools.islice(itertools.permutations(LETTERS, 2), count)
    return tuple(Problem(prompt=" ".join(pair), answer="a") for pair in pairs)


def make_setup(*words: str, own: int = 9) -> Any:
    """Return a setup with a set of `own` problems, one of 2 more to train on, and one of 30."""
    tokenizer = toy_tokenizer(list(LETTERS))

    def encoded(problem: Problem) -> Problem:
        ids = tokenizer.convert_tokens_to_ids(problem.text.split())
        return dataclasses.replace(problem, prompt_ids=array("i", ids))

    def task(name: str, held_out: tuple[Problem, ...]) -> Task:
        held_out = tuple(map(encoded, held_out))
        return Task(name=name, train=problems(1), held_out=held_out, score=lambda *_: 0.0)

    trained = (task("own", problems(own)), task("more", problems(2)))
    tasks = Tasks(trained=trained, evaluated=(task("test", problems(30)),))
    recipe = recipes.load("tiny", words)
    known = {"recipe": recipe, "tasks": tasks, "tokenizer": tokenizer, "conversations": None}
    return types.SimpleNamespace(**known)


def test_greedy_evaluation_answers_all_sets_in_one_call() -> None:
    evaluation, (params,) = judge(make_setup("eval.problems=8"))
    assert len(params) == 8 + 2 + 8
    assert {(param.temperature, param.n, param.max_tokens) for param in params} == {(0.0, 1, 3)}
    row = evaluation.row
    assert [row[f"problems{name}"] for name in ("", "_more", "_test")] == [8, 2, 8]
    assert not any("@" in name for name in row)
    assert len(evaluation.scores) == len(evaluation.samples.texts) == 18


def test_figures_of_sampled_evaluation_equal_their_definitions() -> None:
    """Compute every figure again from answers and scores, with some answers without a reward."""
    words = ["eval.problems=20", "eval.samples=6", "eval.temperature=0.7"]
    evaluation, (params,) = judge(make_setup(*words), refused="bc")
    assert {(param.temperature, param.n) for param in params} == {(0.7, 6)}
    samples, sizes, begin = evaluation.samples, {"": 9, "_more": 2, "_test": 20}, 0
    for name, size in sizes.items():
        mine = range(begin, begin + 6 * size)
        begin = mine.stop
        exact = [samples.ended[i] and samples.texts[i] == "a" for i in mine]
        scored = [i for i in mine if samples.texts[i][0] not in "bc"]
        groups = [exact[start : start + 6] for start in range(0, 6 * size, 6)]
        expected = {
            "correct": sum(exact) / len(exact),
            "avg@6": sum(exact) / len(exact),
            "reward": sum(len(samples.texts[i].split()) / 2 for i in scored) / len(scored),
            "length": sum(len(samples.response_ids[i]) for i in mine) / len(mine),
            "cut_off": sum(not samples.ended[i] for i in mine) / len(mine),
            "problems": size,
            "unscored": len(mine) - len(scored),
            "faults": sum(samples.texts[i][0] == "c" for i in mine),
        }
        for k in (1, 2, 4, 6):
            chances = [
                sum(map(any, itertools.combinations(group, k)))
                / len([*itertools.combinations(group, k)])
                for group in groups
            ]
            expected[f"pass@{k}"] = sum(chances) / size
        found = {figure: evaluation.row[figure + name] for figure in expected}
        assert found == pytest.approx(expected), name
        words = [len(samples.texts[i].split()) for i in scored]
        found = evaluation.row["rewards" + name]["words"]
        assert found == pytest.approx({"mean": fmean(words), "std": stdev(words)}), name
        assert evaluation.row["unscored" + name] > 0


def test_evaluations_repeat_their_seeds_which_differ_by_problem_set_and_recipe() -> None:
    words = ["eval.samples=2", "eval.temperature=1.0"]
    calls = [judge(make_setup(*words, *more))[1][0] for more in ([], [], ["seed=1"])]
    first, again, other = ([param.seed for param in params] for params in calls)
    assert first == again and len({*first, *other}) == 2 * len(first)


def test_answers_without_any_reward_leave_the_mean_out() -> None:
    row = judge(make_setup(), refused=LETTERS)[0].row
    assert "reward" not in row and row["unscored"] == 9 and row["correct"] == 0


def test_first_set_with_problems_has_the_plain_names() -> None:
    setup = make_setup("eval.best=correct_test", own=0)
    row = judge(setup)[0].row
    assert row["problems"] == 2 and row["problems_test"] == 30 and "problems_more" not in row
    check_best(setup)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["eval.samples=4"], "eval.samples=4: .*same greedy answer.*; set eval.samples=1, or eval"),
        (["eval.temperature=1e-7"], r"eval.temperature=1e-07: must be 0 \(greedy\) or at least"),
        (["eval.patience=2", "eval.every=0"], "eval.patience=2: needs evaluations.*; set eval.pat"),
        (["eval.patience=2", "eval.best=null"], "eval.patience=2: needs a figure.*eval.best=null"),
    ],
)
def test_contradicting_keys_are_refused_in_one_line(words: list[str], fault: str) -> None:
    with pytest.raises(RecipeError, match=f"{fault}[^\n]*$"):
        recipes.load("tiny", words)


def test_unknown_best_figure_is_refused_with_the_figures_that_exist() -> None:
    several = ["eval.samples=2", "eval.temperature=1.0"]
    for name in ("length", "pass@3", "correct_own"):
        with pytest.raises(RecipeError) as refused:
            check_best(make_setup(f"eval.best={name}", *several))
        one_set = ["correct", "reward", "avg@2", "pass@1", "pass@2"]
        names = [f"{figure}{end}" for end in ("", "_more", "_test") for figure in one_set]
        assert str(refused.value).endswith(f"set one of {', '.join(names)}")
    for name in ("pass@2_test", "reward_more", "null"):
        check_best(make_setup(f"eval.best={name}", *several))
    check_best(make_setup("eval.best=length", "eval.every=0"))


def test_pool_has_room_for_all_answers_of_an_evaluation() -> None:
    words = ["engine.kv_tokens=null", "engine.max_running=1000", "eval.problems=20"]
    words += ["loop.prompts_per_step=8", "loop.samples_per_prompt=2", "eval.temperature=1.0"]
    recipe = recipes.load("tiny", [*words, "eval.samples=3", "eval.sets=[{name: toy, label: x}]"])
    assert demanded_tokens(recipe, 5) == 2 * 20 * 3 * request_tokens(recipe, 5)


@given(st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=12), st.data())
def test_standing_names_the_first_best_evaluation_and_counts_those_after_it(
    values: list[int | None], data: st.DataObject
) -> None:
    """Compare with a fold over the evaluations, in which only a strictly better one is taken.

    Evaluations with failures of any set are put between, and change nothing.
    """
    best, since = None, 0
    for step, value in enumerate(values):
        if value is not None and (best is None or value > best[1]):
            best, since = (step, value), 0
        elif value is not None:
            since += 1
    evaluations = [
        {"step": step, **({} if value is None else {"x": value})}
        for step, value in enumerate(values)
    ]
    expected = best and (*best, since)
    for place in data.draw(st.lists(st.integers(0, len(values)), max_size=3)):
        failed = {"step": 99, "x": 9, "faults": 0, "faults_b": 1}
        evaluations.insert(place, failed)
    assert standing(evaluations, "x") == expected and standing(evaluations, None) is None


@pytest.fixture
def quality(monkeypatch: pytest.MonkeyPatch, no_pictures: None) -> Iterator[dict[int, float]]:
    """Yield a mapping from updates to the exact match that an evaluation then reports."""
    values: dict[int, float] = {}

    def judged(rollout: Any, setup: Any, rewards: Any) -> Evaluation:
        evaluation = evaluate(rollout, setup, rewards)
        updates = rollout.weights_version - 1
        return dataclasses.replace(evaluation, row={**evaluation.row, "correct": values[updates]})

    monkeypatch.setattr("recipes.loops.loop.evaluate", judged)
    yield values


def tensors(checkpoint: Path) -> dict[str, bytes]:
    """Return the bytes of the checkpoint's tensors by name."""
    (file,) = checkpoint.glob("*.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(file).items()}


def kept(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").glob("step_*")}


def test_best_checkpoint_has_the_weights_that_were_judged_and_stays(
    make_run: MakeRun,
    quality: dict[int, float],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Expect a checkpoint of step 2, which is due only because it is the best.

    The evaluation after step 4 is equally good, which is no improvement.
    """
    every = make_run("tiny", *SMALL, "steps=5", "eval.every=0", "checkpoint.every=1",
                     "checkpoint.keep=9")  # fmt: skip
    quality.update({0: 0.1, 2: 0.6, 4: 0.6, 5: 0.3})
    folder = tmp_path / "run"
    start_run("tiny", [*SMALL, "steps=5", "checkpoint.every=3"], folder)
    best = Checkpoints(folder).best()
    assert best is not None and best.name == "step_2" and kept(folder) == {"step_2", "step_5"}
    assert Checkpoints(folder).newest().name == "step_5"
    for name in kept(folder):
        assert tensors(folder / "checkpoints" / name) == tensors(every / "checkpoints" / name) != {}
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        "best: correct 0.600 after 2 updates (checkpoints/step_2)",
        f"done: {folder}; the model: {folder}/exports/step_5",
    ]
    # A resumed run restores the best.
    quality.update({6: 0.5, 7: 0.6})
    continue_run(folder, None, ["steps=7", "eval.every=6"])
    assert kept(folder) == {"step_2", "step_7"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture
def fakes(model: Path) -> Iterator[None]:
    """Run with sides that hold no tensors, which takes a tenth of the time."""
    with fake_runs(model):
        yield


@pytest.mark.usefixtures("fakes")
def test_last_evaluation_can_be_the_best(quality: dict[int, float], tmp_path: Path) -> None:
    quality.update({0: 0.1, 2: 0.3, 3: 0.5})
    start_run("tiny", [*SMALL, "steps=3"], tmp_path)
    assert (tmp_path / "checkpoints" / "best").read_text() == "step_3\n"
    assert kept(tmp_path) == {"step_3"}


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("word", ["checkpoint.every=0", "checkpoint.every=5"])
def test_initial_weights_and_runs_without_checkpoints_keep_no_best(
    word: str, quality: dict[int, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Expect no checkpoint of step 0, because model.path has the initial weights."""
    quality.update({0: 0.5, 2: 0.3, 3: 0.2} if word.endswith("5") else {0: 0.1, 2: 0.2, 3: 0.4})
    start_run("tiny", [*SMALL, "steps=3", word], tmp_path)
    assert Checkpoints(tmp_path).best() is None
    found = "0.500 before the first update" if word.endswith("5") else "0.400 after 3 updates"
    assert capsys.readouterr().out.splitlines()[-2] == f"best: correct {found}"


@pytest.mark.usefixtures("fakes")
def test_run_ends_early_after_evaluations_without_improvement_and_can_go_on(
    quality: dict[int, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quality.update({0: 0.1, 2: 0.6, 4: 0.6, 6: 0.5, 8: 0.7, 10: 0.1})
    words = [*SMALL, "steps=10", "checkpoint.every=5"]
    early, straight = tmp_path / "early", tmp_path / "straight"
    assert main(["run", "tiny", *words, "eval.patience=2", "--run-dir", str(early)]) == 0
    ending = "6 updates: 2 evaluations without a better correct (eval.patience=2)"
    out = capsys.readouterr().out.splitlines()
    assert out[-2:] == [
        "best: correct 0.600 after 2 updates (checkpoints/step_2)",
        f"ended early after {ending}: {early}; the model: {early}/exports/step_6",
    ]
    assert [row["step"] for row in rows(early, "train")] == [1, 2, 3, 4, 5, 6]
    assert kept(early) == {"step_2", "step_6"}
    assert main(["run", "--resume", str(early)]) == 2
    rule = "eval.patience=2: none of 2 evaluations was better than that after 2 updates"
    line = f"memsaver: --resume {early}: {rule}; set eval.patience=0 to continue\n"
    assert capsys.readouterr().err == line
    continue_run(early, None, ["eval.patience=3"])
    start_run("tiny", words, straight)
    assert same_rows(early, straight)
    assert kept(early) == kept(straight) == {"step_8", "step_10"}


@pytest.mark.usefixtures("fakes")
def test_early_end_without_checkpoints_saves_none(
    quality: dict[int, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quality.update({0: 0.5, 2: 0.4})
    words = [*SMALL, "steps=10", "checkpoint.every=0", "eval.patience=1"]
    start_run("tiny", words, tmp_path)
    assert "ended early after 2 updates" in capsys.readouterr().out.splitlines()[-1]
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.usefixtures("fakes")
def test_resume_without_a_folder_takes_the_newest_run_with_rows(
    make_run: MakeRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    no_pictures: None,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--resume"]) == 2
    line = "--resume: no run under runs/ has begun; name its folder: memsaver run --resume DIR"
    assert capsys.readouterr().err == f"memsaver: {line}\n"
    for name in ("older", "newer"):
        shutil.copytree(make_run("tiny", *SMALL, "steps=1"), tmp_path / "runs" / name)
        (tmp_path / "runs" / name / "metrics.jsonl").touch()
    empty = tmp_path / "runs" / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").touch()
    assert main(["run", "--resume", "steps=2", "checkpoint.every=1"]) == 0
    assert "resuming runs/newer" in capsys.readouterr().out
    done = {name: len(rows(tmp_path / "runs" / name, "train")) for name in ("older", "newer")}
    assert done == {"older": 1, "newer": 2}
    assert main(["run", "checkpoint.every=1", "--resume"]) == 2
    assert "runs/newer: steps=2: the run is done after 2 steps" in capsys.readouterr().err
    with at_work(Path("runs/newer")):
        assert main(["run", "--resume"]) == 2
    assert "runs/newer: another run uses it; wait" in capsys.readouterr().err
