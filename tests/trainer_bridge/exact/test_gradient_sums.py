"""Gradients that do not depend on the division into micro batches."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memsaver.system.devices import Impl
from tests.helpers.case_selection import some
from tests.helpers.models import save_tiny
from tests.helpers.trainer_bridge.states import assert_same_bits
from trainer_bridge import CriticConfig, SequenceBatch, Trainer, TrainerConfig
from trainer_bridge.learning.batch import dispatch, lay_out
from trainer_bridge.ops.gradient_sums import STEP, add_embeddings, add_product, add_rows

DTYPES = some(torch.bfloat16, whole=[torch.float16])
# outputs, inputs, and the steps at which the tokens are divided
DIVISIONS = some(
    (1, 1, (0, 1, 2)),
    (24, 40, (0, 1, 5, 12)),
    whole=[(300, 520, (0, 7, 12)), (128, 256, (0, 2, 3, 9))],
)
LENGTHS = (61, 33, 1, 16, 47, 5, 40)
BF16 = {"param_dtype": "bfloat16"}
CASES = some(
    ("llama", {"tie_word_embeddings": True}, {}),
    ("qwen2", {}, {**BF16, "activation_checkpointing": "mlp", "reference": True}),
    whole=[
        ("qwen2", {"tie_word_embeddings": True}, {"exact_ranks": 2}),
        ("qwen3", {}, {"activation_checkpointing": "layers"}),
        ("mistral", {"sliding_window": 13}, BF16),
    ],
)


@pytest.fixture
def impl(impl: Impl, device: str) -> Impl:
    if impl == "torch" and device != "cpu":
        pytest.skip("sums of torch have the same bits for any division on the CPU alone")
    return impl


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs", "cuts"), DIVISIONS)
def test_sums_do_not_depend_on_their_division(
    outputs: int, inputs: int, cuts: tuple[int, ...], dtype: torch.dtype, impl: Impl, device: str
) -> None:
    """Compare calls with parts of the tokens with one call, and the sums with fp64.

    Partial sums of at most 192 products of normal numbers stay below 2**6, which is four standard
    deviations. Tensor cores truncate, so each addition errs by at most 2**6 * 2**-23.
    """
    steps = cuts[-1]
    generator = torch.Generator().manual_seed(steps)
    shapes = (steps * STEP, outputs), (steps * STEP, inputs)
    grad, x = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    ids = torch.randint(0, 5, (len(x),), generator=generator).to(device)
    found: list[list[Tensor]] = []
    for bounds in (cuts, (0, steps)):
        sums = torch.zeros(outputs, inputs), torch.zeros(outputs), torch.zeros(5, inputs)
        product, rows, words = (total.to(device) for total in sums)
        for first, last in pairwise(bounds):
            part = slice(first * STEP, last * STEP)
            add_product(product, grad[part], x[part], impl)
            add_rows(rows, grad[part], impl)
            add_embeddings(words, ids[part], x[part], impl)
        found.append([product, rows, words])
    grad, x = grad.double(), x.double()
    of_words = torch.zeros(5, inputs, dtype=torch.float64, device=device).index_add_(0, ids, x)
    exact = grad.t() @ x, grad.sum(0), of_words
    for divided, whole, right in zip(*found, exact, strict=True):
        assert torch.equal(divided, whole)
        torch.testing.assert_close(whole.double(), right, rtol=0, atol=len(x) * 2**-17)


def test_tokens_without_gradient_between_sequences_change_no_bits(impl: Impl, device: str) -> None:
    grad, x = (torch.randn(5 * STEP, 24).to(device, torch.bfloat16) for _ in range(2))
    totals = []
    for gap in (0, STEP):
        rows = [F.pad(part, (0, 0, 0, gap)) for part in grad.split(STEP)]
        seen = [torch.cat([part, part[:gap]]) for part in x.split(STEP)]
        totals.append(torch.zeros(24, 24, device=device))
        add_product(totals[-1], torch.cat(rows), torch.cat(seen), impl)
    assert torch.equal(*totals)


def random_batch(words: int) -> SequenceBatch:
    rng = random.Random(0)
    prompts = [[rng.randrange(words) for _ in range(length)] for length in LENGTHS]
    answers = [[rng.randrange(words) for _ in range(1 + length % 19)] for length in LENGTHS]
    return SequenceBatch(
        prompt_ids=prompts,
        response_ids=answers,
        old_logprobs=[[-rng.random() for _ in answer] for answer in answers],
        advantages=[rng.uniform(-1, 1) for _ in answers],
        temperature=0.8,
    )


def test_batch_invariant_trainer_needs_exact_kept_parameters_and_no_experts(
    make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    for changes in ({"exact": True}, {"keep_unsharded": True}):
        with pytest.raises(ValueError, match="True: needs exact and keep_unsharded"):
            TrainerConfig(model_path="model", batch_invariant=True, **changes)
    complete: dict[str, Any] = {"exact": True, "keep_unsharded": True, "batch_invariant": True}
    with pytest.raises(ValueError, match="batch_invariant=True: excludes a critic"):
        TrainerConfig(model_path="model", critic=CriticConfig(), **complete)
    save_tiny(tmp_path, "qwen3_moe")
    with pytest.raises(ValueError, match="batch_invariant is for models without experts"):
        make_trainer(str(tmp_path), exact=True, keep_unsharded=True, batch_invariant=True)


@pytest.mark.parametrize("world", [1, 3])
def test_order_of_sequences_does_not_depend_on_micro_batches(world: int) -> None:
    batch, orders = random_batch(199), set()
    for size in range(1, len(LENGTHS) + 1):
        shares = [
            dispatch(batch, rank, world, size, packed=True, step=STEP) for rank in range(world)
        ]
        orders.add(str([[*chain(*chunks)] for chunks in shares]))
        micro = lay_out(batch, shares[0][0], torch.device("cpu"), size, packed=True, step=STEP)
        assert micro.packing is not None and micro.slots is not None
        assert not any(length % STEP for length in (*micro.packing.lengths, micro.num_slots))
        starts = [0, *accumulate(-(-count // STEP) * STEP for count in micro.counts)]
        expected = [range(s, s + n) for s, n in zip(starts, micro.counts, strict=False)]
        assert micro.slots.tolist() == [*chain(*expected)]
    assert len(orders) == 1


@pytest.mark.parametrize(("kind", "overrides", "changes"), CASES)
def test_weights_do_not_depend_on_micro_batches(
    kind: str,
    overrides: dict[str, Any],
    changes: dict[str, Any],
    make_trainer: Callable[..., Trainer],
    tmp_path: Path,
) -> None:
    save_tiny(tmp_path, kind, **overrides)
    found: list[dict[str, Tensor]] = []
    for size in (1, 2, 3, len(LENGTHS)):
        trainer = make_trainer(
            str(tmp_path),
            exact=True,
            batch_invariant=True,
            micro_batch_size=size,
            keep_unsharded=True,
            learning_rate=0.01,
            **changes,
        )
        batch = random_batch(199)
        before = {name: shard.clone() for name, shard in trainer.shards().items()}
        for _ in range(2):
            assert trainer.update_actor(batch)["grad_norm"] > 0
        found.append({name: shard.clone() for name, shard in trainer.shards().items()})
        assert not any(torch.equal(before[name], found[-1][name]) for name in before)
    for other in found[1:]:
        assert_same_bits(found[0], other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reference_scores_have_the_bits_of_the_policy_in_any_micro_batch(
    dtype: Any, make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    save_tiny(tmp_path, "mistral", sliding_window=9)
    batch, found = random_batch(199), []
    for size in (1, 3, len(LENGTHS)):
        trainer = make_trainer(
            str(tmp_path),
            exact=True,
            batch_invariant=True,
            keep_unsharded=True,
            reference=True,
            micro_batch_size=size,
            param_dtype=None if dtype == "float32" else dtype,
        )
        trainer.reload("reference")
        found += [trainer.compute_ref_log_prob(batch), trainer.compute_log_prob(batch)]
    assert all(scores == found[0] for scores in found)
