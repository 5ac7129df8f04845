"""Replay of an engine's routing in the trainer, against transformers with forced routers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout import Engine, SamplingParams
from tests.helpers.case_selection import some
from tests.helpers.models import DEEPSEEK_MOE, MLA, RELEASE
from tests.helpers.rollout.answers import GAP
from tests.helpers.routers import forced
from tests.helpers.trainer_bridge.models import (
    make_batch,
    reference,
    reference_logprobs,
    write_model,
)
from tests.helpers.trainer_bridge.reference_step import plain_bits, plain_step
from tests.helpers.trainer_bridge.states import bits
from tests.helpers.trainer_bridge.tolerance import (
    STABLE,
    assert_learned,
    assert_metrics,
    assert_scores,
)
from trainer_bridge import PolicyLoss, SequenceBatch, Trainer
from trainer_bridge.learning.batch import lay_out

EXPERTS, TOP_K = 6, 2
QWEN: dict[str, Any] = {"num_experts": EXPERTS, "mlp_only_layers": [0], "num_hidden_layers": 3}
DEEPSEEK: dict[str, Any] = {
    **MLA, **DEEPSEEK_MOE, "head_dim": 8, "n_routed_experts": EXPERTS, "num_experts_per_tok": TOP_K,
    "n_group": 3,
}  # fmt: skip
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", QWEN | {"norm_topk_prob": True}),
    ("qwen3_moe", QWEN | {"norm_topk_prob": False}),
    ("mixtral", {"num_local_experts": EXPERTS}),
    ("deepseek_v3", DEEPSEEK | {"norm_topk_prob": True}),
    ("deepseek_v3", DEEPSEEK | {"norm_topk_prob": False}),
    ("deepseek_v2", DEEPSEEK | {"topk_method": "greedy"}),
]
# Every second one has each family, and each kind of normalization, in one of the layouts.
LAYOUTS = [
    (packed, family, changes)
    for number, (family, changes) in enumerate(FAMILIES)
    for packed in ((True, False) if number % 2 else (False, True))
]
Make = Callable[..., Trainer]


def routed(batch: SequenceBatch, layers: int = 2) -> list[NDArray[Any] | None]:
    """Draw experts for all tokens, for the last tokens, or for no token of a sequence."""
    rng = np.random.default_rng(0)
    entries: list[NDArray[Any] | None] = []
    for i, length in enumerate(batch.lengths):
        shape = ((length - 1) // (1 + i % 2), layers, EXPERTS)
        chosen = rng.random(shape).argsort(-1)[..., :TOP_K].astype(np.uint8)
        entries.append(None if i == 2 else chosen)
    return entries


def routed_tensors(batch: SequenceBatch) -> list[Tensor]:
    """Return the experts of a batch, one tensor per sequence, -1 if unknown."""
    micros = [lay_out(batch, [i], torch.device("cpu"), 1, packed=False) for i in range(len(batch))]
    return [micro.routed.long() for micro in micros if micro.routed is not None]


@pytest.mark.parametrize("packed", [True, False])
def test_micro_batch_has_routed_experts_by_position(packed: bool) -> None:
    batch = SequenceBatch(
        prompt_ids=[[3, 4], [5], [7]],
        response_ids=[[6, 7], [8], [9]],
        routed_experts=[np.array([[[1]], [[2]]], np.uint8), np.array([[[255]]], np.uint8), None],
    )
    micro = lay_out(batch, [1, -1, 0, 2], torch.device("cpu"), 3 * batch.max_length, packed=packed)
    assert micro.routed is not None and micro.routed.shape[1:] == (1, 1)
    rows = [[255, -1], [-1], [-1, 1, 2, -1], [-1, -1]]
    padded = [row if packed else row + [-1] * (4 - len(row)) for row in rows]
    wanted = [*chain.from_iterable(padded)]
    experts = micro.routed.flatten().tolist()
    assert experts == wanted + [-1] * (len(experts) - len(wanted))  # the rest is a filler
    part = batch.select([2])
    assert lay_out(part, [0], torch.device("cpu"), 1, packed=packed).routed is None
    with pytest.raises(ValueError, match="routed_experts 0 has entries for 2 tokens, the seq"):
        dataclasses.replace(batch, prompt_ids=[[3], [5], [7]], response_ids=[[6], [8], [9]])


@pytest.mark.parametrize(("packed", "family", "changes"), some(*LAYOUTS[::2], whole=LAYOUTS[1::2]))
def test_replayed_scores_and_gradients_match_forced_routers(
    packed: bool, family: str, changes: dict[str, Any], tmp_path: Path, make_trainer: Make
) -> None:
    """Recompute layers in the backward pass, which must use the same experts."""
    path = write_model(tmp_path, family, **changes)
    model, batch = reference(path), make_batch(6)
    batch = dataclasses.replace(batch, routed_experts=routed(batch))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, eps=STABLE["adam_eps"], weight_decay=0.0
    )
    trainer = make_trainer(
        path,
        packed=packed,
        loss=PolicyLoss(clip_high=0.3),
        activation_checkpointing="layers" if packed else "mlp",
        micro_batch_size=3,
        **STABLE,
    )
    if family.startswith("deepseek") and RELEASE < (5, 13):  # its routers return logits only
        with pytest.raises(ValueError, match="routed_experts"):
            trainer.compute_log_prob(batch)
        return
    with forced(model, routed_tensors(batch)), torch.no_grad():
        exact = reference_logprobs(model, batch)
    assert_scores(trainer.compute_log_prob(batch), exact)
    with forced(model, routed_tensors(batch)):
        expected = plain_step(model, optimizer, batch, 1.0)
    assert_metrics(trainer.update_actor(batch), expected)
    assert_learned(bits(trainer), plain_bits(model, optimizer), 1)
    with torch.no_grad():
        exact = reference_logprobs(model, batch)
    unreplayed = dataclasses.replace(batch, routed_experts=None)
    assert_scores(trainer.compute_log_prob(unreplayed), exact)


def nearly_tied(path: Path, other: Path, by: float) -> None:
    """Write a copy of a model whose first two experts have nearly the same probability.

    The logit of the second expert exceeds that of the first by the relative amount `by`.
    """
    model = reference(str(path))
    for name, param in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            param.data[1] = param.data[0] * (1 + by)
    model.save_pretrained(str(other))


def test_replay_removes_mismatch_of_near_ties(tmp_path: Path, make_trainer: Make) -> None:
    """Build a near tie of experts, of which trainer and engine prefer different ones."""
    path = tmp_path / "model"
    write_model(path, "qwen3_moe", num_experts=4, num_experts_per_tok=1)
    for name, by in (("engine", 2e-6), ("trainer", -2e-6)):
        nearly_tied(path, tmp_path / name, by)
    engine = Engine.from_pretrained(tmp_path / "engine", return_routed_experts=True)
    trainer = make_trainer(str(tmp_path / "trainer"))
    prompts = make_batch(4).prompt_ids
    out = engine.generate(prompts, SamplingParams(max_tokens=20, n=2, seed=0, ignore_eos=True))
    samples = [sample for group in out for sample in group]
    batch = SequenceBatch(
        prompt_ids=[prompt for prompt, group in zip(prompts, out, strict=True) for _ in group],
        response_ids=[sample.token_ids for sample in samples],
    )
    expected = torch.tensor([sample.logprobs for sample in samples])
    mismatches = []
    for routing in ([sample.routed_experts for sample in samples], None):
        scores = trainer.compute_log_prob(dataclasses.replace(batch, routed_experts=routing))
        mismatches.append(float((torch.tensor(scores) - expected).abs().max()))
    assert mismatches[0] <= GAP < 1e-2 < mismatches[1]


def test_replay_of_another_models_routing_is_refused(tmp_path: Path, make_trainer: Make) -> None:
    path = write_model(tmp_path, "qwen3_moe", num_experts=4)
    batch = make_batch(2)
    batch = dataclasses.replace(batch, routed_experts=routed(batch, layers=5))
    with pytest.raises(ValueError, match=r"routed_experts are \(5, 2\) per token, the model has"):
        make_trainer(path).compute_log_prob(batch)
