"""Records of a log-prob mismatch that two ranks write, and their trace in one process."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout import Engine, SamplingParams
from tests.helpers.models import save_tiny
from tests.helpers.ranks import results, start_ranks
from trainer_bridge import SequenceBatch, Trainer, TrainerConfig
from trainer_bridge.errors import UnequalTokens
from trainer_bridge.exact.trace import trace_mismatch

HEAT = 0.7
PROMPTS = [[5, 9, 2], [8] * 40]


def sampled(path: Path) -> SequenceBatch:
    engine = Engine.from_pretrained(path, dtype=torch.bfloat16)
    asked = SamplingParams(max_tokens=9, temperature=HEAT, seed=2)
    answers = [group[0] for group in engine.generate(PROMPTS, asked)]
    return SequenceBatch(
        prompt_ids=PROMPTS,
        response_ids=[answer.token_ids for answer in answers],
        rollout_logprobs=[answer.logprobs for answer in answers],
        advantages=[1.0, -1.0],
        temperature=HEAT,
    )


def refused(path: Path, batch: SequenceBatch, directory: Path) -> str:
    """Return the error of an exact update that gets other log-probabilities than it computes."""
    assert batch.rollout_logprobs is not None
    logprobs = [[*values] for values in batch.rollout_logprobs]
    logprobs[1][3] -= 2**-10  # nats
    config = TrainerConfig(
        model_path=str(path), param_dtype="bfloat16", exact=True, mismatch_dir=str(directory)
    )
    trainer = Trainer(config)
    with pytest.raises(UnequalTokens) as caught:
        trainer.update_actor(dataclasses.replace(batch, rollout_logprobs=logprobs))
    trainer.close()
    trainer.saver.close()
    return str(caught.value)


def worker(rank: int, path: Path, batch: SequenceBatch, directory: Path) -> str:
    torch.set_num_threads(1)
    return refused(path, batch, directory)


def test_record_of_two_ranks_has_the_weights_and_the_unequal_sequence(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "qwen2", num_key_value_heads=1)
    batch, folder = sampled(tmp_path / "model"), tmp_path / "mismatch"
    ranks = start_ranks(worker, 2, tmp_path / "store", tmp_path / "model", batch, folder)
    for text in results(ranks):
        assert "of 1 token differ, first of token 3 of sequence 1" in text
        assert text.endswith(f"memsaver trace-mismatch {folder} names the operation")
    trace = trace_mismatch(folder, max_prefill_tokens=16)
    assert (trace.record.sequence, trace.record.places) == (1, [3])
    assert trace.record.prompt_ids == PROMPTS[1]
    assert batch.rollout_logprobs is not None
    assert trace.engine == trace.trainer == trace.record.trainer == batch.rollout_logprobs[1]
    assert trace.first is None and len(trace.compared) > 30
    (file,) = folder.glob("**/*.safetensors")
    weights = load_file(file)
    next(weights[name] for name in weights if "down_proj" in name).fill_(3e38)
    save_file(weights, file)
    overflown = trace_mismatch(folder, max_prefill_tokens=16)
    assert overflown.first is not None and np.isnan(overflown.trainer).all()


def test_record_that_cannot_be_written_is_named_in_the_error(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "own.bin").touch()
    text = refused(tmp_path / "model", sampled(tmp_path / "model"), tmp_path / "full")
    assert "of sequence 1: " in text
    assert "full, for memsaver trace-mismatch, was not written: " in text and "own.bin" in text
