"""A module's parameters, sharded by FSDP2 or whole, as what a sync writes from."""

from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from memsaver.system.devices import place_of
from rollout.model import stored_buffers
from rollout.protocols import UpdatableEngine
from trainer_bridge.sync.agree import group_agreement
from trainer_bridge.sync.shards import SourceShard, shard_of
from trainer_bridge.sync.weight_sync import WeightSync


class Shards:
    """This rank's part of parameters and buffers."""

    def __init__(self, read: Callable[[], Mapping[str, Tensor]]) -> None:
        """read: returns them as they are now, by checkpoint name, tied ones once. What is no
        DTensor is whole on every rank.
        """
        self._read = read
        self._sharded: dict[str, object] = {}

    def described(self) -> list[SourceShard]:
        """Return which box of which parameter this rank holds; `tensors` are of these boxes."""
        rank, found = dist.get_rank() if dist.is_initialized() else 0, []
        for name, param in self._read().items():
            self._sharded[name] = _sharding(param)
            found.append(shard_of(name, param, rank))
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's rows of every parameter. A ValueError names one that is sharded
        otherwise than it was described.
        """
        params = self._read()
        for name, before in self._sharded.items():
            if name in params and (now := _sharding(params[name])) != before:
                raise ValueError(
                    f"{name} is {now or 'whole'}, and was {before or 'whole'} when the sync was "
                    "connected; connect anew (nothing was written)"
                )
        return {name: _stored(param).detach() for name, param in params.items()}


def module_sync(
    params: nn.Module | Mapping[str, Tensor], targets: Sequence[UpdatableEngine]
) -> WeightSync:
    """Make the sync of any module's parameters, FSDP2's or plain ones, with the rollouts that this
    rank speaks for; every rank calls it.

    Args:
        params: A module whose names are the checkpoint's, or `dict(module.named_parameters())` by
            checkpoint name. Parameters may change in place, move, and take other strides. Buffers
            that rollouts compute with (router biases) come with a module; a mapping may name them.
        targets: The rollouts, or handles on them.

    Raises:
        ValueError: Lists what does not fit, and names what is computed of a parameter: it would
            not follow it.
    """
    module = params
    shards = Shards(lambda: _named(module) if isinstance(module, nn.Module) else module)
    sync = WeightSync(
        shards.described(),
        shards.tensors,
        targets,
        group_agreement(dist.group.WORLD if dist.is_initialized() else None),
        place=place_of(next(iter(shards.tensors().values())).device),
    )
    if isinstance(params, Mapping):
        computed = [name for name, param in params.items() if not isinstance(param, nn.Parameter)]
        if strays := [name for name in computed if name not in sync.buffers]:
            raise ValueError(
                f"{strays[0]}: no parameter, so it would stay as it is now; pass parameters "
                "themselves, renamed at most"
            )
    return sync


def _named(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | stored_buffers(module)


def _sharding(param: Tensor) -> object:
    """Return over which mesh, and how, a parameter is sharded; None: whole."""
    return (param.device_mesh, param.placements) if isinstance(param, DTensor) else None


def _stored(param: Tensor) -> Tensor:
    """Return the local shard. `to_local` takes a hundred times as long, every time."""
    return param._local_tensor if isinstance(param, DTensor) else param
