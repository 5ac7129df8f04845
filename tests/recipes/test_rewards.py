"""Reward functions: conventions, scores, and what each kind of failure costs, in real workers."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from recipes.cli import main
from recipes.config.sections import ProblemSection, TaskSection
from recipes.errors import RecipeError, ScorerError
from recipes.rewards import Answer, Rewards, RewardSet, Score, Scored
from recipes.rewards.packaged import math
from recipes.tasks import make_tasks
from recipes.tasks.scoring import open_rewards, to_answer
from tests.helpers.dying_actors import wait_gone
from tests.helpers.ray_cluster import until
from tests.helpers.recipes.reward_functions import FAULTS, Judge
from tests.helpers.recipes.tiny_runs import SMALL, rows

MODULE = "tests.helpers.recipes.reward_functions"
OTHERS = Path(__file__).parents[2] / ".venv" / "others"
NUMBERED = [
    Answer(prompt=f"prompt {number // 8}", text="x", columns={"number": number}, token_ids=[1, 2])
    for number in range(64)
]


def answers(set: str, *texts: str, **arguments: Any) -> list[Answer]:
    return [Answer(prompt="say 5", text=text, answer="5", set=set, **arguments) for text in texts]


def of(*functions: Any, **arguments: Any) -> RewardSet:
    """Return a set of callables, or of functions of the helper module by name."""
    named = [f"{MODULE}:{item}" if isinstance(item, str) else item for item in functions]
    return RewardSet(functions=named, **arguments)


def values(scores: list[Scored]) -> list[float | None]:
    return [score.reward for score in scores]


CONVENTIONS = ["plain", "of_all", "mapping", "scored", "batched", "awaited", "awaited_batch"]
CONVENTIONS += ["judge", "half", "Judge", "AwaitedJudge"]


@pytest.mark.parametrize("workers", [0, 2])
def test_function_of_every_convention_is_called_with_the_keywords_it_accepts(workers: int) -> None:
    """Score a right and a wrong answer by each function, all sets in one step."""
    sets = {name: of(name) for name in CONVENTIONS} | {"instance": of(Judge(0.5))}
    with Rewards(sets, workers=workers) as rewards:
        asked = [answer for name in sets for answer in answers(name, "5", "6", columns={"n": 1})]
        scores = rewards.score(asked)
    assert values(scores) == [1.0, 0.0] * len(CONVENTIONS) + [0.5, 0.0]
    assert not any(score.fault for score in scores)
    by_name = dict(zip(sets, scores[::2], strict=True))
    mapped, given = by_name["mapping"], by_name["scored"]
    assert mapped.figures == {"mapping": 1.0, "mapping_length": 1.0} and mapped.correct
    assert given.figures == {"scored": 1.0} and given.correct
    assert by_name["instance"].correct is False


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        *((value, (0.5, False)) for value in (0.5, torch.tensor(0.5), torch.ones(1) / 2)),
        *((value, (1.0, True)) for value in (1, True, torch.ones(1, 1))),
        (Score(reward=2.0), (2.0, True)),
        (Score(reward=2.0, exact=False), (2.0, False)),
        (Score(reward=None, correct=True), (None, False)),
        ({"reward": 0.5, "correct": 1}, (0.5, True)),
        (None, (None, False)),
    ],
)
def test_result_may_be_a_number_of_any_kind_or_a_score_or_none(reward: Any, expected: Any) -> None:
    with Rewards(RewardSet(functions=[lambda **_: reward]), workers=0) as rewards:
        (score,) = rewards.score([Answer(prompt="p", text="t")])
        (cut_off,) = rewards.score([Answer(prompt="p", text="t", ended=False)])
    assert (score.reward, score.correct, score.fault) == (*expected, "")
    assert type(score.reward) in (float, type(None)) and type(score.correct) is bool
    says = getattr(reward, "correct", None) is True or isinstance(reward, dict)
    assert cut_off.correct is (says and expected[1])


def test_rewards_are_weighted_and_functions_that_do_not_apply_are_left_out() -> None:
    """Check that None leaves a function out of one sum, and that only Nones leave no reward."""
    asked = [
        Answer(prompt="p", text="abc", columns={"kind": "long"}),
        Answer(prompt="p", text="ab"),
    ]
    some = of("some", "kept", "nothing", weights=[2.0, 10.0, 5.0], columns=("kind",))
    sets = {"both": some, "none": of("nothing")}
    with Rewards(sets, workers=0) as rewards:
        first, second = rewards.score([Answer(**{**vars(a), "set": "both"}) for a in asked])
        (third,) = rewards.score([Answer(prompt="p", text="t", set="none")])
    assert first.figures == {"some": 4.0, "kept": 0.03}
    assert first.reward == pytest.approx(8.3) and first.correct
    assert (second.figures, second.reward, second.correct) == ({"kept": 0.02}, 0.2, False)
    assert (third.reward, third.correct, third.fault) == (None, False, "")


def test_chat_reaches_a_batched_function_as_trl_passes_it() -> None:
    """Call TRL's own function, too, where TRL's sources are."""
    chat = ({"role": "user", "content": "say 5"},)
    texts = ["<think>\nfive\n</think>\n5", "5"]
    sets: dict[str, RewardSet] = {"ours": of("chat_length")}
    file = OTHERS / "trl" / "rewards" / "format_rewards.py"
    if file.is_file():
        spec = importlib.util.spec_from_file_location("format_rewards", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sets["theirs"] = of(module.think_format_reward)
    with Rewards(sets, workers=0) as rewards:
        scores = rewards.score(
            [Answer(prompt=chat, text=text, set=name) for name in sets for text in texts]
        )
    assert values(scores) == [23.0, 1.0, 1.0, 0.0][: len(scores)]


def test_figures_have_unique_short_names() -> None:
    functions = ["a.b:f", "c.d:f", "a.d:f", "c.d:g", "number"]
    assert RewardSet(functions=functions).names == ["a.b:f", "c.d:f", "a.d:f", "g", "number"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"functions": ["m:f", "m:f"]}, "task.rewards=[m:f,m:f]: names m:f twice; drop one"),
        (
            {"functions": ["m:f"], "weights": [1.0, 0.5]},
            "task.reward_weights=[1,0.5]: has 2 numbers for 1 reward function; set one for each",
        ),
        ({"functions": ["m"], "key": "task.mixture[0]"}, "task.mixture[0].rewards=m: is not pack"),
        (
            {"functions": ["mat"]},
            "task.rewards=mat: is not packaged; take exact_match, math, number",
        ),
        (
            {"functions": ["fractions:Fraction"]},
            "task.rewards=fractions:Fraction: is a class with",
        ),
        ({"functions": ["no_such:f"]}, "task.rewards=no_such:f: cannot import no_such: ModuleNot"),
        ({"functions": ["math:tau"]}, "task.rewards=math:tau: math has no function tau; define it"),
    ],
)
def test_impossible_set_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(RecipeError, match="^" + re.escape(message)):
        Rewards(RewardSet(**arguments), workers=0)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("function", "fault"),
    [
        ("unknown_parameter", "has a parameter 'completion_text' that no column has; columns: "),
        ("missing", f"{MODULE} has no function missing"),
        ("raises", "raised JSONDecodeError"),
    ],
)
def test_trial_refuses_a_function_that_fails(workers: int, function: str, fault: str) -> None:
    asked = [Answer(prompt="p", text="t", columns={"number": 5})]
    with pytest.raises(RecipeError) as raised:
        with Rewards(of(function), workers=workers) as rewards:
            rewards.check(asked)
    line = str(raised.value)
    assert line.startswith(f"task.rewards={MODULE}:{function}: {fault}") and "\n" not in line


def test_callable_that_a_worker_cannot_get_is_refused() -> None:
    with pytest.raises(RecipeError, match="cannot be sent to a worker process: .*; define it at"):
        Rewards(of(lambda completion: 1.0), workers=1)


@pytest.fixture(scope="module")
def faulty() -> dict[str, list[Scored]]:
    """Score the same answers by every function in one step, and return the scores by function."""
    with Rewards({name: of(name) for name in FAULTS}, timeout=1, workers=4) as rewards:
        asked = [Answer(**{**vars(answer), "set": name}) for name in FAULTS for answer in NUMBERED]
        scores = rewards.score(asked)
    size = len(NUMBERED)
    return {name: scores[size * n : size * (n + 1)] for n, name in enumerate(FAULTS)}


@pytest.mark.parametrize("function", FAULTS)
def test_misbehaving_answer_costs_only_its_own_score(
    faulty: dict[str, list[Scored]], function: str
) -> None:
    """Check that a batched function loses the whole group of the answer: its eight answers."""
    scores = [*faulty[function]]
    lost = slice(0, 8) if function in LOSE_GROUPS else slice(5, 6)
    wrong, others = scores[5], [*scores[: lost.start], *scores[lost.stop :]]
    assert values(others) == [1.0] * len(others) and not any(score.fault for score in others)
    assert {score.reward for score in scores[lost]} == {None} and "\n" not in wrong.fault
    about = ", for the answer 'x' to 'prompt 0'"
    assert re.fullmatch(f"{MODULE}:{function}: {FAULTS[function]}.*{about}", wrong.fault)


LOSE_GROUPS = ("short_batch", "batch_raises", "batch_hangs")
IN_PROCESS = sorted(name for name, fault in FAULTS.items() if not re.match(r"took|ended", fault))


@pytest.mark.parametrize("function", [*IN_PROCESS, "awaited_hangs"])
def test_misbehaving_answer_costs_only_its_own_score_in_process(function: str) -> None:
    with Rewards(of(function), workers=0, timeout=1) as rewards:
        scores = rewards.score(NUMBERED)
    assert re.search(FAULTS[function], scores[5].fault)
    lost = 8 if function in LOSE_GROUPS else 1
    assert values(scores).count(1.0) == 64 - lost and values(scores).count(None) == lost


def test_interrupt_in_process_is_no_fault() -> None:
    with pytest.raises(KeyboardInterrupt):
        Rewards(of("interrupts"), workers=0).score(NUMBERED)


def test_fault_of_one_function_costs_the_reward_but_not_the_figures_of_others() -> None:
    notes = list[str]()
    with Rewards(of("kept", "raises"), workers=0, note=notes.append) as rewards:
        scores = rewards.score(NUMBERED)
        with pytest.raises(ScorerError, match=r"no answer has a reward: .*raised JSONDecodeError"):
            rewards.score(NUMBERED[5:6])
    assert scores[5].figures == {"kept": 0.01} and scores[5].reward is None
    assert scores[6].figures == {"kept": 0.01, "raises": 1.0}
    (note,) = notes
    assert note == f"no reward: {scores[5].fault}"


def test_slow_answers_are_shared_among_the_workers() -> None:
    """Check that order survives when workers hand back the rest of their answers."""
    with Rewards(of("slow"), workers=2) as rewards:
        assert values(rewards.score(NUMBERED[:24])) == list(range(24))


def test_worker_is_lean_and_lives_from_step_to_step() -> None:
    with Rewards(of("imported"), workers=1) as rewards:
        steps = [rewards.score(NUMBERED[:2]) for _ in range(2)]
    processes = {score.figures["imported_process"] for scores in steps for score in scores}
    assert len(processes) == 1 and processes != {os.getpid()}
    assert values(steps[0]) == [0.0, 0.0]


def test_worker_killed_between_steps_is_replaced() -> None:
    with Rewards(of("imported"), workers=1) as rewards:
        (first,) = rewards.score(NUMBERED[:1])
        worker = psutil.Process(int(first.figures["imported_process"]))
        worker.kill()
        until(lambda: not worker.is_running())
        (second,) = rewards.score(NUMBERED[:1])
    assert second.reward == 0.0
    assert first.figures["imported_process"] != second.figures["imported_process"]


def test_worker_that_ends_while_it_loads_is_named_at_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ending.py").write_text("import os\nos._exit(9)")
    monkeypatch.syspath_prepend(tmp_path)
    with Rewards(RewardSet(functions=["ending:f"]), workers=1) as rewards:
        with pytest.raises(RecipeError, match="worker processes end while they load .*status 9"):
            rewards.check(NUMBERED[:1])


def test_worker_that_never_loads_is_named_at_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(1000)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("recipes.rewards.worker_pool.LOADING", 0.5)
    with Rewards(RewardSet(functions=["endless:f"]), workers=1, timeout=0.1) as rewards:
        with pytest.raises(RecipeError, match="rewards: take longer than 0.5 s to load; correct"):
            rewards.check(NUMBERED[:1])


def processes() -> Iterator[psutil.Process]:
    return psutil.process_iter(["cmdline"])


def test_late_call_ends_with_its_child_processes(tmp_path: Path) -> None:
    marker = str(tmp_path)
    asked = [Answer(prompt="p", text="t", columns={"number": 5, "marker": marker})]
    asked.append(Answer(prompt="q", text="t", columns={"number": 6, "marker": marker}))
    with Rewards(of("in_a_child"), workers=1, timeout=1) as rewards:
        first, second = rewards.score(asked)
        assert "took longer than 1 s" in first.fault and second.reward == 1.0
        until(lambda: not any(marker in (p.info["cmdline"] or []) for p in processes()))


@pytest.mark.parametrize(("function", "count"), [("hang", 4), ("leaves_a_child", 6)])
def test_close_ends_busy_workers_at_once(function: str, count: int) -> None:
    """Close, too, while children outside the workers' groups hold their sockets."""
    before = set(psutil.Process().children(recursive=True))
    rewards = Rewards(of(function), workers=2)
    rewards.submit(NUMBERED)
    until(lambda: len({*psutil.Process().children(recursive=True)} - before) == count)
    workers = {*psutil.Process().children()} - before
    start = time.monotonic()
    rewards.close()
    assert time.monotonic() - start < 10  # The timeout of a call is 30 s.
    assert not any(worker.is_running() for worker in workers)


DRIVER = f"""
import signal
import psutil
from recipes.rewards import Answer, Rewards, RewardSet

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
with Rewards(RewardSet(functions=["{MODULE}:{{}}"]), workers=2) as rewards:
    waiting = rewards.submit([Answer(prompt=str(n), text="x") for n in range(4)])
    while len(children := psutil.Process().children()) < 2:
        pass
    print(*(child.pid for child in children), flush=True)
    waiting()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_worker_outlives_its_driver(number: int) -> None:
    """Kill or interrupt a driver whose workers hang."""
    script = DRIVER.format("hang")
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
        time.sleep(0.3)  # until they are busy
        driver.send_signal(number)
    assert len(workers) == 2
    wait_gone([worker.pid for worker in workers])


CASES: list[tuple[str, Any, str, str, int]] = [
    ("exact_match", "text", " b e\n", "b e", 1),
    ("exact_match", "text", "b e.", "b e", 0),
    ("exact_match", "boxed", r"So \boxed{\frac{1}{2}}.", r"\frac{1}{2}", 1),
    ("exact_match", "boxed", "1", "1", 0),
    ("exact_match", "tag", "<answer>a</answer> <answer> b</answer>", "b", 1),
    ("exact_match", "number", "It is 42.", "so 12 #### 42", 1),
    ("math", "number", "It is 42.0", "so 12 #### 42", 1),
    ("number", "text", "It costs $1,000 in all.", "1000", 1),
    ("number", "text", "2 + 0 = 2.0", "#### 2", 1),
    ("number", "text", "5 - 9 = \u22124", "-4", 1),
    ("number", "text", "4", "-4", 0),
    ("number", "text", "no idea", "4", 0),
    ("number", "boxed", r"\boxed{7} of 9", "7", 1),
    ("math", "text", r"So \boxed{\frac{1}{2}}.", "0.5", 1),
    ("math", "text", "$x + 1$", "1+x", 1),
    ("math", "text", "7", "8", 0),
    ("math", "tag", r"<answer>2\sqrt{2}</answer>", r"$\sqrt{8}$", 1),
    ("math", "boxed", "none", "8", 0),
]
"""Function, extract, answer, expected answer, and the reward."""


def test_packaged_functions_compare_the_extracted_answer() -> None:
    """Check, too, that an answer that was cut off gets 0, and that a column changes nothing."""
    pytest.importorskip("math_verify")
    sets, asked = dict[str, RewardSet](), list[Answer]()
    for function, extract, text, answer, _ in CASES:
        name = f"{function}, {extract}"
        sets[name] = RewardSet(functions=[function], extract=extract)
        columns = {"extract": "tag"}
        whole = Answer(prompt="p", text=text, answer=answer, columns=columns, set=name)
        asked += [whole, replace(whole, ended=False)]
    with Rewards(sets, workers=0) as rewards:
        scores = rewards.score(asked)
    for case, ended, cut_off in zip(CASES, scores[::2], scores[1::2], strict=True):
        assert (ended.reward, ended.correct) == (case[-1], bool(case[-1])), case
        assert (cut_off.reward, cut_off.correct) == (0, False), case


def test_math_runs_in_a_worker_and_needs_its_package_and_an_expected_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that workers=0 does not bring what a model wrote into this process."""
    pytest.importorskip("math_verify")
    before = psutil.Process().children()
    with Rewards(RewardSet(functions=["math"]), workers=0) as rewards:
        asked = [Answer(prompt="p", text="7", answer=text) for text in ("7", "")]
        right, empty = rewards.score(asked)
        assert len(psutil.Process().children()) > len(before)
    assert right.reward == 1.0
    assert "math: raised ValueError: the expected answer '' is no mathematics, " in empty.fault
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ModuleNotFoundError, match="run: pip install 'memsaver\\[rewards\\]'"):
        math("7", "7", True)


OWN = """
import os
import sys
import zlib

from recipes.tasks import Problem, Task


def judged(section):
    problems = [Problem(prompt=f"first of {a} {b}", answer=a) for a in "abcd" for b in "abcd"]

    def score(problem, text, ended):
        if text == "lean":
            return float("torch" not in sys.modules)
        return float("nan" if text == "nan" else text == problem.answer)

    return Task(name="judged", train=problems[::2], held_out=problems[1::2], score=score)


def shaped(completion, prompt, answer):
    kind = zlib.crc32(f"{prompt}/{completion}".encode()) % 40 if completion != answer else 9
    if kind == 0:
        os._exit(3)
    return [0, float("nan"), float("nan"), "text", *[None] * 3][kind] if kind < 7 else kind / 40


def asks_for_more(completion, reference):
    return 1.0
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write a module `own_rewards` to the working directory, which is not on sys.path."""
    (tmp_path / "own_rewards.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("own_rewards", None)


def test_scorer_of_custom_task_is_called_in_a_worker(own_module: Path) -> None:
    section = TaskSection(name="own_rewards:judged", workers=1)
    tasks = make_tasks(section)
    (task,) = tasks.trained
    asked = [to_answer(task, task.train[0], text, True, ()) for text in ["lean", "nan", "b"]]
    with open_rewards(tasks, section) as rewards:
        scores = rewards.score(asked)
    assert values(scores) == [1.0, None, 0.0]
    assert scores[1].fault.startswith("own_rewards:judged: returned a reward of nan, not fini")
    assert [score.correct for score in scores] == [True, False, False]


def test_packaged_task_starts_no_worker() -> None:
    section = TaskSection(name="toy", mixture=[ProblemSection(name="toy", rewards=["exact_match"])])
    section = replace(section, mixture=[replace(section.mixture[0], label="other")])
    before = psutil.Process().children()
    tasks = make_tasks(section)
    with open_rewards(tasks, section) as rewards:
        asked = [to_answer(task, task.train[0], "a", True, ()) for task in tasks.trained]
        assert values(rewards.score(asked)) == [1.0, 1.0]
        assert psutil.Process().children() == before


def test_wrong_function_is_refused_before_anything_is_written(
    own_module: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["task.rewards=[own_rewards:asks_for_more]", "--run-dir", str(own_module / "run")]
    assert main(["run", "tiny", *SMALL, *words]) == 2
    line = capsys.readouterr().err
    rule = "own_rewards:asks_for_more: has a parameter 'reference' that no column has; columns: "
    assert line.startswith(f"memsaver: task.rewards={rule}prompt, completion, completion_ids, ans")
    assert line.count("\n") == 1 and not (own_module / "run").exists()


def test_run_goes_on_when_answers_of_each_step_fail(
    own_module: Path, capsys: pytest.CaptureFixture[str], no_pictures: None
) -> None:
    """Let functions raise nothing, but end their process or return NaN, text or None."""
    words = ["task.rewards=[own_rewards:shaped]", "task.workers=1", "eval.every=0", *SMALL[:2]]
    assert main(["run", "tiny", *words, "steps=2", "--run-dir", str(own_module / "run")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    train = rows(own_module / "run", "train")
    assert len(train) == 2 and sum(row["faults"] for row in train) >= 4
    assert sum(row["unscored"] - row["faults"] for row in train) >= 1  # None
    noted = re.findall(r"no reward: own_rewards:shaped: (ended|returned)", out)
    assert len(noted) == sum(row["faults"] > 0 for row in train)
