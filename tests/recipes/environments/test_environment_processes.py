"""Environments in their processes: what they return, and what they cannot do to a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from recipes.environments import EnvironmentFault, EnvironmentProcess, Environments
from recipes.errors import RecipeError

HERE = "tests.helpers.recipes.worlds"
WORLD = f"{HERE}:World"


@pytest.fixture
def process() -> Iterator[EnvironmentProcess]:
    process = EnvironmentProcess(timeout=5.0)
    yield process
    process.close()


def tool(process: EnvironmentProcess, name: str, arguments: str = "{}") -> tuple[str, bool]:
    text, failed = process.ask(WORLD, "tool", name, arguments)
    return text, failed


def test_tools_are_described_and_called(process: EnvironmentProcess) -> None:
    found = process.ask(WORLD, "describe", [f"{HERE}:by_calls", f"{HERE}:Echo", "math"])
    names = [entry["function"]["name"] for entry in found["tools"]]
    assert "add" in names and not {"reset", "get_reward"} & {*names}
    add = next(entry["function"] for entry in found["tools"] if entry["function"]["name"] == "add")
    assert add["description"] == "Add two numbers."
    assert add["parameters"]["required"] == ["a"]
    assert (found["rewards"], found["replies"]) == (True, False)
    assert found["judges"] == [f"{HERE}:by_calls"]
    assert process.ask(WORLD, "reset", {"says": " hello", "other": 1}) == " hello"
    assert tool(process, "add", '{"a": 2, "b": 3}') == ("5", False)
    assert tool(process, "wait", '{"seconds": 0.01}') == ("waited", False)
    assert tool(process, "parts", '{"kind": "text"}') == ("ab", False)
    assert process.ask(WORLD, "reward") == 1.0
    assert process.ask(WORLD, "reset", {}) == ""
    assert process.ask(WORLD, "reward") == 0.0, "an instance is used again, and reset"


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("fail", "{}", "no luck at all"),
        ("leave", "{}", "left"),
        ("fly", "{}", "there is no tool fly; there are add"),
        ("reset", "{}", "there is no tool reset"),
        ("__init__", "{}", "there is no tool __init__"),
        ("add", "[1]", "the arguments are no JSON object"),
        ("add", '{"a": ', "Expecting value"),
        ("add", '{"c": 1}', "unexpected keyword argument"),
        ("parts", '{"kind": "image"}', "content of type 'image' is not served"),
        ("take_memory", "{}", "MemoryError"),
    ],
)
def test_errors_of_tools_are_texts_for_the_model(
    process: EnvironmentProcess, name: str, arguments: str, said: str
) -> None:
    process.ask(WORLD, "reset", {})
    text, failed = tool(process, name, arguments)
    assert failed and said in text and text.startswith("{'error': ")
    assert tool(process, "add", '{"a": 1}') == ("2", False), "the environment goes on"


def test_what_tools_print_write_and_return_is_bounded(
    process: EnvironmentProcess, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    process.ask(WORLD, "reset", {})
    assert tool(process, "print_much") == ("printed", False)
    assert capfd.readouterr().out == ""
    text, _ = tool(process, "talk", '{"count": 5000000}')
    assert text == "y" * 100_000 + "... (4900000 more characters)"
    said, failed = tool(process, "fill_file", f'{{"path": "{tmp_path / "file"}"}}')
    assert failed and "File too large" in said


@pytest.mark.parametrize(
    ("name", "fault"),
    [("hang", "took longer than 1 s"), ("crash", "ended its process: exit status 3")],
)
def test_calls_that_hang_or_crash_end_the_process_and_no_other(name: str, fault: str) -> None:
    process, other = EnvironmentProcess(timeout=1.0), EnvironmentProcess(timeout=1.0)
    try:
        for each in (process, other):
            each.ask(WORLD, "reset", {})
        child = int(tool(process, "fork")[0])
        with pytest.raises(EnvironmentFault, match=f"tool {fault}"):
            tool(process, name)
        assert not psutil.pid_exists(child), "what the environment started has ended, too"
        process.ask(WORLD, "reset", {})
        assert tool(process, "add", '{"a": 1}') == ("2", False)
        assert tool(other, "add", '{"a": 1}') == ("2", False)
    finally:
        process.close()
        other.close()


def test_conversations_run_beside_each_other_up_to_a_number() -> None:
    environments = Environments(parallel=2, timeout=20.0)

    def wait(process: EnvironmentProcess) -> tuple[float, float]:
        process.ask(WORLD, "reset", {})
        began = time.monotonic()
        process.ask(WORLD, "tool", "wait", '{"seconds": 0.5}')
        return began, time.monotonic()

    spans = [future.result() for future in [environments.start(wait) for _ in range(6)]]
    environments.close()
    together = [sum(begin <= at < end for begin, end in spans) for at, _ in spans]
    assert max(together) == 2


def test_close_ends_a_call_that_hangs() -> None:
    environments = Environments(parallel=1, timeout=60.0)

    def hang(process: EnvironmentProcess) -> Any:
        process.ask(WORLD, "reset", {})
        return process.ask(WORLD, "tool", "hang", "{}")

    future = environments.start(hang)
    time.sleep(1.5)
    began = time.monotonic()
    environments.close()
    assert time.monotonic() - began < 10
    with pytest.raises(EnvironmentFault):
        future.result(timeout=10)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Useless", "has neither public methods, which are tools, nor __call__"),
        ("Unmade", "the board is missing"),
        ("Endless", "has no method reset; define it"),
        ("Missing", f"{HERE} has no function Missing"),
    ],
)
def test_an_environment_that_is_none_is_refused(name: str, why: str) -> None:
    environments = Environments(parallel=1, timeout=20.0)
    try:
        with pytest.raises(RecipeError, match=f"^task.environment={HERE}:{name}: .*{why}"):
            environments.describe(f"{HERE}:{name}", "task.environment")
    finally:
        environments.close()
