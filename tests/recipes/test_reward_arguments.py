"""What reward functions are called with, what they may do to it, and which of them decides."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes.config.sections import ProblemSection, TaskSection
from recipes.errors import RecipeError
from recipes.rewards import Answer, Rewards, RewardSet
from recipes.tasks import make_tasks
from recipes.tasks.scoring import open_rewards, to_answer, try_rewards

SEEN: dict[str, Any] = {}


def sees(completion: str, **arguments: Any) -> float:
    SEEN.update(arguments, completion=completion)
    return 1.0


def sees_batch(completions: list[str], **arguments: Any) -> list[float]:
    SEEN.update(arguments, completions=completions)
    return [1.0] * len(completions)


def seen(function: Any, columns: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return the arguments of a call for one answer with these columns."""
    SEEN.clear()
    answer = Answer(
        prompt="p", text="t", answer="a", columns=columns, token_ids=[7], rendered_prompt="<p>"
    )
    with Rewards(RewardSet(functions=[function], **options), workers=0) as rewards:
        (scored,) = rewards.score([answer])
    assert scored.reward == 1.0, scored.fault
    return dict(SEEN)


OWN = {
    "prompt": "p", "completion": "t", "answer": "a", "ended": True, "completion_ids": [7],
    "rendered_prompt": "<p>",
}  # fmt: skip
PLURAL = {"prompt": "prompts", "completion": "completions", "rendered_prompt": "rendered_prompts"}


@pytest.mark.parametrize("batched", [False, True])
def test_arguments_win_over_columns_of_the_same_name(batched: bool) -> None:
    """Check every argument's name in both conventions, and that no column is lost."""
    own = {PLURAL.get(name, name) if batched else name: value for name, value in OWN.items()}
    columns = {name: f"column {name}" for name in {*OWN, *PLURAL.values(), "limit"}}
    got = seen(sees_batch if batched else sees, columns)
    expected = dict(own)
    for name, value in columns.items():
        expected[f"column_{name}" if name in own else name] = value
    assert got == {name: [value] if batched else value for name, value in expected.items()}


def test_without_an_answer_column_the_argument_is_the_column_of_that_name() -> None:
    assert seen(sees, {"answer": 5}, answer_column=None)["answer"] == 5
    assert seen(sees, {"other": 5}, answer_column=None)["answer"] == "a"


def limited(completion: str, limit: int | None) -> float:
    return 0.5 if limit is None else float(len(completion) <= limit)


def limited_batch(completions: list[str], limit: list[int | None]) -> list[float]:
    return list(map(limited, completions, limit))


@pytest.mark.parametrize("function", [limited, limited_batch])
def test_columns_of_a_call_do_not_depend_on_its_other_answers(function: Any) -> None:
    """Score answers with and without the column together and alone."""
    asked = [Answer(prompt=str(n), text="t", columns={"limit": 3} if n else {}) for n in range(2)]
    with Rewards(RewardSet(functions=[function], columns=("limit",)), workers=0) as rewards:
        together = [scored.reward for scored in rewards.score(asked)]
        assert together == [0.5, 1.0] == [rewards.score([item])[0].reward for item in asked]
    with Rewards(RewardSet(functions=[function]), workers=0) as rewards:
        faults = [scored.fault for scored in rewards.score(asked)]
        assert "has a parameter 'limit' that no column has" in faults[0]


MODULE = """
def changes(completion, prompt, completion_ids, tests, **columns):
    first = tests["a"].pop(0)
    prompt[0]["content"] = completion_ids[0] = columns["more"][0] = None
    completion_ids.reverse()
    return float(completion == first)


def changes_batch(completions, prompts, completion_ids, tests):
    for prompt, ids, item in zip(prompts, completion_ids, tests):
        prompt.clear(), ids.clear(), item.clear()
    return [1.0] * len(completions)
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_function_changes_only_its_own_copies(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "changing.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    prompt, ids, tests, more = ({"role": "user", "content": "p"},), [5, 6], {"a": ["x", "y"]}, [1]
    columns = {"tests": tests, "more": more}
    asked = [Answer(prompt=prompt, text="x", columns=columns, token_ids=ids) for _ in range(4)]
    group = RewardSet(functions=["changing:changes", "changing:changes_batch"])
    asked = [Answer(**{**vars(item), "prompt": [dict(prompt[0])]}) for item in asked]
    with Rewards(group, workers=workers) as rewards:
        scores = rewards.score(asked)
    assert [scored.reward for scored in scores] == [2.0] * 4, scores[0].fault
    assert (ids, tests, more) == ([5, 6], {"a": ["x", "y"]}, [1])
    assert all(item.prompt == [{"role": "user", "content": "p"}] for item in asked)
    sys.modules.pop("changing", None)


def short(completion: str) -> float:
    return 1.0


def accurate(completion: str, solution: str) -> float:
    return float(completion == solution)


def says(completion: str) -> dict[str, Any]:
    return {"reward": 0.0, "correct": completion == "no"}


@pytest.mark.parametrize(
    ("functions", "options", "correct"),
    [
        ([short], {}, [True, True]),
        ([short, accurate], {"answer_column": "solution"}, [True, False]),
        ([short, accurate], {}, [True, True]),
        ([short, "exact_match"], {}, [True, False]),
        ([short, accurate, says], {"answer_column": "solution"}, [False, True]),
        ([short, accurate, says], {"correct_by": "accurate"}, [True, False]),
        ([short, accurate, says], {"correct_by": "short"}, [True, True]),
    ],
)
def test_function_that_judges_decides_what_is_correct(
    functions: list[Any], options: dict[str, Any], correct: list[bool]
) -> None:
    asked = [
        Answer(prompt="p", text=text, answer="yes", columns={"solution": "yes"})
        for text in ("yes", "no")
    ]
    group = RewardSet(functions=functions, **options)
    with Rewards(group, workers=0) as rewards:
        assert [scored.correct for scored in rewards.score(asked)] == correct


def test_function_that_decides_must_be_one_of_the_set() -> None:
    with pytest.raises(RecipeError, match="task.correct_by=g: is no reward function of this set; "):
        RewardSet(functions=["m:f"], correct_by="g")


def write(folder: Path, answer: str) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(f'{{"prompt": "q{n}", "answer": {answer}}}\n' for n in range(30)))
    return file


@pytest.mark.parametrize(
    ("answer", "extract", "line"),
    [
        (r'"so\n#### 72"', "boxed", ""),
        (r'"so\n#### 72"', "text", "16 of the first 16 expected answers have several lines, all"),
        (r'"a long\nsolution"', "tag", "16 of the first 16 expected answers have several lines"),
        ('"72"', "text", ""),
    ],
)
def test_trial_says_how_many_expected_answers_no_model_would_give(
    answer: str, extract: Any, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, answer)
    section = TaskSection(name="file", data=str(file), extract=extract)
    try_rewards(make_tasks(section), section)
    said = capsys.readouterr().err
    assert said.count("\n") == bool(line) and line in said


@pytest.mark.parametrize("column", ["prompt", "question"])
def test_trial_names_the_columns_that_have_the_name_of_an_argument(
    column: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"prompt": "a", "question": "b", "answer": "7", "ended": True}
    rows = [{**row, column: f"q{n}"} for n in range(30)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    section = TaskSection(name="file", data=str(file), prompt_column=column)
    try_rewards(make_tasks(section), section)
    said = re.findall("get the column as (.*)", capsys.readouterr().err)
    assert said == ["column_prompt"] * (column == "question") + ["column_ended"]


def test_trial_refuses_expected_answers_without_the_number_that_is_compared(tmp_path: Path) -> None:
    section = TaskSection(name="file", data=str(write(tmp_path, '"blue"')), rewards=["number"])
    with pytest.raises(RecipeError, match="the expected answer 'blue' has no number"):
        try_rewards(make_tasks(section), section)


def test_generator_that_evaluates_answers_is_called_in_a_worker_with_limits() -> None:
    """Answer with nested powers, a number of 370 million digits that the generator computes."""
    pytest.importorskip("reasoning_gym")
    parameters = {"size": 40}
    section = TaskSection(
        name="reasoning_gym:countdown", parameters=parameters, timeout=1, workers=0
    )
    tasks = make_tasks(section)
    (task,) = tasks.trained
    texts = ["9**9**9", task.train[0].answer]
    with open_rewards(tasks, section) as rewards:
        asked = [to_answer(task, task.train[0], text, True, ()) for text in texts]
        powers, right = rewards.submit(asked)()
    assert powers.reward is None and "took longer than 1 s" in powers.fault
    assert right.reward == 1.0 and right.correct


def RewardSetOf(name: str) -> Rewards:
    section = ProblemSection(name="toy", rewards=[name])
    return Rewards(RewardSet(functions=section.rewards), workers=0)
