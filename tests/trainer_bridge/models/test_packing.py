"""Packed sequences: attention, scores and updates, and models that get padded sequences instead."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.utils import _apply_to_tensors
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.case_selection import some
from tests.helpers.models import MLA
from tests.helpers.trainer_bridge.models import (
    make_batch,
    reference,
    reference_logprobs,
    write_model,
)
from tests.helpers.trainer_bridge.tolerance import (
    BACKWARD,
    assert_metrics,
    assert_scores,
    assert_within,
    rounding,
)
from trainer_bridge import SequenceBatch, Trainer
from trainer_bridge.models.packing import PACKED, Packing, pack_if_possible, packed_attention

Make = Callable[..., Trainer]
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {"head_dim": 8}),
    ("granite", {"logits_scaling": 3.0}),  # scales logits
    ("deepseek_v3", MLA | {"head_dim": 8}),  # values narrower than keys
    ("qwen3", {}),
    ("llama", {"tie_word_embeddings": False}),
    ("mistral", {"sliding_window": None}),
]


def make_packing(lengths: list[int], device: str = "cpu") -> Packing:
    return Packing(
        lengths=tuple(lengths),
        bounds=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device),
        position_ids=torch.tensor([[i for length in lengths for i in range(length)]]),
    )


def masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]
) -> Any:
    """Compute attention [1, T, heads, width] by its formula, with a mask over all tokens."""
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    numbers = numbers.to(query.device)
    causal = torch.ones(len(numbers), len(numbers), device=numbers.device).tril().bool()
    visible = (numbers[:, None] == numbers) & causal
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    scores = (query @ key.transpose(2, 3) * 0.3).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def attended(
    lengths: list[int], heads: int, groups: int, widths: tuple[int, int], device: str, dtype: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Compute output and gradients of query, key and value.

    Returns:
        Results of `packed_attention`, and of the formula in fp64.
    """
    draw = torch.Generator().manual_seed(sum(lengths))
    total, (width, narrow) = sum(lengths), widths
    shapes = [(heads, width), (heads // groups, width), (heads // groups, narrow), (heads, narrow)]
    *drawn, slope = (
        torch.randn(1, n, total, w, generator=draw).to(device, dtype) for n, w in shapes
    )
    results = []
    for precision in (dtype, torch.float64):
        inputs = [x.detach().to(precision, copy=True).requires_grad_() for x in drawn]
        if precision == dtype:
            packing = make_packing(lengths, device)
            out, _ = packed_attention(None, *inputs, None, packing=packing, scaling=0.3)
        else:
            out = masked_attention(*inputs, lengths)
        out.backward(slope.transpose(1, 2).to(precision))
        grads = [tensor.grad for tensor in inputs if tensor.grad is not None]
        results.append([out.detach(), *grads])
    return results[0], results[1]


@settings(max_examples=40, deadline=None)
@given(
    st.one_of(
        st.lists(st.integers(1, 9), min_size=1, max_size=6),
        st.integers(1, 6).map(lambda length: [length] * 3),
        st.just([1, 1, 1]),
    ),
    st.sampled_from([(4, 1), (4, 2), (3, 3)]),
    st.sampled_from([(8, 8), (12, 5)]),
)
def test_packed_attention_matches_each_sequence_alone(
    lengths: list[int], heads: tuple[int, int], widths: tuple[int, int]
) -> None:
    """Allow for five sums of at most 27 terms below 64.

    A score has 12 terms, an output 9, a gradient 27 of 3 heads and 9 tokens.
    """
    results, exact = attended(lengths, *heads, widths, "cpu", torch.float32)
    for result, wanted in zip(results, exact, strict=True):
        assert_within(result, wanted, rounding(5 * 27, 64.0))


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[1, 130, 7, 1], [64, 64], [1], [300, 2, 129]])
@pytest.mark.parametrize(("heads", "groups", "widths"), [(14, 7, (64, 64)), (4, 1, (192, 128))])
def test_flash_attention_matches_formula(
    lengths: list[int], heads: int, groups: int, widths: tuple[int, int]
) -> None:
    """Allow 4 eps of the largest number, which norms bound from above.

    In bf16, output, probabilities and their gradients are rounded once each. If a token only sees
    itself, gradients of query and key are rounding errors of terms that cancel.
    """
    results, exact = attended(lengths, heads, groups, widths, "cuda:0", torch.bfloat16)
    largest = max(float(wanted.norm()) for wanted in exact)
    for result, wanted in zip(results, exact, strict=True):
        scale = largest if set(lengths) == {1} else float(wanted.norm())
        error = float((result.double() - wanted).norm())
        assert error <= 4 * torch.finfo(torch.bfloat16).eps * scale


def of_lengths(prompts: list[int], responses: list[int]) -> SequenceBatch:
    """Build a random batch of sequences with given lengths."""
    count = len(prompts)
    words = iter(torch.randint(96, (sum(prompts) + sum(responses),)).tolist())
    ids = [[next(words) for _ in range(n)] for n in (*prompts, *responses)]
    return SequenceBatch(
        prompt_ids=ids[:count],
        response_ids=ids[count:],
        old_logprobs=[[-4.5] * n for n in responses],
        advantages=[1.0 - 0.5 * i for i in range(count)],
        temperature=0.8,
    )


BATCHES = [
    ([1, 9, 4, 1, 3, 2, 6], [1, 0, 30, 1, 7, 2, 0]),  # single tokens, empty responses
    ([4] * 6, [3] * 6),
    ([20, 1, 1, 1, 1, 1, 1, 1], [20, 1, 2, 1, 1, 1, 2, 1]),
]


@pytest.mark.parametrize(("family", "changes"), some(*FAMILIES[:3], whole=FAMILIES[3:]))
def test_packed_scores_and_gradients_match_padded(
    family: str, changes: dict[str, Any], tmp_path: Path, make_trainer: Make
) -> None:
    path = write_model(tmp_path, family, **changes)
    packed, padded = make_trainer(path), make_trainer(path, packed=False)
    assert packed.model.packs and not padded.model.packs
    torch.manual_seed(1)
    for lengths in BATCHES:
        batch = of_lengths(*lengths)
        with torch.no_grad():
            exact = reference_logprobs(reference(path), batch)
        assert_scores(packed.compute_log_prob(batch), exact)
        assert_scores(padded.compute_log_prob(batch), exact)
    first, second = (packed.update_actor(of_lengths(*BATCHES[0])) for _ in range(2))
    assert first != second
    packed, padded = make_trainer(path), make_trainer(path, packed=False)
    grads = []
    for trainer in (packed, padded):
        torch.manual_seed(2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer.optimizer, "zero_grad", lambda **_: None)
            metrics = trainer.update_actor(of_lengths(*BATCHES[0]))
        named: Any = trainer.model.named_parameters()
        grads.append((metrics, {name: param.grad.to_local() for name, param in named}))
    (metrics, packed_grads), (expected, padded_grads) = grads
    assert_metrics(metrics, expected)
    assert packed_grads.keys() == padded_grads.keys()
    for name, grad in packed_grads.items():  # clipped to norm 1
        assert_within(grad, padded_grads[name], rounding(BACKWARD), name)


FIELDS: dict[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96, "pad_token_id": 0,
}  # fmt: skip
KNOWN: list[tuple[str, dict[str, Any], bool]] = [
    ("qwen2", {}, True),
    ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}, True),
    ("deepseek_v3", MLA, True),
    ("mistral", {"sliding_window": 8}, False),
    ("mistral", {"sliding_window": None}, True),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, False),
    ("gemma2", {}, False),  # caps scores, and has a window in every second layer
    ("qwen3_next", {"num_experts": 0}, False),  # recurrent
]


@pytest.mark.parametrize(("family", "changes", "packable"), KNOWN)
def test_only_families_with_plain_causal_attention_are_packed(
    family: str, changes: dict[str, Any], packable: bool
) -> None:
    with torch.device("meta"):
        config = AutoConfig.for_model(family, **FIELDS | changes)
        model = AutoModelForCausalLM.from_config(config)
    pack_if_possible(model, PACKED)
    assert model.packs == packable
    pack_if_possible(model, None)
    assert not model.packs


@pytest.mark.parametrize(
    ("family", "changes"), [("mistral", {"sliding_window": 4}), ("qwen3_next", {})]
)
def test_model_that_cannot_be_packed_scores_padded_sequences(
    family: str, changes: dict[str, Any], tmp_path: Path, make_trainer: Make
) -> None:
    path = write_model(tmp_path, family, **changes)
    trainer, batch = make_trainer(path), make_batch(7)
    assert not trainer.model.packs
    with torch.no_grad():
        assert_scores(trainer.compute_log_prob(batch), reference_logprobs(reference(path), batch))
    assert trainer.update_actor(batch)["grad_norm"] > 0


def test_fsdp_does_not_search_a_packing_in_every_layer() -> None:
    packing = make_packing([3, 1, 2])
    assert _apply_to_tensors(lambda _: pytest.fail("searched"), packing) is packing
