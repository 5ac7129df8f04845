"""Exact trainer and engine at the widths of real models, and FlashAttention's backward pass."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from rollout import AdapterSlots, Completion, Engine, SamplingParams
from rollout.ops.torch_attention import attend, hidden_keys
from tests.helpers.ranks import results, start_ranks
from tests.helpers.trainer_bridge.exact_ranks import unequal_in_rounds
from trainer_bridge import (
    Cycle,
    LoraConfig,
    SequenceBatch,
    Trainer,
    TrainerConfig,
    open_inprocess,
)
from trainer_bridge.errors import UnequalTokens
from trainer_bridge.exact.trace import trace_mismatch
from trainer_bridge.ops import decoder_ops
from trainer_bridge.ops.exact import Sequences, attention

pytestmark = pytest.mark.gpu
SHAPES: dict[str, Any] = {
    "qwen2.5-0.5b": Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_attention_heads=14, num_key_value_heads=2,
        vocab_size=151936, tie_word_embeddings=True, num_hidden_layers=4,
    ),
    "qwen2.5-7b": Qwen2Config(
        hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4,
        vocab_size=152064, num_hidden_layers=2,
    ),
    "qwen3-4b": Qwen3Config(
        hidden_size=2560, intermediate_size=9728, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, tie_word_embeddings=True, num_hidden_layers=2,
    ),
    "llama-3.2-1b": LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8,
        head_dim=64, vocab_size=128256, tie_word_embeddings=True, num_hidden_layers=2,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    ),
    "mistral": MistralConfig(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=32000, sliding_window=1000, num_hidden_layers=2,
    ),
    "qwen3-30b-a3b": Qwen3MoeConfig(
        hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
        vocab_size=151936, num_hidden_layers=2,
    ),
}  # fmt: skip
LENGTHS = (7999, 5000, 4097, 2048, 1500, 777, 512, 300, 129, 33, 1)
TOKENS = 40


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(1000, 32000) for _ in range(length)] for length in lengths]


def described(name: str, path: Path) -> Path:
    config = SHAPES[name]
    config.max_position_embeddings, config.eos_token_id = 16384, None
    config.initializer_range = 0.05
    config.architectures = [type(config).__name__.removesuffix("Config") + "ForCausalLM"]
    config.save_pretrained(path)
    return path


def trainer_of(path: Path, **changes: Any) -> Trainer:
    options: dict[str, Any] = {"param_dtype": "bfloat16", "micro_batch_size": 2, **changes}
    config = TrainerConfig(
        model_path=str(path), random_init=True, device="cuda:0", exact=True, learning_rate=1e-4,
        activation_checkpointing="layers", **options,
    )  # fmt: skip
    return Trainer(config)


def answers_of(
    trainer: Trainer, path: Path, prompts: list[list[int]], **options: Any
) -> list[Completion]:
    """Return the answers of an engine that has the trainer's weights."""
    settings = {"kv_tokens": 65536, "max_running": 32, "max_prefill_tokens": 8192, **options}
    dtype = getattr(torch, trainer.config.param_dtype or "float32")
    engine = Engine.from_pretrained(
        path, "cuda:0", dtype=dtype, exact=True, max_context_len=8192, load_weights=False,
        **settings,
    )  # fmt: skip
    trainer.connect([engine])
    trainer.sync_weights(1)
    asked = SamplingParams(max_tokens=TOKENS, temperature=0.8, seed=3)
    answers = [group[0] for group in engine.generate(prompts, asked)]
    trainer.connect([])
    engine.saver.close()
    return answers


def batch_of(prompts: list[list[int]], answers: list[Completion]) -> SequenceBatch:
    return SequenceBatch(
        prompt_ids=prompts,
        response_ids=[answer.token_ids for answer in answers],
        rollout_logprobs=[answer.logprobs for answer in answers],
        advantages=[1.0, -1.0] * (len(prompts) // 2) + [1.0],
        temperature=0.8,
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", SHAPES)
def test_bits_of_engine_and_trainer_are_equal(name: str, dtype: str, tmp_path: Path) -> None:
    path, prompts = described(name, tmp_path), prompts_of(LENGTHS)
    trainer = trainer_of(path, param_dtype=dtype)
    answers = answers_of(trainer, path, prompts)
    batch = batch_of(prompts, answers)
    assert trainer.compute_log_prob(batch) == batch.rollout_logprobs
    for options in ({"max_prefill_tokens": 384}, {"max_running": 1}, {"cuda_graphs": False}):
        again = answers_of(trainer, path, prompts, **options)
        assert [answer.logprobs for answer in again] == batch.rollout_logprobs, options
    if dtype == "bfloat16":  # float16 may overflow with random weights
        assert trainer.update_actor(batch)["unequal_tokens"] == 0
    trainer.close()
    trainer.saver.close()


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-7b", "qwen3-30b-a3b"])
def test_bits_of_served_adapters_are_equal_over_one_base(name: str, tmp_path: Path) -> None:
    """Update at a rate that gives B, which begins as 0, entries of about 0.01."""
    path, prompts = described(name, tmp_path), prompts_of(LENGTHS)
    layers = ("q_proj", "k_proj", "v_proj", "o_proj")
    layers += () if "a3b" in name else ("gate_proj", "up_proj", "down_proj")
    config = TrainerConfig(
        model_path=str(path), random_init=True, device="cuda:0", exact=True, learning_rate=1e-2,
        activation_checkpointing="layers", dtype="bfloat16", micro_batch_size=2,
        lora=LoraConfig(rank=32, alpha=64.0, target_modules=layers, served_as="policy"),
    )  # fmt: skip
    options = {
        "kv_tokens": 65536, "max_running": 32, "max_prefill_tokens": 8192, "exact": True,
        "max_context_len": 8192, "adapters": AdapterSlots(rank=32, target_modules=layers),
    }  # fmt: skip
    asked = SamplingParams(max_tokens=TOKENS, temperature=0.8, seed=3, adapter="policy")
    logprobs = []
    with open_inprocess(config, options, alias=True) as (trainer, rollout):
        cycle = Cycle(trainer, rollout, alias=True, resident=["weights"])
        for version in (1, 2, 3):
            cycle.to_rollout(version)
            answers = [group[0] for group in rollout.generate(prompts, asked)]
            cycle.to_train()
            batch = batch_of(prompts, answers)
            assert trainer.compute_log_prob(batch) == batch.rollout_logprobs
            figures = trainer.update_actor(batch)
            assert figures["unequal_tokens"] == 0 < figures["grad_norm"]
            logprobs.append(batch.rollout_logprobs)
    assert logprobs[0] != logprobs[1] != logprobs[2]


def test_trace_runs_both_sides_on_a_gpu_and_names_a_planted_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, prompts = described("qwen3-4b", tmp_path / "model"), prompts_of((2100,))
    trainer = trainer_of(path, mismatch_dir=str(tmp_path / "mismatch"))
    (answer,) = answers_of(trainer, path, prompts)
    batch = SequenceBatch(
        prompt_ids=prompts,
        response_ids=[answer.token_ids],
        rollout_logprobs=[[logprob - 2**-10 for logprob in answer.logprobs]],
        advantages=[1.0],
        temperature=0.8,
    )
    with pytest.raises(UnequalTokens, match="of 40 tokens differ"):
        trainer.update_actor(batch)
    trainer.close()
    trainer.saver.close()
    trace = trace_mismatch(tmp_path / "mismatch", device="cuda:0", max_prefill_tokens=384)
    assert trace.first is None and trace.engine == trace.trainer == answer.logprobs
    gate = decoder_ops.silu_gate
    monkeypatch.setattr(decoder_ops, "silu_gate", lambda *halves: gate(*halves) * (1 + 2**-7))
    first = trace_mismatch(tmp_path / "mismatch", device="cuda:0").first
    assert first is not None and first.operation == "input of layers.0.mlp.down_proj"
    assert min(first.unequal) == 0


TWO = ("qwen2.5-0.5b", 1), ("qwen2.5-7b", 1), ("qwen3-30b-a3b", 1), ("qwen3-30b-a3b", 2)
FOUR = ("qwen2.5-7b", 1), ("qwen3-30b-a3b", 1), ("qwen3-30b-a3b", 2)


@pytest.mark.parametrize(
    ("world", "name", "parts"),
    [
        *(pytest.param(2, *case, marks=pytest.mark.gpus(2)) for case in TWO),
        *(pytest.param(4, *case, marks=pytest.mark.gpus(4)) for case in FOUR),
    ],
)
def test_bits_of_a_tensor_parallel_engine_and_a_trainer_on_its_ranks_are_equal(
    world: int, name: str, parts: int, tmp_path: Path
) -> None:
    path = described(name, tmp_path / "model")
    config = TrainerConfig(
        model_path=str(path), random_init=True, device="cuda", exact=True, learning_rate=1e-4,
        param_dtype="bfloat16", micro_batch_size=2, activation_checkpointing="layers",
        exact_ranks=world, exact_expert_parallel=parts,
    )  # fmt: skip
    settings = {"kv_tokens": 65536, "max_running": 32, "max_context_len": 8192}
    ways: list[dict[str, Any]] = [
        {"max_prefill_tokens": 8192},
        {"max_prefill_tokens": 384, "prefix_cache": False, "max_running": 3},
        {"max_prefill_tokens": 8192, "cuda_graphs": False},
    ]
    arguments = config, [{**settings, **way} for way in ways], prompts_of(LENGTHS)
    ranks = start_ranks(
        unequal_in_rounds, world, tmp_path / "store", *arguments, backend="nccl", seconds=300
    )
    assert results(ranks, 600) == [[0, 0]] * world


def test_two_updates_from_the_same_weights_have_the_same_bits(tmp_path: Path) -> None:
    path, prompts = described("qwen2.5-0.5b", tmp_path), prompts_of((900, 1300, 40, 700))
    batch = SequenceBatch(
        prompt_ids=prompts,
        response_ids=[prompt[:50] for prompt in prompts],
        old_logprobs=[[-10.0] * len(prompt[:50]) for prompt in prompts],
        advantages=[1.0, -1.0, 0.5, -0.5],
    )
    ends = []
    for _ in range(2):
        trainer = trainer_of(path)
        for _ in range(3):
            trainer.update_actor(batch)
        ends.append([param.full_tensor().clone() for param in trainer.model.parameters()])
        trainer.close()
        trainer.saver.close()
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("width", [64, 128])
def test_gradients_of_attention_equal_autograd_of_the_reference(
    width: int, window: int | None
) -> None:
    """Compare with fp32 over the same inputs.

    FlashAttention rounds weights and their gradients to bf16, 2^-9 of each, before it multiplies.
    """
    lengths = (700, 65, 300, 1)
    draw = torch.Generator("cuda").manual_seed(0)
    shapes = [(sum(lengths), heads, width) for heads in (14, 2, 2)]
    inputs = [
        torch.randn(shape, generator=draw, device="cuda", dtype=torch.bfloat16) for shape in shapes
    ]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")
    ours = [tensor.clone().requires_grad_() for tensor in inputs]
    out = attention(*ours, Sequences(lengths, bounds), width**-0.5, window)  # type: ignore[call-arg]
    slope = torch.randn(out.shape, generator=draw, device="cuda", dtype=torch.bfloat16)
    out.backward(slope)
    plain = [tensor.float().requires_grad_() for tensor in inputs]
    parts = zip(*(tensor.split(lengths) for tensor in plain), strict=True)
    expected = [
        attend(
            q[None], k[None], v[None], hidden_keys(len(q), len(q), window, q.device), width**-0.5
        )
        for q, k, v in parts
    ]
    wide = torch.cat(expected, 1)[0]
    wide.backward(slope.float())
    torch.testing.assert_close(out.float(), wide, atol=2e-2, rtol=2**-7)
    for got, want in zip(ours, plain, strict=True):
        assert got.grad is not None and want.grad is not None
        error = (got.grad.float() - want.grad).norm() / want.grad.norm()
        assert error < 2**-7
