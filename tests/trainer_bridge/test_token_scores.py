"""Token scores without the logits of the whole vocabulary, against fp64, in torch and in Triton.

The last tests check which models get a scoring head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from memsaver.system.devices import Impl
from rollout.ops.token_sampling import SamplingBatch, sample
from tests.helpers.case_selection import pairwise, some
from tests.helpers.trainer_bridge.models import (
    make_batch,
    reference,
    reference_logprobs,
    write_model,
)
from tests.helpers.trainer_bridge.tolerance import U, assert_scores
from trainer_bridge import LoraConfig, Trainer
from trainer_bridge.ops import token_scores as token_scores_module
from trainer_bridge.ops.token_scores import ScoringHead, logit_scores, score_in_head, token_scores

WIDTH = 64
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ASKED = ["logprobs", "both", "entropy"]  # scores that a loss depends on
# (tokens, words, bytes of a slice); 1 byte gives the smallest slices, here three.
SHAPES = some((5, 4999, 1), (0, 300, 1), whole=[(37, 5120, 1), (3, 300, 1 << 27), (1, 2049, 1)])
REAL = some((2, 49152, 1 << 16), whole=[(3, 151936, 1 << 18)])
LARGE = [(700, 151936, 1 << 27), (513, 49152, 1 << 24), (37, 50257, 1), (1, 151936, 1 << 27)]


@pytest.mark.parametrize(
    ("shape", "dtype", "asked"),
    pairwise(SHAPES, DTYPES, ASKED)
    + pairwise(REAL, some(torch.bfloat16, whole=[torch.float32, torch.float16]), ["both"]),
)
@pytest.mark.parametrize("temperature", some(0.7, whole=[1.0, 1.9]))
def test_token_scores_and_gradients_match_fp64(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    asked: str,
    temperature: float,
    impl: Impl,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_scores_module, "SLICE_BYTES", shape[2])
    assert_matches_fp64(shape[:2], dtype, temperature, asked, impl, device)


@pytest.mark.parametrize(
    ("words", "dtype"),
    some(
        (300, torch.float32),
        (4999, torch.bfloat16),
        (6144, torch.float32),  # whole blocks
        whole=[
            (300, torch.bfloat16),
            (4999, torch.float32),
            *product((50_257, 151_936), (torch.float32, torch.bfloat16)),
        ],
    ),
)
def test_log_probs_have_the_bits_of_the_sampler_whatever_the_slices(
    words: int, dtype: torch.dtype, impl: Impl, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if impl == "torch" and device != "cpu":
        pytest.skip("torch's sums on a GPU depend on the number of rows; kernels sample there")
    draw = torch.Generator().manual_seed(words)
    hidden = torch.randint(-2, 3, (7, WIDTH), generator=draw).to(device, dtype) / 4
    weight = torch.randint(-2, 3, (words, WIDTH), generator=draw).to(device, dtype) / 4
    options = [(0.7, row % 2 * 9, 1 - row % 3 / 10, (1, row, 0), -1) for row in range(7)]
    names = ("temperature", "top_k", "top_p", "counters", "forced")
    columns = dict(zip(names, zip(*options, strict=True), strict=True))
    off = {"min_p": [0.0] * 7, "adjusted": [False] * 7}
    batch = SamplingBatch.build(**columns, **off, device=torch.device(device))
    logits = torch.empty(7, words + 3, dtype=dtype, device=device)[:, 3:].copy_(hidden @ weight.T)
    tokens, sampled = sample(logits, batch, impl)
    for nbytes in (1, 1 << 27):
        monkeypatch.setattr(token_scores_module, "SLICE_BYTES", nbytes)
        assert torch.equal(token_scores(hidden, weight, tokens, 0.7, impl)[0], sampled)
    assert torch.equal(logit_scores(logits[2:5], tokens[2:5], 0.7, impl)[0], sampled[2:5])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_token_scores_match_fp64_for_real_vocabularies(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    asked: str,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_scores_module, "SLICE_BYTES", shape[2])
    assert_matches_fp64(shape[:2], dtype, temperature, asked, "auto", "cuda:0")


def assert_matches_fp64(
    shape: tuple[int, int],
    dtype: torch.dtype,
    temperature: float,
    asked: str,
    impl: Impl,
    device: str,
) -> None:
    """Compare scores and gradients with fp64, also from logits.

    All products are sums of 64 terms -1, 0 or 1, so logits are integers below 65, exact in every
    dtype and order of addition. z and the logarithm of the sum of its powers are below 65 / 0.7 +
    log(V) = 105, and rounded 4 times. The exponential rounds its argument times log2(e), so the
    error of a power is 5 * 105 units. The error of a sum of V powers is 4 sqrt(V) units
    (`tolerance.py`). The entropy, and z minus its mean, add terms below log(V) with that error.

    The gradient of a logit is as large as its parts: hit * grad, p * grad, and p * (z - mean) *
    grad_entropy. The gradient, the sum of a slice and the result are rounded to the dtype, or
    truncated by the interpreter: 3 eps, or the smallest number that the dtype can represent.
    """
    count, words = shape
    draw = torch.Generator().manual_seed(words)
    hidden = torch.randint(-1, 2, (count, WIDTH), generator=draw).to(device, dtype)
    weight = torch.randint(-1, 2, (words, WIDTH), generator=draw).to(device, dtype)
    target = torch.randint(words, (count,), generator=draw).to(device)
    target[:2] = torch.tensor([words - 1, 0])[:count]
    grads = torch.randn(2, count, generator=draw).to(device)
    grads *= torch.tensor([[asked != "entropy"], [asked != "logprobs"]], device=device)
    logits = (hidden @ weight.T).requires_grad_()
    hidden.requires_grad_()
    weight.requires_grad_()
    scores = token_scores(hidden, weight, target, temperature, impl)
    wanted = {"logprobs": slice(1), "entropy": slice(1, 2)}.get(asked, slice(2))
    torch.autograd.backward(scores[wanted], [*grads[wanted]])
    torch.autograd.backward(
        logit_scores(logits, target, temperature, impl)[wanted], [*grads[wanted]]
    )

    wide, table = hidden.detach().double(), weight.detach().double()
    logp = torch.log_softmax(wide @ table.T / temperature, -1)
    likely, off = logp.exp(), (525 + 4 * math.sqrt(words)) * U
    expected = logp.gather(1, target[:, None])[:, 0]
    chosen, entropy = (score.detach() for score in scores)
    assert chosen.dtype == entropy.dtype == torch.float32
    assert_below(chosen - expected, torch.full_like(expected, off + 210 * U))
    spread, off_mean = -(likely * logp).sum(-1), off * (1 + 2 * math.log(words))
    assert_below(entropy - spread, off_mean + 0 * spread)
    hit = torch.nn.functional.one_hot(target, words).double()
    scale, scale_entropy = grads.double()[:, :, None] / temperature
    apart = logp + spread[:, None]
    slope = (hit - likely) * scale - likely * apart * scale_entropy
    unit = torch.finfo(dtype)
    lost = unit.smallest_normal * unit.eps
    size = (hit + likely) * scale.abs() + likely * apart.abs() * scale_entropy.abs()
    allowed = (3 * unit.eps + off) * size + likely * (off_mean + off) * scale_entropy.abs() + lost
    for tensor in (hidden, weight, logits):
        assert tensor.grad is not None and tensor.grad.dtype == dtype
    assert_below(logits.grad - slope, allowed)
    assert_below(hidden.grad - slope @ table, allowed @ table.abs() + lost * (2 + words / 2048))
    assert_below(weight.grad - slope.T @ wide, allowed.T @ wide.abs() + lost)


def assert_below(difference: Tensor, allowed: Tensor) -> None:
    """Allow the smallest normal fp32 number for results that are rounded to 0."""
    wrong = difference.abs() > allowed + torch.finfo(torch.float32).tiny
    assert not wrong.any(), (difference[wrong][:5], allowed[wrong][:5])


@pytest.mark.parametrize("temperature", [1.0, 1 / 128])
@pytest.mark.parametrize("offset", [0, 4096])
def test_gradient_stays_exact_with_a_large_common_offset(
    offset: int, temperature: float, impl: Impl, device: str
) -> None:
    """Expect the same precision with a large offset of all logits.

    Logits are integers, and their quotients z exact. The error of a power exp(z - top - log(mass))
    consists of two roundings of its argument, the error of the mass (4 sqrt(V) units), and the
    rounding of the power, for any z. Relevant probabilities have an argument above -20; smaller
    ones are below exp(-20).
    """
    count, words = 5, 300
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randint(-1, 2, (count, 8), generator=draw).float()
    weight = torch.randint(-1, 2, (words, 8), generator=draw).float()
    hidden[:, 0], weight[:, 0] = 64, offset / 64
    hidden, weight = hidden.to(device), weight.to(device).requires_grad_()
    target = torch.arange(count, device=device)
    chosen, _ = token_scores(hidden, weight, target, temperature, impl)
    chosen.backward(torch.eye(count, device=device)[0])
    z = (hidden @ weight.detach().T / temperature).double()
    likely = torch.softmax(z, -1)[0]
    hit = torch.nn.functional.one_hot(target[0], words)
    slope = (hit - likely) / temperature
    assert weight.grad is not None
    off = (3 * 20 + 4 * math.sqrt(words) + 8) * U * (likely + 2e-9) / temperature
    # The gradient of a logit and its product with the hidden state are rounded, too.
    allowed = (off + 4 * U * slope.abs())[:, None] * hidden[0].abs().double()
    assert_below(weight.grad - slope[:, None] * hidden[0].double(), allowed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("words", [9, 300, 4999])
def test_backward_has_the_logits_of_forward(
    words: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of few rows or words may have other bits than padded ones, on the CPU, too."""
    monkeypatch.setattr(token_scores_module, "SLICE_BYTES", 1)
    forward: list[Tensor] = []
    backward: list[Tensor] = []
    for name, seen in (("reduce_logits", forward), ("logits_to_gradient", backward)):
        usual = getattr(token_scores_module, name)

        def recorded(logits: Tensor, *args: Any, usual: Any = usual, seen: Any = seen) -> Any:
            seen.append(logits.clone())
            return usual(logits, *args)

        monkeypatch.setattr(token_scores_module, name, recorded)
    draw = torch.Generator().manual_seed(words)
    weight = torch.randn(words, WIDTH, generator=draw).to(dtype).requires_grad_()
    for tokens in (1, 5, 16, 37):
        hidden = torch.randn(tokens, WIDTH, generator=draw).to(dtype).requires_grad_()
        target = torch.randint(words, (tokens,), generator=draw)
        forward.clear()
        backward.clear()
        scores, _ = token_scores(hidden, weight, target, 0.01)
        scores.sum().backward()
        assert len(forward) == len(backward)
        assert all(map(torch.equal, forward, backward))


@pytest.mark.gpu
def test_only_one_slice_of_logits_is_in_memory() -> None:
    """Allow one slice, a gradient as large as the weights, and 16 MiB of hidden states."""
    hidden = torch.randn(4096, WIDTH, device="cuda:0", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(151936, WIDTH, device="cuda:0", dtype=torch.bfloat16, requires_grad=True)
    target = torch.arange(4096, device="cuda:0")
    rises = []
    for _ in range(2):  # the first pass allocates cuBLAS's workspaces
        hidden.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        token_scores(hidden, weight, target, 1.0)[0].sum().backward()
        rises.append(torch.cuda.max_memory_allocated() - before)
    assert rises[1] <= token_scores_module.SLICE_BYTES + weight.nbytes + (16 << 20)


@pytest.mark.gpu
def test_scores_of_logits_take_one_copy_of_them() -> None:
    """Allow the gradient of the logits, and 1 MiB of scores."""
    logits = torch.randn(512, 151936, device="cuda:0", dtype=torch.bfloat16, requires_grad=True)
    target = torch.arange(512, device="cuda:0")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    chosen, entropy = logit_scores(logits, target, 1.0)
    (chosen + entropy).sum().backward()
    assert torch.cuda.max_memory_allocated() - before <= logits.nbytes + (1 << 20)


def test_entropy_that_no_loss_depends_on_changes_no_bit_of_the_gradient(
    impl: Impl, device: str
) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = (9 * torch.randn(5, 4999, generator=draw)).to(device).requires_grad_()
    chosen, entropy = logit_scores(logits, torch.arange(5, device=device), 0.7, impl)
    first, second = (
        torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0]
        for loss in (chosen, chosen + 0 * entropy)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_frozen_input_gets_no_gradient(trained: str) -> None:
    draw = torch.Generator().manual_seed(0)
    both = {name: torch.randn(7, 5, generator=draw) for name in ("hidden", "weight")}
    both[trained].requires_grad_()
    chosen, _ = token_scores(**both, target=torch.arange(7), temperature=1.0)
    chosen.sum().backward()
    grads = {name: tensor.grad for name, tensor in both.items()}
    logits = both["hidden"] @ both["weight"].T
    expected = torch.autograd.grad(logits.log_softmax(-1).diagonal().sum(), both[trained])[0]
    torch.testing.assert_close(grads.pop(trained), expected)
    assert list(grads.values()) == [None]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns in Triton's interpreter
def test_nan_inputs_give_nan_scores(impl: Impl, device: str) -> None:
    hidden = torch.ones(3, 4, device=device)
    hidden[1] = math.nan
    chosen, _ = token_scores(
        hidden, torch.ones(9, 4, device=device), torch.tensor([0, 5, 8], device=device), 1.0, impl
    )
    assert chosen.isnan().tolist() == [False, True, False]


HEADS: list[tuple[str, dict[str, Any], bool]] = [
    ("qwen2", {}, True),
    ("qwen3_moe", {}, True),
    ("phi", {}, False),  # has a bias
    ("cohere", {}, False),
    ("granite", {}, False),
    ("gemma2", {}, False),
    ("gemma2", {"final_logit_softcapping": None}, True),
]


@pytest.mark.parametrize(("family", "changes", "plain"), HEADS)
def test_scoring_head_replaces_only_plain_heads(
    family: str, changes: dict[str, Any], plain: bool
) -> None:
    fields = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "head_dim": 16}
    config = AutoConfig.for_model(family, **fields, **changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = dict(model.named_parameters()).keys()
    score_in_head(model)
    assert isinstance(model.get_output_embeddings(), ScoringHead) == plain
    assert dict(model.named_parameters()).keys() == names
    assert model.get_output_embeddings().weight.is_meta


def test_adapted_head_is_not_replaced(tmp_path: Path, make_trainer: Callable[..., Trainer]) -> None:
    path = write_model(tmp_path, tie_word_embeddings=False)
    lora = LoraConfig(rank=2, alpha=64.0, target_modules=("lm_head",))
    trainer, batch = make_trainer(path, lora=lora), make_batch(5)
    first = trainer.compute_log_prob(batch)
    with torch.no_grad():
        assert_scores(first, reference_logprobs(reference(path), batch))
    trainer.update_actor(batch)
    assert trainer.compute_log_prob(batch) != first
