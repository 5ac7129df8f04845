"""Tests of the worked examples, which run unchanged."""

from __future__ import annotations

import json
import re
import runpy
import statistics
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

import memsaver
from examples import judge, kv_engine, own_engine, own_model, plain_loop, plain_loop_with_cycle
from recipes.rewards import Answer, Rewards, RewardSet
from recipes.run import start_run
from recipes.setup.model_files import toy_tokenizer
from tests.helpers.docs.pages import ROOT, blocks
from tests.helpers.recipes.tiny_runs import rows, without_pictures
from tests.helpers.trainer_bridge.models import write_model

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model") / "tiny", eos_token_id=None)


@pytest.mark.parametrize("loop", [plain_loop, plain_loop_with_cycle])
def test_loop_learns_without_and_with_the_cycle(
    loop: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    savers: list[memsaver.MemorySaver] = []

    class RecordedSaver(memsaver.MemorySaver):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            savers.append(self)

    monkeypatch.setattr(plain_loop_with_cycle, "MemorySaver", RecordedSaver)
    rewards = loop.main(path, steps=14)
    assert statistics.fmean(rewards[:3]) < 0.6 < 0.7 < statistics.fmean(rewards[-3:])
    if loop is plain_loop_with_cycle:
        (saver,) = savers
        offloaded = [event.tag for event in saver.drain_events() if event.op == "pause"]
        assert (offloaded.count("params"), offloaded.count("optim")) == (14, 14)


def test_rollout_after_sync_generates_as_the_trained_model_does(path: str) -> None:
    """Compare greedy tokens with transformers' own under the weights that are trained."""
    model = plain_loop.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.mul_(-1)  # differs from the weights in the directory
    engine = plain_loop_with_cycle.Engine.from_pretrained(path, kv_tokens=64, load_weights=False)
    engine.sleep(level=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    side = plain_loop_with_cycle.Side(model, optimizer, engine)
    cycle = plain_loop_with_cycle.Cycle(side, engine)
    wanted = model.generate(
        torch.tensor([[1, 2, 3]]), max_new_tokens=6, do_sample=False, pad_token_id=0
    )[0, 3:]
    held = side.saver.report().committed_bytes
    cycle.to_rollout(version=1)
    greedy = plain_loop_with_cycle.SamplingParams(max_tokens=6, temperature=0)
    assert list(engine.generate([[1, 2, 3]], greedy)[0][0].token_ids) == wanted.tolist()
    assert side.saver.report().committed_bytes == 0 < held
    cycle.to_train()
    assert side.saver.report().committed_bytes == held


NEEDING = ["own_engine", "vllm_plain", "vllm_loop", "trl_grpo", "train/ask", "judge"]


@pytest.mark.parametrize("name", NEEDING)
def test_example_without_what_it_needs_ends_in_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the example as a command without arguments, where TRL is not installed."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert re.fullmatch(r"usage: python .*|.*; run: pip install .*|nothing .*", str(ended.value))


def test_cycle_adds_at_most_40_lines_to_a_loop() -> None:
    (shown,) = blocks(ROOT / "docs" / "how-to" / "own-loop.md", "diff")
    assert 20 < sum(bool(re.match(r"\+ +\S", line)) for line in shown.text.splitlines()) <= 40


def test_other_engine_answers_the_same_after_pause_and_resume(path: str) -> None:
    outcome = own_engine.main(path)
    assert outcome["bytes held while paused"] == 0 < outcome["bytes held"]
    assert outcome["bytes held afterwards"] == outcome["bytes held"]
    for check in ("addresses are the same", "weights were kept", "answer is the same"):
        assert outcome[check]


def test_kv_engine_matches_transformers_before_and_after_a_pause() -> None:
    model = kv_engine.make_model()
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = [
        model.generate(torch.tensor([prompt]), pad_token_id=0, **settings)[0].tolist()
        for prompt in kv_engine.PROMPTS
    ]
    saver = memsaver.MemorySaver(device=kv_engine.DEVICE)
    engine = kv_engine.Engine(model, saver)
    assert engine.generate(kv_engine.PROMPTS, max_tokens=8) == expected
    engine.blocks.check_integrity()
    assert engine.blocks.available_pages == engine.blocks.total_pages
    engine.sleep()
    assert saver.report().committed_bytes == 0
    engine.wake_up()
    for layer in range(model.config.num_hidden_layers):
        for buffer in engine.pool.get_kv_buffer(layer):
            buffer.fill_(float("nan"))  # undefined after a pause, so nothing may depend on it
    assert engine.generate(kv_engine.PROMPTS, max_tokens=8) == expected
    saver.close()


def test_model_of_the_user_generates_and_trains_also_without_a_chat_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_model.write_model(tmp_path / "model")
    assert len(own_model.ask(tmp_path / "model")) in range(1, 5)
    with without_pictures():
        run = own_model.train(tmp_path / "model", tmp_path / "run", steps=1)
        assert "plain text" not in capsys.readouterr().out
        (tmp_path / "model" / "chat_template.jinja").unlink()
        own_model.train(tmp_path / "model", tmp_path / "plain", steps=1)
    assert capsys.readouterr().out.splitlines()[1].startswith("prompts: plain text, because the")
    (row,) = rows(run, "train")
    assert row["mismatch_max"] < 5e-5, "trainer and rollout read different weights"


def test_task_named_in_a_recipe_is_imported_and_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # the task is imported from the working folder
    small = ["steps=4", "eval.every=0", "checkpoint.every=0"]
    with without_pictures():
        run = start_run("examples/own_task.yaml", small, tmp_path / "run")
    rewards = [row["reward"] for row in rows(run, "train")]
    assert rewards[0] < 0.1 and rewards[-1] > 0.15


class _Judge(BaseHTTPRequestHandler):
    """A judge whose grade is the answer's number of words, or no number for an empty answer."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        words = request["messages"][0]["content"].rpartition("A: ")[2].split()
        content = f"I give {len(words)} points." if words else "I cannot say."
        reply = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: Any) -> None:
        """Print no line for a request."""


def test_judge_behind_a_server_grades_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ThreadingHTTPServer(("localhost", 0), _Judge)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("JUDGE_URL", f"http://localhost:{server.server_port}")
    texts = ["a b c", "", *("a" for _ in range(40))]
    with Rewards(RewardSet(functions=["examples.judge:helpful"]), workers=1) as rewards:
        scores = rewards.score([Answer(prompt="q", text=text) for text in texts])
    server.shutdown()
    server.server_close()
    assert [score.reward for score in scores] == [0.3, None, *([0.1] * 40)]
    assert not any(score.fault for score in scores)


def test_reward_model_scores_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = toy_tokenizer(["a", "b"])
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    for part in (tokenizer, Qwen3ForSequenceClassification(config)):
        part.save_pretrained(tmp_path)
    monkeypatch.setattr(judge, "SCORER", str(tmp_path))
    texts = ["a b", "b", "a b"]
    with Rewards(RewardSet(functions=[judge.fluent]), workers=0) as rewards:
        scores = rewards.score([Answer(prompt="a", text=text) for text in texts])
    first, second, third = (score.reward for score in scores)
    assert first == pytest.approx(third, rel=1e-5) and abs(first - second) > 1e-4 * abs(first)
