"""A module's parameters, sharded by FSDP2 or whole, as what a sync writes from."""

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from memsaver.common.machine import place_of
from rollout.protocols import SyncTarget
from trainer_bridge.sync.consensus import Alone, group_consensus
from trainer_bridge.sync.shards import SourceShard, dtensor_shards, local_shard
from trainer_bridge.sync.weight_sync import WeightSync


class Shards:
    """This rank's part of parameters."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        """params: by checkpoint name, tied ones once. What is no DTensor is whole on every rank."""
        self.params = params
        self._local: dict[str, Tensor] = {}
        self._addresses: list[int] = []

    def described(self) -> list[SourceShard]:
        """Returns which box of which parameter this rank holds."""
        rank, found = dist.get_rank() if dist.is_initialized() else 0, []
        for name, param in self.params.items():
            if isinstance(param, DTensor):
                found += [shard for shard in dtensor_shards(name, param) if shard.rank == rank]
            else:
                shape, dtype = tuple(param.shape), str(param.dtype).removeprefix("torch.")
                whole = SourceShard(
                    name=name,
                    global_shape=shape,
                    dtype=dtype,
                    start=(0,) * len(shape),
                    shape=shape,
                    rank=rank,
                )
                found.append(whole)
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Returns this rank's rows of every parameter: the same dict until one moves."""
        addresses = [_stored(param).data_ptr() for param in self.params.values()]
        if addresses != self._addresses:
            self._local = {name: _local(param) for name, param in self.params.items()}
            self._addresses = addresses
        return self._local


def module_sync(
    params: Mapping[str, Tensor], targets: Sequence[SyncTarget], *, transport: str = "auto"
) -> WeightSync:
    """Makes the sync of any module's parameters, FSDP2's or plain ones, with the rollouts that this
    rank speaks for; every rank calls it.

    params: `dict(module.named_parameters())`, by checkpoint name; they may change in place, and
    move. A ValueError lists what does not fit, and names what is computed of a parameter: it would
    not follow it.
    """
    if computed := [name for name, param in params.items() if not isinstance(param, nn.Parameter)]:
        raise ValueError(
            f"{computed[0]}: no parameter, so it would stay as it is now; pass parameters "
            "themselves, renamed at most"
        )
    shards = Shards(params)
    group = dist.group.WORLD if dist.is_initialized() else None
    return WeightSync(
        shards.described(),
        shards.tensors,
        targets,
        Alone() if group is None else group_consensus(group),
        place=place_of(next(iter(shards.tensors().values())).device),
        transport=transport,
        group=group,
    )


def _stored(param: Tensor) -> Tensor:
    """Returns the local shard. `to_local` takes a hundred times as long, every time."""
    return param._local_tensor if isinstance(param, DTensor) else param


def _local(param: Tensor) -> Tensor:
    return local_shard(param) if isinstance(param, DTensor) else param.detach()
