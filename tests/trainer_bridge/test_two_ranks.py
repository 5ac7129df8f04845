"""Two gloo processes against one: scores, updates, offloads, checkpoints, and syncs by both ranks.

Sizes are odd, so that the second rank's shards are shorter, and padded by FSDP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import memsaver
from rollout import AdapterSlots, Engine
from tests.helpers.memsaver.prefetches import gated
from tests.helpers.models import DEEPSEEK_MOE, MLA
from tests.helpers.ranks import results, start_ranks
from tests.helpers.trainer_bridge.failures import out_of_memory
from tests.helpers.trainer_bridge.models import (
    as_sampled,
    config,
    describe,
    make_batch,
    value_batch,
    write_model,
)
from tests.helpers.trainer_bridge.states import (
    arrives,
    arrives_in_parts,
    assert_same_bits,
    bits,
    copied,
    weights,
)
from tests.helpers.trainer_bridge.tolerance import (
    STABLE,
    assert_learned,
    assert_merged,
    assert_metrics,
    assert_scores,
)
from trainer_bridge import CriticConfig, LoraConfig, PolicyLoss, Trainer, TrainerConfig
from trainer_bridge.models import sharded_model as model_module
from trainer_bridge.sync.shards import local_shard, shard_box

UNEVEN = {
    "vocab_size": 97,
    "intermediate_size": 45,
    "hidden_size": 33,
    "head_dim": 10,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}
CHANGES: dict[str, Any] = {**STABLE, "micro_batch_size": 2, "weight_decay": 0.1}
STEPS = 2
# All combinations are in `test_policy_loss.py`.
LOSSES = [
    PolicyLoss(kind="ppo", aggregation="sequence", dual_clip=1.5),
    PolicyLoss(kind="gspo", aggregation="constant", max_tokens=9, entropy_coef=0.5),
    PolicyLoss(kind="cispo", aggregation="token"),
]
# The ranks have 3 and 2 experts, or 1 and none; one layer is sharded by columns; latent attention.
EXPERTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"num_experts": 5, "num_experts_per_tok": 1}),
    ("qwen3_moe", {"num_experts": 1, "num_experts_per_tok": 1}),
    ("deepseek_v3", {**MLA, **DEEPSEEK_MOE, "num_hidden_layers": 2, "head_dim": 8}),
]
COUNTS = (5, 1)  # sequences per update; the second rank gets fewer, or none
LORA = LoraConfig(rank=3, alpha=6.0, target_modules=("q_proj", "o_proj", "down_proj"))
ADAPTED = (0, 1)  # indices of EXPERTS
LORA_EXPERTS = LoraConfig(rank=8, alpha=16.0, target_modules=("q_proj", "experts"))
COLUMNS = {"model.layers.1.mlp.experts.down_proj": 2}


def whole(trainer: Trainer) -> dict[str, torch.Tensor]:
    named: Any = trainer.model.named_parameters()
    return {name: param.detach().full_tensor().clone() for name, param in named}


def learn(trainer: Trainer) -> list[dict[str, float]]:
    return [trainer.update_actor(make_batch(COUNTS[step], seed=step)) for step in range(STEPS)]


def losses(path: str, micro_batch_size: int) -> list[tuple[dict[str, float], dict[str, Tensor]]]:
    """Return metrics and learned numbers of one update with each loss; cispo's scores itself.

    Micro batches of one sequence share what they gather.
    """
    results = []
    for loss in LOSSES:
        changes = {**CHANGES, "micro_batch_size": micro_batch_size, "loss": loss}
        changes["keep_unsharded"] = micro_batch_size == 1
        trainer, batch = Trainer(config(path, **changes)), make_batch(COUNTS[0])
        figures = trainer.update_actor(as_sampled(batch) if loss.kind == "cispo" else batch)
        results.append((figures, bits(trainer, whole=True)))
    return results


def sync(trainer: Trainer, path: str) -> dict[str, Any]:
    """Sync into an engine in rank 0's process, and return its weights by name and the receipt."""
    engines = connected(trainer, path)
    receipt = trainer.sync_weights(1)
    return {"receipt": receipt} | {
        name: value for engine in engines for name, value in weights(engine).items()
    }


def connected(trainer: Trainer, path: str) -> list[Engine]:
    engines = [Engine.from_pretrained(path, kv_tokens=64)] if trainer.rank == 0 else []
    trainer.connect(engines)
    return engines


def columns_sharded(trainer: Trainer, path: str) -> dict[str, Any]:
    """Update and sync a second trainer of the same model, whose o_proj are sharded by columns."""
    names = [name for name in trainer.shards() if name.endswith("o_proj.weight")]
    refused = ""
    try:
        Trainer(trainer.config, shard_dims={"lm_head": 0})
    except ValueError as error:
        refused = str(error)
    second = Trainer(trainer.config, shard_dims=dict.fromkeys(names, 1))
    result = {"refused": refused, "shapes": [tuple(second.shards()[name].shape) for name in names]}
    result |= {
        "metrics": learn(second),
        "learned": bits(second, whole=True),
        "weights": whole(second),
    }
    return result | {"synced": sync(second, path)}


def offloaded(trainer: Trainer) -> int:
    """Offload and reload all tags, and return the bytes that the offload copied."""
    before = copied(trainer)
    trainer.offload()
    moved = copied(trainer) - before
    trainer.reload()
    return moved


def adapted(trainer: Trainer, path: str, out: str) -> dict[str, Any]:
    """Run a third trainer, with adapters on weights that are sharded by rows and by columns.

    Entry `hand` of the result has this rank's shards of weights merged by hand, with their boxes.
    """
    columns = {name: 1 for name in trainer.shards() if name.endswith("o_proj.weight")}
    settings = dataclasses.replace(trainer.config, lora=LORA)
    third = Trainer(settings, memsaver.MemorySaver(), shard_dims=columns)
    engines = connected(third, path)
    result: dict[str, Any] = {"first": third.sync_weights(1), "moved": [offloaded(third)]}
    result |= {"metrics": learn(third), "learned": bits(third, whole=True), "weights": whole(third)}
    params: Any = dict(third.model.named_parameters())
    hand = []
    for name in (
        f"{key.removesuffix('.lora_a')}.weight" for key in params if key.endswith("lora_a")
    ):
        a, b = (result["weights"][name.replace("weight", f"lora_{x}")] for x in "ab")
        (row, column), (rows, width) = shard_box(params[name])
        base, at = third.shards()[name], (slice(row, row + rows), slice(column, column + width))
        hand.append((name, at, torch.add(base, b[at[0]] @ a[:, at[1]], alpha=LORA.scale)))
    before = bits(third)
    result["moved"].append(offloaded(third))  # after updates
    assert_same_bits(bits(third), before)
    third.save_checkpoint(f"{out}/adapters")
    report = third.report()
    assert report is not None
    result |= {"hand": hand, "tags": report.tags, "second": third.sync_weights(2)}
    result["synced"] = [weights(engine) for engine in engines]
    return result | {"next": third.update_actor(make_batch(3, seed=9))}


def served_adapters(config: TrainerConfig, path: str) -> bool:
    """Sync adapters of both ranks into a slot; return whether it has all of their factors."""
    lora = dataclasses.replace(LORA, served_as="policy")
    trainer = Trainer(dataclasses.replace(config, lora=lora), memsaver.MemorySaver())
    slots = AdapterSlots(rank=LORA.rank, target_modules=LORA.target_modules)
    engines = [Engine.from_pretrained(path, kv_tokens=64, adapters=slots)] * (trainer.rank == 0)
    trainer.connect(engines)
    trainer.sync_weights(1)
    learn(trainer)
    trainer.sync_weights(2)
    factors = {name: value for name, value in whole(trainer).items() if "lora_" in name}
    for engine in engines:
        assert engine.adapters is not None
        store = engine.adapters.pages.stores[engine.adapters.find("policy").slot - 1]
        assert_same_bits({name: store.tensor(name) for name in factors}, factors)
        assert store.buffers["scale"].item() == LORA.scale
    return all(bool(value.any()) for value in factors.values())


def replicated(config: TrainerConfig, path: str, out: str) -> dict[str, Any]:
    """Train ranks with all parameters each, which an engine of every rank serves meanwhile."""
    slots = AdapterSlots(rank=LORA.rank, target_modules=LORA.target_modules)
    how: dict[str, Any] = {"kv_tokens": 64, "adapters": slots, "load_weights": False}
    engine = Engine.from_pretrained(path, config.device, **how)
    lora = dataclasses.replace(LORA, served_as="policy")
    config = dataclasses.replace(config, lora=lora, replicate=True)
    trainer = Trainer(config, memsaver.MemorySaver(config.device), layout=engine.manifest)
    trainer.connect([engine])
    trainer.alias_weights(1)
    result: dict[str, Any] = {"metrics": learn(trainer), "learned": bits(trainer, whole=True)}
    receipt = trainer.alias_weights(2)
    factors = {name: value for name, value in whole(trainer).items() if "lora_" in name}
    assert engine.adapters is not None
    store = engine.adapters.pages.stores[engine.adapters.find("policy").slot - 1]
    assert_same_bits({name: store.tensor(name) for name in factors}, factors)
    assert receipt.nbytes == 2 * sum(value.nbytes for value in factors.values())
    assert engine.report().tags["weights"].aliased_bytes and not engine.unavailable_reason()
    trainer.save_checkpoint(f"{out}/replicated")
    trainer.close()
    return result


def replicated_on_a_gpu(rank: int, path: str, out: str) -> dict[str, Any]:
    return replicated(config(path, device=f"cuda:{rank}", **CHANGES), path, out)


def adapted_experts(path: str) -> dict[str, Any]:
    """Run a trainer with adapters on experts, one stack of which is sharded by columns."""
    mixture = Trainer(config(path, **CHANGES, lora=LORA_EXPERTS), shard_dims=COLUMNS)
    engines = connected(mixture, path)
    result: dict[str, Any] = {"metrics": learn(mixture), "learned": bits(mixture, whole=True)}
    mixture.save_checkpoint(f"{path}/adapters")
    mixture.sync_weights(1)
    stored, held = [weights(engine) for engine in engines], whole(mixture)
    merged = {name: value for name, value in held.items() if "lora_" not in name}
    for name in merged:
        path_of = name.removesuffix(".weight") if name.endswith(".weight") else f"{name}_lora"
        if f"{path_of}.lora_a" in held:
            a, b = (held[f"{path_of}.lora_{x}"] for x in "ab")
            merged[name] = held[name] + LORA_EXPERTS.scale * b @ a
            if stored and a.ndim == 3:
                for got, base, *factors in zip(stored[0][name], held[name], a, b, strict=True):
                    assert_merged(got, base, *factors, LORA_EXPERTS.scale)
                assert not torch.equal(stored[0][name], held[name])
    result["parts"] = arrives_in_parts(mixture, path, merged, apart=2e-6)
    return result


def streamed(path: str) -> list[bool]:
    """Return whether a trainer with optimizer state on the host is bit-identical to a plain one.

    Only with two ranks could the sums of gradients be rounded to bf16.
    """
    settings = config(path, **CHANGES, param_dtype="bfloat16", keep_unsharded=True)
    plain, streams = (
        Trainer(dataclasses.replace(settings, optimizer_offload=offload))
        for offload in (False, True)
    )
    same = [one == two for one, two in zip(learn(plain), learn(streams), strict=True)]
    for param, rounded in zip(plain.model.parameters(), streams.model.parameters(), strict=True):
        held = {"master": param, **plain.optimizer.state[param]}
        for name, value in streams.optimizer.state[rounded].items():
            pair = (value, held[name])
            same.append(torch.equal(*(pair if name == "step" else map(local_shard, pair))))
        same.append(torch.equal(local_shard(rounded), local_shard(param).bfloat16()))
    return same


def repeated(path: str) -> dict[str, Any]:
    """Update in float16; the first gradients overflow in a sequence of one rank."""
    trainer, twin = (Trainer(config(path, **CHANGES, param_dtype="float16")) for _ in range(2))
    large = dataclasses.replace(make_batch(8), advantages=[1e5] + [0.0] * 7)
    metrics = [trainer.update_actor(batch) for batch in (large, make_batch(8))]
    twin.policy.loss_scale.value = metrics[0]["loss_scale"]
    assert twin.update_actor(large) == metrics[0] | {"overflows": 0.0}
    twin.update_actor(make_batch(8))
    assert_same_bits(bits(twin), bits(trainer))
    return {"metrics": metrics, "learned": bits(trainer, True)}


def interrupted(path: str) -> None:
    """Fail on both ranks in the backward pass of the second micro batch, and update again."""
    changes = {**CHANGES, "micro_batch_size": 1, "keep_unsharded": True}
    trainer, twin = (Trainer(config(path, **changes)) for _ in range(2))
    with out_of_memory(trainer.model.model.layers[0].mlp, "backward"):
        trainer.update_actor(make_batch(COUNTS[0]))
    for shard in (*trainer.shards().values(), *twin.shards().values()):
        shard.mul_(1.01)
    assert learn(trainer) == learn(twin)
    assert_same_bits(bits(trainer), bits(twin))


def drawn(path: str) -> dict[str, Any]:
    """Return this rank's shards of random weights with their boxes; one is sharded by columns."""
    columns = {"model.layers.1.self_attn.o_proj.weight": 1}
    first, second = (Trainer(config(path, random_init=True), shard_dims=columns) for _ in range(2))
    assert_same_bits(first.shards(), second.shards())
    return {
        "shards": dict(first.shards()),
        "boxes": {name: shard_box(p) for name, p in first.model.named_parameters()},
    }


def with_models(path: str, saver: memsaver.MemorySaver | None = None) -> dict[str, Any]:
    """Score and update with a critic and a reference, before and after an offload."""
    trainer = Trainer(
        config(path, **CHANGES, critic=CriticConfig(learning_rate=1e-2), reference=True), saver
    )
    assert trainer.critic is not None
    trainer.reload("reference")
    before = trainer.compute_ref_log_prob(make_batch(COUNTS[0]))
    learned = [trainer.update_critic(value_batch(COUNTS[step], seed=step)) for step in range(STEPS)]
    values = trainer.compute_values(make_batch(COUNTS[0]))
    trainer.offload()
    # Overwrite freed memory; a rank cannot start a helper process.
    torch.full((1 << 20,), 0xFF, dtype=torch.uint8)
    trainer.reload()
    assert trainer.compute_values(make_batch(COUNTS[0])) == values
    assert trainer.compute_ref_log_prob(make_batch(COUNTS[0])) == before
    return {
        "refreshed": refreshed(trainer),
        "scores": before,
        "values": values,
        "metrics": learned,
        "learned": bits(trainer.critic, whole=True),
    }


def refreshed(trainer: Trainer) -> list[list[float]]:
    """Return scores of a refreshed reference, whose bits are the policy's, however sharded."""
    names = [name for name in trainer.shards() if name.endswith("o_proj.weight")]
    columns = Trainer(
        dataclasses.replace(trainer.config, critic=None), shard_dims=dict.fromkeys(names, 1)
    )
    columns.reload("reference")
    scores = []
    for own in (trainer, columns):
        learn(own)
        own.refresh_reference()
        assert own.reference is not None
        for old, new in zip(own.reference.module.parameters(), own.shards().values(), strict=True):
            assert torch.equal(local_shard(old), new)
        scores.append(own.compute_ref_log_prob(make_batch(COUNTS[0])))
        assert scores[-1] == own.compute_log_prob(make_batch(COUNTS[0]))
    assert scores[0] == scores[1]
    return scores[0]


def worker(rank: int, path: str, out: str) -> None:
    saver = memsaver.MemorySaver()
    # Only this trainer has a unit for each layer.
    with mock.patch.object(model_module, "UNIT_BYTES", 1):
        trainer = Trainer(config(path, **CHANGES), saver)
    result: dict[str, Any] = {
        "tags": saver.report().tags,
        "offsets": {
            name: saver.offset_of(shard)
            for name, shard in trainer.shards().items()
            if shard.numel()
        },
        "scores": trainer.compute_log_prob(make_batch(COUNTS[0])),
        "metrics": learn(trainer),
        "learned": bits(trainer, whole=True),
        "weights": whole(trainer),
    }
    before = bits(trainer), trainer.compute_log_prob(make_batch(3))
    trainer.offload()
    # Overwrite freed memory; a rank cannot start a helper process.
    torch.full((1 << 20,), 0xFF, dtype=torch.uint8)
    with gated(saver, 200) as gate, ThreadPoolExecutor(1) as thread:
        trainer.reload(wait="memory")
        thread.submit(gate.trickle)
        assert trainer.compute_log_prob(make_batch(3)) == before[1]  # waits unit by unit
        trainer.reload()
    assert_same_bits(bits(trainer), before[0])
    trainer.save_checkpoint(f"{out}/checkpoint", {"ranks": 2})
    result["columns"] = columns_sharded(trainer, path)
    result["adapted"] = adapted(trainer, path, out)
    result["served"] = served_adapters(trainer.config, path)
    result["replicated"] = replicated(trainer.config, path, out)
    result["streamed"] = streamed(path)
    result["losses"] = losses(path, micro_batch_size=1)
    result["repeated"] = repeated(path)
    interrupted(path)
    result["models"] = with_models(path, memsaver.MemorySaver())
    result["drawn"] = drawn(f"{out}/described")
    result["experts"] = []
    for number in range(len(EXPERTS)):
        path = f"{out}/experts{number}"
        mixture = Trainer(config(path), shard_dims=COLUMNS)
        result["experts"].append(arrives(mixture, path))
        result["experts"] += [
            arrives_in_parts(mixture, path, experts=experts) for experts in (1, 2)
        ]
    result["adapted_experts"] = [adapted_experts(f"{out}/experts{number}") for number in ADAPTED]
    result["next"] = trainer.update_actor(make_batch(3, seed=9))
    torch.save(result, f"{out}/rank{rank}.pt")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("two")
    path = write_model(out / "model", **UNEVEN)
    # Shards have 49 and 48 rows, so the padding token's row is the second rank's.
    describe(out / "described", pad=60, **UNEVEN)
    for number, (kind, changes) in enumerate(EXPERTS):
        write_model(out / f"experts{number}", kind, **changes)
    results(start_ranks(worker, 2, out / "store", path, str(out)))
    return path, out, [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


Ranks = tuple[str, Path, list[dict[str, Any]]]


def assert_learning(
    result: dict[str, Any], metrics: list[dict[str, float]], learned: dict[str, torch.Tensor]
) -> None:
    for got, wanted in zip(result["metrics"], metrics, strict=True):
        assert_metrics(got, wanted)
    assert_learned(result["learned"], learned, STEPS)


@pytest.mark.gpus(2)
def test_replicas_on_two_gpus_learn_like_one(
    tmp_path: Path, make_trainer: Callable[..., Trainer]
) -> None:
    path = write_model(tmp_path / "model")
    store, out = tmp_path / "store", str(tmp_path)
    ranks = start_ranks(replicated_on_a_gpu, 2, store, path, out, backend="nccl", seconds=120)
    both = results(ranks)
    first, second = both[0]["learned"], both[1]["learned"]
    alone = make_trainer(path, device="cuda:0", **CHANGES, lora=LORA)
    assert_learning(both[0], learn(alone), bits(alone))
    assert_same_bits(first, {name: value.to("cuda:0") for name, value in second.items()})


def test_two_ranks_score_and_update_like_one(
    two_ranks: Ranks, make_trainer: Callable[..., Trainer]
) -> None:
    path, _, results = two_ranks
    alone = make_trainer(path, **CHANGES)
    scores, metrics = alone.compute_log_prob(make_batch(COUNTS[0])), learn(alone)
    for result in results:
        assert_scores(result["scores"], scores)
        assert_learning(result, metrics, bits(alone))
    assert results[0]["metrics"] == results[1]["metrics"]


def test_ranks_and_micro_batches_do_not_change_updates_of_each_loss(
    two_ranks: Ranks, make_trainer: Callable[..., Trainer]
) -> None:
    """Compare three micro batches on each of two ranks with one on one rank."""
    path, _, results = two_ranks
    make_trainer(path)  # creates the process group
    alone = losses(path, micro_batch_size=64)
    for result in results:
        for got, wanted in zip(result["losses"], alone, strict=True):
            assert_metrics(got[0], wanted[0])
            assert_learned(got[1], wanted[1], 1)
    assert len({metrics["grad_norm"] for metrics, _ in alone}) == len(LOSSES)
    assert ["mismatch_max" in metrics for metrics, _ in alone] == [False, False, True]


def test_critic_and_reference_on_two_ranks_match_one(
    two_ranks: Ranks, make_trainer: Callable[..., Trainer]
) -> None:
    path, _, results = two_ranks
    make_trainer(path)  # creates the process group
    alone = with_models(path)
    for result in (result["models"] for result in results):
        for name in ("scores", "refreshed", "values"):
            assert_scores(result[name], alone[name])
        assert_learning(result, alone["metrics"], alone["learned"])
    assert results[0]["models"]["values"] == results[1]["models"]["values"]


def test_all_shards_are_on_their_tag_without_gaps(two_ranks: Ranks) -> None:
    for result in two_ranks[2]:
        assert result["offsets"], "no shard of this rank has rows"
        assert max(result["offsets"].values()) < result["tags"]["params"].committed_bytes
        for tag in ("params", "optim"):
            report = result["tags"][tag]
            assert report.committed_bytes <= report.live_bytes * 1.02 + 4096


def test_one_rank_resumes_a_checkpoint_of_two(
    two_ranks: Ranks, make_trainer: Callable[..., Trainer]
) -> None:
    path, out, results = two_ranks
    alone = make_trainer(path, **CHANGES)
    assert alone.load_checkpoint(str(out / "checkpoint")) == {"ranks": 2}
    assert alone.step == STEPS
    assert_same_bits(whole(alone), results[0]["weights"])
    assert_metrics(alone.update_actor(make_batch(3, seed=9)), results[0]["next"])


def test_random_weights_of_two_ranks_match_one(
    two_ranks: Ranks, make_trainer: Callable[..., Trainer]
) -> None:
    alone = make_trainer(str(two_ranks[1] / "described"), random_init=True).shards()
    counts = dict.fromkeys(alone, 0)
    for result in (result["drawn"] for result in two_ranks[2]):
        for name, shard in result["shards"].items():
            box = tuple(
                slice(at, at + size) for at, size in zip(*result["boxes"][name], strict=True)
            )
            assert torch.equal(shard, alone[name][box]), name
            counts[name] += shard.numel()
    assert counts == {name: whole.numel() for name, whole in alone.items()}
    rows = alone["model.embed_tokens.weight"]
    assert (rows == 0).all(1).nonzero().flatten().tolist() == [60]


def test_column_shards_update_and_sync_like_row_shards(two_ranks: Ranks) -> None:
    for result in two_ranks[2]:
        columns = result["columns"]
        assert set(columns["shapes"]) == {(33, 15)}
        assert "this model has no parameters lm_head" in columns["refused"]
        assert_learning(columns, result["metrics"], result["learned"])
    first, second = (result["columns"] for result in two_ranks[2])
    synced, receipts = (
        first["synced"],
        [columns["synced"]["receipt"] for columns in (first, second)],
    )
    assert receipts[0].digests == receipts[1].digests
    assert receipts[0].nbytes == sum(value.numel() * 4 for value in first["weights"].values())
    for name, value in first["weights"].items():
        assert torch.equal(synced[name], value), name


def test_two_ranks_sync_every_expert(two_ranks: Ranks) -> None:
    """Use engines of one rank, and of two ranks that divide experts by channels or by expert."""
    for result in two_ranks[2]:
        assert result["experts"] == [True] * 3 * len(EXPERTS)


def test_adapter_updates_on_two_ranks_match_one(
    two_ranks: Ranks, make_trainer: Callable[..., Trainer]
) -> None:
    path, out, results = two_ranks
    alone = make_trainer(path, **CHANGES, lora=LORA)
    metrics = learn(alone)
    for result in results:
        assert_learning(result["adapted"], metrics, bits(alone))
        assert_learning(result["replicated"], metrics, bits(alone))
        assert result["served"]
    assert_same_bits(*(result["replicated"]["learned"] for result in results))
    alone.load_checkpoint(str(out / "replicated"))
    assert_same_bits(bits(alone), results[0]["replicated"]["learned"])
    alone.load_checkpoint(str(out / "adapters"))  # the same base, however it is sharded
    assert_same_bits(whole(alone), results[0]["adapted"]["weights"])
    assert_metrics(alone.update_actor(make_batch(3, seed=9)), results[0]["adapted"]["next"])


@pytest.mark.parametrize("number", ADAPTED)
def test_expert_adapter_updates_on_two_ranks_match_one(
    number: int, two_ranks: Ranks, make_trainer: Callable[..., Trainer]
) -> None:
    """Include a rank without an expert; the ranks themselves have checked the merged weights."""
    _, out, results = two_ranks
    path = str(out / f"experts{number}")
    alone = make_trainer(path, **CHANGES, lora=LORA_EXPERTS)
    metrics = learn(alone)
    for result in results:
        assert_learning(result["adapted_experts"][number], metrics, bits(alone))
        assert result["adapted_experts"][number]["parts"]
    alone.load_checkpoint(f"{path}/adapters")  # the same base, however it is sharded
    assert_same_bits(bits(alone), results[0]["adapted_experts"][number]["learned"])


def test_both_ranks_write_merged_weights(two_ranks: Ranks) -> None:
    """Expect bit-identical merged weights, and only adapted ones in the second sync."""
    first, second = (result["adapted"] for result in two_ranks[2])
    (synced,), changed = first["synced"], set()
    for name, at, value in [*first["hand"], *second["hand"]]:
        assert torch.equal(synced[name][at], value), name
        assert not torch.equal(value, first["weights"][name][at])
        changed.add(name)
    assert len(changed) == 6
    for name in synced.keys() - changed:
        assert torch.equal(synced[name], first["weights"][name]), name
    expected = sum(synced[name].nbytes for name in changed)
    assert first["second"].nbytes == expected < first["first"].nbytes


def test_padded_adapters_are_on_their_own_tag(two_ranks: Ranks) -> None:
    """Expect one copy of the frozen base to the host, even on the rank with shorter shards."""
    for result in (result["adapted"] for result in two_ranks[2]):
        live = {tag: report.live_bytes for tag, report in result["tags"].items()}
        assert result["moved"] == [sum(live.values()), live["adapters"] + live["optim"]]
        assert min(live.values()) > 0


def test_streamed_optimizer_on_two_ranks_matches_state_on_device(two_ranks: Ranks) -> None:
    _, _, ranks = two_ranks
    assert all(all(result["streamed"]) for result in ranks)


def test_ranks_repeat_an_update_that_overflows_on_one_of_them(two_ranks: Ranks) -> None:
    first, second = (result["repeated"] for result in two_ranks[2])
    assert first["metrics"] == second["metrics"]
    large, after = first["metrics"]
    assert large["overflows"] > after["overflows"] == 0
    assert large["loss_scale"] == after["loss_scale"] == 2.0 ** (16 - large["overflows"])
    assert_same_bits(first["learned"], second["learned"])
