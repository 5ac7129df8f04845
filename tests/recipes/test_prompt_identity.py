"""A prompt is its token ids: for held-out problems, repeated rows, mixtures and resumes."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recipes
from recipes.config.sections import TaskSection
from recipes.setup.model_files import TOY_TEMPLATE
from recipes.setup.preparation import Setup, prepare
from recipes.setup.prompt_digests import prompt_digests
from recipes.tasks import Problem, Task, Tasks, make_tasks, split

Row = dict[str, Any]
SPELLINGS: list[Callable[[str], Any]] = [
    lambda text: text,
    lambda text: [{"role": "user", "content": text}],
    lambda text: [{"content": text, "role": "user"}],
    lambda text: [{"content": text, "name": None, "role": "user"}],
]
TRIMMED = TOY_TEMPLATE.replace("message['content']", "message['content'] | trim")


def write(file: Path, rows: list[Row]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@given(st.sets(st.text("ab", min_size=1), min_size=1, max_size=30), st.data())
def test_spelling_of_a_prompt_decides_neither_its_side_nor_its_identity(
    texts: set[str], data: st.DataObject
) -> None:
    def spelled(text: str) -> Problem:
        prompt = data.draw(st.sampled_from(SPELLINGS[:3]))(text)
        return Problem(prompt=prompt if isinstance(prompt, str) else tuple(prompt))

    def texts_of(problems: tuple[Problem, ...]) -> set[str]:
        return {problem.turns[0]["content"] for problem in problems}

    sides = [split([spelled(text) for text in texts], 0.5) for _ in range(2)]
    assert texts_of(sides[0]["train"]) == texts_of(sides[1]["train"])
    score: Any = lambda *_: 0.0  # noqa: E731
    trained = Task(name="a", train=tuple(map(spelled, texts)), held_out=(), score=score)
    evaluated = Task(name="b", train=(), held_out=sides[0]["held_out"], score=score)
    tasks = Tasks(trained=(trained,), evaluated=(evaluated,))
    (left,) = tasks.separated(lambda problem: problem.text, "prompt").trained
    assert texts_of(left.train) == texts - texts_of(evaluated.held_out)


def test_chats_differ_by_every_turn_key_and_tool() -> None:
    def chat(content: str = "a", tools: tuple[Any, ...] = (), **more: Any) -> Problem:
        return Problem(prompt=({"role": "user", "content": content, **more},), tools=tools)

    system = Problem(prompt=({"role": "system", "content": "a"},))
    several = Problem(prompt=({"role": "user", "content": "a"}, {"role": "user", "content": "a"}))
    others = [chat("b"), chat(name="n"), chat(name="m"), chat(tools=({"type": "function"},))]
    problems = [Problem(prompt="a"), system, several, *others]
    assert len({problem.text for problem in problems}) == len(problems)
    nested = [chat(a={"b": 1, "c": 2}), chat(a={"c": 2, "b": 1})]
    assert nested[0].text == nested[1].text
    assert chat(time=datetime.date(2026, 1, 1)).text != chat(time=datetime.date(2026, 1, 2)).text


def test_repeated_row_in_another_spelling_is_left_out(tmp_path: Path) -> None:
    rows = [{"prompt": spell("a"), "answer": str(n)} for n, spell in enumerate(SPELLINGS)]
    data = write(tmp_path / "rows.jsonl", [*rows, {"prompt": "b", "answer": "c"}])
    section = TaskSection(name="file", data=data, held_out_fraction=0)
    (task,) = make_tasks(section).trained
    assert [problem.answer for problem in task.train] == ["0", "c"]
    assert task.left_out == ("3 whose prompt an earlier row has",)


def prepared(folder: Path, rows: list[Row], *words: str, test: list[Row] | None = None) -> Setup:
    """Prepare the recipe `tiny` with rows of a file, a template that trims, and a test set."""
    (folder / "chat.jinja").write_text(TRIMMED)
    data = write(folder / "rows.jsonl", rows)
    words = ("task.name=file", f"task.data={data}", f"task.template={folder}/chat.jinja", *words)
    words = (*words, "loop.prompts_per_step=1")
    if test is not None:
        words = (*words, f"eval.sets=[{{name: file, data: {write(folder / 'test.jsonl', test)}}}]")
    return prepare(recipes.load("tiny", words), folder / "run")


def test_prompts_of_equal_tokens_are_one_prompt_after_encoding(tmp_path: Path) -> None:
    """Spell prompts so that only the template, or the recipe's system turn, makes them equal."""
    system = {"role": "system", "content": "be short"}
    words = [f"first of {n}" for n in range(40)]
    rows = [{"prompt": f"{text} ", "answer": "a"} for text in words]
    rows += [{"prompt": text, "answer": "a"} for text in words[:30]]
    rows += [{"prompt": [system, *SPELLINGS[1](text)], "answer": "a"} for text in words[:20]]
    test = [{"prompt": [system, *SPELLINGS[2](f" {text}")], "answer": "a"} for text in words[:10]]
    setup = prepared(tmp_path, rows, "task.system_prompt=be short", test=test)
    (task,), (evaluated,) = setup.tasks.trained, setup.tasks.evaluated
    ids = [bytes(problem.prompt_ids) for problem in (*task.problems(), *evaluated.held_out)]
    trained = {bytes(problem.prompt_ids) for problem in task.train}
    assert len(task.problems()) == len({bytes(p.prompt_ids) for p in task.problems()})
    assert not trained & {*ids[len(task.train) :]} and len({*ids}) == 40
    assert any(line == "50 whose tokens another problem of the set has" for line in task.left_out)
    assert any("whose tokens another set holds out" in line for line in task.left_out)


def test_set_whose_tokens_are_all_evaluated_is_refused(tmp_path: Path) -> None:
    rows, test = ([{"prompt": f"a{blank}", "answer": "b"}] for blank in (" ", ""))
    with pytest.raises(recipes.RecipeError, match=r"no problem for training of rows \(1 whose tok"):
        prepared(tmp_path, rows, "task.held_out_fraction=0", test=test)


def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the setting of a reward function that reads columns."""
    (tmp_path / "judges.py").write_text("def f(completion, **columns):\n    return 0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "task.rewards=[judges:f]"


def test_resume_notices_columns_of_functions_and_ignores_spellings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(spell: int = 0, **columns: Any) -> list[Row]:
        texts = [f"first of {n}" for n in range(9)]
        return [{"prompt": SPELLINGS[spell](text), "answer": "a", **columns} for text in texts]

    words = [judged(tmp_path, monkeypatch), "task.workers=0"]
    columns = {"tests": [{"in": "a", "limit": 1}], "none": None}
    saved = prepared(tmp_path, rows(**columns), *words).prompt_digests()
    for spell in range(4):
        assert not prepared(tmp_path, rows(spell, **columns), *words).other_prompts(saved)
    for other in ({"tests": [{"in": "a", "limit": 2}]}, {"none": 0}, {"more": "a"}):
        setup = prepared(tmp_path, rows(**(columns | other)), *words)
        line = f"task.data={tmp_path}/rows.jsonl: has other answers or columns"
        assert setup.other_prompts(saved) == line
    plain = prepared(tmp_path, rows(**columns)).prompt_digests()
    assert not prepared(tmp_path, rows()).other_prompts(plain)  # The file's scorer reads answers.


VALUES: list[Callable[[], Any]] = [
    lambda: b"\x00a",
    lambda: datetime.datetime(2026, 1, 1, 12),
    lambda: {"a": [Decimal("1.5"), None, 1e400]},
    lambda: {(1, 2): "keys that JSON lacks"},
    lambda: {1: "a", "1": "b"},
    lambda: "\ud800",
    object,
]


def digests(*columns: Any) -> dict[str, int]:
    problems = tuple(Problem(prompt="p", columns={"c": value}) for value in columns)
    task = Task(name="own", train=problems, held_out=(), score=lambda *_: 0.0)
    return prompt_digests(recipes.load("tiny", ["task.name=m:f"]), Tasks(trained=(task,)), None)


def test_digest_of_columns_of_any_type_is_stable_and_sees_changes() -> None:
    assert digests(*(value() for value in VALUES)) == digests(*(value() for value in VALUES))
    each = [digests(value())["rows own"] for value in VALUES]
    assert len({*each}) == len(VALUES)
    assert digests({0, 8}) == digests({8, 0}) != digests({0, 9})
    assert digests("ab", "c") != digests("a", "bc")
