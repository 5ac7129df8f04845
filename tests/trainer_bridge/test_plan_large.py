"""A plan for Qwen3-235B-A22B, FSDP over 64 ranks to 8 replicas of tensor parallel 8: time, memory and bytes."""

from __future__ import annotations

import math
import resource
import time
from multiprocessing.connection import Connection

import pytest
import torch

from rollout.model.params import Group, Param, one
from rollout.model.sharding import decoder_splits, shard_groups
from rollout.types import Manifest
from rollout.weights import build_manifest
from tests.helpers.peers import Peer
from trainer_bridge.plan import Plan, Target, make_plan
from trainer_bridge.sources import fsdp_shards

RANKS, TP = 64, 8
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, INNER, VOCAB, LAYERS = 4096, 64, 4, 128, 128, 1536, 151_936, 94


def groups(layers: int) -> list[Group]:
    found = [one("model.embed_tokens.weight", VOCAB, HIDDEN)]
    for i in range(layers):
        attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        heads = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
        qkv = tuple(Param(name=f"{attention}{n}_proj.weight", shape=(rows, HIDDEN)) for n, rows in heads.items())
        found += [
            one(f"model.layers.{i}.input_layernorm.weight", HIDDEN),
            Group(params=qkv, fused=f"{attention}qkv_proj.weight"),
            one(f"{attention}q_norm.weight", HEAD_DIM),
            one(f"{attention}k_norm.weight", HEAD_DIM),
            one(f"{attention}o_proj.weight", HIDDEN, HEADS * HEAD_DIM),
            one(f"model.layers.{i}.post_attention_layernorm.weight", HIDDEN),
            one(f"{mlp}gate.weight", EXPERTS, HIDDEN),
            one(f"{mlp}experts.gate_up_proj", EXPERTS, 2 * INNER, HIDDEN),
            one(f"{mlp}experts.down_proj", EXPERTS, HIDDEN, INNER),
        ]
    return [*found, one("model.norm.weight", HIDDEN), one("lm_head.weight", VOCAB, HIDDEN)]


def least(layout: Manifest, rank: int) -> int:
    """Bytes that the target beside a rank needs and the rank does not hold: all but the common rows."""
    count = 0
    for piece in layout.slices:
        rows = piece.global_shape[0]
        each = math.ceil(rows / RANKS)
        first, last = min(rows, rank * each), min(rows, (rank + 1) * each)
        common = max(0, min(last, piece.start[0] + piece.shape[0]) - max(first, piece.start[0]))
        count += (piece.shape[0] - common) * math.prod(piece.shape[1:]) * 2
    return count


def planned(layers: int) -> tuple[Plan, list[Manifest]]:
    model, splits = groups(layers), decoder_splits(HEAD_DIM)
    params = {param.name: param.shape for group in model for param in group.params}
    assert layers < LAYERS or sum(map(math.prod, params.values())) == 235_093_634_560
    layouts = [build_manifest(shard_groups(model, splits, rank, TP), {}, torch.bfloat16) for rank in range(TP)]
    places = [f"GPU-{i}" for i in range(RANKS)]
    targets = [Target(manifest=layouts[i % TP], place=place) for i, place in enumerate(places)]
    shards = [s for name, shape in params.items() for s in fsdp_shards(name, shape, "float32", RANKS)]
    return make_plan(shards, targets, places), layouts


def test_a_plan_over_64_ranks_moves_the_least() -> None:
    plan, layouts = planned(2)
    copies = plan.copies(5)
    assert sum(c.nbytes for c in copies if c.target != 5) == sum(n for (r, _), n in plan.link_bytes.items() if r == 5)
    assert sum(plan.link_bytes.values()) == sum(least(layouts[i % TP], i) for i in range(RANKS)) < sum(plan.nbytes)


@pytest.mark.extended
def test_a_plan_of_235_billion_parameters_takes_5_s_and_1_gib() -> None:
    """In a process of its own: the memory is counted with torch and all else that it needs, the time is its CPU's."""
    peer = Peer(measured)
    try:
        seconds, resident = peer.hear(120)
    finally:
        peer.bury()
    assert seconds < 5 and resident < 1 << 30


def measured(pipe: Connection) -> None:
    start = time.process_time()
    planned(LAYERS)[0].copies(5)
    pipe.send((time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
