"""Critic and reference against plain transformers and torch.optim, and copies of their offloads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memsaver import StateError
from tests.helpers.trainer_bridge.models import (
    make_batch,
    reference,
    value_batch,
    write_model,
)
from tests.helpers.trainer_bridge.reference_step import plain_adamw, plain_bits
from tests.helpers.trainer_bridge.states import assert_same_bits, bits, copied
from tests.helpers.trainer_bridge.tolerance import (
    STABLE,
    assert_learned,
    assert_metrics,
    assert_scores,
)
from trainer_bridge import CriticConfig, LoraConfig, SequenceBatch, Trainer
from trainer_bridge.sync.shards import local_shard

Make = Callable[..., Trainer]
BOTH: dict[str, Any] = {"critic": CriticConfig(learning_rate=5e-3), "reference": True}


class PlainCritic(torch.nn.Module):
    """A decoder of transformers with a head of one row."""

    def __init__(self, path: str, head: torch.Tensor) -> None:
        super().__init__()
        self.model = reference(path).model
        self.lm_head = torch.nn.Linear(head.shape[1], 1, bias=False)
        self.lm_head.weight.data.copy_(head)

    def values(self, prompt: list[int], response: list[int]) -> torch.Tensor:
        ids = torch.tensor([prompt + response])
        hidden = self.model(input_ids=ids).last_hidden_state[0]
        return self.lm_head(hidden)[len(prompt) - 1 : -1, 0]


def plain_update(
    plain: PlainCritic, optimizer: torch.optim.Optimizer, batch: SequenceBatch
) -> dict[str, float]:
    assert batch.values is not None and batch.returns is not None
    terms = []
    for i, (prompt, response) in enumerate(zip(batch.prompt_ids, batch.response_ids, strict=True)):
        old, target = torch.tensor(batch.values[i]), torch.tensor(batch.returns[i])
        now = plain.values(prompt, response)
        held = torch.minimum(torch.maximum(now, old - 0.2), old + 0.2)
        terms.append(torch.maximum((now - target) ** 2, (held - target) ** 2) / 2)
    loss = torch.cat(terms).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return {"value_loss": float(loss.detach()), "critic_grad_norm": float(norm)}


def head_of(trainer: Trainer) -> torch.Tensor:
    assert trainer.critic is not None
    return local_shard(trainer.critic.module.get_parameter("lm_head.weight"))


@pytest.mark.parametrize("tied", [True, False])
def test_critic_updates_match_plain_adamw(
    tied: bool, device: str, tmp_path: Path, make_trainer: Make
) -> None:
    path = write_model(tmp_path, tie_word_embeddings=tied)
    trainer = make_trainer(path, device=device, weight_decay=0.1, **STABLE, **BOTH)
    assert {value for row in trainer.compute_values(make_batch(3)) for value in row} == {0.0}
    plain = PlainCritic(path, head_of(trainer).cpu())
    optimizer = plain_adamw(plain, weight_decay=0.1, lr=5e-3)
    policy = {name: shard.clone() for name, shard in trainer.shards().items()}
    for step in range(3):
        batch = value_batch(7, seed=step)
        expected = plain_update(plain, optimizer, batch)
        learned = trainer.update_critic(batch)
        assert_metrics(learned, expected)
        assert 0 < learned["value_clip_fraction"] < 1
    batch = make_batch(5)
    with torch.no_grad():
        pairs = zip(batch.prompt_ids, batch.response_ids, strict=True)
        expected_values = [plain.values(prompt, response) for prompt, response in pairs]
    assert_scores(trainer.compute_values(batch), expected_values)
    assert_learned(bits(trainer.critic), plain_bits(plain, optimizer), 3)
    assert_same_bits(trainer.shards(), policy)  # the policy has not changed
    assert trainer.step == 0 and trainer.critic is not None and trainer.critic.step == 3


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_random_policy_critic_and_reference_start_with_the_same_weights(
    family: str, tmp_path: Path, make_trainer: Make
) -> None:
    """Use fp32 masters with a bf16 forward, for which the reference is stored in bf16."""
    trainer = make_trainer(
        write_model(tmp_path, family), random_init=True, seed=4, param_dtype="bfloat16", **BOTH
    )
    assert trainer.critic is not None and trainer.reference is not None
    trainer.reload()
    critic = dict(trainer.critic.module.named_parameters())
    frozen = dict(trainer.reference.module.named_parameters())
    for name, shard in trainer.shards().items():
        assert torch.equal(local_shard(frozen[name]), shard.bfloat16()), name
        assert torch.equal(local_shard(critic[name]), shard), name
    assert not any(param.requires_grad for param in frozen.values())
    batch = make_batch(4)
    assert trainer.compute_ref_log_prob(batch) == trainer.compute_log_prob(batch)


def test_offload_of_unchanged_model_copies_nothing(
    device: str, model_path: str, make_trainer: Make
) -> None:
    trainer, batch = make_trainer(model_path, device=device, **BOTH), value_batch(4)
    saver = trainer.saver

    def offloaded(tag: str) -> int:
        """Offload a tag, and return the bytes that were copied."""
        before = copied(trainer)
        trainer.offload(tag)
        assert saver.report().tags[tag].committed_bytes == 0
        return copied(trainer) - before

    live = {tag: entry.live_bytes for tag, entry in saver.report().tags.items()}
    assert live["critic_optim"] >= 2 * live["critic"] * 0.99 and live["reference"] == live["params"]
    assert saver.report().tags["reference"].committed_bytes == 0, (
        "a new trainer has offloaded its reference"
    )
    first = trainer.compute_log_prob(batch)
    for tag in ("params", "critic", "critic_optim"):
        assert offloaded(tag) == live[tag]
    for _ in range(2):
        for tag, score in (
            ("reference", trainer.compute_ref_log_prob),
            ("critic", trainer.compute_values),
            ("params", trainer.compute_log_prob),
        ):
            trainer.reload(tag)
            score(batch)
            assert offloaded(tag) == 0, tag
    trainer.reload("params", "critic", "critic_optim")
    trainer.update_actor(batch)
    trainer.update_critic(batch)
    trainer.reload("reference")
    assert trainer.compute_ref_log_prob(batch) == first != trainer.compute_log_prob(batch), (
        "the reference is not the initial policy"
    )
    values = trainer.compute_values(batch)
    assert [offloaded(tag) for tag in ("params", "critic")] == [live["params"], live["critic"]], (
        "changed models must be copied"
    )
    trainer.reload("critic")
    assert trainer.compute_values(batch) == values


@pytest.mark.parametrize("offload", [False, True])
def test_refreshed_reference_has_the_bits_of_the_rounded_policy(
    offload: bool, model_path: str, make_trainer: Make
) -> None:
    """Use a bf16 forward with fp32 masters on the device or on the host.

    The reference keeps the refreshed weights through updates and offloads, and only its first
    offload after a refresh copies it.
    """
    trainer, batch = (
        make_trainer(model_path, param_dtype="bfloat16", reference=True, optimizer_offload=offload),
        make_batch(4),
    )
    for step in range(2):
        trainer.update_actor(make_batch(4, seed=step))
        with pytest.raises(
            StateError, match=r"refresh_reference\(\) needs tag 'reference', which is offloaded"
        ):
            trainer.refresh_reference()
        trainer.reload("reference")
        before = trainer.compute_ref_log_prob(batch)
        trainer.refresh_reference()
        first = trainer.compute_ref_log_prob(batch)
        assert trainer.reference is not None
        for old, new in zip(
            trainer.reference.module.parameters(), trainer.shards().values(), strict=True
        ):
            assert torch.equal(local_shard(old), new.bfloat16())
        assert first == trainer.compute_log_prob(batch) != before
        moved = copied(trainer)
        trainer.offload("reference")
        assert copied(trainer) - moved == trainer.saver.report().tags["reference"].live_bytes
        trainer.update_actor(make_batch(4, seed=9))
        trainer.reload("reference")
        assert trainer.compute_ref_log_prob(batch) == first != trainer.compute_log_prob(batch)
        moved = copied(trainer)
        trainer.offload("reference")
        assert copied(trainer) == moved


def test_calls_without_their_model_or_tag_are_refused(model_path: str, make_trainer: Make) -> None:
    plain = make_trainer(model_path)
    trainer = make_trainer(model_path, **BOTH)
    batch = value_batch(2)
    for call, missing in (
        (plain.compute_values, "critic"),
        (plain.compute_ref_log_prob, "reference"),
    ):
        with pytest.raises(
            StateError, match=f"has no {missing}; create the trainer with {missing}="
        ):
            call(batch)
    adapted = make_trainer(
        model_path,
        reference=True,
        lora=LoraConfig(rank=2, alpha=4.0, target_modules=("q_proj",)),
    )
    for own, reason in ((plain, "has no reference; create"), (adapted, "base is the reference")):
        with pytest.raises(StateError, match=reason):
            own.refresh_reference()
    with pytest.raises(ValueError, match="unknown tag 'critic'; the trainer has only 'params'"):
        plain.offload("critic")
    with pytest.raises(
        StateError, match=r"compute_ref_log_prob\(\) needs tag 'reference', which is offloaded"
    ):
        trainer.compute_ref_log_prob(batch)
    trainer.offload("critic_optim")
    trainer.compute_values(batch)
    for call in (trainer.update_critic, lambda batch: trainer.save_checkpoint("nowhere")):
        with pytest.raises(StateError, match="needs tag 'critic_optim', which is offloaded"):
            call(batch)
    trainer.reload("critic_optim")
    with pytest.raises(
        ValueError, match="update_critic needs a SequenceBatch with values and returns"
    ):
        trainer.update_critic(make_batch(2))
