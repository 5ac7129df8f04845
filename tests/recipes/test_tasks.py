"""Sets of problems: generators, splits, custom functions, and what sets share."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.config.sections import ProblemSection, TaskSection
from recipes.errors import RecipeError
from recipes.setup.model_files import decode, toy_tokenizer
from recipes.setup.prompts import PromptFormat
from recipes.tasks import Problem, Task, is_held_out, make_task, make_tasks
from recipes.tasks.gym import signed_terms
from recipes.tasks.toy import TOY_WORDS
from tests.helpers.case_selection import some

HAS_GYM = importlib.util.find_spec("reasoning_gym") is not None  # GPU machines may lack it
DATASETS = importlib.import_module("reasoning_gym.factory").DATASETS if HAS_GYM else {}
with_gym = pytest.mark.skipif(not HAS_GYM, reason="reasoning-gym is not installed")


def sums(digits: int, terms: int = 2, **more: Any) -> ProblemSection:
    """Return the section of sums."""
    parameters = {
        "min_terms": terms,
        "max_terms": terms,
        "min_digits": digits,
        "max_digits": digits,
    }
    pytest.importorskip("reasoning_gym")
    name = "reasoning_gym:chain_sum"
    return ProblemSection(name=name, parameters=parameters, extract="number", **more)


@pytest.fixture(scope="module")
def chain_sum() -> Task:
    return make_task(sums(1))


@pytest.fixture(scope="module")
def toy() -> Task:
    return make_task(ProblemSection(name="toy", parameters={"partial_credit": 0.5}))


def terms_of(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sorted added and the sorted subtracted numbers, parsed word by word."""
    words = str(problem.prompt).rpartition(": ")[2].removesuffix(" =").split()
    signs = ["+", *words[1::2]]
    parts = {
        sign: sorted(int(word) for s, word in zip(signs, words[::2], strict=True) if s == sign)
        for sign in "+-"
    }
    return tuple(parts["+"]), tuple(parts["-"])


@pytest.mark.parametrize(("terms", "digits"), [(2, 1), (2, 2), (3, 1)])
def test_no_held_out_sum_is_trained_on_in_another_order(terms: int, digits: int) -> None:
    """Check that 4 + 3 and 3 + 4 are on one side."""
    task = make_task(sums(digits, terms))
    trained = {terms_of(problem) for problem in task.train}
    assert trained and not trained & {terms_of(problem) for problem in task.held_out}
    share = len(task.held_out) / len(task.problems())
    assert 0.15 < share < 0.25  # of at least 145 groups, equal on every machine


def test_one_digit_sums_are_complete_and_split_by_their_terms(
    chain_sum: Task,
) -> None:
    every = {
        f"{a} {sign} {b}": a + b if sign == "+" else a - b
        for a in range(10)
        for b in range(10)
        for sign in "+-"
    }
    answers: dict[str, int] = {}
    for problem in chain_sum.problems():
        intro, _, sum_ = str(problem.prompt).rpartition(": ")
        assert intro == "State the final answer to the following arithmetic problem"
        answers[sum_.removesuffix(" =")] = int(problem.answer)
        assert is_held_out(signed_terms(problem.text), 0.2) == (problem in chain_sum.held_out)
    # Equal lengths exclude duplicates.
    assert answers == every and len(chain_sum.problems()) == 200
    assert 30 <= len(chain_sum.held_out) <= 50


def test_split_is_the_same_on_every_machine() -> None:
    """Compare with published SHA-256 digests of "", "a" and "abc"."""
    for text, head in (("", 0xE3B0C442), ("a", 0xCA978112), ("abc", 0xBA7816BF)):
        share = head / 2**32
        assert not is_held_out(text, share - 1e-9) and is_held_out(text, share + 1e-9)


UNNAMED = {"graph_color", "rubiks_cube", "boxnet", "rush_hour", "propositional_logic"}
"""Generators whose entries name no answer, because several are right."""
SLOW = {"arc_agi", "codeio", "figlet_font", "futoshiki", "group_anagrams", "knight_swap"}
SLOW |= {"intermediate_integration", "quantum_lock", "rearc", "word_ladder", "zebra_puzzles"}


@pytest.mark.parametrize(
    "name", some(*sorted({*DATASETS} - SLOW - {"composite"}), whole=sorted(SLOW))
)
def test_every_generator_of_reasoning_gym_makes_a_task_that_scores_its_answers(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Skip `composite`, which has no problems of its own."""
    monkeypatch.setattr("recipes.tasks.draws.HASHED", ())
    size = 2 if name == "knight_swap" else 3
    task = make_task(ProblemSection(name=f"reasoning_gym:{name}", parameters={"size": size}))
    problems = task.problems()
    assert 0 < len(problems) <= size and task.name == name
    rewards = {task.score(problem, problem.answer, True).reward for problem in problems}
    assert rewards == {1.0} or (name in UNNAMED and max(rewards) < 0.1)
    assert {task.score(problem, problem.answer, False).reward for problem in problems} == {0.0}
    assert capfd.readouterr().out == ""


@with_gym
@pytest.mark.parametrize(
    ("name", "parameters", "expected"),
    [
        (
            "chian_sum",
            {},
            "task.name=reasoning_gym:chian_sum: reasoning-gym has no generator chian",
        ),
        ("chian_sum", {}, "; set task.name=reasoning_gym:chain_sum"),
        ("chain_sum", {"min_digit": 1}, "task.parameters.min_digit=1: chain_sum has no such par"),
        ("chain_sum", {"min_digit": 1}, "; did you mean min_digits?"),
        ("chain_sum", {"x": 1}, "known here: min_terms, max_terms, "),
        (
            "chain_sum",
            {"min_terms": 0},
            "chain_sum refuses them: AssertionError: min_terms must be",
        ),
        ("chain_sum", {"size": "many"}, "={'size': 'many'}: chain_sum refuses them: "),
        ("composite", {}, "composite refuses them: AssertionError: Must specify at least one"),
    ],
)
def test_generator_that_cannot_be_made_is_refused_in_one_line(
    name: str, parameters: dict[str, Any], expected: str
) -> None:
    with pytest.raises(RecipeError) as raised:
        make_task(ProblemSection(name=f"reasoning_gym:{name}", parameters=parameters))
    assert expected in str(raised.value) and "\n" not in str(raised.value)


@with_gym
def test_slow_generator_tells_how_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("recipes.tasks.draws.PATIENCE", 0.0)
    make_task(ProblemSection(name="reasoning_gym:leg_counting", parameters={"size": 5}))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "memsaver: task.parameters.size=5: drawing takes about 0 s at every start"
    )


def test_held_out_problem_is_not_trained_on_in_another_set() -> None:
    """Mix the toy with itself, once with all problems held out by another share."""
    other = ProblemSection(name="toy", label="other", held_out_fraction=0.6, weight=2.0)
    seen = ProblemSection(name="toy", label="seen")
    tasks = make_tasks(TaskSection(name="toy", mixture=[other]))
    own, mixed = tasks.trained
    held_out = {problem.text for task in tasks.all for problem in task.held_out}
    assert len(held_out) == len(mixed.held_out) > len(own.held_out)
    assert not held_out & {problem.text for task in tasks.trained for problem in task.train}
    count = 48 - len(own.train)
    assert own.left_out == (f"{count} whose prompt another set holds out",) and mixed.left_out == ()
    assert (own.weight, mixed.weight) == (1.0, 2.0)
    with pytest.raises(
        RecipeError, match=r"no problem for training of toy \(48 whose prompt another set h"
    ):
        make_tasks(TaskSection(name="toy"), [seen])
    evaluated = make_tasks(TaskSection(name="toy", held_out_fraction=0), [sums(1)]).all
    assert [len(task.train) for task in evaluated] == [64, 0]
    assert [len(task.held_out) for task in evaluated] == [0, 200]


def test_evaluated_set_is_in_an_arbitrary_order() -> None:
    (_, task) = make_tasks(TaskSection(name="toy"), [sums(2, label="hard")]).all
    first_numbers = {str(problem.prompt).split()[-4] for problem in task.held_out[:43]}
    assert len(first_numbers) > 20


@pytest.mark.parametrize(
    ("section", "name"),
    [
        (ProblemSection(name="toy"), "toy"),
        (ProblemSection(name="a.b:my_task"), "my_task"),
        (ProblemSection(name="reasoning_gym:chain_sum"), "chain_sum"),
        (ProblemSection(name="file", data="data/my train.v2.jsonl"), "my_train.v2"),
        (ProblemSection(name="file", data="data/parts/"), "parts"),
        (ProblemSection(name="file", data="openai/gsm8k-v1.5"), "gsm8k-v1.5"),
        (ProblemSection(name="file", data="x.csv", label="mine"), "mine"),
    ],
)
def test_set_is_named_by_label_or_source(section: ProblemSection, name: str) -> None:
    assert section.set_name == name


@pytest.mark.parametrize(
    ("text", "ended", "exact"),
    [
        ("-4", True, True),
        ("5 - 9 = -4", True, True),
        ("The answer is -4.", True, True),
        ("The answer is -4.", False, False),  # cut off, so the rest is unknown
        ("4", True, False),
        ("-4 or 4", True, False),
        ("", True, False),
    ],
)
def test_chain_sum_scores_the_last_number_of_ended_answers(
    chain_sum: Task, text: str, ended: bool, exact: bool
) -> None:
    score = chain_sum.score(
        Problem(prompt="5 - 9", answer="-4", columns={"metadata": {}}), text, ended
    )
    assert (score.correct, score.reward) == (exact, float(exact))


def test_toy_partial_credit_is_not_correct(toy: Task) -> None:
    def scored(text: str, ended: bool = True) -> tuple[bool, float]:
        score = toy.score(Problem(prompt="first of b e", answer="b"), text, ended)
        return score.correct, score.reward

    assert scored("b") == (True, 1.0)
    assert scored("b", ended=False) == scored("b c") == (False, 0.5)
    assert scored("c b") == scored("") == (False, 0.0)


def test_ids_beyond_the_tokenizer_read_as_unknown_and_score_nothing(toy: Task) -> None:
    """Decode ids outside of the vocabulary; dropping them would make "b <id> end" right."""
    tokenizer = toy_tokenizer(TOY_WORDS)
    (b,) = tokenizer.convert_tokens_to_ids(["b"])
    random_ids = random.Random(0)
    texts = decode(
        tokenizer, [[b, 77], [random_ids.randrange(151_936) for _ in range(512)], [b], []]
    )
    assert texts == ["b <unk>", " ".join(["<unk>"] * 512), "b", ""]
    problem = Problem(prompt="first of b e", answer="b")
    assert [toy.score(problem, text, True).correct for text in texts] == [False, False, True, False]
    assert toy.score(problem, texts[1], False).reward == 0


def test_toy_prompt_follows_the_chat_template() -> None:
    tokenizer = toy_tokenizer(TOY_WORDS)
    form = PromptFormat(tokenizer=tokenizer, template=tokenizer.chat_template)
    (ids,) = form.encode([Problem(prompt="first of b e")])
    words = ["<|im_start|>", "user", "first", "of", "b", "e", "<|im_end|>"]
    assert tokenizer.convert_ids_to_tokens(ids) == [*words, "<|im_start|>", "assistant"]
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids[4:6]) == "b e"
    (longer,) = replace(form, system_prompt="of").encode([Problem(prompt="first of b e")])
    assert len(longer) == len(ids) + 4


OWN = """
from recipes.tasks import Problem, Score, Task, split

def echo(section):
    count = section.parameters["count"]
    problems = [Problem(prompt=f"say {n}", answer=str(n)) for n in range(count)]
    score = lambda problem, text, ended: Score(reward=1.0, correct=text == problem.answer)
    return Task(name="echo", **split(problems, section.held_out_fraction), score=score)

def nothing(section):
    return []

def broken(section):
    return section.colour

def leaves(section):
    raise SystemExit("no data")

def texts(section):
    return Task(name="texts", train=["p"], held_out=[], score=lambda *_: 0.0)

def numbers(section):
    return Problem(prompt="p", answer=7)

def lists(section):
    return Problem(prompt=["p"])

def same(section):
    problems = [Problem(prompt="say b", answer="b"), Problem(prompt="say a", answer="a")]
    score = lambda *_: 0.0
    return Task(name="same", train=problems, held_out=problems, score=score)
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Write a module `own_tasks` to the working directory, which is not on sys.path."""
    (tmp_path / "own_tasks.py").write_text(OWN)
    (tmp_path / "own_syntax.py").write_text("def")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("own_tasks", None)


def test_custom_task_is_imported_from_the_working_directory(own_module: None) -> None:
    count = {"count": 40}
    task = make_task(TaskSection(name="own_tasks:echo", parameters=count))
    assert (task.name, task.source) == ("echo", "task.name=own_tasks:echo")
    assert {p.prompt for p in task.held_out} == {
        f"say {n}" for n in range(40) if is_held_out(f"say {n}", 0.2)
    }
    assert len(task.problems()) == 40
    assert task.score(task.train[0], task.train[0].answer, True).correct
    fraction = (
        "task.held_out_fraction=0.9999: leaves no problem for training of echo; set task.held"
    )
    with pytest.raises(RecipeError, match=fraction):
        make_tasks(TaskSection(name="own_tasks:echo", held_out_fraction=0.9999, parameters=count))


def test_own_train_and_held_out_problems_of_a_custom_task_may_be_the_same(own_module: None) -> None:
    (task,) = make_tasks(TaskSection(name="own_tasks:same")).all
    assert task.train == task.held_out and len(task.train) == 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("own_tasks:missing", "own_tasks has no function missing; define it"),
        ("own_tasks:nothing", "must return a recipes.tasks.Task, not a list"),
        ("own_tasks:broken", "raised AttributeError: 'ProblemSection' object has no attribute "),
        ("own_tasks:leaves", "raised SystemExit: no data"),
        ("own_tasks:texts", "has a str among its problems; use recipes.tasks.Problem"),
        ("own_tasks:numbers", "raised TypeError: answer=7 must be a text; correct it"),
        ("own_tasks:lists", "raised TypeError: prompt=['p'] is neither text nor a tuple of mess"),
        ("no_such_module:echo", "cannot import no_such_module: ModuleNotFoundError"),
        ("own_syntax:echo", "cannot import own_syntax: SyntaxError"),
    ],
)
def test_impossible_custom_task_is_refused_with_its_reason(
    own_module: None, name: str, expected: list[str]
) -> None:
    with pytest.raises(RecipeError, match=f"^task.name={name}: ") as raised:
        make_task(ProblemSection(name=name))
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("parameters", [{"partial": 0.5}, {"partial_credit": "x"}])
def test_toy_refuses_other_parameters(parameters: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=r"^task.parameters={.*}: toy takes only partial_credit"):
        make_task(ProblemSection(name="toy", parameters=parameters))


def test_random_model_learns_the_words_of_prompts_and_answers(chain_sum: Task) -> None:
    chat = ({"role": "user", "content": "say  b"}, {"role": "assistant", "content": "c"})
    problem = Problem(prompt=chat, answer="d\ne")
    assert problem.words == ["say", "b", "c", "d", "e"]
    tasks = make_tasks(TaskSection(name="toy"), [sums(1)])
    assert tasks.words[: len(TOY_WORDS)] == tuple(TOY_WORDS)
    assert {"+", "9", "-9", "arithmetic"} < {*tasks.words}
    assert {*tasks.words} == {*TOY_WORDS}.union(*(p.words for p in chain_sum.problems()))
