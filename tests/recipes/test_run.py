"""Whole runs of the tiny recipe in one process: learning, run folders, resumes and failures."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvcache.pools import TokenPool
from recipes.cli import main
from recipes.config.load import load
from recipes.logs.checkpoints import Checkpoints
from recipes.run import continue_run, start_run
from tests.helpers.peers import Peer
from tests.helpers.ray_cluster import until
from tests.helpers.recipes.tiny_runs import (
    ONE_LAYER,
    SMALL,
    MakeRun,
    has_pictures,
    rows,
    same_rows,
    trace,
    without_clock,
    without_pictures,
)
from trainer_bridge.trainer import Trainer

ROOT = Path(__file__).parents[2]
STAGES = ["offload_optim", "wake_weights", "sync_weights", "offload_params", "wake_kv_cache"]
STAGES += ["generate_sequences", "sleep", "reload_params", "compute_reward"]
STAGES += ["reload_optim", "compute_advantages", "update_actor"]
REPLAY = "loop.router_replay=true"
LEARNT = ["steps=18", "loop.prompts_per_step=32", "loop.samples_per_prompt=8"]
EXPERTS = ["model.config.model_type=qwen3_moe", "model.config.num_experts=8"]
EXPERTS += ["model.config.num_experts_per_tok=2", "model.config.moe_intermediate_size=32"]
EXPERTS += ["model.config.norm_topk_prob=true", "trainer.router_aux_loss_coef=0.001"]
# Two implementations compute log-probabilities in fp32. A logit of magnitude 8 has an ulp of 5e-7.
# A few dozen roundings (two layers, norm, head, softmax) add up to this at the worst token, and
# their mean stays near one ulp.
MISMATCH_MAX, MISMATCH_MEAN = 5e-5, 1e-5


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the packaged recipe with an eighth of its samples, which still learns its task."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    start_run("tiny", LEARNT, folder)
    return folder


def test_run_learns_the_task_and_held_out_problems(tiny: Path) -> None:
    rewards = [row["reward"] for row in rows(tiny, "train")]
    assert len(rewards) == 18
    assert sum(rewards[:5]) / 5 < 0.2 and sum(rewards[-5:]) / 5 > 0.6
    evaluations = rows(tiny, "eval")
    assert [row["step"] for row in evaluations] == [0, 10, 18]
    assert evaluations[0]["correct"] < 0.2 and evaluations[-1]["correct"] > 0.5


def test_overlapped_moves_and_shrinking_pool_change_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare two runs whose answers are long enough for the pool to shrink."""
    words = [*SMALL, "steps=1", "eval.every=0", "sampling.max_tokens=30", "checkpoint.every=0"]
    resized, resize = list[tuple[int, int]](), TokenPool.resize

    def spy(pool: TokenPool, tokens: int) -> int:
        resized.append((pool.size, tokens))
        return resize(pool, tokens)

    monkeypatch.setattr(TokenPool, "resize", spy)
    with without_pictures():
        start_run("tiny", words, tmp_path / "plain")
        assert not resized
        start_run("tiny", [*words, "cycle.overlap=[params,optim]"], tmp_path / "overlapped")
    plain, overlapped = (rows(tmp_path / name, "train") for name in ("plain", "overlapped"))
    for key in ("tokens", "reward", "response_length", "cut_off"):
        assert [row[key] for row in plain] == [row[key] for row in overlapped]
    assert overlapped[0]["hidden_seconds"] > 0
    assert any(after < before for before, after in resized if after > 64)


def test_router_replay_reports_mismatch_with_and_without_replay(
    tmp_path: Path, no_pictures: None
) -> None:
    """Use a model without near ties, so that both sides route alike, with and without replay."""
    few = ["steps=3", "eval.every=2", "loop.prompts_per_step=4", "loop.samples_per_prompt=2"]
    start_run("tiny", [*few, *EXPERTS, REPLAY], tmp_path / "run")
    train = rows(tmp_path / "run", "train")
    assert 0 < max(row["mismatch_max"] for row in train) <= MISMATCH_MAX
    assert ["mismatch_mean_unreplayed" in row for row in train] == [True, False, True]
    assert 0 < train[0]["mismatch_max_unreplayed"] <= MISMATCH_MAX
    assert "compute_log_prob_unreplayed" in train[0]["stages"]


def test_answers_of_a_random_model_of_a_wide_vocabulary_run_to_their_limit(
    tmp_path: Path, no_pictures: None
) -> None:
    """Draw among all 5,000 ids, of which the tokenizer has 17: 32 answers of 40 tokens, at most."""
    few = [*SMALL, "eval.every=0", "steps=1", "model.config.vocab_size=5000"]
    few += ["sampling.max_tokens=40", "model.config.tie_word_embeddings=false"]
    start_run("tiny", few, tmp_path / "run")
    assert rows(tmp_path / "run", "train")[0]["response_length"] >= 39


def test_rollout_and_trainer_agree_on_every_token(tiny: Path) -> None:
    train = rows(tiny, "train")
    tokens = sum(row["tokens"] for row in train)
    assert sum(row["mismatch_mean"] * row["tokens"] for row in train) / tokens <= MISMATCH_MEAN
    # Zero would mean that one side did not compute.
    assert 0 < max(row["mismatch_max"] for row in train) <= MISMATCH_MAX


def test_every_step_has_its_stages_and_sides_take_turns(tiny: Path) -> None:
    for row in rows(tiny, "train"):
        rollout, train = row["memory"]["rollout"], row["memory"]["train"]
        assert min(rollout["weights"], rollout["kv_cache"], train["params"], train["optim"]) > 0
        assert rollout["params"] == rollout["optim"] == train["weights"] == train["kv_cache"] == 0
        assert [
            name for name in row["stages"] if name not in ("evaluate", "save_checkpoint")
        ] == STAGES
        assert 0 < row["sync"]["nbytes"] <= rollout["weights"]
        assert (
            0 < row["sync"]["copy_seconds"] < row["sync"]["seconds"] < row["stages"]["sync_weights"]
        )
    names = {event["name"] for event in trace(tiny)}
    further = {"evaluate", "save_checkpoint", "step 1", "pause params", "resume weights"}
    assert {*STAGES, "weights", "kv_cache", "params", "optim"} | further <= names


def test_run_folder_is_complete(tiny: Path) -> None:
    assert load(tiny / "recipe.yaml") == load("tiny", LEARNT)
    assert has_pictures(tiny)
    assert (tiny / "checkpoints" / "latest").read_text().strip() == "step_18"
    evaluations = rows(tiny, "eval")
    best = max(evaluations, key=lambda row: row["correct"])  # the first of equal ones
    assert (tiny / "checkpoints" / "best").read_text().strip() == f"step_{best['step']}"
    kept = {path.name for path in (tiny / "checkpoints").glob("step_*")}
    assert kept == {"step_18", f"step_{best['step']}"}
    assert max(entry["args"].get("backup", 0) for entry in trace(tiny)) > 0


@pytest.fixture(scope="module")
def straight(make_run: MakeRun) -> Path:
    """Run five steps without interruption."""
    return make_run("tiny", *SMALL, "steps=5")


def test_resident_tags_stay_and_change_no_number(
    straight: Path, tmp_path: Path, no_pictures: None
) -> None:
    """Switch the cycle at each resume: hand-over, overlapped moves, then all resident and aliased.

    The evaluation at the end of a session stays, and the next session does not repeat it.
    """
    folder = tmp_path / "folder"
    words = ["cycle.resident=[optim,weights]", "cycle.hand_over=always"]
    start_run("tiny", [*SMALL, "steps=2", *words], folder)
    for row in rows(folder, "train"):
        rollout, train = row["memory"]["rollout"], row["memory"]["train"]
        assert rollout["optim"] == train["optim"] > 0 and rollout["weights"] == train["weights"] > 0
        assert rollout["params"] == train["kv_cache"] == 0
    words = ["cycle.resident=[]", "cycle.overlap=[params,optim]", "cycle.hand_over=auto"]
    continue_run(folder, None, ["steps=3", *words])
    row = rows(folder, "train")[-1]
    stages = row["stages"]
    assert 0 < row["hidden_seconds"] < row["step_seconds"] and row["update_tflops"] > 0
    assert "begin_offload" in stages and "prefetch" in stages and "reload_params" in stages
    assert "offload_params" not in stages and "offload_optim" not in stages
    words = ["steps=5", "cycle.resident=auto", "cycle.alias=auto", "cycle.overlap=[]"]
    continue_run(folder, None, words)
    row = rows(folder, "train")[-1]
    last = row["memory"]
    assert last["rollout"] == last["train"] and last["train"]["weights"] == 0
    assert row["sync"]["nbytes"] == 0 and "wake_weights" not in row["stages"]
    assert min(last["train"][tag] for tag in ("params", "optim", "kv_cache")) > 0
    own = [row for row in rows(folder) if (row["kind"], row["step"]) != ("eval", 3)]
    assert without_clock(own) == without_clock(rows(straight)) and len(rows(folder)) > len(own)
    assert load(folder / "recipe.yaml") == load("tiny", [*SMALL, *words])


def test_run_whose_updates_launch_layers_as_graphs_has_the_same_rows(make_run: MakeRun) -> None:
    words = [*SMALL, "steps=3", "trainer.micro_batch_size=8"]
    plain, graphed = (
        make_run("tiny", *words, f"trainer.cuda_graphs={graphs}") for graphs in ("false", "true")
    )
    assert same_rows(graphed, plain)
    assert rows(graphed, "train")[-1]["peaks"]["update_actor"]["tags"]["activations"] > 0


def test_failed_run_resumes_from_its_checkpoint_with_the_same_rows(
    straight: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Find finished steps on disk, one line of error, and the same rows after the resume.

    The checkpoint of step 2 is still being written when step 4 fails.
    """
    folder, update, sync = tmp_path / "run", Trainer.update_actor, os.fsync
    failed, latest = threading.Event(), folder / "checkpoints" / "latest"

    def fail_in_the_fourth(trainer: Trainer, batch: Any) -> Any:
        if trainer.step == 3:
            assert not latest.exists()
            failed.set()
            raise OSError("the cable\nwas pulled")
        return update(trainer, batch)

    def slow(file: int) -> None:
        assert threading.current_thread() is threading.main_thread() or failed.wait(60)
        sync(file)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update_actor", fail_in_the_fourth)
        patch.setattr(os, "fsync", slow)
        words = [*SMALL, "steps=5", "checkpoint.every=2", "--run-dir", str(folder)]
        assert main(["run", "tiny", *words]) == 1
    assert (
        capsys.readouterr().err == "memsaver: update_actor failed: OSError: the cable was pulled\n"
    )
    assert [row["step"] for row in rows(folder, "train")] == [1, 2, 3]
    assert latest.read_text() == "step_2\n"
    assert trace(folder) and has_pictures(folder)
    with without_pictures():
        continue_run(folder)
    assert same_rows(folder, straight)


def test_resume_refuses_changed_problems_and_changed_initial_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Replace the content of the task and of the model's folder under their old names."""
    model, folder = tmp_path / "model", tmp_path / "run"
    with without_pictures():
        start_run("tiny", [*SMALL, "steps=1", "eval.every=0"], tmp_path / "first")
        model_of(tmp_path / "first", model, 0)
        words = [word for word in (*SMALL, "steps=1", "eval.every=0") if word != ONE_LAYER]
        words.append(f"model.path={model}")
        start_run("tiny", [*words, "trainer.schedule=linear"], folder)
        again = ["run", "--resume", str(folder), "steps=2"]
        before = contents(folder)
        with monkeypatch.context() as patch:
            patch.setattr("recipes.tasks.toy.TOY_LETTERS", "hgfedcba")
            assert main(again) == 2
        assert "task.name=toy: has other problems, or in another order" in capsys.readouterr().err
        assert contents(folder) == before
        model_of(tmp_path / "first", model, 1)
        assert main(again) == 2
        text = capsys.readouterr().err
        assert f"model.path={model}: " in text and "began with other weights" in text
        model_of(tmp_path / "first", model, 0)
        assert main(again) == 0
    note = "steps was 1: without a jump, the fall of the learning rate now ends after step 2"
    assert note in capsys.readouterr().out
    rates = [row["learning_rate"] for row in rows(folder, "train")]
    assert rates[0] == rates[1] == load("tiny").trainer.learning_rate


def model_of(run: Path, model: Path, seed: int) -> None:
    """Save random weights with the config and tokenizer of a run with a random model."""
    shutil.copytree(run / "model", model, dirs_exist_ok=True)
    torch.manual_seed(seed)
    config = transformers.AutoConfig.from_pretrained(model)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--resume", "FOLDER"], ["steps=1", "set steps=11"]),
        (["--resume", "FOLDER", "steps=4", "seed=5"], ["seed=5", "differs"]),
        (["--resume", "FOLDER", "steps=4", "sampling.max_tokens=5"], ["max_tokens=5", "differs"]),
        (
            ["tiny", "steps=4", ONE_LAYER, "--resume", "FOLDER"],
            ["loop.prompts_per_step=48", "differs"],
        ),
        (["--resume", "FOLDER", "steps=2"], ["holds no checkpoint"]),
        (["--resume", "/nowhere"], ["/nowhere", "holds no run"]),
        (["--resume", "FOLDER", "--run-dir", "x"], ["--run-dir"]),
        (["tiny", "--run-dir", "FOLDER"], ["already holds a run", "--resume"]),
        (["steps=3"], ["names no recipe", "memsaver run tiny"]),
    ],
)
def test_impossible_resume_is_refused_in_one_line_with_status_2(
    words: list[str], expected: list[str], make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    word = "checkpoint.every=0" if "holds no checkpoint" in expected else "seed=0"
    folder = make_run("tiny", *SMALL, "steps=1", word)
    before = (folder / "metrics.jsonl").read_bytes()
    assert main(["run", *[str(folder) if word == "FOLDER" else word for word in words]]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and all(word in message for word in expected), message
    assert (folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("owner", "method", "stage"),
    [
        ("trainer_bridge.trainer.Trainer", "sync_weights", "sync_weights"),
        ("rollout.Engine", "generate", "evaluate"),
    ],
)
def test_failure_names_its_stage_and_verbose_shows_the_traceback(
    owner: str,
    method: str,
    stage: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    no_pictures: None,
) -> None:
    monkeypatch.setattr(f"{owner}.{method}", lambda *_, **__: 1 / 0)
    words = [*SMALL, "steps=2", "--run-dir", str(tmp_path / "run"), "--verbose"]
    assert main(["run", "tiny", *words]) == 1
    message = capsys.readouterr().err
    assert "Traceback" in message and message.endswith(
        f"{stage} failed: ZeroDivisionError: division by zero\n"
    )
    assert (tmp_path / "run" / "trace.json").exists()


def command(pipe: Connection, words: Sequence[str], errors: Path) -> None:
    """Run the command as in a terminal, in a process group of its own."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with errors.open("w") as sys.stderr, contextlib.redirect_stdout(io.StringIO()):
        status = main(words)
    pipe.send(status)


def test_interrupt_ends_the_command_with_a_checkpoint_and_no_traceback(tmp_path: Path) -> None:
    """Expect exit status 128 + signal, no traceback, and the step's checkpoint on disk.

    test_interrupts covers the other signal and bad recipes, test_ray_runs covers Ray jobs.
    """
    folder, errors = tmp_path / "run", tmp_path / "errors"
    words = ["run", "tiny", *SMALL, "steps=100000", "task.workers=1", "--run-dir", str(folder)]
    peer = Peer(command, words, errors)

    def stepped() -> bool:
        return (folder / "metrics.jsonl").exists() and len(rows(folder, "train")) >= 2

    until(lambda: peer.dies_within(0) or stepped())
    os.killpg(peer.pid, signal.SIGINT)  # as Ctrl-C does in a terminal
    assert peer.hear() == 128 + signal.SIGINT
    peer.bury()
    done = rows(folder, "train")[-1]["step"]
    text = f"memsaver: interrupted in step {done}; checkpoint of step {done} saved; continue with: "
    text += f"memsaver run --resume {folder}\n"
    assert errors.read_text() == text
    assert done >= 2 and Checkpoints(folder).done == done and trace(folder) and has_pictures(folder)


def test_exit_status_reports_an_interrupt_inside_exec(tmp_path: Path) -> None:
    """Interrupt an exec(), which dataclasses use; Python would then exit by SIGINT after `-m`.

    The command imports neither torch nor the rest of a run, which takes seconds.
    """
    text = "import os, signal; os.kill(os.getpid(), signal.SIGTERM); os.getpid()"
    lines = ["import sys", "from recipes import cli"]
    lines += [f"cli.packaged_recipes = lambda: exec({text!r})", "sys.exit(cli.main(['recipes']))"]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    done = subprocess.run(
        [sys.executable, "-m", "mine"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
    )
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, b"memsaver: interrupted\n")
