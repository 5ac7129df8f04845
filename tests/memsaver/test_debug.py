"""Debug mode: what touches paused memory raises before it runs, what does not passes; digests of
kept content. (What a digest notices: ops/test_digest.)
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _python_dispatch

import memsaver
from memsaver import MemorySaver
from memsaver.content.on_host import Checksums
from memsaver.debug import PausedGuard, paused_tag
from tests.helpers.memsaver.savers import at_once

MODES = (torch.enable_grad, torch.no_grad, torch.inference_mode)
Operation = Callable[[torch.Tensor, torch.Tensor], object]


class Finder:
    """Looks an address up in the only tag of a saver."""

    def __init__(self, saver: memsaver.MemorySaver, tensor: torch.Tensor) -> None:
        (self.tag,) = saver.tags
        self.saver = saver
        self.start = tensor.data_ptr() - saver.offset_of(tensor)

    def find(self, address: int) -> str | None:
        report = self.saver.report().tags[self.tag]
        inside = 0 <= address - self.start < report.reserved_bytes
        # a resume restores content before the tag is active again
        return self.tag if inside and not report.committed_bytes else None


@contextlib.contextmanager
def guarding(guard: PausedGuard) -> Iterator[None]:
    """Guard this thread inside of the block."""
    guard.enable()
    try:
        yield
    finally:
        guard.disable()


class Case:
    """A paused 4x4 tensor of ones and another that is not; the paused tag is 'kv_cache'."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.saver = memsaver.MemorySaver(device)
        self.paused = self.saver.empty((4, 4), tag="kv_cache", content="host").fill_(1)
        self.finder = Finder(self.saver, self.paused)
        self.other = torch.ones(4, 4, device=device)
        self.guard = PausedGuard(self.finder.find)
        self.saver.pause()


@pytest.fixture
def case(device: str) -> Iterator[Case]:
    case = Case(device)
    with guarding(case.guard):
        try:
            yield case
        finally:
            case.saver.resume()
        assert torch.equal(case.paused, torch.ones(4, 4, device=device))  # nothing ran


TOUCHING: dict[str, tuple[Operation, str]] = {
    "read": (lambda p, o: p + 1, "aten.add.Tensor uses argument 'self'"),
    "linear": (lambda p, o: torch.nn.functional.linear(o, p, o[0]), " uses "),
    "copy by reshape": (lambda p, o: p.t().reshape(-1), " uses "),
    "through a view": (
        lambda p, o: p.view(-1)[2:6].exp(),
        r"exp.default uses argument 'self' \(\[4\], torch.float32",
    ),
    "index": (lambda p, o: p[[0, 1]], "aten.index.Tensor uses argument 'self'"),
    "indexed by": (lambda p, o: o.view(-1)[p.view(torch.int32)[0]], "argument 'indices\\[0\\]'"),
    "list": (lambda p, o: torch.cat([o, p]), "aten.cat.default uses argument 'tensors\\[1\\]'"),
    "foreach": (
        lambda p, o: torch._foreach_add_([o, p], 1),
        "_foreach_add_.Scalar uses argument 'self\\[1\\]'",
    ),
    "in place": (lambda p, o: p.add_(o), "aten.add_.Tensor uses argument 'self'"),
    "copy to": (lambda p, o: p.copy_(o), "aten.copy_.default uses argument 'self'"),
    "copy from": (lambda p, o: o.copy_(p), "aten.copy_.default uses argument 'src'"),
    "out": (lambda p, o: torch.add(o, o, out=p), "aten.add.out uses argument 'out'"),
    "out of a factory": (lambda p, o: torch.zeros(4, 4, out=p), "'out'"),
    "tolist": (lambda p, o: p.tolist(), "Tensor.tolist uses a tensor"),
    "numpy": (lambda p, o: p.numpy(), "Tensor.numpy"),
    "repr": (lambda p, o: repr(p), "Tensor.__repr__"),
    "format": (lambda p, o: f"{p}", "Tensor.__format__"),
    "int": (lambda p, o: range(p.view(torch.int32)[0, 0]), "aten._local_scalar_dense"),
    "in a list": (lambda p, o: torch.tensor([1.0, p[0, 0]]), "torch.tensor uses a tensor"),
    "index by a number": (lambda p, o: o[p.view(torch.int32)[0, 0]], " uses "),
    "repr of a parameter": (lambda p, o: repr(torch.nn.Parameter(p)), " uses "),
}


@pytest.mark.parametrize("name", TOUCHING)
def test_what_touches_paused_memory_raises_before_it_runs(case: Case, name: str) -> None:
    operation, said = TOUCHING[name]
    for mode in MODES:
        other = case.other.clone()
        with mode(), pytest.raises(memsaver.StateError, match=said) as caught:
            operation(case.paused, other)
        assert "on tag 'kv_cache', which is paused; call resume('kv_cache') first" in str(
            caught.value
        )
        assert torch.equal(other, case.other)


NOT_TOUCHING: dict[str, Operation] = {
    "metadata": lambda p, o: (
        p.shape,
        p.stride(),
        p.dtype,
        p.device,
        p.data_ptr(),
        p.is_contiguous(),
        len(p),
    ),
    "views": lambda p, o: (
        p.view(-1)[1:5],
        p.t().unsqueeze(0).squeeze(0).expand(4, 4),
        p.view(torch.uint8),
        p[:, ::2],
    ),
    "more views": lambda p, o: (
        p.reshape(2, 8),
        p.chunk(2),
        p.unbind(),
        p.flatten(),
        p.as_strided((2,), (1,)),
    ),
    "same": lambda p, o: (
        p.contiguous(),
        p.to(p.dtype),
        p.detach(),
        p.data,
        p.view_as(o),
        p.requires_grad_(False),
    ),
    "factories": lambda p, o: (
        torch.empty_like(p),
        p.new_empty(3),
        torch.zeros_like(p),
        p.new_ones(2),
    ),
    "in-place views": lambda p, o: p.detach().t_().unsqueeze_(0),
    "aliases": lambda p, o: (o.detach().set_(p), torch.as_tensor(p)),
    "identity": lambda p, o: (p.is_set_to(p), p.is_same_size(o), p.is_floating_point(), p is p),
    "no elements": lambda p, o: (
        p[:0].sum(),
        p[:0].add_(1),
        torch.cat([p[:0], o]),
        p[2:2].tolist(),
    ),
    "parameter": lambda p, o: torch.nn.Parameter(p).grad,
    "autograd": lambda p, o: p.detach().requires_grad_().view(-1)[0].grad_fn,
    "others": lambda p, o: repr((o @ o + 1).tolist()),
    "deletion": lambda p, o: [p.view(-1)].clear(),
}


@pytest.mark.parametrize("name", NOT_TOUCHING)
def test_what_touches_no_memory_passes(case: Case, name: str) -> None:
    for mode in MODES:
        with mode():
            NOT_TOUCHING[name](case.paused, case.other.clone())


def test_the_range_a_view_touches_decides() -> None:
    buffer = torch.zeros(1 << 14, dtype=torch.uint8)
    middle = buffer.data_ptr() + (1 << 13)

    def upper(address: int) -> str | None:
        return "upper" if address >= middle else None

    assert paused_tag(buffer, upper) == "upper"
    assert paused_tag(buffer[: 1 << 13], upper) is None
    assert paused_tag(buffer[: (1 << 13) + 1], upper) == "upper"
    assert paused_tag(buffer.as_strided((2, 2), (1 << 13, 1)), upper) == "upper"
    assert paused_tag(buffer.as_strided((1, 2), (1 << 13, 1)), upper) is None
    assert paused_tag(buffer.as_strided((1000,), (0,)), upper) is None
    assert paused_tag(torch.empty(1 << 14, device="meta"), lambda _: "any") is None


def test_backward_raises_in_python(device: str) -> None:
    saver = memsaver.MemorySaver(device)
    with saver.region("weights", content="host"):
        weight = torch.nn.Parameter(torch.ones(4, 4, device=device))
    x = torch.ones(4, 4, device=device, requires_grad=True)
    finder = Finder(saver, weight)
    with guarding(PausedGuard(finder.find)):
        loss = (x @ weight).sum()
        saver.pause()
        with pytest.raises(memsaver.StateError, match="on tag 'weights'"):
            loss.backward()
        saver.resume()
        (x @ weight).sum().backward()
        assert x.grad is not None and torch.equal(x.grad, torch.full((4, 4), 4.0, device=device))


class _Deeper(torch.autograd.Function):
    """Goes backward inside backward; from a depth of 60 autograd does that on its own thread."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, depth: int, last: Callable
    ) -> torch.Tensor:
        ctx.depth, ctx.last = depth, last
        return x.clone()

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        if not ctx.depth:
            ctx.last()
        else:
            with torch.enable_grad():
                x = torch.ones((), requires_grad=True)
                _Deeper.apply(x, ctx.depth - 1, ctx.last).backward()
        return grad, None, None


def test_autograds_threads_are_covered(case: Case) -> None:
    threads = []

    def last() -> None:
        threads.append(threading.get_ident())
        case.paused.sum()

    x = torch.ones((), requires_grad=True)
    with pytest.raises(memsaver.StateError, match="on tag 'kv_cache'"):
        _Deeper.apply(x, 70, last).backward()
    assert threads and threads[0] != threading.get_ident()


class _Count(_python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_enable_and_disable_go_between_other_modes() -> None:
    case, count = Case("cpu"), _Count()
    with count, torch.device("cpu"):
        case.guard.enable()
    with pytest.raises(memsaver.StateError):  # still on, after the block it was enabled in
        case.paused.sum()
    torch.set_default_device("cpu")
    with count, torch.device("cpu"):
        case.guard.enable()  # is on already: nothing changes
        with pytest.raises(memsaver.StateError):
            case.paused.sum()
        case.guard.disable()
        before = count.seen
        torch.ones(1).sum()
        assert count.seen == before + 2
    case.guard.enable()
    torch.set_default_device(None)
    case.guard.disable()
    assert not _python_dispatch._get_current_dispatch_mode_stack()
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_guard_dies_with_its_owner_and_keeps_it_not_alive() -> None:
    class Owner:
        def __init__(self) -> None:
            self.guard = PausedGuard(self.find)
            self.guard.enable()

        def find(self, address: int) -> str | None:
            return "everything"

    owner = Owner()
    with pytest.raises(memsaver.StateError, match="'everything'"):
        torch.ones(1).fill_(2)
    alive = weakref.ref(owner)
    del owner
    gc.collect()
    assert alive() is None
    assert not _python_dispatch._get_current_dispatch_mode_stack()


def test_subclasses_are_seen_through(case: Case) -> None:
    both = TwoTensor(case.other, case.paused)
    with pytest.raises(memsaver.StateError, match="aten.add.Tensor uses argument 'self'"):
        both + 1
    with pytest.raises(memsaver.StateError, match="Tensor.__repr__"):
        repr(both)
    assert both.view(-1).shape == (16,)
    assert torch.equal((TwoTensor(case.other, case.other) + 1).a, case.other + 1)


def test_fake_tensors_have_no_memory(case: Case) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(case.other)
        assert ((fake @ fake) + torch.ones(4, 4, device=case.device)).shape == (4, 4)
    assert (fake + 1).shape == (4, 4)
    repr(fake)


def test_a_saver_in_debug_mode(device: str) -> None:
    """Every thread that uses the saver is covered, until it is closed; its own copies pass."""
    saver = MemorySaver(device, debug=True)
    kept = saver.empty(100, tag="kept", content="host").fill_(3)
    saver.pause()
    with pytest.raises(
        memsaver.StateError, match=r"aten.sum.*'kept', which is paused; call resume\('kept'\) first"
    ):
        kept.sum()

    def other() -> None:
        saver.report()
        saver.pause("kept")
        with pytest.raises(memsaver.StateError, match="kept"):
            kept.sum()

    at_once(other)
    saver.resume()
    assert kept.sum() == 300
    saver.pause()
    saved = saver.saved(kept, zero_copy=True).view(torch.uint8)
    saved[5] ^= 1  # what somebody else's stray write would do
    with pytest.raises(memsaver.BackendError, match="'kept' changed across a pause"):
        saver.resume()
    assert saver.is_paused("kept")
    saved[5] ^= 1
    saver.resume()
    saver.close()


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "a bit": lambda data: data[len(data) // 2].bitwise_xor_(16),
    "the last bit": lambda data: data[-1].bitwise_xor_(128),
    "two words swapped": lambda data: (
        data[:32].view(2, 16).copy_(data[:32].view(2, 16).flip(0).clone())
    ),
    "shifted": lambda data: data.copy_(data.roll(8)),
    "zeroed": torch.Tensor.zero_,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("nbytes", [64, 1003, 3 * (8 << 16) + 5])
def test_checksums_notice_a_change(device: str, change: str, nbytes: int) -> None:
    generator = torch.Generator().manual_seed(nbytes)
    data = torch.randint(0, 256, (nbytes + 128,), dtype=torch.uint8, generator=generator).to(device)

    def view(offset: int, nbytes: int) -> torch.Tensor:
        return data[offset : offset + nbytes]

    taken = Checksums.take("kv_cache", [(0, 64), (64, nbytes), (64 + nbytes // 8 * 8, 16)], view)
    taken.verify(view, 1 << 40)
    data[-1] ^= 1  # outside every range
    taken.verify(view, 1 << 40)
    CHANGES[change](view(64, nbytes))
    with pytest.raises(
        memsaver.BackendError, match=f"'kv_cache'.*{nbytes} bytes at offset 64 differ.*of 3 ranges"
    ):
        taken.verify(view, 1 << 40)
