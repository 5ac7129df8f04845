"""Autocast, inference mode, default device and default dtype of the caller change no result."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout import Engine, SamplingParams
from tests.helpers.default_dtype import default_dtype
from tests.helpers.models import save_tiny
from tests.helpers.rollout.answers import random_prompts
from tests.helpers.trainer_bridge.models import make_batch, value_batch, write_model
from trainer_bridge import CriticConfig, PolicyLoss, Trainer, module_sync

PROMPTS = random_prompts((5, 40))
ASKED = [
    SamplingParams(max_tokens=5, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=5, top_k=9, seed=3, n=2, ignore_eos=True),
    SamplingParams(max_tokens=5, beam_width=2, ignore_eos=True),
]
Do = Callable[[Callable[[], Any]], Any]
SETTINGS: list[Callable[[], contextlib.AbstractContextManager[Any]]] = [
    lambda: torch.autocast("cpu", torch.bfloat16),
    torch.inference_mode,
    torch.no_grad,
    lambda: torch.device("meta"),
    lambda: default_dtype(torch.float64),
]


def inside(call: Callable[[], Any]) -> Any:
    """Make a call while all settings apply."""
    with contextlib.ExitStack() as stack:
        for setting in SETTINGS:
            stack.enter_context(setting())
        state = ambient()
        result = call()
        assert ambient() == state, "the caller's settings are restored"
        return result


def ambient() -> tuple[object, ...]:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.get_default_device(),
        torch.get_default_dtype(),
    )


def engine_session(do: Do, path: str, dtype: torch.dtype) -> list[Any]:
    """Build, generate, sleep, load and stream, each call by `do`; return all answers."""
    results = []
    engine: Engine = do(lambda: Engine.from_pretrained(path, kv_tokens=512, dtype=dtype))
    for params in ASKED:
        results.append(do(lambda params=params: engine.generate(PROMPTS, params)))  # type: ignore[misc]
        do(lambda: engine.sleep(1))
        do(engine.wake_up)
        do(lambda: engine.load(path))
        results.append(engine.generate(PROMPTS, params))
    do(lambda: engine.submit(PROMPTS[1], ASKED[1]))
    while engine.unfinished:
        results.append(do(engine.step))
    engine.check_integrity()
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_engine_called_inside_settings_answers_as_outside(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    save_tiny(tmp_path, "qwen3")
    expected = engine_session(lambda call: call(), str(tmp_path), dtype)
    assert engine_session(inside, str(tmp_path), dtype) == expected


def trainer_session(
    do: Do, path: str, make: Callable[..., Trainer], folder: Path, changes: dict[str, Any]
) -> list[Any]:
    """Score, learn, offload, save and sync, each call by `do`; return scores, figures, tokens."""
    trainer: Trainer = do(
        lambda: make(path, critic=CriticConfig(), reference=True, loss=LOSS, **changes)
    )
    engine: Engine = do(lambda: Engine.from_pretrained(path, kv_tokens=512, load_weights=False))
    batch, results = make_batch(4), []
    valued = [value_batch(4, seed) for seed in range(2)]
    do(lambda: trainer.reload("reference"))
    scores = do(lambda: trainer.compute_ref_log_prob(batch))
    batch = dataclasses.replace(batch, ref_logprobs=scores)
    results += [scores, do(lambda: trainer.compute_log_prob(batch))]
    results += [do(lambda: trainer.compute_values(valued[0]))]
    for values in valued:
        results.append(do(lambda: trainer.update_actor(batch)))
        results.append(do(lambda values=values: trainer.update_critic(values)))  # type: ignore[misc]
        do(lambda: trainer.offload("params", "optim"))
        do(lambda: trainer.reload("params", "optim"))
    do(lambda: trainer.save_checkpoint(str(folder)))
    do(lambda: trainer.load_checkpoint(str(folder)))
    do(lambda: trainer.connect([engine]))
    do(lambda: trainer.sync_weights(1))
    results.append(do(lambda: engine.generate(batch.prompt_ids, ASKED[0])))
    sync = do(lambda: module_sync(trainer.model, [engine]))
    do(lambda: sync.sync(2))
    results.append(do(lambda: engine.generate(batch.prompt_ids, ASKED[0])))
    return results


LOSS = PolicyLoss(kl_coef=0.1, entropy_coef=0.01)


@pytest.mark.parametrize("changes", [{}, {"exact": True}], ids=["plain", "exact"])
def test_trainer_called_inside_settings_learns_as_outside(
    changes: dict[str, Any], make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    path = write_model(tmp_path / "model")
    first = trainer_session(lambda call: call(), path, make_trainer, tmp_path / "0", changes)
    assert trainer_session(inside, path, make_trainer, tmp_path / "1", changes) == first
