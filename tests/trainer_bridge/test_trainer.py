"""The trainer against plain transformers and torch.optim; its offloads and random weights."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_groups
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from transformers import AutoConfig, AutoModelForCausalLM

from memsaver import OutOfMemory, StateError, TagError
from tests.helpers.memory import scribble
from tests.helpers.trainer_bridge.failures import failing_once, out_of_memory
from tests.helpers.trainer_bridge.models import (
    describe,
    make_batch,
    reference,
    reference_logprobs,
    value_batch,
    write_model,
)
from tests.helpers.trainer_bridge.reference_step import plain_adamw, plain_bits, plain_step
from tests.helpers.trainer_bridge.states import assert_same_bits, bits
from tests.helpers.trainer_bridge.tolerance import (
    STABLE,
    assert_learned,
    assert_metrics,
    assert_scores,
)
from trainer_bridge import (
    CriticConfig,
    LoraConfig,
    PolicyLoss,
    Schedule,
    SequenceBatch,
    Trainer,
    fsdp_internals,
)
from trainer_bridge.models import sharded_model as model_module

Make = Callable[..., Trainer]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("qwen3", {"tie_word_embeddings": False}),
    ("qwen2", {"head_dim": 8}),
    ("qwen3_moe", {"num_experts": 5, "mlp_only_layers": [0]}),
    ("llama", {"tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE}),
]


MANY: dict[str, dict[str, Any]] = {"num_local_experts": 4, "num_experts_per_tok": 2}
NOISES: list[tuple[str, dict[str, Any]]] = [
    ("phi", {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attention_dropout": 0.3}),
    ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.3, "attn_pdrop": 0.3}),
    ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.3, "layerdrop": 0.9}),
    ("phimoe", {**MANY, "input_jitter_noise": 0.3, "router_jitter_noise": 0.3}),
]


@pytest.mark.parametrize(("family", "noises"), NOISES)
def test_scores_are_deterministic_for_configs_with_dropout_or_jitter(
    family: str, noises: dict[str, Any], tmp_path: Path, make_trainer: Make
) -> None:
    """Expect importance ratios of exactly 1 in an update with the weights that scored."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}
    AutoConfig.for_model(family, **{**sizes, **noises}).save_pretrained(tmp_path)
    trainer, batch = make_trainer(str(tmp_path), random_init=True), make_batch(6)
    scored = dataclasses.replace(batch, old_logprobs=trainer.compute_log_prob(batch))
    assert trainer.update_actor(scored)["approx_kl"] == 0.0


def test_small_layers_share_a_unit_and_units_change_no_bit(
    tmp_path: Path, make_trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, updates = write_model(tmp_path, num_hidden_layers=3), []
    layer = make_trainer(path).model.model.layers[0]
    size = sum(param.numel() * param.element_size() for param in layer.parameters())
    for fitting, units in ((1, 3), (2, 2)):
        monkeypatch.setattr(model_module, "UNIT_BYTES", fitting * size)
        trainer, batch = make_trainer(path), make_batch(6)
        states = {id(fully_shard.state(layer)) for layer in trainer.model.model.layers}
        assert len(states) == units
        updates.append((trainer.update_actor(batch), bits(trainer)))
    (figures, learned), (other_figures, other_learned) = updates
    assert figures == other_figures
    assert_same_bits(learned, other_learned)


@pytest.mark.parametrize(
    ("method", "where", "keep"),
    [
        ("compute_log_prob", "forward", False),
        ("compute_log_prob", "forward", True),
        ("update_actor", "forward", True),
        ("update_actor", "backward", False),
        ("update_actor", "backward", True),
    ],
)
def test_call_that_failed_inside_a_unit_leaves_nothing_behind(
    method: str, where: str, keep: bool, tmp_path: Path, make_trainer: Make
) -> None:
    """Fail in the second micro batch, then change the weights, and compare with a twin."""
    path = write_model(tmp_path, num_hidden_layers=3)
    trainer, twin = (make_trainer(path, micro_batch_size=1, keep_unsharded=keep) for _ in range(2))
    batch = make_batch(6)
    with out_of_memory(trainer.model.model.layers[1].mlp, where):
        getattr(trainer, method)(batch)
    for shard in (*trainer.shards().values(), *twin.shards().values()):
        shard.mul_(1.01)
    assert trainer.compute_log_prob(batch) == twin.compute_log_prob(batch)
    assert trainer.update_actor(batch) == twin.update_actor(batch)
    assert_same_bits(bits(trainer), bits(twin))


@pytest.mark.parametrize(
    ("window", "graphs"), [(None, False), (None, True), (64, False)]
)  # with a window, sequences are padded
@pytest.mark.parametrize(
    ("method", "where"),
    [("compute_log_prob", "forward"), ("update_actor", "forward"), ("update_actor", "backward")],
)
def test_call_without_room_is_repeated_in_half_as_large_passes(
    method: str, where: str, window: int | None, graphs: bool, tmp_path: Path, make_trainer: Make
) -> None:
    """Fail in the second pass, and compare with a twin that has half as large ones at first."""
    path, batch = write_model(tmp_path, "mistral", sliding_window=window), make_batch(12)
    how: dict[str, Any] = {"cuda_graphs": graphs}
    trainer, twin = (make_trainer(path, micro_batch_size=size, **how) for size in (4, 2))
    with failing_once(trainer.model.model.layers[1].mlp, where):
        with pytest.warns(UserWarning, match=r"^out of memory: micro_batch_\w+=\d+ from now on"):
            result = getattr(trainer, method)(batch)
    assert result == getattr(twin, method)(batch)
    assert trainer.update_actor(batch) == twin.update_actor(batch)
    assert_same_bits(bits(trainer), bits(twin))


def test_error_of_a_pass_is_raised_even_if_fsdp_cannot_be_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = mock.Mock(side_effect=RuntimeError("the device is lost"))
    monkeypatch.setattr(fsdp_internals, "reshard", lost)
    with pytest.raises(KeyError) as caught, fsdp_internals.whole_pass(torch.nn.Linear(1, 1)):
        raise KeyError("first")
    assert caught.value.__notes__ == ["and FSDP's state was not reset: the device is lost"]


def counting(counts: Counter[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any, **more: Any) -> Any:
        counts[name] += 1
        return function(*args, **more)

    return counted


def of_critic(trainer: Trainer) -> list[Callable[..., Any]]:
    if trainer.critic is None:
        return []
    return [trainer.compute_ref_log_prob, trainer.compute_values, trainer.update_critic]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"param_dtype": "bfloat16", "activation_checkpointing": "layers"},
        {"param_dtype": "bfloat16", "optimizer_offload": True},
        {"param_dtype": "float16"},
        {
            "param_dtype": "bfloat16",
            "lora": LoraConfig(rank=8, alpha=8.0, target_modules=("experts",)),
        },
        {"reference": True, "critic": CriticConfig()},
    ],
    ids=str,
)
def test_kept_parameters_are_gathered_and_reduced_once_in_a_batch(
    changes: dict[str, Any], tmp_path: Path, make_trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expect the bits of a trainer that gathers and reduces in each of four micro batches."""
    counts = Counter[str]()
    for owner, name in ((FSDPParamGroup, "_to_unsharded"), (param_groups, "foreach_reduce")):
        monkeypatch.setattr(owner, name, counting(counts, name, getattr(owner, name)))
    path = write_model(tmp_path, "qwen3_moe" if "lora" in changes else "qwen3")
    results: list[list[Any]] = []
    for keep in (False, True):
        trainer = make_trainer(path, micro_batch_size=1, keep_unsharded=keep, **changes)
        trainer.reload()
        results.append([])
        for call in (trainer.compute_log_prob, trainer.update_actor, *of_critic(trainer)):
            counts.clear()
            results[-1].append(call(value_batch(4) if trainer.critic else make_batch(4)))
            results[-1].append(Counter(counts))
        results[-1].append(bits(trainer))
    for plain, kept in zip(*results, strict=True):
        if isinstance(kept, Counter):
            # Scoring never reshards the root of its own accord.
            assert plain["_to_unsharded"] >= 4 * (kept["_to_unsharded"] - 1) + 1 > 1
            assert plain["foreach_reduce"] == 4 * kept["foreach_reduce"]
        elif isinstance(kept, dict) and "loss" not in kept and "value_loss" not in kept:
            assert_same_bits(plain, kept)
        else:
            assert plain == kept


@pytest.mark.parametrize(
    ("limits", "passes"),
    [
        ({"micro_batch_size": 1}, [12, 12, 6]),
        ({"micro_batch_size": 1, "micro_batch_tokens": 24}, [24, 6]),
        ({"micro_batch_size": 1, "micro_batch_tokens": 7}, [12, 12, 6]),
    ],
)
def test_budget_of_tokens_fills_passes_that_hold_at_least_the_longest_sequence(
    limits: dict[str, int], passes: list[int], model_path: str, make_trainer: Make
) -> None:
    """Count the real tokens of each pass over sequences of 12, 6, 6 and 6 tokens."""
    lengths = [12, 6, 6, 6]
    batch = SequenceBatch(
        prompt_ids=[[3]] * 4, response_ids=[[5] * (length - 1) for length in lengths]
    )
    trainer, counts = make_trainer(model_path, **limits), list[int]()

    def count(module: Any, args: Any, inputs: dict[str, Any]) -> None:
        sizes = inputs["packing"].lengths
        counts.append(sum(size for size in sizes if size in lengths))

    trainer.model.register_forward_pre_hook(count, with_kwargs=True)
    whole = make_trainer(model_path, micro_batch_size=4).compute_log_prob(batch)
    scores = trainer.compute_log_prob(batch)
    assert counts == passes
    assert scores.values == pytest.approx(whole.values, abs=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_recomputation_changes_no_bits_of_the_weights(
    family: str, device: str, tmp_path: Path, make_trainer: Make
) -> None:
    path, results = write_model(tmp_path, family), list[dict[str, torch.Tensor]]()
    for way in ("none", "mlp", "layers"):
        how: dict[str, Any] = {"param_dtype": "bfloat16", "device": device}
        trainer = make_trainer(path, activation_checkpointing=way, **STABLE, **how)
        for seed in range(2):
            trainer.update_actor(make_batch(7, seed=seed))
        results.append(bits(trainer))
    for others in results[1:]:
        assert_same_bits(others, results[0])


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_model_and_log_probs_match_transformers(
    family: str, changes: dict[str, Any], device: str, tmp_path: Path, make_trainer: Make
) -> None:
    path = write_model(tmp_path, family, **changes)
    plain, trainer = reference(path), make_trainer(path, device=device)
    assert_same_bits(
        {name: shard.cpu() for name, shard in trainer.shards().items()},
        dict(plain.named_parameters()),
    )
    buffers = dict(trainer.model.named_buffers())
    assert buffers
    if device == "cpu":  # buffers are computed on the CPU
        assert_same_bits(buffers, dict(plain.named_buffers()))
    model: Any = trainer.model
    assert all(isinstance(layer, FSDPModule) for layer in [model, *model.model.layers])
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == changes.get(
        "tie_word_embeddings", True
    )
    for buffer in buffers.values():
        with pytest.raises(TagError):
            trainer.saver.offset_of(buffer)
    batch = make_batch(7)
    batch = dataclasses.replace(
        batch, response_ids=[*batch.response_ids[:6], []], old_logprobs=None
    )
    for temperature in (1.0, 0.6):
        batch = dataclasses.replace(batch, temperature=temperature)
        with torch.no_grad():
            assert_scores(trainer.compute_log_prob(batch), reference_logprobs(plain, batch))


def test_shards_and_moments_are_on_tags_that_commit_only_used_bytes(
    device: str, tmp_path: Path, make_trainer: Make
) -> None:
    hidden = 256 if device == "cpu" else 2048  # extents are multiples of 4 KiB or 2 MiB
    trainer = make_trainer(
        write_model(tmp_path, hidden_size=hidden, intermediate_size=2 * hidden), device=device
    )
    trainer.update_actor(make_batch(4))
    saver, shards = trainer.saver, trainer.shards()
    elements = sum(param.numel() for param in trainer.model.parameters())
    tags = saver.report().tags
    for tag, expected in (("params", 4 * elements), ("optim", 8 * elements)):
        live, committed = tags[tag].live_bytes, tags[tag].committed_bytes
        assert expected <= live <= committed <= live * 1.02
        assert tags[tag].live_bytes <= expected * 1.001 and tags[tag].content == "host"
    for name, param in trainer.model.named_parameters():
        assert saver.offset_of(shards[name]) < tags["params"].live_bytes
        for moment in ("exp_avg", "exp_avg_sq"):
            offset = saver.offset_of(trainer.optimizer.state[param][moment].to_local())
            assert offset < tags["optim"].live_bytes
    addresses = {name: shard.data_ptr() for name, shard in shards.items()}
    trainer.update_actor(make_batch(4, seed=1))
    assert addresses == {name: shard.data_ptr() for name, shard in trainer.shards().items()}


@pytest.mark.parametrize(
    ("tied", "decay", "changes"),
    [
        (True, None, {"max_grad_norm": 0.3, "micro_batch_size": 1}),
        (False, None, {"max_grad_norm": 1e6, "micro_batch_size": 64}),
        (True, 3, {"activation_checkpointing": "layers"}),  # the last step changes nothing
        (False, 5, {"activation_checkpointing": "mlp"}),
    ],
)
def test_updates_match_plain_adamw_for_any_micro_batch_size(
    tied: bool,
    decay: int | None,
    changes: dict[str, Any],
    device: str,
    tmp_path: Path,
    make_trainer: Make,
) -> None:
    path = write_model(tmp_path, tie_word_embeddings=tied)
    adam: dict[str, Any] = {"betas": (0.8, 0.9), "weight_decay": 0.1}
    model = reference(path)
    optimizer = plain_adamw(model, **adam)
    end = 1.0 if decay is None else 0.0
    schedule = torch.optim.lr_scheduler.LinearLR(
        optimizer, start_factor=1.0, end_factor=end, total_iters=decay or 1
    )
    falls = Schedule() if decay is None else Schedule(kind="linear", updates=decay)
    trainer = make_trainer(
        path,
        device=device,
        loss=PolicyLoss(clip_high=0.3),
        schedule=falls,
        **STABLE,
        **adam,
        **changes,
    )
    norm, max_norm, steps = 0.0, changes.get("max_grad_norm", 1.0), 4 if decay == 3 else 3
    for step in range(steps):
        batch = make_batch(7, seed=step)
        if step == 1:
            weights = [[n / 2 for n, _ in enumerate(row)] for row in batch.response_ids]
            batch = dataclasses.replace(batch, weights=weights)
        expected = plain_step(model, optimizer, batch, max_norm)
        schedule.step()
        metrics = trainer.update_actor(batch)
        assert_metrics(metrics, expected)
        assert metrics["tokens"] == batch.num_tokens
        assert 0 < metrics["entropy"] < math.log(96)
        norm = max(norm, min(max_norm, expected["grad_norm"]))
    assert trainer.step == steps
    assert_learned(bits(trainer), plain_bits(model, optimizer), steps, norm)


def test_mixed_precision_keeps_full_precision_masters(model_path: str, make_trainer: Make) -> None:
    full, mixed = make_trainer(model_path), make_trainer(model_path, param_dtype="bfloat16")
    batch = make_batch(5)
    rows = zip(mixed.compute_log_prob(batch), full.compute_log_prob(batch), strict=True)
    assert (
        1e-5 < max(abs(a - b) for row, exact in rows for a, b in zip(row, exact, strict=True)) < 0.2
    )
    mixed.update_actor(batch)
    assert {shard.dtype for shard in mixed.shards().values()} == {torch.float32}
    assert any((shard != shard.bfloat16()).any() for shard in mixed.shards().values())


def test_offload_and_reload_keep_all_bits_and_addresses(
    device: str, model_path: str, make_trainer: Make
) -> None:
    trainer = make_trainer(model_path, device=device)
    twin = make_trainer(model_path, device=device)
    batches = [make_batch(5, seed=seed) for seed in range(3)]
    for side in (trainer, twin):
        side.update_actor(batches[0])
        side.compute_log_prob(batches[1])  # FSDP leaves the root unsharded
    before = bits(trainer)
    addresses = {name: shard.data_ptr() for name, shard in trainer.shards().items()}
    live = {tag: trainer.saver.report().tags[tag].live_bytes for tag in ("params", "optim")}
    trainer.offload("optim")
    trainer.offload("params")
    trainer.offload()
    for tag, nbytes in live.items():
        report = trainer.saver.report().tags[tag]
        assert (report.state, report.committed_bytes, report.backup_bytes) == ("paused", 0, nbytes)
    scribble(16 << 20, device)
    trainer.reload("params")
    trainer.reload()
    assert_same_bits(bits(trainer), before)
    assert addresses == {name: shard.data_ptr() for name, shard in trainer.shards().items()}
    for batch in batches[1:]:
        assert trainer.compute_log_prob(batch) == twin.compute_log_prob(batch)
        assert trainer.update_actor(batch) == twin.update_actor(batch)
    assert_same_bits(bits(trainer), bits(twin))


def test_overlapped_offload_and_reload_keep_all_bits_and_calls_wait(
    device: str, model_path: str, make_trainer: Make
) -> None:
    trainer = make_trainer(model_path, device=device)
    twin = make_trainer(model_path, device=device)
    for step in range(3):
        batch = make_batch(5, seed=step)
        trainer.offload("optim", "params", wait=False)
        trainer.reload("params")  # waits for the offload
        assert trainer.saver.is_paused("optim")
        scribble(16 << 20, device)
        trainer.reload("optim")
        trainer.offload("params", "optim", wait=False)
        trainer.reload("params", wait=False)  # begins after the offload
        trainer.reload("optim", wait=False)
        assert trainer.compute_log_prob(batch) == twin.compute_log_prob(batch)
        for side in (trainer, twin):
            side.update_actor(batch)
        assert_same_bits(bits(trainer), bits(twin))


def test_failed_overlapped_transfer_is_raised_by_next_call_and_changes_nothing(
    model_path: str, make_trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, batch = make_trainer(model_path), make_batch(2)
    scores = trainer.compute_log_prob(batch)

    def fail(error: Exception) -> Any:
        def raises(*_: Any, **__: Any) -> None:
            raise error

        return raises

    with monkeypatch.context() as patch:
        patch.setattr(trainer.saver, "pause", fail(RuntimeError("no host")))
        trainer.offload("params", wait=False)
        with pytest.raises(RuntimeError, match="no host"):
            trainer.compute_log_prob(batch)
    assert trainer.compute_log_prob(batch) == scores  # params were not offloaded
    trainer.offload()
    short = OutOfMemory("nothing was changed", requested_bytes=2, missing_bytes=1, holders={})
    with monkeypatch.context() as patch:
        patch.setattr(trainer.saver, "begin_resume", fail(short))
        trainer.reload("params", wait=False)  # lack of room is not an error
        trainer.reload("optim", wait=False)
        with pytest.raises(StateError, match="'params', which is offloaded"):
            trainer.compute_log_prob(batch)
    trainer.reload()
    assert trainer.compute_log_prob(batch) == scores


def test_overlapped_offload_that_fails_halfway_keeps_paused_tags_offloaded(
    model_path: str, make_trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, batch = make_trainer(model_path), make_batch(2)
    scores, saver = trainer.compute_log_prob(batch), trainer.saver
    pause = saver.pause

    def fail(*tags: str, **how: Any) -> None:
        if tags == ("optim",):
            raise RuntimeError("no host")
        pause(*tags, **how)

    with monkeypatch.context() as patch:
        patch.setattr(saver, "pause", fail)
        trainer.offload("params", "optim", wait=False)
        with pytest.raises(RuntimeError, match="no host"):
            trainer.compute_log_prob(batch)
    with pytest.raises(StateError, match="'params', which is offloaded"):
        trainer.compute_log_prob(batch)
    trainer.reload("params", wait="memory")
    assert trainer.compute_log_prob(batch) == scores and not saver.is_paused("optim")


@pytest.mark.parametrize("tag", ["params", "optim", "reference", "critic", "critic_optim"])
def test_calls_refuse_content_that_was_discarded_outside_of_the_trainer(
    tag: str, model_path: str, make_trainer: Make, tmp_path: Path
) -> None:
    config = {"reference": True, "critic": CriticConfig()}
    trainer = make_trainer(model_path, **config)
    batch, saver = make_batch(2), trainer.saver
    trainer.reload()
    calls = {
        "reference": partial(trainer.compute_ref_log_prob, batch),
        "params": partial(trainer.compute_log_prob, batch),
        "critic": partial(trainer.compute_values, batch),
    }
    scores = {name: call() for name, call in calls.items()}
    learn: Callable[[], Any] = partial(trainer.save_checkpoint, str(tmp_path / "again"))
    trainer.save_checkpoint(str(tmp_path / "saved"))
    saver.pause(tag)  # keeps the content
    with pytest.raises(StateError, match=f"'{tag}', which is offloaded"):
        calls.get(tag, learn)()
    saver.resume(tag)
    assert {name: call() for name, call in calls.items()} == scores
    saver.pause(tag, content="discard")
    saver.resume(tag)
    trainer.offload()
    trainer.reload()
    with pytest.raises(StateError, match=rf"tag '{tag}': .* was discarded .* load_checkpoint\(\)"):
        calls.get(tag, learn)()
    trainer.load_checkpoint(str(tmp_path / "saved"))
    if tag != "reference":  # checkpoints do not contain the reference
        assert {name: call() for name, call in calls.items()} == scores
        learn()
    saver.resize(tag, saver.report().tags[tag].committed_bytes // 2)
    with pytest.raises(StateError, match=rf"'{tag}' has no memory behind .* MemorySaver.resize"):
        calls.get(tag, learn)()


def test_overlapped_reload_begins_when_there_is_room(model_path: str, make_trainer: Make) -> None:
    trainer, batch = make_trainer(model_path), make_batch(2)
    scores, saver = trainer.compute_log_prob(batch), trainer.saver
    for _ in range(2):
        trainer.offload()
        saver.limit_bytes = 1
        trainer.reload("params", wait=False)
        trainer.reload("optim", wait=False)
        time.sleep(0.15)
        assert saver.is_paused("params")
        saver.limit_bytes = None
        end = time.monotonic() + 20
        while saver.is_paused("optim"):  # returns although no call needs it
            assert time.monotonic() < end
            time.sleep(0.01)
        assert not saver.is_paused("params")
    assert trainer.compute_log_prob(batch) == scores
    trainer.offload()
    saver.limit_bytes = 1
    trainer.reload("params", wait=False)
    trainer.close()  # does not wait for room
    assert saver.is_paused("params")


def test_calls_that_need_an_offloaded_tag_are_refused(
    model_path: str, make_trainer: Make, tmp_path: Path
) -> None:
    trainer, batch = make_trainer(model_path), make_batch(2)
    trainer.offload("optim")
    with pytest.raises(StateError, match=r"update_actor\(\) needs tag 'optim', which is offloaded"):
        trainer.update_actor(batch)
    with pytest.raises(StateError, match="save_checkpoint.*'optim'"):
        trainer.save_checkpoint(str(tmp_path / "c"))
    scores = trainer.compute_log_prob(batch)
    trainer.offload("params")
    with pytest.raises(StateError, match=r"compute_log_prob\(\) needs tag 'params'"):
        trainer.compute_log_prob(batch)
    trainer.reload()
    assert trainer.compute_log_prob(batch) == scores
    trainer.update_actor(batch)
    with pytest.raises(ValueError, match="unknown tag 'weights'"):
        trainer.offload("weights")


def test_update_with_nan_gradient_changes_nothing(model_path: str, make_trainer: Make) -> None:
    trainer = make_trainer(model_path)
    trainer.update_actor(make_batch(3))
    before = bits(trainer)
    poisoned = dataclasses.replace(make_batch(3), advantages=[1.0, math.nan, 1.0])
    with pytest.raises(FloatingPointError, match="norm is nan in step 2, parameters are unchanged"):
        trainer.update_actor(poisoned)
    assert_same_bits(bits(trainer), before)
    assert trainer.step == 1
    trainer.update_actor(make_batch(3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": [[1], [96]]}, r"sequence 1 has token ids outside 0\.\.95"),
        ({"response_ids": [[-1], [1]]}, "sequence 0 has token ids"),
        ({"prompt_ids": [[1] * 128, [1]]}, "129 tokens exceeds the model's 128 positions"),
        ({"old_logprobs": None}, "old_logprobs and advantages"),
        ({"response_ids": [[], []], "old_logprobs": [[], []]}, "no response tokens"),
    ],
)
def test_batch_that_does_not_fit_the_model_is_refused(
    changes: dict[str, Any], message: str, model_path: str, make_trainer: Make
) -> None:
    fields: dict[str, Any] = {
        "prompt_ids": [[1], [2]],
        "response_ids": [[3], [4]],
        "old_logprobs": [[0.0], [0.0]],
        "advantages": [1.0, 1.0],
    }
    with pytest.raises(ValueError, match=message):
        make_trainer(model_path).update_actor(SequenceBatch(**{**fields, **changes}))


def test_directory_without_a_fitting_model_is_refused(
    model_path: str, make_trainer: Make, tmp_path: Path
) -> None:
    for random in (False, True):
        with pytest.raises(ValueError, match=r"config\.json not found"):
            make_trainer(str(tmp_path / "nothing"), random_init=random)
    (tmp_path / "config.json").write_text((Path(model_path) / "config.json").read_text())
    with pytest.raises(ValueError, match=r"lacks model\.safetensors"):
        make_trainer(str(tmp_path))
    qwen2 = Path(write_model(tmp_path / "other", "qwen2", num_hidden_layers=1, head_dim=8))
    (tmp_path / "model.safetensors").write_bytes((qwen2 / "model.safetensors").read_bytes())
    with pytest.raises(
        ValueError, match=r"missing model\.layers\.0\.self_attn\.k_norm\.weight"
    ) as caught:
        make_trainer(str(tmp_path))
    assert "unknown model.layers.0.self_attn.q_proj.bias" in str(caught.value)


# ---------------------------------------------------------------- random weights


def clones(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: shard.clone() for name, shard in trainer.shards().items()}


@pytest.mark.parametrize(
    ("family", "changes", "dtype"),
    [
        ("qwen3", {}, "float32"),
        ("qwen2", {"tie_word_embeddings": False, "initializer_range": 0.3}, "bfloat16"),
        ("llama", {"attention_bias": True}, "float32"),
    ],
)
def test_random_weights_are_distributed_as_in_transformers(
    family: str,
    changes: dict[str, Any],
    dtype: str,
    device: str,
    tmp_path: Path,
    make_trainer: Make,
) -> None:
    path = describe(tmp_path, family, **changes)
    trainer = make_trainer(path, random_init=True, dtype=dtype, device=device)
    plain = dict(
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).named_parameters()
    )
    shards = trainer.shards()
    assert shards.keys() == plain.keys()
    deviation = json.loads((tmp_path / "config.json").read_text())["initializer_range"]
    normal = []
    for name, expected in plain.items():
        drawn = shards[name].cpu().float()
        assert (drawn.shape, shards[name].dtype) == (expected.shape, getattr(torch, dtype))
        if expected.ndim == 1:
            assert torch.equal(drawn, expected.detach()), f"{name}: constant"
            continue
        rows = [(values == 0).all(-1) for values in (drawn, expected)]
        assert torch.equal(*rows), f"{name}: other rows are zero"
        normal.append(drawn[drawn != 0] / deviation)
        assert abs(float(normal[-1].mean())) < 5 / normal[-1].numel() ** 0.5
        assert float(normal[-1].std()) == pytest.approx(1, abs=0.1)
    assert not shards["model.embed_tokens.weight"][5].any()
    assert len({tuple(values[:4].tolist()) for values in normal}) == len(normal), (
        "two parameters start with the same numbers"
    )


def test_random_weights_depend_only_on_the_seed(
    device: str, tmp_path: Path, make_trainer: Make
) -> None:
    path = describe(tmp_path / "described")
    first = make_trainer(path, random_init=True, seed=1, device=device)
    torch.rand(7)  # unrelated use of the global generator
    path = write_model(tmp_path / "whole", pad_token_id=5)  # its weights must not be read
    same = make_trainer(path, random_init=True, seed=1, device=device)
    different = make_trainer(path, random_init=True, seed=2, device=device)
    assert_same_bits(clones(first), clones(same))
    for name, shard in first.shards().items():
        assert torch.equal(shard, different.shards()[name]) == (shard.ndim == 1), name
