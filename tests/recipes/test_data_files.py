"""Sets of problems from JSONL, JSON, CSV and parquet files, and from the Hub."""

from __future__ import annotations

import csv
import errno
import json
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

import recipes
from recipes.cli import main
from recipes.config.sections import ProblemSection, TaskSection
from recipes.errors import RecipeError
from recipes.run import continue_run
from recipes.setup.model_files import TOY_TEMPLATE
from recipes.setup.preparation import prepare
from recipes.tasks import Problem, Task, make_task, make_tasks
from tests.helpers.recipes.data_hub import GATED, serve_data_sets
from tests.helpers.recipes.tiny_runs import rows

Row = dict[str, Any]
SUMS = [{"prompt": f"{a} + {b} =", "answer": a + b, "level": a} for a in range(9) for b in range(9)]


def write_jsonl(file: Path, table: list[Row]) -> None:
    file.write_text("\n".join(json.dumps(row) for row in table))


def write_json(file: Path, table: list[Row]) -> None:
    file.write_text(json.dumps(table, indent=1))


def write_csv(file: Path, table: list[Row]) -> None:
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, table[0])
        writer.writeheader()
        writer.writerows(table)


def write_parquet(file: Path, table: list[Row]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), file)


WRITERS: dict[str, Callable[[Path, list[Row]], None]] = {
    "jsonl": write_jsonl,
    "json": write_json,
    "csv": write_csv,
    "parquet": write_parquet,
}


def read(data: str | Path, **keys: Any) -> Task:
    return make_task(ProblemSection(name="file", data=str(data), **keys))


def refused(data: str | Path, **keys: Any) -> str:
    with pytest.raises(RecipeError) as raised:
        read(data, **keys)
    line = str(raised.value)
    assert "\n" not in line
    return line


def content(task: Task) -> dict[str, tuple[str, str]]:
    """Return answer and level by prompt; CSV has no numbers."""
    return {p.text: (p.answer, str(p.columns["level"])) for p in task.problems()}


@pytest.mark.parametrize("ending", WRITERS)
def test_file_of_each_format_gives_the_same_problems(ending: str, tmp_path: Path) -> None:
    file = tmp_path / f"sums.{ending}"
    WRITERS[ending](file, SUMS)
    task = read(file)
    assert (task.name, task.left_out) == ("sums", ())
    assert content(task) == {r["prompt"]: (str(r["answer"]), str(r["level"])) for r in SUMS}
    assert 5 < len(task.held_out) < 30
    assert task.train[0].prompt == "0 + 0 =" and {*task.train[0].columns} == {*SUMS[0]}


def test_folder_is_read_in_order_of_names_and_other_files_are_ignored(tmp_path: Path) -> None:
    write_parquet(tmp_path / "b.parquet", SUMS[40:])
    write_jsonl(tmp_path / "a.jsonl", SUMS[:40])
    (tmp_path / "README.md").write_text("# Sums")
    task = read(tmp_path, held_out_fraction=0)
    assert [p.text for p in task.train] == [row["prompt"] for row in SUMS]
    assert task.name == tmp_path.name


@pytest.mark.parametrize("ending", WRITERS)
def test_text_survives_each_format(ending: str, tmp_path: Path) -> None:
    """Use quotes, line breaks, a line separator, tabs, an emoji, and a byte-order mark."""
    prompts = ['say "a, b"', "two\nlines", "a\u2028b\tc", "\U0001f600 \u00e9", "x" * 200_000]
    file = tmp_path / f"odd.{ending}"
    WRITERS[ending](file, [{"prompt": prompt, "answer": "a"} for prompt in prompts])
    if ending != "parquet":
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert [p.text for p in read(file, held_out_fraction=0).train] == prompts


def test_columns_are_mapped_and_numbers_become_text(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    write_jsonl(file, [{"q": "a", "a": 1.5, "prompt": "p"}, {"q": "b", "a": 0, "prompt": "p"}])
    keys = {"prompt_column": "q", "answer_column": "a", "held_out_fraction": 0.0}
    task = read(file, **keys)
    columns = {"q": "a", "a": 1.5, "prompt": "p"}
    assert task.train == (
        Problem(prompt="a", answer="1.5", columns=columns),
        Problem(prompt="b", answer="0", columns={"q": "b", "a": 0, "prompt": "p"}),
    )
    own = read(file, **keys | {"answer_column": None, "rewards": ["m:f"]})
    assert own.train[0].columns == columns and own.train[0].answer == ""


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_messages_become_turns(ending: str, tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "a", "name": "Ann"},
    ]
    table = [
        {"messages": [*chat, {"role": "user", "content": str(n)}], "answer": n} for n in (1, 2)
    ]
    WRITERS[ending](tmp_path / f"chat.{ending}", table)
    task = read(tmp_path / f"chat.{ending}", prompt_column="messages", held_out_fraction=0)
    assert task.train[0].prompt == (*chat, {"role": "user", "content": "1"})
    assert len({problem.text for problem in task.train}) == 2
    assert task.train[0].words == ["be", "short", "a", "1", "1"]


def test_rows_of_a_prompt_that_was_there_are_left_out_and_counted(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "x.jsonl", [*SUMS, *SUMS[:3], {**SUMS[0], "answer": 7, "level": 1}])
    task = read(tmp_path / "x.jsonl")
    assert content(task)["0 + 0 ="] == ("0", "0")
    assert task.summary().endswith("; left out: 4 whose prompt an earlier row has)")


GOOD = '{"prompt": "a", "answer": "b"}\n'
BAD_LINES = [
    ("{", "line 3: is no JSON: Expecting property name enclosed in double quotes: column 2 ("),
    ("[" * 100_000, "x.jsonl, line 3: is no JSON: "),
    ("7", "x.jsonl, line 3: is no object; write {COLUMN: VALUE, ...}"),
    ('{"prompt": "", "answer": "b"}', "x.jsonl, line 3: prompt is empty; correct the row"),
    ('{"prompt": " \\n", "answer": "b"}', "line 3: prompt is empty"),
    ('{"prompt": null, "answer": "b"}', "line 3: prompt is null, neither text nor messages"),
    ('{"prompt": 7, "answer": "b"}', "line 3: prompt is 7 (int), neither text nor messages"),
    ('{"prompt": [], "answer": "b"}', "line 3: prompt is [] (list), neither text nor messages"),
    ('{"prompt": {"a": 1}, "answer": "b"}', "prompt is {'a': 1} (dict), neither"),
    ('{"prompt": "\\ud800", "answer": "b"}', "line 3: prompt is no valid text: 'utf-8' codec"),
    ('{"prompt": "c", "answer": "\\udc00"}', "line 3: answer is no valid text"),
    ('{"prompt": "c"}', "line 3: answer is empty; correct the row, or remove it"),
    ('{"answer": "b", "question": "c"}', "line 3: prompt is null, neither text nor messages"),
    (
        '{"prompt": "c", "answer": 1e400}',
        "line 3: answer is inf (float), neither text nor a finite",
    ),
    ('{"prompt": "c", "answer": NaN}', "line 3: answer is empty; correct the row, or remove it"),
    ('{"prompt": "c", "answer": "b", "tools": "a"}', "line 3: tools is a (str), no list of JSON"),
    ('{"prompt": "c", "answer": "b", "tools": ["a"]}', "line 3: tools is [a] (list), no list of"),
    (
        '{"prompt": [{"role": "user", "content": "c", "name": "\\ud800"}], "answer": "b"}',
        "line 3: name in a message of prompt is no valid text: 'utf-8' codec",
    ),
    ('{"prompt": "c", "answer": null}', "line 3: answer is empty; correct the row, or remove it"),
    ('{"prompt": "c", "answer": ["b"]}', "line 3: answer is [b] (list), neither text nor a"),
    (
        '{"prompt": [{"role": "user"}], "answer": ""}',
        "a message of prompt has no text under content",
    ),
    ('{"prompt": ["a"], "answer": ""}', "a message of prompt has no text under role and content; "),
    (
        '{"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": ""}',
        "has no text under content; write {role: user, content: TEXT}",
    ),
    (
        '{"prompt": [{"role": "assistant", "content": "b"}], "answer": "b"}',
        "line 3: prompt ends with the assistant's turn, which the model is to write; ",
    ),
]


@pytest.mark.parametrize(("line", "said"), BAD_LINES)
def test_bad_line_is_refused_with_file_line_column_and_remedy(
    line: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "x.jsonl").write_text(f"{GOOD}\n{line}\n{GOOD}")
    message = refused(tmp_path / "x.jsonl")
    assert message.startswith(f"task.data={tmp_path}/x.jsonl: ") and said in message
    assert message.count("; ") >= 1


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("x.txt", "a", "has the unknown ending .txt; convert it to .jsonl, .json, .csv, .pa"),
        ("x", "a", "has the unknown ending none; convert it"),
        ("x.jsonl", "", "has no rows; name data with at least 2 problems"),
        ("x.jsonl", b"\xff\xfe", "x.jsonl is not UTF-8: 'utf-8' codec can't decode byte 0xff"),
        ("x.json", "3", "x.json is no list of objects; write a list, or JSONL"),
        ("x.json", '{"prompt": "a", "answer": 1}\n{}', "x.json, line 2: prompt is null, neither"),
        ("x.json", '[{"prompt": "a", "answer": 1}, 3]', "x.json, row 2: is no object"),
        ("x.json", "[", "x.json: is no JSON: Expecting value"),
        ("x.csv", "prompt,answer\na", "x.csv, line 2: has 1 field, and the header has 2; quote"),
        ("x.csv", 'prompt,answer\n"a\nb",c\n"d"e,f', "x.csv, line 4: is no CSV: ',' expected"),
        ("x.csv", "prompt,prompt\na,b", "x.csv, line 1: names a column twice"),
        ("x.csv", "prompt,answer\n", "has no rows"),
        ("x.parquet", "PAR", "x.parquet is no readable parquet: "),
    ],
)
def test_unreadable_file_is_refused_in_one_line(
    name: str, text: str | bytes, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert said in refused(tmp_path / name)


def test_data_that_is_not_there_is_refused_with_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rule = f"no such file or folder in {tmp_path}; correct it, or name ORG/NAME on the Hub"
    assert refused("data/x.jsonl") == f"task.data=data/x.jsonl: {rule}"
    assert "no such file or folder; correct it" in refused("/nowhere/x.csv")
    assert rule in refused("gsm8k")
    (tmp_path / "empty").mkdir()
    assert "empty: has no rows" in refused("empty")
    rule = "only a data set on the Hub has one, and this is a folder; drop it"
    assert refused("empty", subset="main") == f"task.subset=main: {rule}"
    assert refused("empty", split="test") == f"task.split=test: {rule}"


def test_message_about_a_set_of_a_mixture_names_its_entry(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "x.jsonl", SUMS)
    good = ProblemSection(name="file", data=f"{tmp_path}/x.jsonl", prompt_column="promt")
    bad = ProblemSection(name="file", data=f"{tmp_path}/y.jsonl", label="y")
    with pytest.raises(
        RecipeError, match=r"^task.mixture\[0\].data=.*set task.mixture\[0\].prompt"
    ):
        make_tasks(TaskSection(name="toy", mixture=[good]))
    with pytest.raises(
        RecipeError, match=r"^eval.sets\[0\].data=.*/y.jsonl: no such file or folder"
    ):
        make_tasks(TaskSection(name="toy"), [bad])


@pytest.mark.parametrize(
    ("extract", "answer", "text", "exact"),
    [
        ("text", "New  York", " New\nYork ", True),
        ("text", "New York", "new york", False),
        ("number", "so 12 #### 42", "it is 42.", True),
        ("number", "42", "42 or 43", False),
        ("boxed", "7", r"thus \boxed{7}", True),
        ("boxed", r"hence \boxed{7}", "7", False),
        ("tag", "7", "<answer> 7 </answer>", True),
    ],
)
def test_extracted_answer_must_equal_the_expected_one(
    extract: str, answer: str, text: str, exact: bool, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "x.jsonl", [{"prompt": "p", "answer": answer}])
    task = read(tmp_path / "x.jsonl", extract=extract)
    (problem,) = task.problems()
    assert task.score(problem, text, True) == float(exact)
    assert not task.score(problem, text, False)


def test_local_files_need_neither_datasets_nor_network_nor_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hide both packages; a parquet file then names the extra."""
    write_parquet(tmp_path / "x.parquet", SUMS)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("pyarrow", "datasets")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setenv("HOME", "/nowhere")
    for ending in ("jsonl", "json", "csv"):
        WRITERS[ending](tmp_path / f"sums.{ending}", SUMS)
        assert len(read(tmp_path / f"sums.{ending}").problems()) == 81
    line = "x.parquet needs the package pyarrow; run: pip install 'memsaver[data]'"
    assert line in refused(tmp_path / "x.parquet")
    line = "is no file or folder, and the Hub needs the package datasets; run: pip install"
    assert line in refused("org/sums")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionError("no\nroute"), "the Hub cannot be reached: no route; name a file"),
        (
            OSError(errno.EROFS, "Read-only"),
            "Read-only; set HF_HOME to a folder that you may write",
        ),
        (RuntimeError("a\nscript"), "a script; correct it, or task.subset=null, task.split=train"),
    ],
)
def test_failure_of_the_hub_is_one_line(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    datasets = types.SimpleNamespace(load_dataset=fail, exceptions=types.SimpleNamespace())
    datasets.exceptions.DatasetNotFoundError = KeyError
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    assert refused("org/sums").endswith(said)


def test_data_set_of_the_hub_is_read_by_subset_and_split_or_refused(tmp_path: Path) -> None:
    subsets = {"main": {"train": SUMS, "test": SUMS[:9]}, "odd": {"train": SUMS[1::2]}}
    with serve_data_sets({"org/sums": {"main": {"train": SUMS}}, "org/many": subsets}) as hub:
        task, test, cached, absent, gated, subset, split = hub.read(
            tmp_path,
            {"data": "org/sums"},
            {"data": "org/many", "subset": "main", "split": "test", "held_out_fraction": 0},
            {"data": "org/sums", "offline": True},
            {"data": "org/absent"},
            {"data": GATED},
            {"data": "org/many"},
            {"data": "org/many", "subset": "main", "split": "tran"},
        )
    assert len(task) == 81 and len(test) == 9 and cached == task
    assert task["0 + 1 ="] == ["1", SUMS[1]]
    begin = "task.data=org/absent: is no file or folder here, nor a public data set of the Hub; "
    assert absent == f"{begin}correct it, or set HF_TOKEN"
    page = f"https://huggingface.co/datasets/{GATED}"
    assert gated == f"task.data={GATED}: is gated; accept its terms at {page}, and set HF_TOKEN"
    assert "Config name is missing" in subset and "task.subset=null" in subset
    assert 'Unknown split "tran"' in split and "task.split=tran" in split


def test_run_on_a_file_and_a_mixture_resumes_and_refuses_other_data(
    tmp_path: Path, no_pictures: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run two steps of tiny by the command, then a third; prompts begin with the time of day."""
    data, run, template = (tmp_path / name for name in ("sums.jsonl", "run", "chat.jinja"))
    write_jsonl(data, [*SUMS, SUMS[0]])
    time = "{% for digit in strftime_now('%f') %}{{ digit }} {% endfor %}"
    template.write_text(time + TOY_TEMPLATE)
    words = ["task.name=file", f"task.data={data}", "task.max_prompt_tokens=15"]
    words += [f"task.template={template}"]
    words += ["task.mixture=[{name: toy, weight: 0.5}]", "loop.prompts_per_step=12"]
    words += ["loop.samples_per_prompt=2", "eval.every=0", "checkpoint.every=1"]
    assert main(["run", "tiny", *words, "steps=2", "--run-dir", str(run)]) == 0
    counts = "; left out: 1 whose prompt an earlier row has)"
    opening = capsys.readouterr().out.splitlines()[0]
    assert opening.startswith(f"{run}: inprocess, cpu, 2 steps; sums (") and counts in opening
    assert opening.endswith("; toy (48 to train, 16 held out)")
    write_jsonl(data, SUMS[::-1])
    line = f"task.data={data}: has other problems, or in another order, than the run began with"
    with pytest.raises(RecipeError, match=line):
        continue_run(run, overrides=["steps=3"])
    write_jsonl(data, SUMS)
    line = r"task.mixture\[0\].weight=2.0: differs from the run's own recipe.yaml; start a new run"
    with pytest.raises(RecipeError, match=line):
        continue_run(run, overrides=["task.mixture[0].weight=2"])
    continue_run(run, overrides=["steps=3"])
    assert [row["step"] for row in rows(run, "train")] == [1, 2, 3]


def test_7500_prompts_are_ready_within_seconds(tmp_path: Path) -> None:
    """Bound reading, rendering and tokenizing loosely; the tests share their cores."""
    words = "the quick brown fox jumps over lazy dogs and counts apples in a basket " * 4
    table = [{"prompt": f"{n} {words}", "answer": str(n % 97)} for n in range(7500)]
    write_jsonl(tmp_path / "many.jsonl", table)
    recipe = ["task.name=file", f"task.data={tmp_path}/many.jsonl", "engine.kv_tokens=null"]
    long = ["model.config.max_position_embeddings=128"]
    begun = time.process_time()
    setup = prepare(recipes.load("tiny", [*recipe, *long]), tmp_path / "run")
    assert time.process_time() - begun < 8
    assert len([*setup.tasks.problems()]) == 7500
