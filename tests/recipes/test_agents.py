"""Whole runs with agents that ask the model by themselves: forks, faults, resumes, refusals."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from recipes.config.load import load
from recipes.errors import RecipeError
from recipes.logs.recorded_samples import read_samples
from recipes.run import continue_run, start_run
from recipes.setup.preparation import prepare
from tests.helpers.recipes.tiny_runs import MakeRun, rows, same_rows

AGENTS = "task.agent=tests.helpers.recipes.agents"
FEW = ("loop.prompts_per_step=4", "loop.samples_per_prompt=4", "loop.parallel_environments=3")
SHORT = (*FEW, "eval.problems=4", "eval.every=2", "samples=32")
HOT = "temperature: this session samples at 1; leave it out"
FORKING = (*SHORT, f"{AGENTS}:forking", "exact=true", "loss.aggregation=sequence")


@pytest.fixture(scope="module")
def short(make_run: MakeRun) -> Path:
    """Run three steps with an agent that goes back in each conversation."""
    return make_run("guess", *FORKING, "steps=3")


def test_forks_are_learned_as_they_were_sampled(short: Path) -> None:
    """Bit for bit, each answer once, and a conversation is one answer however often it forks."""
    for row in rows(short, "train"):
        assert row["mismatch_max"] == 0.0
        assert (row["turns"], row["forks"]) == (6.0, 4 * 16)
        assert 6 <= row["response_length_min"] <= row["response_length_max"] <= 36
        assert row["tokens"] == 16 * row["response_length"], "trained on all"
        assert row["grad_norm"] > 0 and row["cut_off"] == 0.0
    samples = [sample for sample in read_samples(short) if sample["kind"] == "train"]
    for sample in samples:
        said = [m["content"] for m in sample["messages"] if m["role"] == "assistant"]
        assert sample["reward"] == pytest.approx(sum(map(len, said)) / 100, abs=0.2)
        assert len(said) == 6
        assert sum(message["role"] == "fork" for message in sample["messages"]) == 4


def test_a_resumed_run_repeats_forks(
    short: Path, make_run: MakeRun, tmp_path: Path, no_pictures: None
) -> None:
    halves = tmp_path / "halves"
    shutil.copytree(make_run("guess", *FORKING, "steps=2"), halves)
    continue_run(halves, None, ["steps=3"])
    assert same_rows(halves, short)


@pytest.mark.parametrize(
    "words",
    [
        ("algorithm=ppo", "loss.kl_coef=0.1"),
        pytest.param(
            ("correction.mode=decoupled", "grpo.baseline=batch", "grpo.scale=batch"),
            marks=pytest.mark.extended,
        ),
        ("loss.kl_coef=0.1", "loss.kl_in=reward", "loop.mini_batches=2", "loop.epochs=2"),
    ],
)
def test_forks_pass_through_every_loop(words: tuple[str, ...], tmp_path: Path) -> None:
    always = [*FEW, f"{AGENTS}:forking", "eval.every=0", "steps=2"]
    start_run("guess", [*always, *words], tmp_path / "run")
    for row in rows(tmp_path / "run", "train"):
        assert row["mismatch_max"] < 1e-4, "fp32 on both sides, in other orders of sums"
        assert row["forks"] == 4 * 16 and row["grad_norm"] > 0


def test_faults_cost_the_reward_of_their_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process at a time, so that each agent has its turn, twice."""
    monkeypatch.setenv("AGENTS_TURN", str(tmp_path / "turn"))
    words = [*FEW, f"{AGENTS}:mixed", "eval.every=0", "samples=16", "steps=1"]
    start_run(
        "guess", [*words, "loop.parallel_environments=1", "loop.agent_timeout=2"], tmp_path / "run"
    )
    samples = read_samples(tmp_path / "run")
    name = "tests.helpers.recipes.agents:mixed"
    faults = [
        sample["fault"].replace(f"{name}: ", "").partition(", for the")[0] for sample in samples
    ]
    assert faults == 2 * [
        "",
        "asked for no answer; let it use base_url",
        f"solve: BadRequestError: Error code: 400 - {HOT}",
        "",
        "solve: HTTPError: HTTP Error 404: Not Found",
        "a reward of nan, not finite in fp32",
        "solve took longer than 2 s",
        "solve ended its process: exit status 3",
    ]
    rewarded = [sample["reward"] is not None for sample in samples]
    assert rewarded == 2 * [True, *7 * [False]], "leaving gives none, and is no fault"
    (row,) = rows(tmp_path / "run", "train")
    assert (row["unscored"], row["faults"]) == (14, 12)
    assert [len(sample["messages"]) for sample in samples[:5]] == [5, 0, 0, 3, 0]


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["task.agent=tests.helpers.recipes.worlds:Echo"], "is a class, an environment; name it"),
        (["task.environment=tests.helpers.recipes.agents:hot"], "is a function, an agent; name it"),
        ([f"{AGENTS}:hot", "task.environment=x:Y"], "takes the place of an environment"),
        ([f"{AGENTS}:nobody"], "has no function nobody"),
        ([f"{AGENTS}:hot", "task.template=none"], "task.agent: needs a chat template"),
        ([f"{AGENTS}:hot", "loop.router_replay=true"], "exclude it"),
    ],
)
def test_recipes_without_a_usable_agent_are_refused(
    words: list[str], refusal: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=refusal):
        prepare(load("guess", words), tmp_path)
