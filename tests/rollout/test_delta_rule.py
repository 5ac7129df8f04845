"""The gated delta rule against transformers, and its convolution in parts against torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from rollout.model.mixers.delta_net import causal_conv, gated_delta_rule

HEADS, DIM, VALUE_DIM = 3, 8, 12
# A state decays, and adds products of 8 terms. About 64 roundings count at any time; as a random
# walk they add up to 8 * 2**-24 of a value, and to as much of the largest sum that cancelled. The
# tolerance is ten times that.
CLOSE = {"rtol": 1e-5, "atol": 2e-6}


def inputs(batch: int, tokens: int, device: str) -> tuple[list[Tensor], Tensor]:
    """Draw q, k, v, decay and beta of some tokens, and an initial state."""
    generator = torch.Generator().manual_seed(tokens)
    token = batch, tokens, HEADS
    shapes = (*token, DIM), (*token, DIM), (*token, VALUE_DIM), (batch, HEADS, DIM, VALUE_DIM)
    q, k, v, state = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
    decay, beta = (
        torch.randn(batch, tokens, HEADS, generator=generator).to(device) for _ in range(2)
    )
    return [q, k, v, -2 * F.softplus(decay), beta.sigmoid()], state


@pytest.mark.parametrize(
    "rule", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"]
)
@pytest.mark.parametrize(("batch", "tokens"), [(5, 1), (2, 63), (1, 64), (2, 150)])
def test_delta_rule_equals_transformers(rule: str, batch: int, tokens: int, device: str) -> None:
    given, state = inputs(batch, tokens, device)
    before = state.clone()
    expected = getattr(theirs, rule)(
        *given, initial_state=state.clone(), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    for ours, reference in zip(gated_delta_rule(*given, state), expected, strict=True):
        torch.testing.assert_close(ours, reference, **CLOSE)
    assert torch.equal(state, before)


def test_delta_rule_of_bf16_tokens_is_computed_in_fp32(device: str) -> None:
    given, state = inputs(2, 70, device)
    rounded = [part.bfloat16() for part in given]
    out, after = gated_delta_rule(*rounded, state)
    expected, expected_after = gated_delta_rule(*(part.float() for part in rounded), state)
    assert out.dtype == after.dtype == torch.float32
    assert torch.equal(out, expected) and torch.equal(after, expected_after)


@pytest.mark.parametrize("part", [1, 2, 5, 20])
@pytest.mark.parametrize("kernel", [2, 4])
def test_convolution_in_parts_equals_whole_convolution(part: int, kernel: int, device: str) -> None:
    generator = torch.Generator().manual_seed(kernel)
    x = torch.randn(2, 20, 6, generator=generator).to(device)
    weight = torch.randn(6, 1, kernel, generator=generator).to(device)
    padded = F.pad(x.transpose(1, 2), (kernel - 1, 0))
    expected = F.silu(F.conv1d(padded, weight, groups=6)).transpose(1, 2)
    outs, state = [], torch.zeros(2, 6, kernel - 1, device=device)
    for start in range(0, 20, part):
        out, state = causal_conv(x[:, start : start + part], state, weight)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), expected)
    assert torch.equal(state, x.transpose(1, 2)[:, :, -(kernel - 1) :])
