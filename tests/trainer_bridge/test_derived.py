"""LoRA: base + scale * b @ a written from an unmodified base, into the changed modules only."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from tests.helpers.trainer_bridge.layouts import manifest, piece
from tests.helpers.trainer_bridge.targets import PageTarget
from tests.helpers.trainer_bridge.tolerance import assert_merged
from trainer_bridge.derived import DerivedCopies, LowRank
from trainer_bridge.plan import Target, make_plan, torch_dtype
from trainer_bridge.session import WeightSync
from trainer_bridge.sources import SourceShard, fsdp_shards

ROWS, COLUMNS, OTHER = 12, 8, (5,)
SHAPES: Mapping[str, tuple[int, ...]] = {"proj": (ROWS, COLUMNS), "norm": OTHER}
SCALE = 0.5


def tensors(dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {name: torch.randn(shape, generator=generator).to(device, dtype) for name, shape in SHAPES.items()}


def factors(rank: int = 3, seed: int = 5, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn((rank, COLUMNS), generator=generator), torch.randn((ROWS, rank), generator=generator)
    return a.to(device), b.to(device)


def shards_of(dtype: str = "float32") -> list[SourceShard]:
    return [shard for name, shape in SHAPES.items() for shard in fsdp_shards(name, shape, dtype, 1)]


def layout(dtype: str, columns: slice = slice(0, COLUMNS)) -> PageTarget:
    width, size = columns.stop - columns.start, torch_dtype(dtype).itemsize
    proj = piece("proj", 0, (ROWS, width), dtype, global_shape=(ROWS, COLUMNS), start=(0, columns.start))
    norm = piece("norm", (ROWS * width * size + 15) // 16 * 16, OTHER, dtype, index_base=ROWS * COLUMNS)
    return PageTarget(manifest(proj, norm))


@pytest.mark.parametrize(("base_dtype", "target_dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_whole_sync_and_then_the_changed_modules_only(base_dtype: str, target_dtype: str) -> None:
    source, target = tensors(torch_dtype(base_dtype)), layout(target_dtype)
    before = {name: tensor.clone() for name, tensor in source.items()}
    made: dict[str, LowRank] = {}
    shards = shards_of(base_dtype)
    sync = WeightSync(shards, lambda: source, [target], place=target.place, derived=lambda: made)
    whole = sync.sync(1)
    assert torch.equal(target.read(0), source["proj"].to(target.read(0).dtype)), "no factors yet"
    for version, seed in ((2, 5), (3, 6)):
        a, b = factors(seed=seed)
        made["proj"] = LowRank(a=a, b=b, scale=SCALE)
        target.arena[target.layout.slices[1].offset :] = 0x11  # a partial sync leaves it alone
        target.only = ("proj",)
        receipt = sync.sync(version, names=["proj"])
        assert_merged(target.read(0), before["proj"], a, b, SCALE)
        assert receipt.nbytes == target.read(0).nbytes < whole.nbytes
        assert bool((target.arena[target.layout.slices[1].offset :] == 0x11).all())
    assert all(torch.equal(source[name], before[name]) for name in source), "the base was modified"
    target.only = None
    sync.sync(4)
    assert_merged(target.read(0), before["proj"], a, b, SCALE)
    assert torch.equal(target.read(1), source["norm"].to(target.read(1).dtype))


@pytest.mark.parametrize("scratch", [COLUMNS * 4, COLUMNS * 4 * 5, 1 << 20])
def test_pieces_of_any_size_write_the_same(scratch: int, device: str) -> None:
    """Two tensor-parallel slices of columns from one shard, in pieces of one row, of five, and whole."""
    source, (a, b) = tensors(torch.float32, device), factors(device=device)
    halves = [layout("float32", slice(0, 4)), layout("float32", slice(4, 8))]
    shards = shards_of()
    plan = make_plan(shards, [Target(manifest=half.layout, place="here") for half in halves], ["here"])
    copies = [copy for copy in plan.copies(0) if copy.name == "proj"]
    pages = {i: torch.zeros(half.layout.nbytes, dtype=torch.uint8, device=device) for i, half in enumerate(halves)}
    derived = DerivedCopies(copies, source, scratch)
    derived.start(pages, {"proj": LowRank(a=a, b=b, scale=SCALE)})
    digests = derived.digests()
    for number, page in pages.items():
        found = page[: ROWS * 4 * 4].view(torch.float32).view(ROWS, 4)
        mine = slice(number * 4, number * 4 + 4)
        assert_merged(found.cpu(), source["proj"][:, mine].cpu(), a[:, mine].cpu(), b.cpu(), SCALE)
        halves[number].arena[: page.numel()] = page.cpu()
        halves[number].only = ("proj",)
        assert digests[number] % 2**64 == halves[number].digest()


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.zeros(3, COLUMNS), torch.zeros(ROWS - 1, 3), r"proj: b \(11, 3\) @ a \(3, 8\) does not fit the shard"),
        (torch.zeros(3, COLUMNS), torch.zeros(ROWS, 2), r"proj: b \(12, 2\) @ a \(3, 8\) does not fit"),
    ],
)
def test_factors_that_do_not_fit_are_refused_untouched(a: Tensor, b: Tensor, message: str) -> None:
    source, target = tensors(torch.float32), layout("float32")
    shards = shards_of()
    made = {"proj": LowRank(a=a, b=b, scale=1.0)}
    sync = WeightSync(shards, lambda: source, [target], place=target.place, derived=lambda: made)
    with pytest.raises(ValueError, match=f"nothing was written: {message}"):
        sync.sync(1)
    assert target.untouched() and target.version == 0
