"""Exact runs on a device whose library of matrix products has other bits."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout import Engine, SamplingParams
from tests.helpers.models import save_tiny
from tests.helpers.rollout.other_library import other_library
from trainer_bridge import SequenceBatch, Trainer, TrainerConfig

DTYPE: Any = "bfloat16"
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]


def test_engine_and_trainer_replace_a_library_with_other_bits(
    device: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let all products of the library depend on the number of rows.

    The engine computes each of 2 x 2 tokens alone or with another, the trainer all at once.
    """
    for user in ("rollout.engine.checks", "trainer_bridge.ops.exact"):
        monkeypatch.setattr(f"{user}.is_probed", lambda device, dtype: True)
    save_tiny(
        tmp_path, "qwen2", num_hidden_layers=1, vocab_size=72, intermediate_size=40, hidden_size=64
    )
    with caplog.at_level(logging.INFO, "rollout"), other_library(lambda rows, columns: True):
        engine = Engine.from_pretrained(
            tmp_path, device, getattr(torch, DTYPE), kv_tokens=64, exact=True
        )
        asked = SamplingParams(max_tokens=2, seed=1)
        answers = [answer for (answer,) in engine.generate(PROMPTS, asked)]
        engine.saver.close()
        config = TrainerConfig(
            model_path=str(tmp_path), param_dtype=DTYPE, device=device, exact=True, threads=1
        )
        trainer = Trainer(config)
        batch = SequenceBatch(
            prompt_ids=PROMPTS,
            response_ids=[answer.token_ids for answer in answers],
            rollout_logprobs=[answer.logprobs for answer in answers],
            advantages=[1.0, -1.0],
        )
        figures = trainer.update_actor(batch)
        trainer.close()
        trainer.saver.close()
    assert figures["unequal_tokens"] == 0 < figures["grad_norm"]
    of_engine, of_trainer = (record.message for record in caplog.records)
    assert "computes 0 of 5 products with the defined bits; Triton computes" in of_engine
    assert "computes 0 of 6 products with the defined bits; Triton computes" in of_trainer
