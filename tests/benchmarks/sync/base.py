"""What the cases of `bench_sync.py` share: sizes, contents and their check, clocks, figures."""

from __future__ import annotations

import contextlib
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.benchmarks.common import Sampler
from tests.benchmarks.sync.shapes import Shape, Shapes, count, qwen_shapes

GIB = 1 << 30
TARGET = torch.bfloat16  # of every engine


class Skipped(Exception):
    """A case that this machine can't run; says why."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A trainer's parameters. dtype: as torch names it, "bfloat16" or "float32"."""

    dtype: str
    shapes: Shapes

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def params(self) -> int:
        return count(self.shapes)

    @property
    def layers(self) -> int:
        return sum(name.endswith("q_proj.weight") for name in self.shapes)

    @property
    def copied(self) -> int:
        """Bytes that one pass reads and writes."""
        return self.params * (self.torch_dtype.itemsize + TARGET.itemsize)

    def __str__(self) -> str:
        return f"{self.dtype} -> bfloat16, {self.params / 1e9:.2f} G"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Where and how large the cases run. tiny: sizes for a test of the scripts, whose times mean nothing.

    sources: one run of each case for each. bucket: bytes of staging that bucketed rivals take. seconds: how long a case
    may take before its processes are killed.
    """

    on_gpu: bool
    tiny: bool
    sources: tuple[Source, ...]
    warmup: int = 2
    repeats: int = 5
    bucket: int = 2 * GIB
    seconds: float = 60.0

    @property
    def backend(self) -> str:
        return "nccl" if self.on_gpu else "gloo"

    def device(self, number: int = 0) -> torch.device:
        return torch.device("cuda", number) if self.on_gpu else torch.device("cpu")


def make_scale(on_gpu: bool, tiny: bool, layers: Sequence[int] = (28, 14), repeats: int = 5) -> Scale:
    """layers: of the bf16 and of the fp32 source, at the 7B shape."""
    dtypes = ("bfloat16", "float32")
    if tiny:
        small = tuple(Source(dtype=dtype, shapes=qwen_shapes("tiny")) for dtype in dtypes)
        return Scale(on_gpu=on_gpu, tiny=True, sources=small, warmup=1, repeats=1, bucket=5000)
    pairs = zip(dtypes, layers, strict=True)
    sources = tuple(Source(dtype=dtype, shapes=qwen_shapes("7b", number)) for dtype, number in pairs)
    return Scale(on_gpu=on_gpu, tiny=False, sources=sources, repeats=repeats)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes a second of the same run. copy: of a device's memory, read and written both counted; link: in each of both
    directions at once; 0 where there is no link."""

    copy: float
    link: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One way to do one sync.

    ms: median. copied: bytes that its floor reads and writes on a device; linked: takes in over the link. rise: bytes
    of the device in use, all processes together, at most beyond those before; None: not looked at. parts: ms of its
    phases, medians each.
    """

    what: str
    ms: float
    copied: int = 0
    linked: int = 0
    rise: int | None = None
    parts: Mapping[str, float] = field(default_factory=dict)

    def floor_ms(self, rates: Rates) -> float:
        """Of what must be moved, on the device and over the link at once."""
        link = self.linked / rates.link if self.linked and rates.link else 0.0
        return max(self.copied / rates.copy, link) * 1e3


# ---------------------------------------------------------------- contents


def content(name: str, shape: Shape, device: torch.device) -> Tensor:
    """fp32, other values for each name, the same in every process on the same kind of device."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, device=device)


def make_source(source: Source, device: torch.device) -> dict[str, Tensor]:
    return {name: content(name, shape, device).to(source.torch_dtype) for name, shape in source.shapes.items()}


def make_target(source: Source, device: torch.device) -> dict[str, Tensor]:
    """Zeros: what is not written fails the check."""
    return {name: torch.zeros(shape, dtype=TARGET, device=device) for name, shape in source.shapes.items()}


def check(target: Mapping[str, Tensor], source: Source) -> None:
    """AssertionError names the first parameter whose bits are not the cast source's."""
    assert list(target) == list(source.shapes), "other parameters than the source's"
    for name, tensor in target.items():
        expected = content(name, source.shapes[name], tensor.device).to(source.torch_dtype).to(TARGET)
        assert torch.equal(tensor.view(torch.int16), expected.view(torch.int16)), f"{name} was not synced"


# ---------------------------------------------------------------- clocks


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def elapsed_ms(device: torch.device, run: Callable[[], object]) -> float:
    """From an idle device to an idle device."""
    settle(device)
    started = time.perf_counter()
    run()
    settle(device)
    return (time.perf_counter() - started) * 1e3


def median_ms(scale: Scale, device: torch.device, run: Callable[[], object]) -> float:
    times = [elapsed_ms(device, run) for _ in range(scale.warmup + scale.repeats)]
    return statistics.median(times[scale.warmup :])


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each key."""
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


@contextlib.contextmanager
def memory_rise(device: torch.device) -> Iterator[list[int]]:
    """The list holds, once the block is left, by how many bytes the device's use rose; nothing without a GPU."""
    seen: list[int] = []
    if device.type != "cuda":
        yield seen
        return
    settle(device)
    torch.cuda.empty_cache()
    with Sampler(device) as sampler:
        yield seen
    seen.append(sampler.rise)
