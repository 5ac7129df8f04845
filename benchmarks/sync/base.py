"""What the cases of `bench_sync.py` share: sizes, contents and their check, figures beside floors,
processes.
"""

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
from recipes.setup.models import meta_model
from tests.helpers.peers import Failed, Gone, Peer, server
from tests.helpers.ranks import start_ranks

Shape = tuple[int, ...]
Shapes = dict[str, Shape]

# norms and routers are on every tensor-parallel rank; dimensions that are split otherwise than
# along 0
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
TARGET = torch.bfloat16  # of every engine
WARMUP, RANKS = 2, 2


@dataclass(frozen=True, kw_only=True)
class Source:
    """A trainer's parameters. dtype: as torch names it, "bfloat16" or "float32". shapes: 339 of
    Qwen2.5-7B.
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
        """Bytes that one pass reads and writes."""
        return self.params * (self.torch_dtype.itemsize + TARGET.itemsize)

    @property
    def experts(self) -> bool:
        return any(".experts." in name for name in self.shapes)

    def save(self, folder: str) -> Path:
        """A model directory without weights."""
        return write_config(Path(folder) / "model", self.fields)

    def __str__(self) -> str:
        return f"{self.dtype} -> bfloat16, {self.params / 1e9:.2f} G"


@dataclass(frozen=True, kw_only=True)
class SyncScale(Scale):
    """sources: one run of each case for each. bucket: bytes of staging that bucketed rivals take.
    seconds: how long a case may take before its processes are killed.
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
    """shape: as a recipe's `model.shape`. layers: of the source of each dtype; None: the shape's
    own.
    """
    sources = tuple(_source(scale, shape, *each) for each in layers.items())
    sizes = {"repeats": scale.choose(repeats, 1), "bucket": scale.choose(2 * GIB, 5000)}
    return SyncScale(**vars(scale), sources=sources, **sizes)


def _source(scale: Scale, shape: str, dtype: str, layers: int | None) -> Source:
    fields = fields_of(scale, shape, layers)
    if scale.tiny and "num_experts" in fields:
        fields |= _TINY_EXPERTS
    params = meta_model(fields).named_parameters()
    shapes = {name: tuple(each.shape) for name, each in params}
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
    """One way to do one sync, beside the floor of what must be moved, on the device and over the
    link at once.

    copied: bytes that its floor reads and writes on a device; linked: takes in over the link. rise:
    bytes of the device in use, all processes together, at most beyond those before; None: not
    looked at. parts: ms of its phases.
    """
    found = [Figure(what=what, value=ms)]
    if floor := 1e3 * max(copied / scale.copy_rate, linked / scale.link_rate if linked else 0.0):
        found += [
            Figure(what=what, value=floor, unit="ms, floor"),
            Figure(what=what, value=ms / floor, unit="x floor"),
        ]
    if rise is not None:
        found.append(Figure(what=what, value=rise / MIB, unit="MiB of the device more"))
    return found + figures(parts or {}, "ms of it", f"{what}: ")


# ---------------------------------------------------------------- shapes and boxes


def count(shapes: Shapes) -> int:
    """Elements of all parameters."""
    return sum(math.prod(shape) for shape in shapes.values())


def tp_dim(name: str, needs: str) -> int | None:
    """The dimension that tensor parallel splits, with needs="ep" experts by expert; None: every
    rank holds it whole.
    """
    if name.endswith(_WHOLE):
        return None
    if needs == "ep" and ".experts." in name:
        return 0
    return next((dim for end, dim in _COLUMNS.items() if name.endswith(end)), 0)


def moves(shapes: Shapes, needs: str, aligned: bool = False) -> tuple[int, int]:
    """(local, linked) elements that one of two ranks takes in: all parameters, or with needs="tp"
    or "ep" its slices of them and the norms whole. Shards are halves along dimension 0; aligned:
    along the engine's slices, norms along 0.
    """
    sizes = {None: 0, False: 0, True: 0}  # by whether it is split otherwise than along 0
    for name, shape in shapes.items():
        assert all(length % RANKS == 0 for length in shape), (
            f"{name} {shape} does not divide by {RANKS}"
        )
        dim = tp_dim(name, needs)
        sizes[None if dim is None else dim > 0] += math.prod(shape)
    norms, rows, columns = sizes.values()
    if needs == "replica":
        return (norms + rows + columns) // 2, (norms + rows + columns) // 2
    # of its columns the half that the other rank's rows hold
    linked = norms // 2 + (0 if aligned else columns // 4)
    return norms + (rows + columns) // 2 - linked, linked


# ---------------------------------------------------------------- contents


def content(name: str, shape: Shape, device: torch.device) -> Tensor:
    """fp32, other values for each name, the same in every process on the same kind of device."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, device=device)


def make_source(source: Source, device: torch.device) -> dict[str, Tensor]:
    return {
        name: content(name, shape, device).to(source.torch_dtype)
        for name, shape in source.shapes.items()
    }


def make_target(source: Source, device: torch.device) -> dict[str, Tensor]:
    """Zeros: what is not written fails the check."""
    return {
        name: torch.zeros(shape, dtype=TARGET, device=device)
        for name, shape in source.shapes.items()
    }


def check(target: Mapping[str, Tensor], source: Source) -> None:
    """AssertionError names the first parameter whose bits are not the cast source's."""
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
    """What each process returned. None outlives this, and its device memory is free again;
    ExceptionGroup with what became of those that raised, died, or had no answer in time.
    """
    found, failures = [], list[Exception]()
    try:
        for peer in peers:
            try:
                found.append(peer.hear(5.0 if failures else seconds))
            except (Failed, Gone, AssertionError) as error:
                failures.append(error)
    finally:
        for peer in peers:
            peer.kill()
        for peer in peers:
            peer.process.join()
    if failures:
        raise ExceptionGroup("processes of the case", failures)
    return found


def _answer(pipe: Connection, run: Callable[..., Any], args: tuple[Any, ...]) -> None:
    pipe.send(run(*args))
    # until all were heard: who leaves first takes connections and shared memory along
    pipe.poll(60)


def alone(scale: SyncScale, run: Callable[..., Any], *args: Any) -> Any:
    """In one process: its device memory is free again afterwards."""
    return answers([Peer(_answer, run, args)], scale.seconds)[0]


def pair(
    scale: SyncScale, trainer: Callable[..., Any], engine: Callable[..., Any], *args: Any
) -> list[Any]:
    """`run(pipe, *args)` of both, the pipe to the other."""
    ends = server.Pipe()
    peers = [
        Peer(_answer, run, (end, *args)) for run, end in zip((trainer, engine), ends, strict=True)
    ]
    for end in ends:
        end.close()  # theirs alone: one hears when the other is gone
    return answers(peers, scale.seconds)


def ranks(scale: SyncScale, run: Callable[..., Any], *args: Any) -> list[Any]:
    """`run(rank, scale, *args)` in a default group of NCCL, a GPU each, or of gloo."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if scale.on_gpu else "gloo"
        start = partial(start_ranks, seconds=scale.seconds, backend=backend)
        return answers(start(run, RANKS, Path(folder) / "store", scale, *args), scale.seconds)
