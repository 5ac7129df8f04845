"""Private names of FSDP2 and DTensor, which only this file reads.

The tests list them (`private_torch.py`), with the other private names of torch in this package. A
test refuses names that are not listed, and another one names what the installed torch lacks, and
what depends on it.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from memsaver.ops.layout import round_up

_ALIGN = 64  # elements; enough for any load of a kernel
AwaitContent = Callable[[Sequence[Tensor], Sequence[torch.cuda.Stream]], None]
StridedShard = _StridedShard


def initialize_fsdp(model: nn.Module) -> None:
    """Run FSDP's lazy initialization, which may allocate shards again to pad them."""
    assert isinstance(model, FSDPModule)
    model._get_fsdp_state()._lazy_init()


def pad_shards(model: nn.Module, names: Collection[str]) -> None:
    """Pad the shards of parameters with these names in their modules."""
    for param in chain.from_iterable(group.fsdp_params for group in _groups(model)):
        if param._module_info.param_name in names:
            param.reset_sharded_param()


def keep_fp32_gradients(model: nn.Module) -> None:
    """Keep reduced gradients, and their sums over micro batches, in fp32."""
    for group in _groups(model):
        group._orig_dtype = torch.float32  # torch 2.15 takes it from the shards' grad_dtype


class _Copies:
    """Copies of shards in another dtype, in a block that has memory from `gather` to `free`.

    Attributes:
        parts: The copies.
    """

    def __init__(self, shards: list[Tensor], dtype: torch.dtype) -> None:
        self._shards = shards
        sizes = [round_up(shard.numel(), _ALIGN) for shard in shards]
        self._block = shards[0].new_empty(sum(sizes), dtype=dtype)
        self._nbytes = self._block.nbytes
        pieces = zip(self._block.split(sizes), shards, strict=True)
        self.parts = [piece[: shard.numel()].view(shard.shape) for piece, shard in pieces]
        self.free()

    def gather(self) -> None:
        """Copy the shards, unless that is done."""
        if not self._block.untyped_storage().nbytes():
            self._block.untyped_storage().resize_(self._nbytes)
            torch._foreach_copy_(self.parts, self._shards)

    def free(self) -> None:
        """Free the copies."""
        self._block.untyped_storage().resize_(0)


class _LoneParam(FSDPParam):
    """A parameter of a single rank, whose shard is all of it.

    In forward's dtype, the shard serves as the unsharded parameter, too: FSDP would copy it before
    each pass, and cast and copy its gradient. Otherwise a unit's copies are one operation.
    """

    copies: _Copies | None
    unsharded: Tensor  # the shard or its copy

    @property
    def all_gather_inputs(self) -> list[Tensor]:  # read before each pass
        if self.copies is not None:
            self.copies.gather()
        return self.all_gather_outputs

    def init_all_gather_outputs(self, *_: Any, **__: Any) -> None:
        self.all_gather_outputs = [self._sharded_param_data.new_empty(0)]

    def init_unsharded_param(self) -> None:
        if not hasattr(self, "_unsharded_param"):
            # `data` has a version of its own: a backward pass may copy the shard again.
            self._unsharded_param = nn.Parameter(
                self.unsharded.data, self.sharded_param.requires_grad
            )

    def free_unsharded_param(self) -> None:
        if self.copies is not None:
            self.copies.free()

    def take_gradient(self) -> None:
        """Add the gradient of the unsharded parameter to that of the shard, without a reduction."""
        param, shard = getattr(self, "_unsharded_param", None), self.sharded_param
        if param is None or param.grad is None:
            return
        grad, param.grad = param.grad.to(shard.grad_dtype or shard.dtype), None
        if shard.grad is None:
            shard.grad = self.to_sharded_dtensor(grad)
        else:
            local_tensor(shard.grad).add_(grad)


def run_alone(model: nn.Module) -> None:
    """Let a single rank pass over an initialized model without FSDP's copies.

    Nothing is gathered, reduced or kept for parameters in forward's dtype.
    """
    for group in _groups(model):
        params = [p for p in group.fsdp_params if p.sharded_param.device_mesh.size() == 1]
        narrowed = [param for param in params if param.param_dtype is not None]
        for param in params:
            if param.param_dtype is None:
                _become_lone(param, None, local_tensor(param.sharded_param))
        if narrowed:
            shards = [local_tensor(param.sharded_param) for param in narrowed]
            copies = _Copies(shards, narrowed[0].param_dtype)
            for param, part in zip(narrowed, copies.parts, strict=True):
                _become_lone(param, copies, part)
        if params:
            group.post_backward = partial(_take_gradients, params, group.post_backward)


def _become_lone(param: Any, copies: _Copies | None, unsharded: Tensor) -> None:
    param.__class__ = _LoneParam
    param.copies, param.unsharded = copies, unsharded
    param.init_all_gather_outputs()


def _take_gradients(
    params: Sequence[_LoneParam], post_backward: Callable[..., None], *unused: Any
) -> None:
    """Run FSDP's `post_backward` of a group, which then finds gradients of other parameters."""
    for param in params:
        param.take_gradient()
    post_backward(*unused)


class LoneUnit:
    """A unit of a single rank (`run_alone`), whose modules are computed without FSDP's hooks.

    Attributes:
        modules: Its modules.
        trained: Its trained shards.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.modules: Sequence[nn.Module] = group.modules
        shards = [param.sharded_param for param in group.fsdp_params]
        self.trained: list[nn.Parameter] = [shard for shard in shards if shard.requires_grad]

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Let the modules have parameters in forward's dtype inside the block."""
        self._group._to_sharded()  # an earlier pass may have kept what it gathered
        try:
            for param in self._group.fsdp_params:
                if param.copies is not None:
                    param.copies.gather()
                param.init_unsharded_param()
                param.to_unsharded()
            yield
        finally:
            for param in self._group.fsdp_params:
                param.to_sharded()

    def trained_of(self, module: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
        """Return what is gathered of each trained shard of one of the modules."""
        owners = set(module.modules())
        params = [param for param in self._group.fsdp_params if param.sharded_param.requires_grad]
        return {
            param.sharded_param: param._unsharded_param
            for param in params
            if param._module_info.module in owners
        }


def lone_units(model: nn.Module, modules: Collection[nn.Module]) -> list[LoneUnit]:
    """Return the units of a single rank that have any of these modules, in their order."""
    groups = (group for group in _groups(model) if not set(modules).isdisjoint(group.modules))
    return [*map(LoneUnit, groups)]


def reshard(model: nn.Module) -> None:
    """Free all unsharded parameters, and gradients that were not reduced."""
    for group in _groups(model):
        group.wait_for_unshard()  # a failed pass may have begun to gather
        group._to_sharded()  # reshard() keeps what a failed forward gathered
        for param in group.fsdp_params:
            if "unsharded_accumulated_grad" in vars(param):  # the sum, in torch before 2.15
                param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None


def keep_unsharded(model: nn.Module, keep: bool, *, last: bool) -> None:
    """Let the next passes keep the parameters that they gather, and add gradients unsharded.

    The `last` backward reduces the gradients and reshards. Without `keep`, every backward does so,
    and every forward reshards all units but the root.
    """
    for unit in _wrapped(model):
        unit.set_reshard_after_backward(last or not keep, recurse=False)
        unit.set_requires_gradient_sync(last or not keep, recurse=False)
        if unit is not model:
            unit.set_reshard_after_forward(not keep, recurse=False)


def run_backward(model: nn.Module, loss: Tensor) -> None:
    """Run a backward pass, which adds up the gradients of each parameter in forward's dtype.

    FSDP converts sums of batches to its reduction's dtype after the pass. If a pass does not reduce
    gradients, FSDP of torch 2.15 would convert every single one: the sum of a tied matrix would
    have other bits than in a pass that reduces, and more bytes.
    """
    for group in _groups(model):
        for param in getattr(group, "_fsdp_params_with_wider_grad_dtype", ()):
            if param._unsharded_param.grad is None:
                param._unsharded_param.grad_dtype = None
    loss.backward()


@contextmanager
def whole_pass(model: nn.Module) -> Iterator[None]:
    """Run passes that leave no parameter unsharded; if one fails, FSDP forgets it."""
    try:
        yield
    except BaseException as error:
        try:
            _forget_pass(model)
        except Exception as also:  # such as a device that is lost
            error.add_note(f"and FSDP's state was not reset: {also}")
        raise
    reshard(model)


def _forget_pass(model: Any) -> None:
    """Reset FSDP after a pass that raised an error, which FSDP counts as still running.

    The next pass would gather no unit that is complete for it (torch 2.11), or reduce no gradients.
    """
    reshard(model)
    keep_unsharded(model, False, last=True)
    root = model._get_fsdp_state()
    root._state_ctx.manual_backward_finalization_active = False  # torch 2.15 sets it in backward
    root._root_post_backward_final_callback()  # no gradient is left to reduce
    for module in _wrapped(model):
        state = module._get_fsdp_state()
        state._modules_to_run_forward.clear()
        state._state_ctx.iter_forward_root = None  # else its streams would not be ordered


def shards_in_order(model: nn.Module) -> list[Tensor]:
    """Return this rank's shards in the order in which a decoder's forward gathers them.

    These are the shards of root, embedding, layers and head, as they are stored on tags.
    """
    return [*chain.from_iterable(map(_shards, _groups(model)))]


def await_shards(model: nn.Module, await_content: AwaitContent) -> None:
    """Call `await_content` before each unit's forward, with its shards and the reading streams."""
    for group in _groups(model):
        hook = partial(_await, group, await_content)
        # The first module's forward gathers the unit; the hook comes before FSDP's.
        group.modules[0].register_forward_pre_hook(hook, prepend=True)


def _await(group: Any, await_content: AwaitContent, module: nn.Module, args: object) -> None:
    streams = []
    if group.device.type == "cuda":
        streams = [
            torch.cuda.current_stream(group.device),
            group.comm_ctx.all_gather_copy_in_stream,
        ]
    await_content(_shards(group), streams)


def _shards(group: Any) -> list[Tensor]:
    return [param._sharded_param_data for param in group.fsdp_params]


def local_tensor(param: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without gradient; writes change the tensor.

    `DTensor.to_local` takes a hundred times as long.
    """
    local = param._local_tensor if isinstance(param, DTensor) else param
    return local.detach() if local.requires_grad else local


def host_shard(local: Tensor, param: Tensor) -> DTensor:
    """Wrap `local`, on the host and of any dtype, as this rank's shard of a tensor like `param`.

    `from_local` would move the shard to the mesh's device.
    """
    assert isinstance(param, DTensor)
    spec = copy.copy(param._spec)
    assert spec.tensor_meta is not None
    spec.tensor_meta = spec.tensor_meta._replace(dtype=local.dtype)
    return DTensor(local, spec, requires_grad=False)


def _wrapped(model: nn.Module) -> list[FSDPModule]:
    """Return the modules in FSDP's units; a unit can have several."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _groups(model: nn.Module) -> list[Any]:
    """Return FSDP's groups of parameters; a group is gathered and reduced together."""
    groups = (module._get_fsdp_state()._fsdp_param_group for module in _wrapped(model))
    return [*dict.fromkeys(group for group in groups if group is not None)]
