"""The dry run: bytes against closed formulas and a real run, and what must hold of two recipes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import recipes
from memsaver.ops.layout import round_up
from recipes.config.recipe import Recipe, switching
from recipes.planner.dry_run import DryRun, Stages, dry_run, planned_trainer
from recipes.planner.sizes import GIB, MIB
from recipes.planner.tracing import PAGE, EngineSizes
from recipes.run import start_run

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
MLP_AGAIN = "trainer.activation_checkpointing=mlp"


def planned(fields: dict[str, Any], *words: str) -> DryRun:
    recipe = recipes.load("tiny", ["cycle.overlap=[]", "cycle.resident=[]", *words])
    (run,) = runs(recipe, fields=fields)
    return run


def runs(
    *switched: Recipe, rooms: Sequence[int] = (GIB,), fields: dict[str, Any] = FIELDS
) -> list[DryRun]:
    """Runs of one trainer, in each room with each of these switches."""
    given = {"prompt_tokens": 9, "workspace_bytes": 8 * MIB}
    with planned_trainer(switched[0], fields, **given) as pair:
        return [dry_run(each, SIZES, *pair, room=room) for room in rooms for each in switched]


@cache
def step(*words: str, model: str = "dense") -> Stages:
    return planned(MODELS[model], "sampling.max_tokens=200", *words).stages


def torch_of(stages: Stages, stage: str) -> int:
    held: int = stages[stage]["torch"]["trainer"]
    return held


def of_dense(fields: dict[str, Any], *, biases: bool) -> list[tuple[int, int]]:
    """Rows, and the elements of each, of every parameter."""
    width, inner, words = (fields[f"{of}_size"] for of in ("hidden", "intermediate", "vocab"))
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
def test_parameters_and_moments_take_what_the_formula_says(
    fields: dict[str, Any], shapes: list[tuple[int, int]], ranks: int, dtype: str
) -> None:
    """Rows go to the ranks in equal parts, the last ones short; a moment is as wide as a master."""
    words = [f"cluster.n_gpus_per_node={ranks}", "driver=ray", f"trainer.dtype={dtype}"]
    tags = planned(fields, *words, "sampling.max_tokens=8").tags
    width = {"float32": 4, "bfloat16": 2}[dtype]
    shards = [-(-rows // ranks) * row * width for rows, row in shapes]
    params = sum(round_up(nbytes, 64) for nbytes in shards)
    assert 0 <= tags["params"] - params < 256 + PAGE
    assert 0 <= tags["optim"] - 2 * params < 0.01 * params + PAGE


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_held_until_the_step(model: str) -> None:
    """All gradients are there before the optimizer's step; scores need none."""
    stages = step(model=model)
    params = stages["update_actor"]["tags"]["params"]
    table = 4 * FIELDS["vocab_size"] * FIELDS["hidden_size"]  # scored with logits of it
    assert torch_of(stages, "update_actor") - torch_of(stages, "compute_log_prob") > (
        params - 2 * table - PAGE
    )


@pytest.mark.parametrize(
    ("less", "more", "model"),
    [
        (["cluster.n_gpus_per_node=4"], ["cluster.n_gpus_per_node=2"], "mixture"),
        (["cluster.n_gpus_per_node=8"], ["cluster.n_gpus_per_node=4"], "dense"),
        ([], ["trainer.micro_batch_size=8"], "dense"),
        ([], ["sampling.max_tokens=400"], "dense"),
        ([], ["sampling.max_tokens=400"], "hybrid"),
        ([], ["sampling.max_tokens=400"], "latent"),
        (["trainer.activation_checkpointing=layers"], [MLP_AGAIN], "dense"),
        ([MLP_AGAIN], ["trainer.activation_checkpointing=none"], "dense"),
        (["lora.rank=8"], [], "dense"),
    ],
)
def test_more_of_it_never_takes_less(less: list[str], more: list[str], model: str) -> None:
    """At any stage; the trainer's tags alone may have a page more."""
    ray = ["driver=ray", "trainer.micro_batch_size=4"]
    one, other = (step(*ray, *words, model=model) for words in (less, more))
    assert one.keys() == other.keys()
    for stage in one:
        assert one[stage]["device_bytes"] <= other[stage]["device_bytes"] + PAGE, stage


def test_more_steps_prompts_and_problems_change_nothing() -> None:
    """Micro batches hold as many sequences, however many there are."""
    batch = "trainer.micro_batch_size=4"
    more = ["grpo.prompts_per_step=16", "steps=100", "eval.problems=16"]
    assert step(batch, *more) == step(batch)


def test_each_layer_takes_the_same_in_addition() -> None:
    """Torch's own to one segment, tags to the page: of what is checkpointed an input remains."""
    words = ["trainer.activation_checkpointing=layers", "trainer.micro_batch_size=4"]
    deep = [
        planned(FIELDS | {"num_hidden_layers": layers}, *words, "sampling.max_tokens=600")
        for layers in (4, 8, 12)
    ]
    params = [run.tags["params"] for run in deep]
    held = [torch_of(run.stages, "update_actor") for run in deep]
    assert abs(params[2] - 2 * params[1] + params[0]) <= 2 * PAGE
    assert abs(held[2] - 2 * held[1] + held[0]) <= 2 * 20 * MIB
    assert held[2] - held[1] >= params[2] - params[1] - 20 * MIB  # its gradients


def test_what_stays_has_its_bytes_at_every_stage() -> None:
    recipe = recipes.load("tiny", ["cycle.alias=never"])
    residents = [["optim", "weights"], [], ["params"]]
    for resident, run in zip(
        residents, runs(*[switching(recipe, tags) for tags in residents]), strict=True
    ):
        tags = run.tags | SIZES.tags
        for stage, entry in run.stages.items():
            for tag in resident:
                assert entry["tags"][tag] == tags[tag], (stage, tag)
        generating = run.stages["generate_sequences"]["tags"]
        assert (generating["optim"] > 0) == ("optim" in resident)


def test_what_nobody_empties_is_there_from_the_first_stage_on() -> None:
    """A later step begins with the cache that the update left, unless something leaves."""
    recipe = recipes.load("tiny", ["cycle.alias=never"])
    every = ["params", "optim", "weights", "kv_cache", "cuda_graph"]
    both = runs(switching(recipe, every), switching(recipe, every[1:]))
    all_stays, leaves = (run.stages for run in both)
    assert len({torch_of(all_stays, stage) for stage in all_stays}) == 1
    assert torch_of(leaves, "wake_kv_cache") <= PAGE  # buffers
    assert torch_of(leaves, "update_actor") == torch_of(all_stays, "update_actor")


def test_parameters_come_back_beside_the_answers_where_a_gib_besides_stays_free() -> None:
    """Then the engine sleeps beside them; else it sleeps first."""
    recipe = switching(recipes.load("tiny", ["cycle.alias=never"]), [], ["params", "optim"])
    roomy, tight = (run.stages for run in runs(recipe, rooms=(2 * GIB, GIB)))
    params = roomy["update_actor"]["tags"]["params"]
    asleep = [stages["sleep"] for stages in (roomy, tight)]
    assert [stage["tags"]["params"] for stage in asleep] == [params, 0]
    assert asleep[0]["device_bytes"] - asleep[1]["device_bytes"] == params > 0
    needed = params + sum(SIZES.tags.values()) + GIB
    needed += sum(roomy["generate_sequences"]["torch"].values())
    least = [run.stages["sleep"]["tags"] for run in runs(recipe, rooms=(needed, needed - 1))]
    assert [tags["params"] for tags in least] == [params, 0]
    others = roomy.keys() - {"sleep"}
    assert {stage: roomy[stage]["device_bytes"] for stage in others} == {
        stage: tight[stage]["device_bytes"] for stage in others
    }


@pytest.mark.parametrize(
    "words", ["tiny", "tiny-ppo trainer.micro_batch_size=1 ppo.mini_batches=4"]
)
def test_a_run_after_others_takes_what_it_takes_alone(words: str) -> None:
    """What was computed before is not computed again, whatever empties the cache."""
    name, *more = words.split()
    recipe = recipes.load(name, ["cycle.alias=never", *more])
    switched = [
        switching(recipe, ["params", "optim"]),
        switching(recipe, [], ["params", "optim"]),
        switching(recipe, []),
        switching(recipe, recipe.resident_tags()),
    ]
    assert runs(*switched) == [run for each in switched for run in runs(each)]


def test_a_mixture_in_fp32_is_planned_where_torch_knows_the_shapes_of_bf16_alone() -> None:
    """What is saved for the backward pass is as much more as its elements are wider."""
    held = [
        torch_of(
            step(f"model.dtype={dtype}", "sampling.max_tokens=10", model="mixture"),
            "compute_log_prob",
        )
        for dtype in ("float32", "bfloat16")
    ]
    assert 1.5 < held[0] / held[1] < 2.5


def test_a_process_with_a_group_is_refused_and_keeps_it() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="process group; end it, or plan elsewhere"):
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
def test_tags_of_every_stage_are_those_of_a_real_run(
    name: str, overlap: str, begin: str, tmp_path: Path
) -> None:
    """On a CPU, where pages are smaller: to the planned page. Prefetched parameters have come when
    the reference scores, and stay beside it and the critic.
    """
    words = ["steps=2", "eval.every=0", "cycle.alias=never", "cycle.resident=[]"]
    words += [f"cycle.overlap={overlap}", *["ppo.kl_coef=0.1"] * (name == "tiny-ppo")]
    folder = start_run(name, words, tmp_path / "run")
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    measured = [row["peaks"] for row in rows if row["kind"] == "train"][-1]
    recipe = recipes.load(name, words)
    (run,) = runs(recipe, rooms=(4 * GIB,), fields=recipe.model.random_fields())
    stages = [*run.stages]
    assert stages == [*measured]
    for stage in stages[stages.index(begin) if begin else 0 :]:
        for tag in {"params", "optim", "critic", "reference"} & run.tags.keys():
            held, taken = run.stages[stage]["tags"][tag], measured[stage]["tags"].get(tag, 0)
            assert held == round_up(taken, PAGE), (stage, tag)
