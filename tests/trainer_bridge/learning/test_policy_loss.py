"""The policy's loss and its gradient against fp64 by definition, verl and TRL.

The model is a table of logits, one row for each preceding token, so that passes over micro batches
cost nothing. Losses of a trainer on two ranks are in `test_two_ranks.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.helpers.case_selection import some
from tests.helpers.rollout.package_names import Wheel
from tests.helpers.trainer_bridge.models import as_sampled, make_batch, reference, write_model
from tests.helpers.trainer_bridge.reference_step import plain_bits, plain_step
from tests.helpers.trainer_bridge.rival_losses import TRL, VERL, trl_loss, verl_loss
from tests.helpers.trainer_bridge.states import assert_same_bits, bits
from tests.helpers.trainer_bridge.tolerance import (
    STABLE,
    U,
    assert_learned,
    assert_metrics,
    rounding,
)
from trainer_bridge import (
    CorrectionConfig,
    PolicyLoss,
    SequenceBatch,
    Trainer,
    TrainerConfig,
    correct,
)
from trainer_bridge.learning import reference_figures
from trainer_bridge.learning.policy import Policy
from trainer_bridge.learning.policy_loss import kl_terms, policy_terms, ppo_clip
from trainer_bridge.learning.trainer_model import TokenValues
from trainer_bridge.ops import token_scores

WORDS = 11
LENGTHS = [5, 1, 7, 3, 0, 4, 2, 6, 1]  # response tokens; one answer is empty
KINDS: list[dict[str, Any]] = [
    {"kind": "ppo"},
    {"kind": "ppo", "dual_clip": 1.4},
    {"kind": "gspo"},
    {"kind": "gspo", "dual_clip": 1.4},
    {"kind": "cispo"},
]
AGGREGATIONS = ["token", "sequence", "constant"]
CLIPS = [(0.2, 0.2), (1.0, 0.3)]
KLS: list[dict[str, Any]] = [{}, *({"kl_coef": 0.3, "kl_estimator": k} for k in ("k2", "k3"))]
# (sequences of a micro batch, packed, ranks)
LAYOUTS = [(2, False, 1), (2, True, 1), (1, False, 2), *some(whole=[(64, True, 1), (3, True, 2)])]
CPU = torch.device("cpu")


class Table(nn.Module):
    """A language model whose logits depend only on the preceding token."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table, self.packs = nn.Parameter(table), False

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, input_ids: Tensor, logits_to_keep: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids[:, logits_to_keep]])


class Arrays(NamedTuple):
    """Numbers of the tokens of all answers, fp64 [S, T]; `every` is [S, T, V]."""

    logp: Tensor
    old: Tensor
    ref: Tensor
    advantages: Tensor
    mask: Tensor
    entropy: Tensor
    every: Tensor  # log-probabilities of all words
    ids: tuple[Tensor, Tensor]  # the preceding token, and the token


def draw(seed: int, per_token: bool) -> tuple[Tensor, SequenceBatch]:
    """Return a table of logits, and a batch whose ratios are on all sides of the limits."""
    rng = torch.Generator().manual_seed(seed)
    table = 1.5 * torch.randn(WORDS, WORDS, generator=rng)
    ids = [torch.randint(WORDS, (count + 2,), generator=rng).tolist() for count in LENGTHS]
    advantages = [torch.randn(count or 1, generator=rng).tolist() for count in LENGTHS]
    batch = SequenceBatch(
        prompt_ids=[row[:2] for row in ids],
        response_ids=[row[2:] for row in ids],
        advantages=[row[:count] for row, count in zip(advantages, LENGTHS, strict=True)]
        if per_token
        else [row[0] for row in advantages],
        temperature=0.7,
    )
    logp = arrays(batch, table).logp
    moved = {
        name: [
            (row[:count] + shift + 0.4 * torch.randn(count, generator=rng)).float().tolist()
            for row, shift, count in zip(
                logp, 0.3 * torch.randn(len(batch), generator=rng), LENGTHS, strict=True
            )
        ]
        for name in ("old_logprobs", "ref_logprobs")
    }
    return table, dataclasses.replace(batch, **moved)


def partly_read(batch: SequenceBatch) -> SequenceBatch:
    """Return the batch with tokens that are only read, one whole answer, and NaN for them."""
    mask = [[(i + t) % 3 > 0 for t in range(count)] for i, count in enumerate(LENGTHS)]
    mask[1] = [False]
    changes: dict[str, Any] = {}
    for name in ("old_logprobs", "ref_logprobs", "advantages"):
        changes[name] = [
            [number if learned else math.nan for number, learned in zip(row, own, strict=True)]
            for row, own in zip(getattr(batch, name), mask, strict=True)
        ]
    return dataclasses.replace(batch, mask=mask, **changes)


def arrays(batch: SequenceBatch, table: Tensor) -> Arrays:
    longest = max(map(len, batch.response_ids))

    def padded(rows: Any) -> Tensor:
        filled = [[*row, *[0] * (longest - len(row))] for row in rows]
        return torch.tensor(filled, dtype=torch.float64).nan_to_num()

    pairs = list(zip(batch.prompt_ids, batch.response_ids, strict=True))
    before = padded([[*prompt, *answer][len(prompt) - 1 : -1] for prompt, answer in pairs]).long()
    token = padded(batch.response_ids).long()
    every = torch.log_softmax(table.double()[before] / batch.temperature, -1)
    nothing = [[0.0] * len(row) for row in batch.response_ids]
    advantages = [
        row if isinstance(row, list) else [row] * longest
        for row in batch.advantages or [0.0] * len(batch)
    ]
    return Arrays(
        logp=every.gather(-1, token[:, :, None])[:, :, 0],
        old=padded(batch.old_logprobs or nothing),
        ref=padded(batch.ref_logprobs or nothing),
        advantages=padded(advantages),
        mask=padded(batch.mask or [[1.0] * len(row) for row in batch.response_ids]),
        entropy=-(every.exp() * every).sum(-1),
        every=every,
        ids=(before, token),
    )


def sequence_means(terms: Tensor, mask: Tensor) -> Tensor:
    return (terms * mask).sum(-1) / mask.sum(-1).clamp(min=1)


def aggregate(loss: PolicyLoss, terms: Tensor, mask: Tensor) -> Tensor:
    if loss.aggregation == "token":
        return (terms * mask).sum() / mask.sum()
    if loss.aggregation == "sequence":
        return sequence_means(terms, mask).mean()
    return (terms * mask).sum() / (len(mask) * (loss.max_tokens or 0))


def ratios(loss: PolicyLoss, a: Arrays) -> Tensor:
    if loss.kind != "gspo":
        return (a.logp - a.old).exp()
    mean = sequence_means(a.logp - a.old, a.mask)[:, None].detach()
    return (mean + a.logp - a.logp.detach()).exp()


def by_definition(loss: PolicyLoss, a: Arrays) -> Tensor:
    ratio, gain = ratios(loss, a), a.advantages
    held = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    if loss.kind == "cispo":
        terms = -held.detach() * gain * a.logp
    else:
        terms = torch.maximum(-ratio * gain, -held * gain)
        if loss.dual_clip is not None:
            terms = torch.where(gain < 0, terms.minimum(-loss.dual_clip * gain), terms)
    far = a.logp - a.ref
    kl = far.square() / 2 if loss.kl_estimator == "k2" else (-far).exp() - 1 + far
    return aggregate(loss, terms + loss.kl_coef * kl - loss.entropy_coef * a.entropy, a.mask)


def clipped_sides(loss: PolicyLoss, a: Arrays) -> list[int]:
    ratio, sign = ratios(loss, a), a.advantages.sign()
    low, high = ratio < 1 - loss.clip_low, ratio > 1 + loss.clip_high
    if loss.kind != "cispo":
        low, high = low & (sign < 0), high & (sign > 0)
    if loss.dual_clip is not None:
        high = high | ((ratio > loss.dual_clip) & (sign < 0))
    return [int((side * a.mask).sum()) for side in (low, high)]


def unit_of(a: Arrays) -> float:
    """Return the largest relative error of a sum of terms.

    All numbers are at most `size`. A log-probability has fewer than 13 roundings of such numbers:
    of z, its maximum, their difference, and the logarithm of a sum of 11 powers. The ratio to
    another one, its mean over at most 7 tokens and the exponential are off by less than 32 size
    units. All factors and p have fewer than 16 more. The parts of a term count with their sizes
    before they cancel. At last the tokens are added.
    """
    size = max(float(numbers.abs().max()) for numbers in (a.every, a.old, a.ref))
    return 48 * max(4.0, size) * U + rounding(sum(LENGTHS))


def limits(loss: PolicyLoss, a: Arrays) -> tuple[Tensor, Tensor]:
    """Return the largest errors of loss and gradient."""
    far, weight = a.logp - a.ref, ratios(loss, a)
    if loss.kind == "cispo":
        weight = weight.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    slope = weight * a.advantages.abs() + loss.kl_coef * (1 + far.abs() + (-far).exp())
    value = slope * (1 + a.logp.abs()) + loss.kl_coef * far.square()
    value = value + loss.entropy_coef * (1 + a.entropy)
    factors = torch.autograd.functional.jacobian(
        lambda terms: aggregate(loss, terms, a.mask), torch.zeros_like(a.mask)
    )
    likely, (before, token) = a.every.exp(), a.ids
    apart = (a.every + a.entropy[:, :, None]).abs()
    hit = nn.functional.one_hot(token, WORDS)
    parts = slope[:, :, None] * (hit + likely) + loss.entropy_coef * likely * (1 + apart)
    parts = (factors[:, :, None] * parts / 0.7).flatten(0, 1)
    rows = torch.zeros(WORDS, WORDS, dtype=torch.float64).index_add(0, before.flatten(), parts)
    return unit_of(a) * (factors * value).sum(), unit_of(a) * rows


def update(
    loss: PolicyLoss, batch: SequenceBatch, table: Tensor, size: int, packed: bool, world: int
) -> tuple[list[float], Tensor]:
    """Return the sums of an update of all ranks, and the mean of the ranks' gradients."""
    model, parts = Table(table), []
    model.packs = packed
    config = TrainerConfig(model_path="m", reference=True, loss=loss, micro_batch_size=size)
    for rank in range(world):
        runtime: Any = SimpleNamespace(
            rank=rank,
            world=world,
            device=CPU,
            numbers=Tensor.numpy,
            sum_ranks=np.asarray,
            keep_unsharded=False,
            use_graphs=lambda graphs: None,
        )
        policy = Policy(model, config, runtime)
        learn = partial(policy.gradient, batch, 1.0, TokenValues())
        parts.append(policy.add_gradients(batch, learn))
    assert model.table.grad is not None
    return [sum(column) for column in zip(*parts, strict=True)], model.table.grad / world


def forked(batch: SequenceBatch) -> SequenceBatch:
    """Return the batch with answers in two parts, of which the second follows the first."""
    parts: list[tuple[int, int, int]] = []
    for answer, count in enumerate(LENGTHS):
        parts += [(answer, 0, count // 2), (answer, count // 2, count)]
    columns: dict[str, Any] = {}
    for name in ("response_ids", "old_logprobs", "ref_logprobs", "advantages", "mask"):
        if (rows := getattr(batch, name)) is not None:
            columns[name] = [rows[answer][begin:end] for answer, begin, end in parts]
    columns["prompt_ids"] = [
        [*batch.prompt_ids[answer], *batch.response_ids[answer][:begin]]
        for answer, begin, _ in parts
    ]
    return dataclasses.replace(batch, **columns, answers=[answer for answer, *_ in parts])


def assert_matches_definition(
    loss: PolicyLoss,
    batch: SequenceBatch,
    table: Tensor,
    layout: tuple[int, bool, int],
    learned: SequenceBatch | None = None,
) -> None:
    wide = table.double().requires_grad_()
    a = arrays(batch, wide)
    expected = by_definition(loss, a)
    (slope,) = torch.autograd.grad(expected, wide)
    a = Arrays(*(x if isinstance(x, tuple) else x.detach() for x in arrays(batch, table)))
    ratio = ratios(loss, a)
    for limit in (1 - loss.clip_low, 1 + loss.clip_high, loss.dual_clip or 9):
        assert (ratio - limit)[a.mask > 0].abs().min() > 1e-4, (
            "fp32 may decide otherwise; draw other numbers"
        )
    value_off, slope_off = limits(loss, a)
    (value, low, high, kl, entropy), grad = update(loss, learned or batch, table, *layout)
    assert abs(value - float(expected.detach())) <= value_off, (loss, layout)
    assert ((grad - slope).abs() <= slope_off).all(), (loss, layout)
    assert [low, high] == clipped_sides(loss, a), (loss, layout)
    moved = a.logp - a.old
    kls, sizes = moved.exp() - 1 - moved, moved.exp() + 1 + moved.abs()
    for got, exact, parts in ((kl, kls, sizes), (entropy, a.entropy, 1 + a.entropy)):
        wanted, allowed = ((numbers * a.mask).sum() for numbers in (exact, unit_of(a) * parts))
        assert abs(got - wanted) <= allowed, (loss, layout)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_loss_and_gradient_of_every_combination_match_fp64(kind: dict[str, Any]) -> None:
    combinations = product(AGGREGATIONS, KLS, (0.0, 0.2), CLIPS, (False, True))
    table, whole = draw(0, per_token=True)
    drawn = [draw(0, per_token=False), (table, partly_read(whole))]
    for aggregation, kl, entropy, (low, high), per_token in combinations:
        loss = PolicyLoss(
            **kind,
            **kl,
            aggregation=aggregation,
            entropy_coef=entropy,
            clip_low=low,
            clip_high=high,
            max_tokens=9,
        )
        table, batch = drawn[per_token]
        assert_matches_definition(loss, batch, table, (64, False, 1))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_and_ranks_do_not_change_the_update(
    kind: dict[str, Any], aggregation: Any
) -> None:
    """Expect the result by definition for any layout, also with fillers and without any token."""
    loss = PolicyLoss(**kind, aggregation=aggregation, max_tokens=9, kl_coef=0.3, entropy_coef=0.2)
    table, batch = draw(0, per_token=True)
    for layout, part in product(LAYOUTS, (batch, partly_read(batch))):
        assert_matches_definition(loss, part, table, layout)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_an_answer_in_parts_weighs_as_much_as_the_whole(aggregation: Any) -> None:
    loss = PolicyLoss(aggregation=aggregation, max_tokens=9, kl_coef=0.3, entropy_coef=0.2)
    table, batch = draw(0, per_token=True)
    for layout, whole in product(LAYOUTS, (batch, partly_read(batch))):
        parts = forked(whole)
        assert_matches_definition(loss, whole, table, layout, parts)
        assert (len(parts), parts.num_answers) == (2 * len(whole), len(whole))
        some = parts.of_answers([3, 0])
        assert some.by_answer(some.tokens("old_logprobs")) == whole.select([3, 0]).tokens(
            "old_logprobs"
        )


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "loss", "clipped"),
    [
        (1.0, 2.0, None, -2.0, (0, 0)),
        (1.5, 1.0, None, -1.3, (0, 1)),  # good token, more likely: clipped at 1 + high
        (0.5, 1.0, None, -0.5, (0, 0)),  # good token, less likely: not clipped
        (0.5, -1.0, None, 0.9, (1, 0)),  # bad token, less likely: clipped at 1 - low
        (1.5, -1.0, None, 1.5, (0, 0)),  # bad token, more likely: not clipped
        (3.0, -1.0, 2.0, 2.0, (0, 1)),  # bad token, far more likely: clipped at dual_clip
        (3.0, 1.0, 2.0, -1.3, (0, 1)),
        (1.5, 0.0, 1.2, 0.0, (0, 0)),
        (0.5, 0.0, 1.2, 0.0, (0, 0)),
    ],
)
def test_ppo_clip_gives_loss_clip_counts_and_gradient_worked_out_by_hand(
    ratio: float,
    advantage: float,
    dual_clip: float | None,
    loss: float,
    clipped: tuple[int, int],
) -> None:
    log_ratio = torch.tensor([math.log(ratio)], requires_grad=True)
    settings = PolicyLoss(clip_low=0.1, clip_high=0.3, dual_clip=dual_clip)
    terms, low, high = ppo_clip(settings, log_ratio, torch.tensor([advantage]))
    assert float(terms.detach()) == pytest.approx(loss)
    assert (int(low), int(high)) == clipped
    terms.sum().backward()
    assert log_ratio.grad is not None
    assert float(log_ratio.grad) == pytest.approx(0.0 if any(clipped) else -ratio * advantage)


def test_gspo_has_the_gradient_of_clipped_sequence_ratios() -> None:
    """Compare with the original form, in which the mean log-ratio itself has the gradient."""
    loss = PolicyLoss(kind="gspo", aggregation="sequence", clip_low=0.1, clip_high=0.15)
    table, batch = draw(3, per_token=False)
    wide = table.double().requires_grad_()
    a = arrays(batch, wide)
    ratio, gain = sequence_means(a.logp - a.old, a.mask).exp(), a.advantages[:, 0]
    original = -torch.minimum(ratio * gain, ratio.clamp(0.9, 1.15) * gain)
    held = (original.detach() != -(ratio * gain).detach()) & (a.mask.sum(-1) > 0)
    assert 0 < held.sum() < len(batch) - 1
    # An answer without tokens has a ratio of 1 here, and no term in the loss.
    expected = (original * (a.mask.sum(-1) > 0)).mean()
    for got, wanted in zip(
        torch.autograd.grad(by_definition(loss, a), wide, retain_graph=True),
        torch.autograd.grad(expected, wide),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)
    assert_matches_definition(loss, batch, table, (2, True, 1))


def shared_losses(name: str) -> list[PolicyLoss]:
    """Return losses that verl or TRL computes by the same definition."""
    losses = []
    for kind, aggregation, kl in product(KINDS, AGGREGATIONS, KLS):
        loss = PolicyLoss(
            **kind, **kl, aggregation=aggregation, max_tokens=9, clip_low=0.1, clip_high=0.3
        )
        if name == "verl" and (loss.kind != "gspo" or loss.dual_clip is None):
            losses.append(dataclasses.replace(loss, entropy_coef=0.2))
        elif name == "trl" and loss.kl_estimator == "k3":
            token = loss.aggregation == "token"
            loss = dataclasses.replace(loss, entropy_coef=0.2 * token)
            if loss.kind != "cispo":
                losses.append(loss)
            elif token:
                losses.append(dataclasses.replace(loss, clip_low=1.0))
    return losses


@pytest.mark.parametrize(("name", "wheel"), [("verl", VERL), ("trl", TRL)])
def test_definition_is_that_of_verl_and_trl(name: str, wheel: Wheel) -> None:
    """Compare values and gradients of `by_definition` with those of the packages, in fp64."""
    if wheel.may_skip:
        pytest.skip(f"needs the sources of {name}")
    theirs = {"verl": verl_loss, "trl": trl_loss}[name]
    table, batch = draw(0, per_token=name == "verl")
    for loss in shared_losses(name):
        wide = table.double().requires_grad_()
        a = arrays(batch, wide)
        losses = by_definition(loss, a), theirs(loss, *a[:6])
        (own, other) = (torch.autograd.grad(x, wide, retain_graph=True)[0] for x in losses)
        # verl adds 1e-8 to the number of tokens of an answer.
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-7, atol=1e-8, msg=str(loss))
        torch.testing.assert_close(own, other, rtol=1e-7, atol=1e-8, msg=str(loss))


def test_expectations_of_kl_estimates_are_the_divergence_or_its_gradient() -> None:
    """Expect the value from k3, and the gradient from k2."""
    rng = torch.Generator().manual_seed(0)
    scores, reference = torch.randn(2, 7, generator=rng, dtype=torch.float64)
    scores.requires_grad_()
    policy, reference = scores.log_softmax(-1), reference.log_softmax(-1)
    divergence = (policy.exp() * (policy - reference)).sum()
    drawn = policy.exp().detach()
    k2, k3 = (kl_terms(name, policy, reference) for name in ("k2", "k3"))
    torch.testing.assert_close((drawn * k3).sum(), divergence)
    (expected,) = torch.autograd.grad(divergence, scores, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad((drawn * k2).sum(), scores)[0], expected)
    assert (k2 >= 0).all() and (k3 >= 0).all()


@pytest.mark.parametrize("micro_batch_size", some(2, whole=[64]))
def test_update_that_scores_itself_has_the_bits_of_one_after_a_scoring_pass(
    micro_batch_size: int, model_path: str, make_trainer: Callable[..., Trainer]
) -> None:
    """Expect the figures of the mismatch, too, from the same numbers."""
    drawn = dataclasses.replace(make_batch(7), ref_logprobs=make_batch(7).old_logprobs)
    for kind in ("ppo", "gspo", "cispo"):
        loss = PolicyLoss(kind=kind, kl_coef=0.3, aggregation="sequence")
        changes = {"loss": loss, "micro_batch_size": micro_batch_size, "reference": True, **STABLE}
        first, second = (make_trainer(model_path, **changes) for _ in "ab")
        scores = first.compute_log_prob(drawn)
        expected = first.update_actor(dataclasses.replace(drawn, old_logprobs=scores))
        got = second.update_actor(as_sampled(drawn))
        assert got.items() >= expected.items() and got["approx_kl"] == got["clip_fraction"] == 0
        assert_same_bits(bits(first), bits(second))
        old = drawn.tokens("old_logprobs").values
        compared = correct(old, scores.values, scores.lengths, CorrectionConfig())
        figures = compared.figures | reference_figures(scores, drawn.ref_logprobs)
        assert {name: got[name] for name in got.keys() - expected.keys()} == figures
        assert 0 < figures["effective_sample_size"] < 1 and figures["weights_truncated"] > 0
    lost = [*scores[:-1], [math.nan] * len(scores[-1])]
    kept = bits(second)
    for wrong in (
        {"old_logprobs": scores},
        {"rollout_logprobs": None},
        {"rollout_logprobs": lost},
    ):
        with pytest.raises(ValueError, match="update_actor.* (old|rollout)_logprobs"):
            second.update_actor(dataclasses.replace(as_sampled(drawn), **wrong))
    assert_same_bits(bits(second), kept)


@pytest.mark.parametrize(
    ("family", "changes"), [("qwen3", {}), ("granite", {"logits_scaling": 2.0})]
)
def test_entropy_bonus_of_trainer_matches_plain_transformers(
    family: str,
    changes: dict[str, Any],
    tmp_path: Path,
    make_trainer: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Expect work for the entropy's gradient only with a bonus, in both kinds of heads."""
    asked, compute = [], token_scores.logits_to_gradient

    def spy(*args: Any) -> None:
        asked.append(args[6] is not None)
        compute(*args)

    monkeypatch.setattr(token_scores, "logits_to_gradient", spy)
    path, batch = write_model(tmp_path, family, **changes), make_batch(7, temperature=0.8)
    for coefficient in (0.0, 3.0):
        model = reference(path)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-2, eps=STABLE["adam_eps"], weight_decay=0.0
        )
        entropies = []
        for prompt, answer in zip(batch.prompt_ids, batch.response_ids, strict=True):
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            entropies.append(torch.distributions.Categorical(logits=logits / 0.8).entropy())
        entropy = torch.cat(entropies).mean()
        expected = plain_step(model, optimizer, batch, 1.0, -coefficient * entropy)
        loss = PolicyLoss(clip_high=0.3, entropy_coef=coefficient)
        trainer = make_trainer(path, loss=loss, **STABLE)
        asked.clear()
        metrics = trainer.update_actor(batch)
        assert set(asked) == {coefficient > 0}
        assert_metrics(metrics, {**expected, "entropy": float(entropy.detach())})
        assert_learned(bits(trainer), plain_bits(model, optimizer), 1)


@pytest.mark.parametrize("fields", KINDS)
def test_token_that_the_policy_left_far_behind_makes_no_term_nan(fields: dict[str, Any]) -> None:
    """fp32 overflows at a log-ratio of 88; an advantage of 0 must still give a gradient of 0."""
    moved = torch.tensor([-300.0, -90.0, 0.0, 79.0, 90.0, 300.0])
    advantages = torch.tensor([[-1.0], [0.0], [1.0]]).expand(3, 6).flatten()
    logprobs = moved.repeat(3).requires_grad_()
    micro: Any = SimpleNamespace(token_counts=lambda: torch.ones(18, dtype=torch.int64))
    loss = PolicyLoss(**fields)
    terms = policy_terms(loss, logprobs - 0.0, logprobs, advantages, micro)
    terms.loss.sum().backward()
    assert logprobs.grad is not None
    assert terms.loss.isfinite().all() and logprobs.grad.isfinite().all()
    assert not terms.loss[6:12].any() and not logprobs.grad[6:12].any()


def test_k3_of_a_token_far_below_the_reference_has_a_finite_gradient_of_the_right_sign() -> None:
    logprobs = torch.tensor([-300.0, -100.0, -80.0, -1.0]).requires_grad_()
    (terms := kl_terms("k3", logprobs, torch.zeros(4))).sum().backward()
    assert logprobs.grad is not None
    assert terms.isfinite().all() and logprobs.grad.isfinite().all() and (logprobs.grad < 0).all()
    assert (terms.diff() < 0).all()
