"""Rows as they were saved: nulls, declared JSON, tools, folders, names of columns, and numbers."""

from __future__ import annotations

import datetime
import json
import re
import shlex
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recipes
from recipes.config.sections import ProblemSection
from recipes.errors import RecipeError
from recipes.setup.preparation import Setup, prepare
from recipes.tasks import Task, make_task, make_tasks

pyarrow = pytest.importorskip("pyarrow")  # GPU machines may lack it
parquet = pytest.importorskip("pyarrow.parquet")
Row = dict[str, Any]


def read(data: Path, **keys: Any) -> Task:
    keys = {"held_out_fraction": 0.0, **keys}
    return make_task(ProblemSection(name="file", data=str(data), **keys))


def refusal(data: Path, **keys: Any) -> str:
    with pytest.raises(RecipeError) as raised:
        read(data, **keys)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def write(file: Path, rows: list[Row]) -> Path:
    """Write rows as JSONL or, by the file's ending, as parquet."""
    if file.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def call(name: str, **arguments: Any) -> Row:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}


def chat(question: str, *turns: Row) -> list[Row]:
    return [{"role": "user", "content": question}, *turns, {"role": "tool", "content": "1"}]


CHATS = [chat("a", call("f", city="Rome")), chat("b", call("g", x=1, y={"z": 2})), chat("c")]
TOOLS = [
    [{"type": "function", "function": {"name": "f", "parameters": {"city": {"type": "string"}}}}],
    [{"type": "function", "function": {"name": "g", "parameters": {"x": {"type": "integer"}}}}],
    None,
]
SAVED = [
    {"prompt": prompt, "answer": "x", "tools": tools}
    for prompt, tools in zip(CHATS, TOOLS, strict=True)
]


@pytest.mark.parametrize("way", ["jsonl", "parquet", "parquet-to-jsonl", "datasets", "tools-text"])
def test_chats_and_tools_are_read_as_they_were_saved(way: str, tmp_path: Path) -> None:
    """Let Arrow fill in nulls for the keys of other rows, at every depth."""
    rows, file = SAVED, tmp_path / f"rows.{way.partition('-')[0].replace('tools', 'jsonl')}"
    if way == "datasets":
        datasets = pytest.importorskip("datasets")
        datasets.disable_progress_bars()
        file = tmp_path / "rows.parquet"
        datasets.Dataset.from_list(rows).to_parquet(str(file))
    elif way == "parquet-to-jsonl":
        write(file, rows)
        padded = parquet.read_table(file).to_pylist()
        assert '"city": null' in json.dumps(padded)
        file = write(tmp_path / "rows.jsonl", padded)
    elif way == "tools-text":
        write(file, [{**row, "tools": row["tools"] and json.dumps(row["tools"])} for row in rows])
    else:
        write(file, rows)
    problems = read(file).train
    assert [list(problem.prompt) for problem in problems] == CHATS
    assert [list(problem.tools) for problem in problems] == [tools or [] for tools in TOOLS]


def with_type(kind: Any, note: Any, rows: list[Row]) -> Any:
    """Return a table with a column `j` of JSON texts, declared by type or by a note of datasets."""
    features = {"prompt": {"dtype": "string", "_type": "Value"}, "j": note}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})} if note else None
    schema = pyarrow.schema({"prompt": pyarrow.string(), "j": kind}, metadata)
    return pyarrow.Table.from_pylist(rows, schema)


JSON, TEXT = pyarrow.json_(), pyarrow.string()
NOTE = {"_type": "Json"}
VALUE = {"a": None, "b": [1, None, {"c": "d"}]}


@pytest.mark.parametrize(
    ("kind", "note", "wrap"),
    [
        (JSON, None, lambda item: item),
        (TEXT, NOTE, lambda item: item),
        (pyarrow.list_(TEXT), {"feature": NOTE, "_type": "List"}, lambda item: [item, None]),
        (pyarrow.large_list(TEXT), [NOTE], lambda item: [item]),
        (pyarrow.struct({"k": TEXT, "t": TEXT}), {"k": NOTE}, lambda item: {"k": item, "t": "1"}),
        (
            pyarrow.list_(pyarrow.struct({"k": TEXT})),
            {"feature": {"k": NOTE}, "_type": "List"},
            lambda item: [{"k": item}],
        ),
    ],
)
def test_declared_json_is_decoded_wherever_it_stands(
    kind: Any, note: Any, wrap: Any, tmp_path: Path
) -> None:
    """Keep nulls inside of JSON, and texts that are JSON but not declared."""
    rows = [{"prompt": "p", "j": wrap(json.dumps(VALUE))}, {"prompt": "q", "j": None}]
    parquet.write_table(with_type(kind, note, rows), tmp_path / "x.parquet")
    problems = read(tmp_path / "x.parquet", answer_column=None, rewards=["m:f"]).train
    assert [problem.columns["j"] for problem in problems] == [wrap(VALUE), None]


def test_broken_declared_json_is_refused_with_row_and_column(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "j": "1"}, {"prompt": "q", "j": "{"}]
    parquet.write_table(with_type(TEXT, NOTE, rows), tmp_path / "x.parquet")
    said = "x.parquet, row 2: j: is no JSON: Expecting property name"
    assert said in refusal(tmp_path / "x.parquet", answer_column=None, rewards=["m:f"])


@pytest.mark.parametrize("value", [datetime.datetime(2026, 1, 1), b"a", Decimal(1)])
@pytest.mark.parametrize("place", ["turn", "call", "tools"])
def test_value_that_json_lacks_is_refused_with_file_row_and_key(
    place: str, value: Any, tmp_path: Path
) -> None:
    turn = {"role": "user", "content": "a"} | ({"at": value} if place == "turn" else {})
    row: Row = {"prompt": [call("f", x=value), turn] if place == "call" else [turn], "answer": "b"}
    row |= {"tools": [{"x": value}]} if place == "tools" else {}
    line = refusal(write(tmp_path / "x.parquet", [row]))
    key = {"turn": "at in a message", "call": "tool_calls in a message", "tools": "tools is no"}
    assert "x.parquet, row 1: " in line and key[place] in line
    assert f"Object of type {type(value).__name__} is not JSON" in line


TEMPLATE = "{% for tool in tools or [] %}<|im_start|> {% endfor %}{{ messages[0].content }}"


def prepared(tmp_path: Path, template: str) -> Setup:
    data = write(tmp_path / "rows.jsonl", [{**row, "prompt": "user"} for row in SAVED])
    (tmp_path / "chat.jinja").write_text(template)
    words = ["task.name=file", f"task.data={data}", "task.held_out_fraction=0", "eval.every=0"]
    words += [f"task.template={tmp_path}/chat.jinja", "loop.prompts_per_step=1"]
    return prepare(recipes.load("tiny", words), tmp_path / "run")


def test_template_gets_the_tools_of_each_row_or_the_row_is_refused(tmp_path: Path) -> None:
    (task,) = prepared(tmp_path, TEMPLATE).tasks.trained
    assert [len(problem.prompt_ids) for problem in task.train] == [2, 1]  # equal tokens: one prompt
    assert task.left_out == ("1 whose tokens another problem of the set has",)
    with pytest.raises(RecipeError, match="it takes no tools, and the prompt's row has the column"):
        prepared(tmp_path, "{{ messages[0].content }}")


@pytest.mark.parametrize("saved", ["saved", "splits", "clone", "clone-of-old"])
def test_folder_that_datasets_wrote_is_read(saved: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = [{"prompt": p, "answer": "x", "tests": ["a", 1]} for p in "abc"]
    try:
        data = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    except TypeError:  # older datasets have no columns of JSON
        rows = [row | {"tests": ["a", "1"]} for row in rows]
        data = datasets.Dataset.from_list(rows)
    splits, folder = {"train": data, "test": data.select([0])}, tmp_path / saved
    if saved == "saved":
        data.save_to_disk(folder)
    elif saved == "splits":
        datasets.DatasetDict(splits).save_to_disk(folder)
    else:
        (folder / "data").mkdir(parents=True)
        for split, part in splits.items():
            part.to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
        if saved == "clone-of-old":
            (folder / "dataset_infos.json").write_text("{}")
    assert [problem.columns for problem in read(folder).train] == rows
    if saved != "saved":
        assert len(read(folder, split="test").train) == 1
    assert "correct it, or task.subset=null, task.split=tran" in refusal(folder, split="tran")


def test_blank_after_the_commas_of_a_header_belongs_to_no_name_and_value(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text('prompt, answer, note\n" a, b", "7", c\nd, 8, \n')
    problems = read(tmp_path / "x.csv").train
    assert [(p.prompt, p.answer, p.columns["note"]) for p in problems] == [
        (" a, b", "7", "c"),
        ("d", "8", ""),
    ]


NAMES = ["my answer", " answer", "answer ", "answer (final)", "answer's", "réponse", "answer.text"]


@pytest.mark.parametrize("shell", [False, True])
@pytest.mark.parametrize("nested", ["", "reward_model.", "a.b."])
@pytest.mark.parametrize("name", [*NAMES, "ground_truth", "solution", "Answer"])
def test_setting_that_a_refusal_names_works_as_it_is_typed(
    name: str, nested: str, shell: bool, tmp_path: Path
) -> None:
    """Type the setting into a shell, which takes quotes away, and as an argument of Python."""
    row: Row = {name: "7", "style": "rule"}
    for part in reversed(nested.split(".")[:-1]):
        row = {part: row}
    data = write(tmp_path / "x.jsonl", [{"prompt": "3 + 4", **row}])
    recipe = tmp_path / "recipe.yaml"
    task = f"{{name: file, data: {data}, held_out_fraction: 0, answer_column: answr}}"
    recipe.write_text(f"model: {{shape: qwen2.5-0.5b}}\ntask: {task}\nsteps: 1\neval: {{every: 0}}")
    with pytest.raises(RecipeError) as raised:
        make_tasks(recipes.load(recipe).task)
    advice = re.search(r"; set (task\.answer_column=.*)$", str(raised.value))
    if advice is None:  # No name of the row is close or usual.
        assert str(raised.value).endswith("; name data with a column of answers")
        return
    words = shlex.split(advice[1]) if shell and "'s" not in name else [advice[1]]
    (problem,) = make_tasks(recipes.load(recipe, [words[0]]).task).trained[0].train
    assert problem.answer == "7"


def test_missing_column_is_told_with_the_names_of_the_set(tmp_path: Path) -> None:
    def told(*rows: Row, **keys: Any) -> str:
        return refusal(write(tmp_path / "x.jsonl", [*rows]), **keys).partition("x.jsonl: ")[2]

    rule = "x.jsonl, line 1: has no column"
    answers = "name data with a column of answers"
    assert told({"prompt": "c"}) == f"{rule} answer, only [prompt]; {answers}"
    assert told({"prompt": "c", "id": 3, "answers": ["b"]}).endswith(answers)
    setting = "set task.answer_column=null"
    assert told({"prompt": "c"}, rewards=["m:f"]) == f"{rule} answer, only [prompt]; {setting}"
    assert told({"answer": "b", "promt": "c"}).endswith("; set task.prompt_column=promt")
    assert told({"answer": "b", "question": "c"}).endswith("; set task.prompt_column=question")
    assert told({"answer": "b", "text": 3}).endswith("; name data with a column of prompts")
    nested = {"prompt": "c", "reward_model": {"ground_truth": "b"}}
    line = told(nested, answer_column="reward_model")
    assert line.endswith("; set task.answer_column=reward_model.ground_truth")
    line = told({"prompt": "c", "answer": {"list": [], "value": 3}})
    rule = "answer has columns of its own, and is neither text nor a number"
    assert line == f"x.jsonl, line 1: {rule}; set task.answer_column=answer.value"


def test_rows_have_all_columns_of_the_set_and_nested_answers_may_be_null(tmp_path: Path) -> None:
    rows: list[Row] = [{"prompt": "a", "m": {"t": 1.0}}, {"prompt": "b", "m": None, "x": [1]}]
    file = write(tmp_path / "x.jsonl", rows)
    problems = read(file, answer_column="m.t", rewards=["m:f"]).train
    assert [problem.answer for problem in problems] == ["1", ""]
    assert [problem.columns for problem in problems] == [{**rows[0], "x": None}, rows[1]]
    assert "line 2: m.t is empty; correct the row, or remove it" in refusal(
        file, answer_column="m.t"
    )


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.booleans())
def test_number_of_an_answer_reads_as_a_person_writes_it(
    tmp_path_factory: pytest.TempPathFactory, value: float
) -> None:
    file = write(tmp_path_factory.getbasetemp() / "x.jsonl", [{"prompt": "p", "answer": value}])
    answer = read(file).train[0].answer
    if isinstance(value, bool):
        assert answer == json.dumps(value)
        return
    assert float(answer) == value and re.fullmatch(r"-?\d+(\.\d*[1-9])?", answer)
    assert ("." in answer) == (value != int(value))


def test_small_floats_and_decimals_of_parquet_read_as_they_were_written(tmp_path: Path) -> None:
    kinds = {"f": pyarrow.float32(), "d": pyarrow.decimal128(38, 3), "t": TEXT}
    table = pyarrow.Table.from_pylist(
        [{"f": 0.1, "d": Decimal("7.500"), "t": "a"}, {"f": None, "d": Decimal(7), "t": "b"}],
        pyarrow.schema(kinds),
    )
    parquet.write_table(table, tmp_path / "x.parquet")
    keys: Row = {"prompt_column": "t", "rewards": ["m:f"]}
    floats = read(tmp_path / "x.parquet", answer_column="f", **keys).train
    assert [(p.answer, p.columns["f"]) for p in floats] == [("0.1", 0.1), ("", None)]
    decimals = read(tmp_path / "x.parquet", answer_column="d", **keys).train
    assert [problem.answer for problem in decimals] == ["7.5", "7"]
