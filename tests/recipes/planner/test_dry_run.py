"""Dry runs: bytes against formulas and a real run, and relations between two recipes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import recipes
from memsaver.ops.layout import round_up
from recipes.config.decisions import Decisions
from recipes.config.recipe import Recipe
from recipes.planner.dry_run import DryRun, Stages, dry_run, planned_trainer
from recipes.planner.planned_device import PAGE
from recipes.planner.planned_sides import EngineSizes
from recipes.planner.sizes import GIB, MIB
from recipes.run import start_run
from tests.helpers.case_selection import some
from tests.helpers.recipes.model_folders import model_folder

SIZES = EngineSizes(
    weights=4 * MIB,
    kv_cache=6 * MIB,
    grows=True,
    least=6 * MIB,
    wanted=6 * MIB,
    cuda_graph=2 * MIB,
    idle=4 * MIB,
    generating=40 * MIB,
)
FIELDS: dict[str, Any] = {"model_type": "qwen2", "vocab_size": 3000, "hidden_size": 256}
FIELDS |= {"intermediate_size": 700, "num_hidden_layers": 2, "tie_word_embeddings": False}
FIELDS |= {"num_attention_heads": 8, "num_key_value_heads": 2}
HYBRID = FIELDS | {"model_type": "qwen3_next", "num_experts": 0, "head_dim": 32}
HYBRID |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_hidden_layers": 4}
HYBRID |= {"linear_key_head_dim": 16, "linear_value_head_dim": 32}
LATENT = FIELDS | {"model_type": "deepseek_v3", "num_key_value_heads": 8}
LATENT |= {"first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2}
LATENT |= {"moe_intermediate_size": 64, "n_group": 1, "topk_group": 1}
MIXTURE = FIELDS | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
MIXTURE |= {"moe_intermediate_size": 64, "head_dim": 32}
TIED = FIELDS | {"model_type": "llama", "tie_word_embeddings": True}
MODELS = {"dense": FIELDS, "hybrid": HYBRID, "latent": LATENT, "mixture": MIXTURE}
ALGORITHMS = {"tiny": "grpo", "tiny-ppo": "ppo"}
BATCH = ("driver=ray", "trainer.micro_batch_size=4")  # Tests share the dry runs with these.
SCORED = "correction.mode=decoupled"  # with a pass that computes log-probabilities
MLP_AGAIN = "trainer.activation_checkpointing=mlp"


def planned(fields: dict[str, Any], *words: str) -> DryRun:
    recipe = recipes.load("tiny", ["cycle.overlap=[]", "cycle.resident=[]", *words])
    (run,) = runs(recipe, {}, fields=fields)
    return run


def runs(
    recipe: Recipe,
    *choices: dict[str, Any],
    rooms: Sequence[int] = (GIB,),
    fields: dict[str, Any] = FIELDS,
) -> list[DryRun]:
    """Run one trainer in each room with each choice of decisions."""
    given = {"prompt_tokens": 9, "workspace_bytes": 8 * MIB}
    named = Decisions.named(recipe)
    with planned_trainer(recipe, named, model_folder(fields), **given) as pair:
        decided = [replace(named, **choice) for choice in choices]
        return [dry_run(made, SIZES, *pair, room=room) for room in rooms for made in decided]


@cache
def step(*words: str, model: str = "dense") -> Stages:
    return planned(MODELS[model], "sampling.max_tokens=200", *words).stages


def torch_of(stages: Stages, stage: str) -> int:
    held: int = stages[stage]["torch"]["trainer"]
    return held


def of_dense(fields: dict[str, Any], *, biases: bool) -> list[tuple[int, int]]:
    """Return the rows, and the elements of a row, of every parameter."""
    names = ("hidden", "intermediate", "vocab")
    width, inner, words = (fields[f"{name}_size"] for name in names)
    narrow = width * fields["num_key_value_heads"] // fields["num_attention_heads"]
    outs = (width, narrow, narrow)
    layer = [(rows, width) for rows in outs] + [(rows, 1) for rows in outs] * biases
    layer += [(width, width), (inner, width), (inner, width), (width, inner)]
    layer += [(width, 1), (width, 1)]
    ends = [(words, width), (width, 1)]
    ends += [] if fields["tie_word_embeddings"] else [(words, width)]
    return layer * fields["num_hidden_layers"] + ends


@pytest.mark.parametrize(("ranks", "dtype"), [(1, "float32"), (7, "bfloat16")])
@pytest.mark.parametrize(
    ("fields", "shapes"),
    [
        (FIELDS, of_dense(FIELDS, biases=True)),
        (TIED, of_dense(TIED, biases=False)),
    ],
    ids=["biases", "tied"],
)
def test_parameters_and_moments_take_the_bytes_of_the_formula(
    fields: dict[str, Any], shapes: list[tuple[int, int]], ranks: int, dtype: str
) -> None:
    """Divide rows evenly among ranks, the last ones short; moments are as wide as masters."""
    words = [f"cluster.n_gpus_per_node={ranks}", "driver=ray", f"trainer.dtype={dtype}"]
    tags = planned(fields, *words, "sampling.max_tokens=8").tags
    width = {"float32": 4, "bfloat16": 2}[dtype]
    shards = [-(-rows // ranks) * row * width for rows, row in shapes]
    params = sum(round_up(nbytes, 64) for nbytes in shards)
    assert 0 <= tags["params"] - params < 256 + PAGE
    assert 0 <= tags["optim"] - 2 * params < 0.01 * params + PAGE


@pytest.mark.parametrize("ranks", [1, 7])
def test_moments_in_8_bits_take_the_bytes_of_the_formula(ranks: int) -> None:
    """Expect the sizes of real trainers, for which test_adamw_8bit.py has the same formula."""
    words = [f"cluster.n_gpus_per_node={ranks}", "driver=ray", "trainer.optimizer=adamw_8bit"]
    expected = 0
    for rows, row in of_dense(FIELDS, biases=True):
        shard = -(-rows // ranks) * row
        parts = [shard, 4 * -(-shard // 256)] if row > 1 and rows * row >= 4096 else [4 * shard]
        expected += 2 * sum(round_up(nbytes, 64) for nbytes in parts)
    held = planned(FIELDS, *words, "sampling.max_tokens=8").tags["optim"]
    assert 0 <= held - expected < 256 + PAGE


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_held_until_the_optimizer_step(model: str) -> None:
    """Compare an update, which holds all gradients, with a scoring pass, which holds none."""
    stages = step(*BATCH, SCORED, model=model)
    params = stages["update_actor"]["tags"]["params"]
    table = 4 * FIELDS["vocab_size"] * FIELDS["hidden_size"]  # Scoring has logits of this size.
    assert torch_of(stages, "update_actor") - torch_of(stages, "compute_log_prob") > (
        params - 2 * table - PAGE
    )


@pytest.mark.parametrize(
    ("less", "more", "model"),
    some(
        (["cluster.n_gpus_per_node=4"], ["cluster.n_gpus_per_node=2"], "mixture"),
        ([], ["trainer.micro_batch_size=8"], "dense"),
        ([], ["sampling.max_tokens=400"], "dense"),
        (["trainer.activation_checkpointing=layers"], [MLP_AGAIN], "dense"),
        ([MLP_AGAIN], ["trainer.activation_checkpointing=none"], "dense"),
        (["lora.rank=8"], [], "dense"),
        whole=[
            (["cluster.n_gpus_per_node=8"], ["cluster.n_gpus_per_node=4"], "dense"),
            ([], ["sampling.max_tokens=400"], "hybrid"),
            ([], ["sampling.max_tokens=400"], "latent"),
        ],
    ),
)
def test_larger_settings_never_take_less_memory(
    less: list[str], more: list[str], model: str
) -> None:
    """Compare every stage, where the trainer's tags may differ by a page."""
    smaller, larger = (step(*BATCH, *words, model=model) for words in (less, more))
    assert smaller.keys() == larger.keys()
    for stage in smaller:
        assert smaller[stage]["device_bytes"] <= larger[stage]["device_bytes"] + PAGE, stage


def test_more_steps_prompts_and_problems_take_no_more_memory() -> None:
    """Keep the micro batch, whose size alone counts."""
    more = ["loop.prompts_per_step=16", "steps=100", "eval.problems=16"]
    assert step(*BATCH, *more) == step(*BATCH)


def test_memory_grows_linearly_with_layers() -> None:
    """Compare depths: torch to a segment, tags to a page; a checkpointed layer keeps its input."""
    words = ["trainer.activation_checkpointing=layers", "trainer.micro_batch_size=4"]
    deep = [
        planned(FIELDS | {"num_hidden_layers": layers}, *words, "sampling.max_tokens=600")
        for layers in (1, 3, 5)
    ]
    params = [run.tags["params"] for run in deep]
    held = [torch_of(run.stages, "update_actor") for run in deep]
    assert abs(params[2] - 2 * params[1] + params[0]) <= 2 * PAGE
    assert abs(held[2] - 2 * held[1] + held[0]) <= 2 * 20 * MIB
    assert held[2] - held[1] >= params[2] - params[1] - 20 * MIB  # its gradients


def test_update_that_keeps_unsharded_parameters_has_their_bytes() -> None:
    """Run on one trainer with, without, and again with them: at least as many bytes as shards."""
    recipe = recipes.load("tiny", ["trainer.micro_batch_size=4", "trainer.keep_unsharded=auto"])
    turns = (True, False, True)
    held = runs(recipe, *[{"keep_unsharded": keep, "resident": ()} for keep in turns])
    kept, plain, again = (torch_of(run.stages, "update_actor") for run in held)
    assert kept == again >= plain + held[0].tags["params"] - 20 * MIB


def test_resident_tags_have_their_bytes_at_every_stage() -> None:
    recipe = recipes.load("tiny", ["cycle.alias=never"])
    residents = [["optim", "weights"], [], ["params"]]
    for resident, run in zip(
        residents, runs(recipe, *[{"resident": tags} for tags in residents]), strict=True
    ):
        tags = run.tags | SIZES.tags
        for stage, entry in run.stages.items():
            for tag in resident:
                assert entry["tags"][tag] == tags[tag], (stage, tag)
        generating = run.stages["generate_sequences"]["tags"]
        assert (generating["optim"] > 0) == ("optim" in resident)


def test_torch_cache_stays_from_first_stage_on_if_all_tags_stay() -> None:
    """Compare with a tag that leaves, which empties the cache that an update fills."""
    recipe = recipes.load("tiny", ["cycle.alias=never"])
    every = ["params", "optim", "weights", "kv_cache", "cuda_graph"]
    pair = runs(recipe, {"resident": every}, {"resident": every[1:]})
    all_stays, leaves = (run.stages for run in pair)
    assert len({torch_of(all_stays, stage) for stage in all_stays}) == 1
    assert torch_of(leaves, "wake_kv_cache") <= PAGE  # buffers
    assert torch_of(leaves, "update_actor") == torch_of(all_stays, "update_actor")


def test_parameters_return_during_generation_if_a_gib_stays_free() -> None:
    """Check whether parameters are back when the engine goes to sleep, by the room."""
    recipe = recipes.load("tiny", ["cycle.alias=never"])
    leaving = {"resident": (), "overlap": ("params", "optim")}
    roomy, tight = (run.stages for run in runs(recipe, leaving, rooms=(2 * GIB, GIB)))
    params = roomy["update_actor"]["tags"]["params"]
    asleep = [stages["sleep"] for stages in (roomy, tight)]
    assert [stage["tags"]["params"] for stage in asleep] == [params, 0]
    assert asleep[0]["device_bytes"] - asleep[1]["device_bytes"] == params > 0
    needed = params + sum(SIZES.tags.values()) + GIB
    needed += sum(roomy["generate_sequences"]["torch"].values())
    rooms = needed, needed - 1
    least = [run.stages["sleep"]["tags"] for run in runs(recipe, leaving, rooms=rooms)]
    assert [tags["params"] for tags in least] == [params, 0]
    further = roomy.keys() - {"sleep"}
    assert {stage: roomy[stage]["device_bytes"] for stage in further} == {
        stage: tight[stage]["device_bytes"] for stage in further
    }


@pytest.mark.parametrize(
    "words",
    some(
        "tiny-ppo trainer.micro_batch_size=1 loop.mini_batches=4 loop.prompts_per_step=4",
        whole=["tiny"],
    ),
)
def test_later_dry_runs_of_a_trainer_equal_separate_ones(words: str) -> None:
    """Reuse cached computations over switches that empty the cache at different places."""
    name, *more = words.split()
    recipe = recipes.load(name, ["cycle.alias=never", *more])
    choices: list[dict[str, Any]] = [
        {"resident": ("params", "optim"), "hand_over": True},
        {"resident": (), "overlap": ("params", "optim")},
        {"resident": recipe.present_tags(), "hand_over": True},
    ]
    fields = FIELDS | {"num_hidden_layers": 1}
    separate = [run for choice in choices for run in runs(recipe, choice, fields=fields)]
    assert runs(recipe, *choices, fields=fields) == separate


def test_mixture_in_fp32_is_planned_with_twice_the_bytes_of_bf16() -> None:
    """Compare scoring in fp32 and bf16; torch's meta shapes of grouped products need bf16."""
    held = [
        torch_of(
            step(f"model.dtype={dtype}", "sampling.max_tokens=10", SCORED, model="mixture"),
            "compute_log_prob",
        )
        for dtype in ("float32", "bfloat16")
    ]
    assert 1.5 < held[0] / held[1] < 2.5


def test_planning_in_a_process_with_a_group_is_refused_and_keeps_the_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="process group; destroy the group, or plan"):
            planned(FIELDS)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
    planned(FIELDS, "sampling.max_tokens=8")
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("name", "overlap", "begin"),
    [("tiny", "[]", ""), ("tiny-ppo", "[params,optim]", "compute_ref_log_prob")],
)
def test_tags_of_every_stage_equal_those_of_a_real_run(
    name: str, overlap: str, begin: str, tmp_path: Path, no_pictures: None
) -> None:
    """Compare with a CPU run, whose pages are smaller than the planned ones.

    Prefetched parameters are back when the reference scores, and stay on the device with it. The
    reference returns in training, to be refreshed. The moments of the run with PPO are in 8 bits.
    """
    words = ["steps=2", "eval.every=0", "cycle.alias=never", "cycle.resident=[]"]
    words += [f"cycle.overlap={overlap}", f"{ALGORITHMS[name]}.prompts_per_step=8"]
    if name == "tiny-ppo":
        words += ["loss.reference_every=1", "loss.kl_in=loss", "trainer.optimizer=adamw_8bit"]
    folder = start_run(name, words, tmp_path / "run")
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    measured = [row["peaks"] for row in rows if row["kind"] == "train"][-1]
    recipe = recipes.load(name, words)
    (run,) = runs(recipe, {}, rooms=(4 * GIB,), fields=recipe.model.random_fields())
    stages = [*run.stages]
    assert stages == [*measured]
    for stage in stages[stages.index(begin) if begin else 0 :]:
        for tag in {"params", "optim", "critic", "critic_optim", "reference"} & run.tags.keys():
            held, taken = run.stages[stage]["tags"][tag], measured[stage]["tags"].get(tag, 0)
            assert held == round_up(taken, PAGE), (stage, tag)
