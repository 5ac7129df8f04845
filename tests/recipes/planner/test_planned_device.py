"""Planned device: tensors have the storages of real ones, and no content."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memsaver.report import PAGE_POOL
from recipes.planner.planned_device import PlannedDevice, PlannedTensor
from recipes.planner.planned_sides import PlannedSaver
from recipes.planner.sizes import MIB
from tests.helpers.default_dtype import default_dtype


class RealStorages(TorchDispatchMode):
    """Dispatch mode that counts the bytes of live storages and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self._refs: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        address, nbytes = id(storage), storage.nbytes()
        if address in self._refs:
            return

        def gone(_: Any) -> None:
            del self._refs[address]
            self.live -= nbytes

        self._refs[address] = weakref.ref(storage, gone)
        self.live += nbytes
        self.most = max(self.most, self.live)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(nn.functional.silu(self.up(self.norm(hidden))))


def learn(checkpointed: bool) -> None:
    """Train a small model for one step; its large tensors have whole mebibytes."""
    model = nn.Sequential(nn.Embedding(2048, 512), *[Block(512) for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        hidden = model[0](torch.zeros(1, 512, dtype=torch.int64))
        for block in model[1:]:
            hidden = (
                torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=False)
                if checkpointed
                else block(hidden)
            )
        logits = hidden @ model[0].weight.T
        nn.functional.cross_entropy(logits.flatten(0, 1), torch.zeros(512).long()).backward()
    optimizer.step()


def test_new_tensor_has_the_default_dtype_of_its_moment() -> None:
    with PlannedDevice(workspace_bytes=0):
        for dtype in (torch.bfloat16, torch.float32):
            with default_dtype(dtype):
                made = torch.empty(3, 7), torch.full((3, 7), 0.5), torch.arange(0.0, 3.0)
            assert {tensor.dtype for tensor in made} == {dtype}


@pytest.mark.parametrize("checkpointed", [False, True])
def test_planned_step_holds_the_bytes_of_a_real_step(checkpointed: bool) -> None:
    with RealStorages() as real:
        learn(checkpointed)
    with PlannedDevice(workspace_bytes=0) as device:
        learn(checkpointed)
    # torch's allocator rounds sizes up and cannot use all of its segments.
    assert real.most <= device.allocator.peak <= 1.15 * real.most


def test_view_keeps_storage_of_its_base_and_takes_no_memory() -> None:
    with PlannedDevice(workspace_bytes=0) as device:
        base = torch.empty(10 * MIB, dtype=torch.uint8)
        view = base[MIB:].view(torch.float32)
        assert isinstance(view, PlannedTensor) and view.shape == (9 * MIB // 4,)
        del base
        held = device.allocator.reserved
        device.empty_cache()
        assert device.allocator.reserved == held == 10 * MIB
        del view
        device.empty_cache()
        assert device.allocator.reserved == 0


def test_resized_storage_takes_its_new_size() -> None:
    """Resize as FSDP does with unsharded parameters."""
    with PlannedDevice(workspace_bytes=0) as device:
        tensor = torch.empty(16 * MIB, dtype=torch.uint8)
        tensor.untyped_storage().resize_(0)
        device.empty_cache()
        assert device.allocator.reserved == 0
        tensor.untyped_storage().resize_(12 * MIB)
        assert device.allocator.reserved == 12 * MIB and tensor.untyped_storage().size() == 12 * MIB


def test_memory_on_a_tag_is_not_counted_as_torchs() -> None:
    saver = PlannedSaver(PlannedDevice(workspace_bytes=0))
    with saver.planned:
        with saver.region("params"):
            weight = torch.empty(3 * MIB, dtype=torch.uint8)
        moments = saver.empty((5 * MIB,), torch.uint8, tag="optim")
        assert saver.sizes() == {"optim": 6 * MIB, "params": 20 * MIB}
        assert saver.usage().torch_bytes == 0
        grown = weight + moments[: 3 * MIB]
        assert saver.usage().torch_bytes == 20 * MIB and grown.shape == weight.shape
        saver.pause("optim", content="host", release="driver")
        assert saver.take_usage().tags == {"optim": 0, "params": 20 * MIB, PAGE_POOL: 0}


def test_forward_and_backward_threads_have_workspaces_until_empty_cache() -> None:
    with PlannedDevice(workspace_bytes=32 * MIB) as device:
        weight = torch.empty(8, 8, requires_grad=True)
        loss = (torch.empty(8, 8) @ weight).sum()
        assert device.allocator.reserved == 34 * MIB
        loss.backward()
        assert device.allocator.reserved == 66 * MIB
        device.empty_cache()
        assert device.allocator.reserved == 2 * MIB


def test_meta_tensors_and_host_numbers_take_no_memory() -> None:
    numbers = torch.arange(6.0).view(2, 3)
    with PlannedDevice(workspace_bytes=0) as device:
        meta = torch.empty(1 << 30, device="meta") * 2
        assert meta.is_meta and device.allocator.reserved == 0
        total = numbers + torch.tensor([1.0, 2.0, 3.0])
        assert isinstance(total, PlannedTensor) and total.shape == (2, 3)
        assert total.device.type == "cpu" and float(total.sum()) == 0
        assert torch.empty_like(meta[:4], device="cpu").device.type == "cpu"
        assert device.allocator.reserved == 2 * MIB


def test_planned_tensor_fails_outside_of_its_device() -> None:
    with PlannedDevice(workspace_bytes=0):
        tensor = torch.empty(3)
    with pytest.raises(RuntimeError, match="outside of its PlannedDevice"):
        tensor + 1
