"""Counted operations of an update, against those that torch counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from recipes.setup.operations import Operations
from tests.helpers.models import build_tiny

TOKENS = 24


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_operations_of_an_update_are_those_that_torch_counts(
    family: str, tied: bool, frozen: bool
) -> None:
    """torch counts attention to all tokens, and a product of the rotary table."""
    model = build_tiny(family, tie_word_embeddings=tied)
    model.set_attn_implementation("eager")  # whose products torch counts on a CPU
    config = model.config
    shapes = {name: param.shape for name, param in model.named_parameters()}
    if frozen:  # as below adapters: gradients pass through all layers
        model.requires_grad_(False)
        model.get_input_embeddings().register_forward_hook(lambda *out: out[2].requires_grad_())
    with FlopCounterMode(display=False) as counter:
        ids = torch.arange(TOKENS)[None]
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    operations = Operations.of(config, shapes, frozen)
    own = operations.update([TOKENS], TOKENS)
    width = operations.pair / 12 / config.num_hidden_layers / config.num_attention_heads
    more = operations.pair * TOKENS**2 / 2 + width * TOKENS
    assert counter.get_total_flops() == own + more


def test_experts_count_as_often_as_a_token_takes_one() -> None:
    model = build_tiny("qwen3_moe", num_experts=8, num_experts_per_tok=2)
    shapes = {name: param.shape for name, param in model.named_parameters()}
    few = Operations.of(model.config, shapes)
    model.config.num_experts_per_tok = 8
    all_of_them = Operations.of(model.config, shapes)
    sizes = [param.numel() for name, param in model.named_parameters() if ".experts." in name]
    assert all_of_them.token - few.token == 6 * sum(sizes) * 6 / 8
