"""Shards of real DTensors in four gloo processes: FSDP2, HSDP, tensor parallelism with FSDP2."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.helpers.ranks import results, start_ranks
from tests.helpers.trainer_bridge.layouts import box_of
from trainer_bridge.sync.shards import SourceShard, shard_of

WORLD = 4
SHAPES = {
    "even": (8, 4),
    "uneven": (7, 3),
    "few": (2, 5),
    "row": (1, 2),
    "long": (9,),
    "experts": (3, 8, 4),
}
LAYOUTS = ["fsdp", "fsdp dims", "hsdp", "tp rows + fsdp", "tp columns + fsdp", "tp + fsdp dims"]
# Layouts in which full_tensor() supports uneven sizes.
WHOLE = {"fsdp", "fsdp dims", "hsdp", "tp columns + fsdp", "tp + fsdp dims"}


class Held(NamedTuple):
    """One rank's shard of a parameter; `full` is None if torch cannot gather it."""

    shard: SourceShard
    local: Tensor
    full: Tensor | None


def full(name: str) -> Tensor:
    shape = SHAPES[name]
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def last_dim(param: Tensor) -> Shard:
    return Shard(param.ndim - 1)


def model(layout: str) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = nn.Module()
    dims = layout.endswith("dims")
    for name, shape in SHAPES.items():
        if dims and shape[-1] % WORLD:
            continue  # FSDP2 shards dimensions other than 0 only evenly
        tensor = full(name)
        if layout.startswith("tp"):
            dim = 1 if "columns" in layout else len(shape) - 1
            if "rows" in layout or len(shape) == 1:
                dim = 0
            tensor = distribute_tensor(tensor, mesh["tp"], [Shard(dim)])
        module.register_parameter(name, nn.Parameter(tensor))
    if layout.startswith("tp"):
        # A parameter that tensor parallelism does not divide.
        module.register_parameter("norm", nn.Parameter(torch.arange(5.0)))
    meshes = {"fsdp": init_device_mesh("cpu", (WORLD,)), "hsdp": mesh}
    fully_shard(
        module,
        mesh=meshes.get(layout.split()[0], mesh["dp"]),
        shard_placement_fn=last_dim if dims else None,
    )
    return module


def hold(rank: int) -> dict[str, dict[str, Held]]:
    held: dict[str, dict[str, Held]] = {}
    for layout in LAYOUTS:
        held[layout] = {}
        for name, param in model(layout).named_parameters():
            assert isinstance(param, DTensor)
            even = name in ("even", "norm") or layout in WHOLE
            gathered = param.full_tensor().detach() if even else None
            local = param.to_local().detach()
            assert local.is_contiguous()
            held[layout][name] = Held(shard_of(name, param, rank), local.clone(), gathered)
    wrong = distribute_tensor(torch.zeros(8), init_device_mesh("cpu", (WORLD,)), [Shard(0)])
    wrong._local_tensor = torch.zeros(3)
    with pytest.raises(ValueError, match=r"w: this rank holds a tensor of \(3,\)"):
        shard_of("w", wrong, rank)
    return held


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Held]]]:
    return results(start_ranks(hold, WORLD, tmp_path_factory.mktemp("sources") / "meet"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_match_their_boxes_and_boxes_cover_the_parameter(
    ranks: list[dict[str, dict[str, Held]]], layout: str
) -> None:
    for name, first in ranks[0][layout].items():
        whole = torch.arange(5.0) if name == "norm" else full(name)
        if first.full is not None:
            assert torch.equal(first.full, whole), "torch gathers another tensor"
        holders = torch.zeros(whole.shape, dtype=torch.int64)
        for rank, held in enumerate(ranks):
            shard, local = held[layout][name].shard, held[layout][name].local
            box = box_of(shard)
            assert (shard.global_shape, shard.shape) == (whole.shape, local.shape)
            assert torch.equal(whole[box], local), (name, rank)
            holders[box] += 1
        replicas = 2 if layout == "hsdp" or name == "norm" else 1
        assert (holders == replicas).all(), name
