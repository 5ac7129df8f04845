"""Division of parameters among tensor-parallel ranks, and their places in manifests."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from memsaver import MemorySaver
from memsaver.system.devices import Impl
from rollout.weights import Manifest
from rollout.weights import pages as weights_module
from rollout.weights.params import Split, one, shard_groups
from rollout.weights.store import WeightStore, build_manifest
from tests.helpers.reference_digest import element
from tests.helpers.rollout.tp_splits import decoder_splits


def pieces(
    name: str, shape: tuple[int, ...], size: int, head_dim: int = 2, experts: int = 1
) -> list[list[tuple[tuple[int, ...], Any]]]:
    """Return the (start, shape) of every stored piece, by rank."""
    by_rank = []
    for rank in range(size):
        (group,) = shard_groups(
            [one(name, *shape)], decoder_splits(head_dim, size, experts), rank, size
        )
        by_rank.append([(piece.start, piece.shape) for piece in group.params[0].pieces])
    return by_rank


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("self_attn.q_proj.weight", (8, 3), [[((0, 0), (4, 3))], [((4, 0), (4, 3))]]),
        ("self_attn.k_proj.bias", (4,), [[((0,), (2,))], [((2,), (2,))]]),
        ("self_attn.v_proj.weight", (2, 3), [[((0, 0), (2, 3))], [((0, 0), (2, 3))]]),
        ("self_attn.o_proj.weight", (3, 8), [[((0, 0), (3, 4))], [((0, 4), (3, 4))]]),
        ("mlp.up_proj.weight", (6, 3), [[((0, 0), (3, 3))], [((3, 0), (3, 3))]]),
        ("mlp.down_proj.weight", (3, 6), [[((0, 0), (3, 3))], [((0, 3), (3, 3))]]),
        (
            "mlp.experts.gate_up_proj",
            (5, 8, 3),
            [
                [((0, 0, 0), (5, 2, 3)), ((0, 4, 0), (5, 2, 3))],
                [((0, 2, 0), (5, 2, 3)), ((0, 6, 0), (5, 2, 3))],
            ],
        ),
        ("mlp.experts.down_proj", (5, 3, 4), [[((0, 0, 0), (5, 3, 2))], [((0, 0, 2), (5, 3, 2))]]),
        ("model.embed_tokens.weight", (5, 3), [[((0, 0), (3, 3))], [((3, 0), (2, 3))]]),
        ("model.norm.weight", (3,), [[((0,), (3,))], [((0,), (3,))]]),
        ("mlp.gate.weight", (5, 3), [[((0, 0), (5, 3))], [((0, 0), (5, 3))]]),
    ],
)
def test_two_ranks_store_expected_pieces(
    name: str, shape: tuple[int, ...], expected: object
) -> None:
    assert pieces(name, shape, 2) == expected


def test_adjacent_ranks_store_copies_of_a_kv_head_when_heads_are_few() -> None:
    starts = [rank[0][0][0] for rank in pieces("self_attn.k_proj.weight", (4, 3), 8)]
    assert starts == [0, 0, 0, 0, 2, 2, 2, 2], "query heads 0..3 share KV head 0"


@pytest.mark.parametrize(
    ("name", "shape", "size", "message"),
    [
        (
            "self_attn.q_proj.weight",
            (6, 3),
            2,
            "dimension 0 of (6, 3) cannot be shared in units of 2 by 2",
        ),
        ("self_attn.k_proj.weight", (6, 3), 2, "divides 3"),
        (
            "mlp.experts.gate_up_proj",
            (5, 6, 3),
            2,
            "dimension 1 of (5, 6, 3) cannot be shared by 2",
        ),
    ],
)
def test_parameter_that_ranks_cannot_share_evenly_is_refused_by_name(
    name: str, shape: tuple[int, ...], size: int, message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        pieces(name, shape, size)
    assert str(caught.value).startswith(name) and message in str(caught.value)
    with pytest.raises(ValueError, match=r"tensor-parallel rank 2 must be a number in \[0, 2\)"):
        shard_groups([], {}, 2, 2)


def layout(name: str, shape: tuple[int, ...], rank: int, size: int) -> Manifest:
    groups = [one("first", 7), one(name, *shape), one("last", 2)]
    return build_manifest(
        shard_groups(groups, decoder_splits(2, size), rank, size), {}, torch.bfloat16
    )


def test_halves_of_fused_tensor_are_slices_of_one_stored_tensor() -> None:
    manifest = layout("mlp.experts.gate_up_proj", (5, 8, 3), 1, 2)
    gate, up = (s for s in manifest.slices if s.name == "mlp.experts.gate_up_proj")
    assert gate.strides == up.strides == (12, 3, 1)
    assert (gate.offset, up.offset) == (256, 256 + 2 * 3 * 2)
    stored = manifest.modules["mlp.experts.gate_up_proj"]
    assert (stored.offset, stored.shape) == (256, (5, 4, 3))
    assert manifest.slices[-1].index_base == 7 + 5 * 8 * 3, "numbers count whole parameters"


def test_manifest_lists_padded_rows_as_zeros() -> None:
    first, second, third = (
        layout("model.embed_tokens.weight", (4, 3), rank, 3) for rank in range(3)
    )
    assert first.zeros == second.zeros == () and third.zeros == ((256, 2 * 3 * 2),)
    assert "model.embed_tokens.weight" not in {s.name for s in third.slices}
    (_, half, _) = layout("model.embed_tokens.weight", (5, 3), 1, 2).slices
    assert half.shape == (2, 3)
    assert len({m.layout_hash for m in (first, second, third)}) == 3
    assert first.nbytes == third.nbytes


def test_every_element_is_stored_by_exactly_one_rank() -> None:
    for shape, split in (((12, 4), Split(dim=0, units=(2,))), ((7, 4), Split(dim=0, padded=True))):
        owners = torch.zeros(shape, dtype=torch.int64)
        for rank in range(3):
            (group,) = shard_groups([one("p", *shape)], {"p": [split]}, rank, 3)
            assert math.prod(group.params[0].shape) == -(-shape[0] // 3) * 4
            for piece in group.params[0].pieces:
                owners[
                    tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))
                ] += 1
        assert (owners == 1).all()


SHAPES = [
    ("model.embed_tokens.weight", (5, 3)),
    ("self_attn.o_proj.weight", (6, 8)),
    ("mlp.gate_proj.weight", (4, 3)),
    ("mlp.down_proj.weight", (3, 16)),
    ("mlp.experts.gate_up_proj", (3, 8, 5)),
    ("mlp.experts.down_proj", (3, 5, 4)),
    ("model.norm.weight", (3,)),
]


def numbered(store: WeightStore, whole: dict[str, torch.Tensor]) -> int:
    """Compute the digest of a rank's elements from the whole parameters, element by element."""
    total = 0
    for piece in store.manifest.slices:
        box = tuple(
            slice(first, first + n) for first, n in zip(piece.start, piece.shape, strict=True)
        )
        numbers = (
            torch.arange(whole[piece.name].numel()).view(piece.global_shape)[box].flatten().tolist()
        )
        bits = whole[piece.name].bfloat16().view(torch.int16)[box].flatten().tolist()
        total += sum(
            element(piece.index_base + i, b & 0xFFFF) for i, b in zip(numbers, bits, strict=True)
        )
    return total % 2**64


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_digest_of_rank_numbers_elements_as_in_whole_parameters(
    size: int, impl: Impl, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # with slices of columns and of experts; padding is not part of a digest
    made = weights_module.RowCopies
    monkeypatch.setattr(weights_module, "RowCopies", lambda segments, on: made(segments, on, impl))
    generator = torch.Generator().manual_seed(size)
    whole = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES}
    groups = [one(name, *shape) for name, shape in SHAPES]
    for rank in range(size):
        shards = shard_groups(groups, decoder_splits(2, size), rank, size)
        store = WeightStore(shards, {}, torch.bfloat16, MemorySaver(device=device))
        store.load(whole.items(), "test")
        assert store.digest() == numbered(store, whole), (rank, size)
