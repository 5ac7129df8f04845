"""This rank's part of a sharded tensor: to write to, to make, and where it lies in the whole."""

import copy

from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer_bridge.sync.boxes import Box
from trainer_bridge.sync.shards import local_box


def like_shard(local: Tensor, param: Tensor) -> DTensor:
    """Returns `local` as this rank's shard of a tensor sharded like `param`."""
    assert isinstance(param, DTensor)
    mesh, places = param.device_mesh, param.placements
    return DTensor.from_local(
        local, mesh, places, run_check=False, shape=param.shape, stride=param.stride()
    )


def host_shard(local: Tensor, param: Tensor) -> DTensor:
    """Returns `local`, on the host and of any dtype, as this rank's shard of a tensor sharded like
    `param`. `from_local` would move it to the mesh's device.
    """
    assert isinstance(param, DTensor)
    spec = copy.copy(param._spec)
    assert spec.tensor_meta is not None
    spec.tensor_meta = spec.tensor_meta._replace(dtype=local.dtype)
    return DTensor(local, spec, requires_grad=False)


def shard_box(param: Tensor) -> Box:
    """Returns (start, shape) of this rank's shard in the whole parameter."""
    assert isinstance(param, DTensor)
    mesh = param.device_mesh
    at = mesh.get_coordinate()
    assert at is not None
    return local_box(param.shape, param.placements, mesh.mesh.shape, at)
