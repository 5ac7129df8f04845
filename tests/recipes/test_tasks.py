"""Split of problems, parsing of answers, and scores."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.cli import main
from recipes.config.models import TaskSection
from recipes.errors import RecipeError, ScorerError
from recipes.setup.models import decode, encode_prompt, toy_tokenizer
from recipes.tasks import (
    TOY_WORDS,
    Problem,
    Score,
    Task,
    extract_number,
    is_held_out,
    make_task,
    score_answer,
    signed_terms,
)


@pytest.fixture(scope="module")
def chain_sum() -> Task:
    return make_task(TaskSection(name="chain_sum"))


@pytest.fixture(scope="module")
def toy() -> Task:
    return make_task(TaskSection(name="toy", partial_credit=0.5))


def terms_of(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sorted added and the sorted subtracted numbers, parsed word by word."""
    words = problem.question.rpartition(": ")[2].removesuffix(" =").split()
    signs = ["+", *words[1::2]]
    parts = {
        sign: sorted(int(word) for s, word in zip(signs, words[::2], strict=True) if s == sign)
        for sign in "+-"
    }
    return tuple(parts["+"]), tuple(parts["-"])


@pytest.mark.parametrize(("terms", "digits"), [(2, 1), (2, 2), (3, 1)])
def test_no_held_out_sum_is_trained_on_in_another_order(terms: int, digits: int) -> None:
    """Check that 4 + 3 and 3 + 4 are on one side, and that kinds of other digits share no sum."""
    section = TaskSection(name="chain_sum", num_terms=terms, num_digits=digits)
    task = make_task(section)
    trained = {terms_of(problem) for problem in task.train}
    assert trained and not trained & {terms_of(problem) for problem in task.held_out}
    share = len(task.held_out) / len(list(task.problems()))
    assert 0.15 < share < 0.25  # of at least 145 groups, equal on every machine
    beside = make_task(TaskSection(name="chain_sum", num_digits=3), also_digits=[digits]).beside[
        f"{digits}_digits"
    ]
    assert terms != 2 or set(beside) == set(task.held_out)


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
    for problem in [*chain_sum.train, *chain_sum.held_out]:
        intro, _, sum_ = problem.question.rpartition(": ")
        assert intro == "State the final answer to the following arithmetic problem"
        answers[sum_.removesuffix(" =")] = int(problem.answer)
        assert is_held_out(signed_terms(problem.question), 0.2) == (problem in chain_sum.held_out)
    # Equal lengths exclude duplicates.
    assert answers == every and len(chain_sum.train) + len(chain_sum.held_out) == 200
    assert 30 <= len(chain_sum.held_out) <= 50


def test_split_is_the_same_on_every_machine() -> None:
    """Compare with published SHA-256 digests of "", "a" and "abc"."""
    for text, head in (("", 0xE3B0C442), ("a", 0xCA978112), ("abc", 0xBA7816BF)):
        share = head / 2**32
        assert not is_held_out(text, share - 1e-9) and is_held_out(text, share + 1e-9)


def test_further_digits_are_separate_kinds_with_the_same_split(chain_sum: Task) -> None:
    task = make_task(TaskSection(name="chain_sum", also_train_digits=[2]), also_digits=[2, 3])
    own, further = task.kinds
    assert (own, task.held_out) == (chain_sum.train, chain_sum.held_out)
    assert len(further) > 3000 and list(task.beside) == ["2_digits", "3_digits"]
    beside = [(n, task.beside[f"{n}_digits"], True) for n in (2, 3)]
    for digits, problems, held_out in [(2, further, False), *beside]:
        assert len(problems) > 800
        for problem in problems:
            assert {len(word) for word in problem.question.split() if word.isdigit()} == {digits}
            assert is_held_out(signed_terms(problem.question), 0.2) == held_out
    for problem in task.beside["3_digits"]:
        assert task.score(problem, problem.answer, True).exact
    first_numbers = {problem.question.split()[-4] for problem in task.beside["2_digits"][:43]}
    assert len(first_numbers) > 20, (
        "the first held-out problems are alike, so they are no fair sample"
    )
    assert {*task.problems()} == {*own, *further, *task.held_out}.union(*task.beside.values())


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", "7"),
        ("The final answer is 5 - 9 = -4.", "-4"),
        ("= \u22124", "-4"),
        ("9-4", "4"),
        ("9 - 4", "4"),
        ("9 -4", "4"),
        ("(-4)", "-4"),
        ("1,000, I think", "1,000"),
        ("3.5.", "3.5"),
        ("It is 12", "12"),
        ("no idea", None),
    ],
)
def test_last_number_is_read_with_its_sign(text: str, number: int) -> None:
    assert extract_number(text) == number


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
    score = chain_sum.score(Problem(question="5 - 9", answer="-4"), text, ended)
    assert (score.exact, score.reward) == (exact, float(exact))


def test_toy_partial_credit_is_no_exact_match(toy: Task) -> None:
    def scored(text: str, ended: bool = True) -> tuple[bool, float]:
        score = toy.score(Problem(question="first of b e", answer="b"), text, ended)
        return score.exact, score.reward

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
    problem = Problem(question="first of b e", answer="b")
    assert [toy.score(problem, text, True).exact for text in texts] == [False, False, True, False]
    assert toy.score(problem, texts[1], False).reward == 0


def test_toy_prompt_follows_the_chat_template() -> None:
    tokenizer = toy_tokenizer(TOY_WORDS)
    ids = encode_prompt(tokenizer, "first of b e")
    words = ["<|im_start|>", "user", "first", "of", "b", "e", "<|im_end|>"]
    assert tokenizer.convert_ids_to_tokens(ids) == [*words, "<|im_start|>", "assistant"]
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids[4:6]) == "b e"
    assert len(encode_prompt(tokenizer, "first of b e", "of")) == len(ids) + 4


OWN = """
from recipes.tasks import Problem, Score, Task, split

def echo(section):
    problems = [Problem(question=f"say {n}", answer=str(n)) for n in range(section.num_digits * 20)]
    score = lambda problem, text, ended: Score(reward=1.0, exact=text == problem.answer)
    return Task(name="echo", **split(problems, section.held_out_fraction), score=score)

def nothing(section):
    return []

def broken(section):
    return section.colour

def leaves(section):
    raise SystemExit("no data")

def scored(score):
    problems = [Problem(question="say b", answer="b"), Problem(question="say a", answer="a")]
    return Task(name="scored", train=problems, held_out=problems, score=score, words=("say", "a"))

def raising(section):
    return scored(lambda problem, text, ended: int("a judge's answer"))
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
    task = make_task(TaskSection(name="own_tasks:echo", num_digits=2))
    assert task.name == "own_tasks:echo"
    assert (len(list(task.problems())), task.beside) == (40, {})
    assert {p.question for p in task.held_out} == {
        f"say {n}" for n in range(40) if is_held_out(f"say {n}", 0.2)
    }
    assert task.score(task.train[0], task.train[0].answer, True).exact
    with pytest.raises(RecipeError, match="leaves no problem for training"):
        make_task(TaskSection(name="own_tasks:echo", held_out_fraction=0.9999))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("own_tasks:missing", "own_tasks has no function missing; define it"),
        ("own_tasks:nothing", "returned a list; return a recipes.tasks.Task"),
        ("own_tasks:broken", "raised AttributeError: 'TaskSection' object has no attribute "),
        ("own_tasks:leaves", "raised SystemExit: no data"),
        ("no_such_module:echo", "cannot import no_such_module: ModuleNotFoundError"),
        ("own_syntax:echo", "cannot import own_syntax: SyntaxError"),
    ],
)
def test_impossible_custom_task_is_refused_with_its_reason(
    own_module: None, name: str, expected: list[str]
) -> None:
    with pytest.raises(RecipeError, match=f"^task.name={name}: ") as raised:
        make_task(TaskSection(name=name))
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)


def test_random_model_without_words_of_the_task_is_refused(
    own_module: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["task.name=own_tasks:echo", "grpo.prompts_per_step=2", "steps=1"]
    assert main(["run", "tiny", *words, "--run-dir", str(tmp_path / "run")]) == 2
    rule = "task.name=own_tasks:echo: a random model has no tokenizer for this task; set"
    assert rule in capsys.readouterr().err


SCORED = Task(name="m:f", train=(), held_out=(), score=lambda *_: 0.0)
ASKED = Problem(question="first of\na b", answer="a")


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        *((number, (0.5, False)) for number in (0.5, np.float32(0.5), torch.tensor(0.5))),
        *((number, (1.0, True)) for number in (1, True, np.bool_(True), torch.ones(1))),
    ],
)
def test_reward_may_be_a_number_of_any_kind(reward: Any, expected: tuple[float, bool]) -> None:
    """Count a bare number as an exact match from 1 on."""
    bare, scored = replace(SCORED, score=lambda *_: reward), Score(reward=reward, exact=np.True_)
    score = score_answer(bare, ASKED, "a", True)
    assert (score.reward, score.exact) == expected
    assert (type(score.reward), type(score.exact)) == (float, bool)
    whole = score_answer(replace(SCORED, score=lambda *_: scored), ASKED, "a", True)
    assert whole == Score(reward=expected[0], exact=True)


@pytest.mark.parametrize(
    ("score", "words"),
    [
        *(
            (lambda *_, value=value: value, words)
            for value, words in [
                (math.nan, "returned a reward of nan, not finite"),
                (10**400, "returned a reward of 1000"),
                (None, "returned a reward of type NoneType"),
                ("1.0", "returned a reward of type str"),
                (torch.ones(2), "returned a reward of type Tensor"),
                (Score(reward=math.inf, exact=False), "returned a reward of inf"),
                (Score(reward=1.0, exact=None), "returned exact=None, neither true nor false"),
            ]
        ),
        (lambda *_: sys.exit("bye"), r"raised SystemExit: bye (.*test_tasks.py:\d+)"),
        (lambda *_: json.loads("{"), r"raised JSONDecodeError: .* (.*test_tasks.py:\d+)"),
        (lambda problem, text: 0, r"test_tasks.py:\d+, called with \(problem, text, ended\)\)"),
    ],
)
def test_invalid_score_is_reported_with_problem_and_answer(score: Any, words: str) -> None:
    with pytest.raises(ScorerError, match=words) as raised:
        score_answer(replace(SCORED, score=score), ASKED, "b\nc", True)
    line = str(raised.value)
    assert line.startswith("task.name=m:f: the scorer ") and "\n" not in line
    assert r"for the answer 'b\nc' to 'first of\na b'; " in line


def test_scorer_is_tried_before_anything_is_written(
    own_module: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["task.name=own_tasks:raising", "grpo.prompts_per_step=1", "steps=1"]
    assert main(["run", "tiny", *words, "--run-dir", str(tmp_path / "run")]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and not (tmp_path / "run").exists()
    assert "task.name=own_tasks:raising: the scorer raised ValueError: invalid literal" in line
    assert "own_tasks.py:" in line and "for the answer 'b' to 'say b'" in line
