"""PEFT adapters in TRL's class: in-place syncs merge them in one pass and round once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.helpers.trainer_bridge.adapters import assert_one_rounding, exact_weights, randomize
from tests.helpers.trainer_bridge.trl_generation import WHEEL, own_sync
from trainer_bridge.adoption import trl

pytestmark = pytest.mark.skipif(WHEEL.may_skip, reason="trl is not installed")
TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj"]


def adapted(model: Any, **fields: Any) -> Any:
    """Wrap a model by PEFT, with random factors of every adapter."""
    peft = pytest.importorskip("peft")  # takes seconds, which collecting this file must not
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 9, "target_modules": TARGETS, **fields})
    wrapped = peft.get_peft_model(model, config)
    randomize(wrapped)
    return wrapped


def use(generation: Any, model: Any) -> trl.InPlaceSync:
    generation.model = model
    return trl.use(SimpleNamespace(vllm_generation=generation))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"use_rslora": True, "r": 7},
        {"modules_to_save": ["norm"], "bias": "lora_only"},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 1}},
    ],
    ids=["plain", "rslora", "modules and biases", "patterns"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_written_bits_are_one_rounding_of_the_merge(
    fields: dict[str, Any], dtype: torch.dtype, generation: Any
) -> None:
    model = adapted(generation.model.to(dtype), **fields)
    before = {name: param.clone() for name, param in model.named_parameters()}
    sync = use(generation, model)
    for version in (1, 2):  # the second finds the first, and writes adapted and trained ones only
        generation.sync_weights()
        assert sync.receipt is not None and sync.receipt.version == version
        assert_one_rounding(generation.llm.fused, *exact_weights(model))
        for name, param in model.named_parameters():
            assert torch.equal(param, before[name]), name
        randomize(model, seed=version)
        before = {name: param.clone() for name, param in model.named_parameters()}
    generation.sync_weights()
    assert sync.receipt.nbytes < sum(
        weight.nbytes for weight in generation.llm.fused.model.parameters()
    )
    assert_one_rounding(generation.llm.fused, *exact_weights(model))


def test_trls_own_sync_writes_nearly_the_same_and_changes_its_frozen_weights(
    generation: Any,
) -> None:
    """Compare with PEFT's merge in fp32, which rounds once more, and with its undoing."""
    model = adapted(generation.model)
    frozen = {name: param.clone() for name, param in model.named_parameters()}
    use(generation, model)
    generation.generate([[1, 2]], None, 1)
    generation.sync_weights()
    assert all(torch.equal(param, frozen[name]) for name, param in model.named_parameters())
    written = generation.llm.fused.model.tensors()
    own_sync(generation)
    for name, stored in generation.llm.fused.model.named_parameters():
        assert_close(written[name], stored, rtol=2**-7, atol=2**-20, msg=name)
    assert not all(torch.equal(param, frozen[name]) for name, param in model.named_parameters())


def test_active_adapter_is_merged_and_others_are_not(generation: Any) -> None:
    """Train with a frozen adapter "ref" beside the active one, as TRL does for its KL term."""
    model = adapted(generation.model, modules_to_save=["norm"])
    model.add_adapter("ref", model.peft_config["default"])
    randomize(model)
    use(generation, model)
    for active in ("default", "ref"):
        model.set_adapter(active)
        generation.sync_weights()
        assert_one_rounding(generation.llm.fused, *exact_weights(model, active))


def assert_refused(generation: Any, model: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        use(generation, model)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_dora": True}, "q_proj.weight: .* Dora.* use TRL's own sync"),
        ({"lora_bias": True, "target_modules": ["q_proj"]}, r"lora_bias.* use TRL's own sync"),
        ({"target_modules": ["embed_tokens"]}, "merge Embedding adapters; use TRL's own sync"),
        ({"trainable_token_indices": [3]}, "trained tokens; use TRL's own sync"),
        ({"target_modules": ["lm_head"]}, "lm_head.weight is adapted and shares its weight"),
    ],
)  # fmt: skip
def test_adapters_that_are_not_merged_as_products_are_refused(
    fields: dict[str, Any], words: str, generation: Any
) -> None:
    assert_refused(generation, adapted(generation.model, **fields), words)


def test_other_kinds_several_active_and_merged_adapters_are_refused(generation: Any) -> None:
    peft = pytest.importorskip("peft")
    base = generation.model
    model = adapted(base)
    model.add_adapter("more", model.peft_config["default"])
    model.base_model.set_adapter(["default", "more"])
    assert_refused(generation, model, "active adapters are default, more; activate one")
    model.set_adapter("default")
    use(generation, model)
    with (
        model.disable_adapter(),
        pytest.raises(ValueError, match="is off; call enable_adapter_layers"),
    ):
        generation.sync_weights()
    model.merge_adapter()
    with pytest.raises(ValueError, match="contains adapter default; call unmerge_adapter"):
        generation.sync_weights()
    plain = model.unload()
    scaled = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    assert_refused(generation, peft.get_peft_model(plain, scaled), "adapter default is IA3")
    plain = SimpleNamespace(peft_config={})
    assert_refused(generation, plain, "adapters are in a SimpleNamespace; use peft.get_peft_model")


def test_retrained_tied_head_is_refused(generation: Any) -> None:
    """vLLM ties the head, and would not serve the copy that PEFT trains."""
    model = adapted(generation.model, modules_to_save=["lm_head"])
    use(generation, model)
    with pytest.raises(ValueError, match=r"lm_head.* one parameter in the rollout \(tied\)"):
        generation.sync_weights()
