"""Shared parts of the cases of `bench_sync.py`: sizes, contents, figures with floors, processes."""

from __future__ import annotations

import math
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import GIB, MIB, Figure, Figures, Scale, fields_of, figures, write_config
from recipes.setup.model_files import meta_model
from tests.helpers.peers import Failed, Gone, Peer, server
from tests.helpers.ranks import start_ranks

Shape = tuple[int, ...]
Shapes = dict[str, Shape]

# Norms and routers are on every tensor-parallel rank. Other parameters are split along dimension 0,
# except for these.
_WHOLE = ("norm.weight", "mlp.gate.weight")
_COLUMNS = {
    "o_proj.weight": 1,
    "down_proj.weight": 1,
    "experts.gate_up_proj": 1,
    "experts.down_proj": 2,
}
_TINY_EXPERTS = {
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
TARGET = torch.bfloat16  # dtype of every engine
WARMUP, RANKS = 2, 2


@dataclass(frozen=True, kw_only=True)
class Source:
    """The parameters of a trainer.

    Attributes:
        dtype: Name of the torch dtype, "bfloat16" or "float32".
        fields: Fields of the model's configuration.
        shapes: Shapes by name; Qwen2.5-7B has 339.
    """

    dtype: str
    fields: dict[str, Any]
    shapes: Shapes

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def params(self) -> int:
        return count(self.shapes)

    @property
    def copied(self) -> int:
        """Return the bytes that one pass reads and writes."""
        return self.params * (self.torch_dtype.itemsize + TARGET.itemsize)

    @property
    def experts(self) -> bool:
        return any(".experts." in name for name in self.shapes)

    def save(self, folder: str) -> Path:
        """Write a model directory without weights."""
        return write_config(Path(folder) / "model", self.fields)

    def __str__(self) -> str:
        return f"{self.dtype} -> bfloat16, {self.params / 1e9:.2f} G"


@dataclass(frozen=True, kw_only=True)
class SyncScale(Scale):
    """Where and how large the cases of a sync run.

    Attributes:
        sources: Sources, for each of which every case runs.
        repeats: Measured rounds.
        bucket: Bytes of staging that rivals with buckets use.
        seconds: Time limit of a case, after which its processes are killed.
    """

    sources: tuple[Source, ...]
    repeats: int
    bucket: int
    seconds: float = 60.0

    def place(self, rank: int = 0) -> torch.device:
        return torch.device("cuda", rank) if self.on_gpu else self.device


def sync_scale(
    scale: Scale, shape: str, layers: Mapping[str, int | None], repeats: int
) -> SyncScale:
    """Return the scale of a sync.

    Args:
        scale: The scale of all benchmarks.
        shape: A recipe's `model.shape`.
        layers: Number of layers by the source's dtype; None: the shape's own.
        repeats: Measured rounds.
    """
    sources = tuple(_source(scale, shape, dtype, count) for dtype, count in layers.items())
    sizes = {"repeats": scale.choose(repeats, 1), "bucket": scale.choose(2 * GIB, 5000)}
    return SyncScale(**vars(scale), sources=sources, **sizes)


def _source(scale: Scale, shape: str, dtype: str, layers: int | None) -> Source:
    fields = fields_of(scale, shape, layers)
    if scale.tiny and "num_experts" in fields:
        fields |= _TINY_EXPERTS
    params = meta_model(fields).named_parameters()
    shapes = {name: tuple(param.shape) for name, param in params}
    return Source(dtype=dtype, fields=fields, shapes=shapes)


def synced(
    scale: SyncScale,
    what: str,
    ms: float,
    copied: int = 0,
    linked: int = 0,
    rise: int | None = None,
    parts: Mapping[str, float] | None = None,
) -> Figures:
    """Return the figures of one way to sync, with the floor of the bytes that must be moved.

    The floor's copies on the device and over the link overlap.

    Args:
        scale: The scale, with its rates.
        what: Name of the way.
        ms: Milliseconds of a sync.
        copied: Bytes that the floor reads and writes on a device.
        linked: Bytes that the floor receives over the link.
        rise: Peak bytes of the device, used by all processes, above the use before; None: not
            measured.
        parts: Milliseconds of the phases.
    """
    measured = [Figure(what=what, value=ms)]
    if floor := 1e3 * max(copied / scale.copy_rate, linked / scale.link_rate if linked else 0.0):
        measured += [
            Figure(what=what, value=floor, unit="ms, floor"),
            Figure(what=what, value=ms / floor, unit="x floor"),
        ]
    if rise is not None:
        measured.append(Figure(what=what, value=rise / MIB, unit="MiB of the device more"))
    return measured + figures(parts or {}, "ms of it", f"{what}: ")


# ---------------------------------------------------------------- shapes and boxes


def count(shapes: Shapes) -> int:
    """Return the number of elements of all parameters."""
    return sum(math.prod(shape) for shape in shapes.values())


def tp_dim(name: str, needs: str) -> int | None:
    """Return the dimension that tensor parallelism splits; None: every rank has the whole tensor.

    With needs="ep", experts are split by expert.
    """
    if name.endswith(_WHOLE):
        return None
    if needs == "ep" and ".experts." in name:
        return 0
    return next((dim for end, dim in _COLUMNS.items() if name.endswith(end)), 0)


def moves(shapes: Shapes, needs: str, aligned: bool = False) -> tuple[int, int]:
    """Return the elements that one of two ranks receives: (on the device, over the link).

    It receives all parameters, or with needs="tp" or "ep" its slices of them and whole norms.
    Shards are halves along dimension 0, or if `aligned` along the engine's slices, and norms along
    dimension 0.
    """
    sizes = {None: 0, False: 0, True: 0}  # by whether they are split along another dimension than 0
    for name, shape in shapes.items():
        assert all(length % RANKS == 0 for length in shape), (
            f"{name} {shape} does not divide by {RANKS}"
        )
        dim = tp_dim(name, needs)
        sizes[None if dim is None else dim > 0] += math.prod(shape)
    norms, rows, columns = sizes.values()
    if needs == "replica":
        return (norms + rows + columns) // 2, (norms + rows + columns) // 2
    # half of its columns are in the other rank's rows
    linked = norms // 2 + (0 if aligned else columns // 4)
    return norms + (rows + columns) // 2 - linked, linked


# ---------------------------------------------------------------- contents


def content(name: str, shape: Shape, device: torch.device) -> Tensor:
    """Return fp32 values that depend on the name, but not on the process."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, device=device)


def make_source(source: Source, device: torch.device) -> dict[str, Tensor]:
    return {
        name: content(name, shape, device).to(source.torch_dtype)
        for name, shape in source.shapes.items()
    }


def make_target(source: Source, device: torch.device) -> dict[str, Tensor]:
    """Return zeros, so that a parameter that is not written fails the check."""
    return {
        name: torch.zeros(shape, dtype=TARGET, device=device)
        for name, shape in source.shapes.items()
    }


def check(target: Mapping[str, Tensor], source: Source) -> None:
    """Check that the target has the bits of the cast source."""
    assert list(target) == list(source.shapes), "other parameters than the source's"
    for name, tensor in target.items():
        expected = (
            content(name, source.shapes[name], tensor.device).to(source.torch_dtype).to(TARGET)
        )
        assert torch.equal(tensor.view(torch.int16), expected.view(torch.int16)), (
            f"{name} was not synced"
        )


# ---------------------------------------------------------------- processes


def answers(peers: Sequence[Peer], seconds: float) -> list[Any]:
    """Return the result of each process, and end all of them, which frees their device memory.

    Raises:
        ExceptionGroup: Some processes raised, died, or did not answer in time.
    """
    results, failures = [], list[Exception]()
    try:
        for peer in peers:
            try:
                results.append(peer.hear(5.0 if failures else seconds))
            except (Failed, Gone, AssertionError) as error:
                failures.append(error)
    finally:
        for peer in peers:
            peer.kill()
        for peer in peers:
            peer.process.join()
    if failures:
        raise ExceptionGroup("processes of the case", failures)
    return results


def _answer(pipe: Connection, run: Callable[..., Any], args: tuple[Any, ...]) -> None:
    pipe.send(run(*args))
    # wait until all have answered: a process that ends takes connections and shared memory along
    pipe.poll(60)


def alone(scale: SyncScale, run: Callable[..., Any], *args: Any) -> Any:
    """Run a function in its own process, which frees its device memory at the end."""
    return answers([Peer(_answer, run, args)], scale.seconds)[0]


def pair(
    scale: SyncScale, trainer: Callable[..., Any], engine: Callable[..., Any], *args: Any
) -> list[Any]:
    """Run `trainer` and `engine` in two processes, each with a pipe to the other."""
    ends = server.Pipe()
    peers = [
        Peer(_answer, run, (end, *args)) for run, end in zip((trainer, engine), ends, strict=True)
    ]
    for end in ends:
        end.close()  # only the processes keep them, so that each notices if the other is gone
    return answers(peers, scale.seconds)


def ranks(scale: SyncScale, run: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `run(rank, scale, *args)` on ranks of a default group: NCCL with a GPU each, or gloo."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if scale.on_gpu else "gloo"
        start = partial(start_ranks, seconds=scale.seconds, backend=backend)
        return answers(start(run, RANKS, Path(folder) / "store", scale, *args), scale.seconds)
