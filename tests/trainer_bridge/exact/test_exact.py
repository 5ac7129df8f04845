"""An exact trainer computes the bits of the engine's log-probabilities."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout import (
    AdapterSlots,
    Completion,
    DoubleSparsity,
    Engine,
    EngineConfig,
    SamplingParams,
)
from tests.helpers.case_selection import some
from tests.helpers.models import build_tiny, save_tiny
from trainer_bridge import LoraConfig, SequenceBatch, Trainer, TrainerConfig
from trainer_bridge.errors import UnequalTokens
from trainer_bridge.exact.model import foreign_operations, make_exact
from trainer_bridge.models.moe import expert_routers
from trainer_bridge.models.sharded_model import meta_model
from trainer_bridge.ops.exact import LinearAdapter, Sequences, add_adapter, attention
from trainer_bridge.ops.token_scores import score_in_head
from trainer_bridge.sync.shards import local_shard

HEAT = 0.7
LAYERS = ("q_proj", "v_proj", "o_proj")
LORA = LoraConfig(rank=4, alpha=8.0, target_modules=LAYERS, served_as="policy")
# dense layers and mixtures; experts whose rows are whole 16 bytes
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "num_hidden_layers": 3, "mlp_only_layers": [1]}
MIXTRAL = {"num_local_experts": 6, "intermediate_size": 40}
SPARSE = DoubleSparsity(heavy_channel_num=2, heavy_token_num=4)
FAMILIES = some(
    ("llama", "float32", {"tie_word_embeddings": True}),
    ("qwen2", "bfloat16", {}),
    ("qwen3_moe", "bfloat16", MOE),
    whole=[
        ("qwen3_moe", "float32", MOE | {"norm_topk_prob": True}),
        ("mixtral", "bfloat16", MIXTRAL),
        ("mixtral", "float32", MIXTRAL | {"sliding_window": 37}),
        ("llama", "bfloat16", {}),
        ("qwen2", "float32", {}),
        ("qwen3", "float32", {}),
        ("qwen3", "bfloat16", {}),
        ("mistral", "float32", {"sliding_window": 37}),
    ],
)


def prompts_of(lengths: tuple[int, ...], vocab: int = 199) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


def sampled(path: Path, prompts: list[list[int]], dtype: str, **options: Any) -> list[Completion]:
    settings = {"kv_tokens": 8192, "page_size": 4, "max_prefill_tokens": 512, "exact": True}
    settings |= options
    engine = Engine.from_pretrained(path, dtype=getattr(torch, dtype), **settings)
    asked = SamplingParams(max_tokens=12, temperature=HEAT, n=2, seed=5)
    answers = engine.generate(prompts, asked)
    engine.saver.close()
    return [completion for group in answers for completion in group]


def batch_of(prompts: list[list[int]], answers: list[Completion]) -> SequenceBatch:
    return SequenceBatch(
        prompt_ids=[prompt for prompt in prompts for _ in range(2)],
        response_ids=[answer.token_ids for answer in answers],
        rollout_logprobs=[answer.logprobs for answer in answers],
        advantages=[1.0 if number % 3 else -1.0 for number in range(len(answers))],
        temperature=HEAT,
    )


def trainer_of(path: Path, dtype: str = "float32", **changes: Any) -> Trainer:
    options = {"exact": True, "micro_batch_size": 3, "threads": 1, "learning_rate": 1e-2, **changes}
    return Trainer(TrainerConfig(model_path=str(path), param_dtype=dtype, **options))


LENGTHS = (3, 130, 257, 40)


@pytest.mark.parametrize(("family", "dtype", "fields"), FAMILIES)
def test_trainer_and_engine_compute_the_same_bits_however_they_batch(
    family: str, dtype: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    save_tiny(tmp_path, family, **fields)
    prompts = prompts_of(LENGTHS)
    answers = sampled(tmp_path, prompts, dtype)
    for options in (
        {"max_prefill_tokens": 50, "prefix_cache": False},
        {"max_running": 1},
        {"kv_tokens": 320, "max_running": 3},  # samples are preempted
    ):
        again = sampled(tmp_path, prompts, dtype, **options)
        assert [a.token_ids for a in again] == [a.token_ids for a in answers], options
        assert [a.logprobs for a in again] == [a.logprobs for a in answers], options
    batch = batch_of(prompts, answers)
    for size, checkpointing in ((1, "none"), (8, "mlp")):
        trainer = trainer_of(
            tmp_path, dtype, micro_batch_size=size, activation_checkpointing=checkpointing
        )
        assert trainer.compute_log_prob(batch) == batch.rollout_logprobs
        figures = trainer.update_actor(batch)
        assert figures["unequal_tokens"] == figures["mismatch_max"] == 0
        trainer.close()
        trainer.saver.close()


def randomize(trainer: Trainer) -> None:
    """Draw B of all adapters, which begins as 0."""
    generator = torch.Generator().manual_seed(0)
    for name, param in trainer.model.named_parameters():
        if name.endswith("lora_b"):
            factor = local_shard(param)
            factor.copy_(torch.randn(factor.shape, generator=generator) * 0.1)


@pytest.mark.parametrize(
    ("family", "dtype", "fields"),
    [("qwen2", "bfloat16", {}), ("qwen3", "float32", {}), ("qwen3_moe", "bfloat16", MOE)],
)
def test_trainer_and_engine_compute_the_same_bits_of_adapters(
    family: str, dtype: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    save_tiny(tmp_path, family, **fields)
    slots = AdapterSlots(rank=LORA.rank, target_modules=LORA.target_modules)
    trainer = trainer_of(tmp_path, dtype, lora=LORA)
    engine = Engine.from_pretrained(
        tmp_path, dtype=getattr(torch, dtype), kv_tokens=4096, adapters=slots, exact=True
    )
    trainer.connect([engine])
    randomize(trainer)
    prompts, asked = prompts_of(LENGTHS), SamplingParams(max_tokens=12, temperature=HEAT, n=2)
    for version in (1, 2):
        trainer.sync_weights(version)
        groups = engine.generate(prompts, dataclasses.replace(asked, adapter="policy"))
        batch = batch_of(prompts, [answer for group in groups for answer in group])
        assert trainer.compute_log_prob(batch) == batch.rollout_logprobs
        assert trainer.compute_log_prob(batch, base=True) != batch.rollout_logprobs
        figures = trainer.update_actor(batch)
        assert figures["unequal_tokens"] == figures["mismatch_max"] == 0
    trainer.close()
    trainer.saver.close()


@pytest.mark.parametrize("tokens", [5, 600])
def test_adapter_by_kernels_equals_the_reference_in_values_and_gradients(
    tokens: int, device: str
) -> None:
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off: the kernel runs on the GPU")
    generator = torch.Generator().manual_seed(0)
    shapes = (tokens, 33), (tokens, 48), (4, 48), (33, 4)
    inputs = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    results = []
    for impl in ("triton", "torch"):
        out, x, a, b = (part.clone().requires_grad_() for part in inputs)
        total = add_adapter(out * 1, x, LinearAdapter(a, b, 0.5), impl)  # type: ignore[arg-type]
        results.append([total, *torch.autograd.grad((total * inputs[0]).sum(), [out, x, a, b])])
    # Sums of at most 600 terms of about 4 in another order, each rounded by 2**-24: a random walk.
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-3)


def test_update_with_other_bits_changes_nothing_and_names_the_token(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3")
    prompts = prompts_of((5, 9))
    batch = batch_of(prompts, sampled(tmp_path, prompts, "float32"))
    assert batch.rollout_logprobs is not None
    logprobs = [[*values] for values in batch.rollout_logprobs]
    logprobs[2][4] += 2**-21  # nats
    wrong = dataclasses.replace(batch, rollout_logprobs=logprobs)
    trainer = trainer_of(tmp_path)
    before = [param.clone() for param in trainer.model.parameters()]
    with pytest.raises(UnequalTokens, match="of 1 token differ, first of token 4 of sequence 2"):
        trainer.update_actor(wrong)
    assert all(map(torch.equal, trainer.model.parameters(), before)) and trainer.step == 0
    trainer.config = dataclasses.replace(trainer.config, exact="warn")
    assert trainer.update_actor(wrong)["unequal_tokens"] == 1
    trainer.close()
    trainer.saver.close()


@pytest.mark.parametrize(
    ("family", "fields", "options"),
    [
        ("qwen3", {}, {}),
        ("qwen3", {}, {"lora": LORA}),
        ("qwen3_moe", MOE, {"fp32_router": True, "router_aux_loss_coef": 0.5}),
    ],
)
def test_gradients_are_those_of_the_plain_forward(
    family: str, fields: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    """Compare gradients of both forwards in fp32.

    Both round each of some 100 operations in a row once, and sums of up to 200 terms as often; 1e-4
    of the largest gradient of a parameter is 800 units of rounding.
    """
    save_tiny(tmp_path, family, **fields)
    prompts = prompts_of((3, 140))
    batch = batch_of(prompts, sampled(tmp_path, prompts, "float32"))
    gradients = []
    for exact in ("warn" if "lora" in options else True, False):
        changes = {"exact": exact, "learning_rate": 0.0, "max_grad_norm": None, **options}
        trainer = trainer_of(tmp_path, **changes)
        randomize(trainer)
        kept: list[torch.Tensor] = []
        trainer.optimizer.register_step_pre_hook(
            lambda optimizer, *_, kept=kept: kept.extend(
                param.grad.full_tensor().clone() for param in optimizer.param_groups[0]["params"]
            )
        )
        trainer.update_actor(batch)
        gradients.append(kept)
        trainer.close()
        trainer.saver.close()
    assert all(bool(plain.any()) for plain in gradients[1]) or "lora" not in options
    assert any(len(plain.shape) == 3 for plain in gradients[1]) == (family == "qwen3_moe")
    for ours, plain in zip(*gradients, strict=True):
        limit = 1e-4 * plain.abs().max().item()
        torch.testing.assert_close(ours, plain, rtol=0, atol=limit)


@pytest.mark.parametrize(
    ("dtype", "options"),
    some(("bfloat16", {"fp32_router": True}), whole=[("float32", {}), ("bfloat16", {})]),
)
def test_tied_experts_are_chosen_by_id_on_both_sides_with_and_without_replay(
    dtype: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Let experts 2i and 2i + 1 tie, so that one of a pair is the last of three choices."""
    model = build_tiny("qwen3_moe", **MOE)
    for router in expert_routers(model):
        router.weight.data[1::2] = router.weight.data[::2]  # type: ignore[index, union-attr, operator]
    model.save_pretrained(tmp_path)
    prompts = prompts_of(LENGTHS)
    answers = sampled(tmp_path, prompts, dtype, return_routed_experts=True, **options)
    batch = batch_of(prompts, answers)
    routed = [answer.routed_experts for answer in answers]
    for experts in routed:
        assert experts is not None and ((experts[..., 0] ^ 1) == experts[..., 1]).all()
        assert not (experts[..., ::2] % 2).any()  # the first of a tie comes first, and alone
    trainer = trainer_of(tmp_path, dtype, router_aux_loss_coef=0.1, **options)
    assert trainer.compute_log_prob(batch) == batch.rollout_logprobs
    batch = dataclasses.replace(batch, routed_experts=routed)
    assert trainer.compute_log_prob(batch) == batch.rollout_logprobs
    assert trainer.update_actor(batch)["unequal_tokens"] == 0
    trainer.close()
    trainer.saver.close()


@pytest.mark.parametrize(
    ("family", "fields", "rule"),
    [
        (
            "ministral",
            {"head_dim": 16},
            "is for llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, and this is min",
        ),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    ],
)
def test_exact_refuses_other_models(
    family: str, fields: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, family, **fields)
    with pytest.raises(ValueError, match=rule):
        trainer_of(tmp_path)


def test_probe_names_operations_that_are_not_the_engines(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_moe")
    config = TrainerConfig(model_path=str(tmp_path))
    model: Any = meta_model(config)
    score_in_head(model)
    make_exact(model, config)
    norm = model.get_decoder().norm
    norm.forward = type(norm).forward.__get__(norm)
    router: Any = expert_routers(model)[0]
    router.forward = type(router).forward.__get__(router)
    assert {"pow", "mean", "rsqrt", "topk", "_softmax"} <= foreign_operations(model)


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "fp8_e4m3"}, {"double_sparsity": SPARSE}])
def test_engine_refuses_options_with_other_bits(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="has other bits than an exact trainer; use exact=False"):
        EngineConfig(exact=True, **options)


def test_trainer_refuses_merged_adapters() -> None:
    lora = dataclasses.replace(LORA, served_as=None)
    with pytest.raises(ValueError, match="exact=True: excludes adapters, which are merged rounded"):
        TrainerConfig(model_path="m", exact=True, lora=lora)


@pytest.mark.parametrize("window", [None, 50])
def test_attention_of_a_sequence_has_the_same_bits_and_gradients_alone(window: int | None) -> None:
    """Pack sequences that are computed together and apart, in an order that is not by length."""
    lengths, draw = (300, 1, 129, 70, 2, 128, 64, 257), torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), heads, 16) for heads in (4, 2, 2, 4)]
    *inputs, slope = (torch.randn(shape, generator=draw) for shape in shapes)

    def run(rows: slice, lengths: tuple[int, ...]) -> list[torch.Tensor]:
        ours = [tensor[rows].clone().requires_grad_() for tensor in inputs]
        bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        out = attention(*ours, Sequences(lengths, bounds), 0.25, window)  # type: ignore[call-arg]
        return [out, *torch.autograd.grad(out, ours, slope[rows])]

    together, first = run(slice(None), lengths), 0
    for length in lengths:
        rows = slice(first, first + length)
        out, *gradients = run(rows, (length,))
        assert torch.equal(out, together[0][rows])
        # fp32 sums of at most 600 terms in another order: 24 roundings of 6e-8, of 10 at most
        torch.testing.assert_close(
            gradients, [tensor[rows] for tensor in together[1:]], rtol=0, atol=24 * 6e-8 * 10
        )
        first += length
