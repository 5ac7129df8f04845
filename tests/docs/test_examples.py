"""The worked examples, run as they stand."""

from __future__ import annotations

import difflib
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

import memsaver
from examples import own_engine, own_model, plain_loop, plain_loop_with_cycle
from recipes.run import start_run
from tests.helpers.docs.pages import ROOT, blocks
from tests.helpers.recipes.tiny_runs import rows, without_pictures
from tests.helpers.trainer_bridge.models import write_model

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model") / "tiny", eos_token_id=None)


@pytest.mark.parametrize("loop", [plain_loop, plain_loop_with_cycle])
def test_the_loop_learns_before_and_after(
    loop: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    savers: list[memsaver.MemorySaver] = []

    class Seen(memsaver.MemorySaver):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            savers.append(self)

    monkeypatch.setattr(plain_loop_with_cycle, "MemorySaver", Seen)
    rewards = loop.main(path, steps=14)
    assert statistics.fmean(rewards[:3]) < 0.6 < 0.7 < statistics.fmean(rewards[-3:])
    if loop is plain_loop_with_cycle:
        (saver,) = savers
        offloaded = [event.tag for event in saver.drain_events() if event.op == "pause"]
        assert (offloaded.count("params"), offloaded.count("optim")) == (14, 14)


def test_the_engine_answers_with_the_loops_own_weights(path: str) -> None:
    """After the cycle's sync the rollout's greedy tokens are transformers' with the model that
    learns.
    """
    model = plain_loop.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.mul_(-1)  # other weights than the directory's
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


def test_the_cycle_takes_about_35_lines_which_the_page_marks() -> None:
    before, after = (
        (EXAMPLES / f"{name}.py").read_text().splitlines()
        for name in ("plain_loop", "plain_loop_with_cycle")
    )
    changes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    new = [(start + 1, end) for kind, *_, start, end in changes if kind in ("insert", "replace")]
    assert sum(bool(line.strip()) for start, end in new for line in after[start - 1 : end]) <= 40
    marks = " ".join(f"{start}-{end}" if end > start else str(end) for start, end in new)
    shown = {
        block.snippet: block.options for block in blocks(ROOT / "docs" / "how-to" / "own-loop.md")
    }
    assert shown["examples/plain_loop_with_cycle.py"] == f'hl_lines="{marks}"'


def test_memsaver_around_another_engine(path: str) -> None:
    seen = own_engine.main(path)
    assert seen["bytes held while paused"] == 0 < seen["bytes held"]
    assert seen["bytes held afterwards"] == seen["bytes held"]
    for what in ("addresses are the same", "weights were kept", "answer is the same"):
        assert seen[what]


def test_content_that_is_discarded_is_gone_and_costs_no_copy(path: str) -> None:
    """On the CPU new memory reads as zeros."""
    saver = memsaver.MemorySaver(device="cpu")
    engine = own_engine.OtherEngine(path, saver)
    engine.generate(own_engine.PROMPT)
    keys = engine.cache.layers[0].keys
    assert keys.abs().sum() > 0
    saver.pause("kv_cache")
    assert saver.report().backup_bytes == 0
    saver.resume("kv_cache")
    assert keys.abs().sum() == 0
    saver.close()


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    own_model.write_model(tmp_path / "model")
    assert len(own_model.ask(tmp_path / "model")) in range(1, 5)
    with without_pictures():
        run = own_model.train(tmp_path / "model", tmp_path / "run", steps=1)
    (row,) = rows(run, "train")
    assert row["mismatch_max"] < 5e-5, "trainer and rollout read different weights"


def test_a_task_of_ones_own_is_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named in a recipe and imported from where the command is run."""
    monkeypatch.chdir(ROOT)
    small = ["steps=4", "eval.every=0", "checkpoint.every=0"]
    with without_pictures():
        run = start_run("examples/own_task.yaml", small, tmp_path / "run")
    rewards = [row["reward"] for row in rows(run, "train")]
    assert rewards[0] < 0.1 and rewards[-1] > 0.15
