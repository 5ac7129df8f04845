"""Updates of stores of tensor-parallel ranks: parts, padding, and parameters that a rank holds
nothing of.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memsaver import MemorySaver, attach
from rollout.weights import WeightOffer, WriteReceipt
from rollout.weights.params import one, shard_groups
from rollout.weights.store import WeightStore
from rollout.weights.update import WeightUpdate
from tests.helpers.rollout.splits import decoder_splits

EMBED = "model.embed_tokens.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
NORM = "model.norm.weight"
SHAPES = {EMBED: (5, 3), DOWN: (3, 8), NORM: (3,)}
SIZE = 4


def weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def store_of(rank: int, seed: int, saver: MemorySaver) -> WeightStore:
    groups = shard_groups(
        [one(name, *shape) for name, shape in SHAPES.items()], decoder_splits(2, SIZE), rank, SIZE
    )
    store = WeightStore(groups, {}, torch.float32, saver)
    store.load(weights(seed).items(), "a seed")
    return store


def write(offer: WeightOffer, source: WeightStore) -> WriteReceipt:
    """The parameters that are offered, as another store has them, and ones all around."""
    nbytes = 0
    with attach(offer.ticket) as lease:
        pages = lease.tensor((offer.manifest.nbytes // 4,), torch.float32)
        if offer.names is None:
            pages.fill_(1.0)
        for piece in offer.manifest.slices:
            if offer.names is None or piece.name in offer.names:
                box = source.box(piece)
                pages.as_strided(box.shape, box.stride(), piece.offset // 4).copy_(box)
                nbytes += box.nbytes
    return WriteReceipt(
        version=offer.version,
        layout_hash=offer.manifest.layout_hash,
        digest=source.digest(names=offer.names),
        nbytes=nbytes,
    )


@pytest.mark.parametrize("names", [None, (EMBED,), (DOWN, NORM)])
@pytest.mark.parametrize("shadow", [False, True])
@pytest.mark.parametrize("rank", range(SIZE))
def test_a_rank_gets_its_part_and_zeros(
    rank: int, shadow: bool, names: tuple[str, ...] | None
) -> None:
    saver, raised = MemorySaver(device="cpu"), list[str]()
    store, new, old = (
        store_of(rank, seed, each)
        for seed, each in ((1, saver), (2, MemorySaver()), (1, MemorySaver()))
    )
    update = WeightUpdate(store, saver, lambda: raised.append(f"at version {store.version}"))
    offer = update.begin(1, shadow, names)
    receipt = write(offer, new)
    if rank == SIZE - 1 and names == (EMBED,):
        assert receipt.nbytes == receipt.digest == 0, (
            "five rows in parts of two: nothing is left for the last rank"
        )
    update.verify(receipt)
    update.commit(1)
    # between the exchange of the pages and the commit nothing is served
    assert raised == [f"at version {None if shadow else 0}"] and store.version == 1
    for piece in store.manifest.slices:
        source = new if names is None or piece.name in names else old
        assert torch.equal(store.box(piece), source.box(piece)), piece.name
    assert bool(store.manifest.zeros) == (rank >= 2)
    for offset, nbytes in store.manifest.zeros:
        assert not store.arena[offset : offset + nbytes].any()
    assert store.digest() == (new.digest() if names is None else store.digest(names=SHAPES))
