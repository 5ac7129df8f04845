"""Replay of an engine's routing in the trainer: transformers' own routers, told what to choose."""

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
from trainer_bridge import SequenceBatch, Trainer
from trainer_bridge.training.batch import lay_out

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
Make = Callable[..., Trainer]


def routed(batch: SequenceBatch, layers: int = 2) -> list[NDArray[Any] | None]:
    """Random ones: of all tokens, of the last ones, and of none."""
    rng = np.random.default_rng(0)
    found: list[NDArray[Any] | None] = []
    for i, length in enumerate(batch.lengths):
        shape = ((length - 1) // (1 + i % 2), layers, EXPERTS)
        chosen = rng.random(shape).argsort(-1)[..., :TOP_K].astype(np.uint8)
        found.append(None if i == 2 else chosen)
    return found


def told(batch: SequenceBatch) -> list[Tensor]:
    """Those of a batch, one entry a sequence, -1 where none are known."""
    micros = [lay_out(batch, [i], torch.device("cpu"), 1, packed=False) for i in range(len(batch))]
    return [micro.routed.long() for micro in micros if micro.routed is not None]


@pytest.mark.parametrize("packed", [True, False])
def test_a_micro_batch_says_where_tokens_go(packed: bool) -> None:
    batch = SequenceBatch(
        prompt_ids=[[3, 4], [5], [7]],
        response_ids=[[6, 7], [8], [9]],
        routed_experts=[np.array([[[1]], [[2]]], np.uint8), np.array([[[255]]], np.uint8), None],
    )
    micro = lay_out(batch, [1, -1, 0, 2], torch.device("cpu"), 3, packed=packed)
    assert micro.routed is not None and micro.routed.shape[1:] == (1, 1)
    rows = [[255, -1], [-1], [-1, 1, 2, -1], [-1, -1]]
    each = [row if packed else row + [-1] * (4 - len(row)) for row in rows]
    wanted = [*chain.from_iterable(each)]
    found = micro.routed.flatten().tolist()
    assert found == wanted + [-1] * (len(found) - len(wanted))  # of a filler
    part = batch.select([2])
    assert lay_out(part, [0], torch.device("cpu"), 1, packed=packed).routed is None
    with pytest.raises(ValueError, match="routed_experts 0 are of 2 tokens, the sequence has 1"):
        dataclasses.replace(batch, prompt_ids=[[3], [5], [7]], response_ids=[[6], [8], [9]])


@pytest.mark.parametrize(("family", "changes"), FAMILIES)
@pytest.mark.parametrize("packed", [True, False])
def test_scores_and_gradients_are_those_of_routers_that_choose_so(
    packed: bool, family: str, changes: dict[str, Any], tmp_path: Path, make_trainer: Make
) -> None:
    """Layers that are computed again in the backward pass go to the same experts."""
    path = write_model(tmp_path, family, **changes)
    model, batch = reference(path), make_batch(6)
    batch = dataclasses.replace(batch, routed_experts=routed(batch))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, eps=STABLE["adam_eps"], weight_decay=0.0
    )
    trainer = make_trainer(
        path,
        packed=packed,
        clip_eps_high=0.3,
        activation_checkpointing="layers" if packed else "mlp",
        micro_batch_size=3,
        **STABLE,
    )
    if family.startswith("deepseek") and RELEASE < (5, 13):  # its routers return logits only
        with pytest.raises(ValueError, match="routed_experts"):
            trainer.compute_log_prob(batch)
        return
    with forced(model, told(batch)), torch.no_grad():
        exact = reference_logprobs(model, batch)
    assert_scores(trainer.compute_log_prob(batch), exact)
    with forced(model, told(batch)):
        expected = plain_step(model, optimizer, batch, 1.0)
    assert_metrics(trainer.update_actor(batch), expected)
    assert_learned(bits(trainer), plain_bits(model, optimizer), 1)
    with torch.no_grad():
        exact = reference_logprobs(model, batch)
    unreplayed = dataclasses.replace(batch, routed_experts=None)
    assert_scores(trainer.compute_log_prob(unreplayed), exact)


def nearly_tied(path: Path, other: Path, by: float) -> None:
    """A copy of the model whose first expert is `by` less likely, in proportion, than its twin, the
    second; what they compute differs.
    """
    model = reference(str(path))
    for name, param in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            param.data[1] = param.data[0] * (1 + by)
    model.save_pretrained(str(other))


def test_near_ties_are_no_gap(tmp_path: Path, make_trainer: Make) -> None:
    """The trainer's routers find another of two experts likelier than the engine's, by no more than
    rounding could do.
    """
    path = tmp_path / "model"
    write_model(path, "qwen3_moe", num_experts=4, num_experts_per_tok=1)
    for name, by in (("engine", 2e-6), ("trainer", -2e-6)):
        nearly_tied(path, tmp_path / name, by)
    engine = Engine.from_pretrained(tmp_path / "engine", return_routed_experts=True)
    trainer = make_trainer(str(tmp_path / "trainer"))
    prompts = make_batch(4).prompt_ids
    out = engine.generate(prompts, SamplingParams(max_tokens=20, n=2, seed=0, ignore_eos=True))
    answers = [(prompt, each) for prompt, group in zip(prompts, out, strict=True) for each in group]
    batch = SequenceBatch(
        prompt_ids=[prompt for prompt, _ in answers],
        response_ids=[each.token_ids for _, each in answers],
    )
    said = torch.tensor([each.logprobs for _, each in answers])
    gaps = []
    for routing in ([each.routed_experts for _, each in answers], None):
        scores = trainer.compute_log_prob(dataclasses.replace(batch, routed_experts=routing))
        gaps.append(float((torch.tensor(scores) - said).abs().max()))
    assert gaps[0] <= GAP < 1e-2 < gaps[1]


def test_routing_of_another_model_is_refused(tmp_path: Path, make_trainer: Make) -> None:
    path = write_model(tmp_path, "qwen3_moe", num_experts=4)
    batch = make_batch(2)
    batch = dataclasses.replace(batch, routed_experts=routed(batch, layers=5))
    with pytest.raises(ValueError, match=r"routed_experts are \(5, 2\) a token, the model has"):
        make_trainer(path).compute_log_prob(batch)
