"""The harness of all benchmarks: devices and sizes, clocks, floors, figures and their output."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from memsaver.memory import make_backend
from recipes.config.sections import shapes
from recipes.setup.model_files import meta_model

if TYPE_CHECKING:  # rivals' processes import this module, too
    from trainer_bridge import Trainer

MIB, GIB = 1 << 20, 1 << 30
REPEATS, WARMUP = 7, 2


class Skipped(Exception):
    """Raised by a case that this machine cannot run, with the reason."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Where and how large the cases run.

    Attributes:
        device: The device.
        tiny: Whether to use sizes for a test of the scripts, which a CPU can run. Times then mean
            nothing.
        copy_rate: Bytes a second of a large copy on the device in the same run, counting both the
            bytes read and the bytes written.
        link_rate: Bytes a second over the link between two devices, in each direction while both
            are used; 0: there is no link.
    """

    device: torch.device
    tiny: bool = False
    copy_rate: float = 1e9
    link_rate: float = 0.0

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def choose(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full


@dataclass(frozen=True, kw_only=True)
class Figure:
    what: str
    value: float
    unit: str = "ms"


Figures = list[Figure]
Case = Callable[[Scale], Figures]
Run = Callable[[], object]


def figures(values: Mapping[str, float], unit: str = "ms", prefix: str = "") -> Figures:
    return [Figure(what=prefix + what, value=value, unit=unit) for what, value in values.items()]


# ---------------------------------------------------------------- models


TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "tie_word_embeddings": True,
}
NO_END = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}


def fields_of(scale: Scale, shape: str, layers: int | None = None) -> dict[str, Any]:
    """Return the fields of a recipe's `model.shape`, or of a tiny model; no answer stops early.

    `layers` replaces the shape's number of layers.
    """
    fields = shapes()[shape] | NO_END
    if scale.tiny:
        return fields | TINY
    return fields | ({} if layers is None else {"num_hidden_layers": layers})


def write_config(directory: Path, fields: dict[str, Any]) -> Path:
    """Write a model directory without weights."""
    model = meta_model(fields)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    GenerationConfig(eos_token_id=None).save_pretrained(directory)
    return directory


def random_model(scale: Scale, directory: Path, shape: str, dtype: torch.dtype) -> Any:
    """Build a model of a shape, or a tiny one, with random weights, and save it to `directory`.

    The model is on the device and in eval mode.
    """
    config = AutoConfig.from_pretrained(write_config(directory, fields_of(scale, shape)))
    torch.manual_seed(0)
    with scale.device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(directory)
    return model.eval()


@contextmanager
def random_trainer(
    scale: Scale, shape: str, layers: int | None = None, **options: Any
) -> Iterator[Trainer]:
    """Yield a trainer in bf16 of a shape with random weights; `options` are `TrainerConfig`'s."""
    from trainer_bridge import Trainer, TrainerConfig

    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), fields_of(scale, shape, layers))
        fixed: Any = {"random_init": True, "param_dtype": "bfloat16", "device": str(scale.device)}
        trainer = Trainer(TrainerConfig(model_path=folder, **fixed, **options))
        yield trainer
        trainer.close()
        trainer.saver.close()
    settle(scale.device)


# ---------------------------------------------------------------- clocks


def settle(device: torch.device | None = None) -> None:
    """Wait for a device, by default the current one; on the CPU there is nothing to wait for."""
    if torch.cuda.is_initialized() and (device is None or device.type == "cuda"):
        torch.cuda.synchronize(device)


def timed(run: Run, device: torch.device | None = None) -> float:
    """Return the milliseconds of a run, from an idle device to an idle device."""
    settle(device)
    started = time.perf_counter()
    run()
    settle(device)
    return (time.perf_counter() - started) * 1e3


def median_ms(
    run: Run, repeats: int = 10, warmup: int = 3, device: torch.device | None = None
) -> float:
    return statistics.median([timed(run, device) for _ in range(warmup + repeats)][warmup:])


class Times:
    """Milliseconds by name over several rounds, the first of which warm up."""

    def __init__(self, repeats: int = REPEATS, warmup: int = WARMUP) -> None:
        self.rows: dict[str, list[float]] = defaultdict(list)
        self.rounds, self._warmup = range(repeats + warmup), warmup

    def __call__(self, name: str, run: Run) -> None:
        self.rows[name].append(timed(run))

    @property
    def medians(self) -> dict[str, float]:
        return {
            name: statistics.median(values[self._warmup :]) for name, values in self.rows.items()
        }


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each key."""
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


# ---------------------------------------------------------------- floors, and the device's memory


def measured_copy_rate(scale: Scale) -> float:
    """Return the bytes a second of one large copy, the floor of all other copies."""
    source = torch.ones(scale.choose(4 * GIB, MIB), dtype=torch.uint8, device=scale.device)
    target = torch.zeros_like(source)
    ms = median_ms(lambda: target.copy_(source), device=scale.device)
    assert torch.equal(source, target)
    return 2 * source.numel() / (ms / 1e3)


def extent_by_driver(
    device: torch.device, nbytes: int, take: str, give: str, between: Run
) -> dict[str, float]:
    """Measure the driver's calls for one extent, without anything else.

    Args:
        device: The device.
        nbytes: Bytes of the extent.
        take: The name of the time to create and map it.
        give: The name of the time to unmap and release it.
        between: Called after each release.

    Returns:
        Median milliseconds by name.
    """
    backend, times, handle = make_backend(device), Times(), 0
    nbytes = backend.round_up(nbytes)
    address = backend.reserve(nbytes)

    def map_extent() -> None:
        nonlocal handle
        handle = backend.create(nbytes).handle
        backend.map(address, nbytes, handle)
        backend.set_access(address, nbytes)

    def release_extent() -> None:
        backend.unmap(address, nbytes)
        backend.release(handle, nbytes)

    map_extent()
    for _ in times.rounds:
        times(give, release_extent)
        between()
        times(take, map_extent)
    release_extent()
    backend.unreserve(address, nbytes)
    return times.medians


def others_write(scale: Scale, nbytes: int | None) -> None:
    """Write free memory as another engine would between pause and resume.

    `nbytes` of None means nearly all free memory. 0 means to wait until the driver has cleared it.
    """
    if scale.tiny or not scale.on_gpu:
        return
    if nbytes == 0:
        time.sleep(1.0)
        return
    nbytes = torch.cuda.mem_get_info()[0] - 2 * GIB if nbytes is None else nbytes
    torch.full((nbytes,), 255, dtype=torch.uint8, device=scale.device)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@contextmanager
def watched(device: torch.device) -> Iterator[list[int]]:
    """Sample a GPU's used bytes every 0.5 ms in the block, from its first statement on."""
    used, done = list[int](), threading.Event()

    def look() -> None:
        while not done.is_set():
            free, total = torch.cuda.mem_get_info(device)
            used.append(total - free)
            time.sleep(5e-4)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        while not used:
            time.sleep(1e-3)
        yield used
    finally:
        done.set()
        thread.join()


def rise_of(device: torch.device, run: Run) -> int:
    """Return the rise of a GPU's used bytes during a run; 0 on the CPU."""
    if device.type != "cuda":
        run()
        return 0
    settle(device)
    torch.cuda.empty_cache()
    with watched(device) as used:
        run()
        settle(device)
    return max(used) - used[0]


# ---------------------------------------------------------------- scripts


def parser(doc: str | None, cases: Iterable[str] = ()) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--out", type=Path, help="folder for full results as JSON, and for pictures"
    )
    options.add_argument(
        "--tiny", action="store_true", help="sizes for a test of this script; times mean nothing"
    )
    if names := list(cases):
        options.add_argument("--cases", nargs="+", choices=names, default=names)
    return options


def make_scale(args: argparse.Namespace) -> Scale:
    """Choose the GPU, or the CPU for tiny sizes; raise SystemExit if neither is possible.

    A process of torchrun has a GPU of its own.
    """
    if not torch.cuda.is_available() and not args.tiny:
        raise SystemExit("no GPU; --tiny runs this script on the CPU")
    own = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    device = torch.device(own if torch.cuda.is_available() else "cpu")
    return Scale(device=device, tiny=args.tiny)


Bar = Callable[[str, Figure], tuple[str, str] | None]
"""(case, figure) -> the bar of the picture, and the part of the bar; None: not shown."""


def run_cases(
    script: str,
    cases: Mapping[str, Callable[[], Figures]],
    out: Path | None,
    bar: Bar | None = None,
) -> None:
    """Run every case, print a table of all figures, and save full results and a picture.

    If a case fails, the others still run, and SystemExit names it at the end.
    """
    results: dict[str, Figures] = {}
    failed = []
    for name, case in cases.items():
        print(f"{name} ...", flush=True)
        try:
            torch.cuda.empty_cache()
            results[name] = case()
        except Skipped as why:
            print(f"{name}: skipped, {why}", flush=True)
        except Exception:
            traceback.print_exc()
            failed.append(name)
        else:
            print(
                name, {f"{f.what}, {f.unit}": round(f.value, 2) for f in results[name]}, flush=True
            )
    both = [(name, figure) for name, case in results.items() for figure in case]
    head = ["case", "what", "value", "unit"]
    saved = {name: [asdict(figure) for figure in case] for name, case in results.items()}
    report(script, head, [[name, f.what, f.value, f.unit] for name, f in both], saved, out)
    placed = [(place, f) for name, f in both if bar is not None and (place := bar(name, f))]
    if out is not None and placed:
        _draw(out / f"{script}.png", script, placed)
    if failed:
        raise SystemExit(f"failed, see above: {', '.join(failed)}")


def _draw(path: Path, title: str, placed: Sequence[tuple[tuple[str, str], Figure]]) -> None:
    """Draw a bar of parts for each row, the first row on top, with the sum of the parts."""
    from matplotlib.figure import Figure as Picture

    ends: dict[str, float] = {}
    picture = Picture(layout="constrained")
    axes = picture.subplots()
    for part in dict.fromkeys(part for (_, part), _ in placed):
        mine = {name: figure.value for (name, label), figure in placed if label == part}
        axes.barh(
            list(mine), list(mine.values()), left=[ends.get(name, 0.0) for name in mine], label=part
        )
        ends = {**ends, **{name: ends.get(name, 0.0) + value for name, value in mine.items()}}
    for name, total in ends.items():
        axes.text(total, name, f" {total:.1f}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel=placed[0][1].unit.split()[0], title=title)
    axes.margins(x=0.08)
    picture.set_size_inches(9, 0.9 + 0.38 * len(ends))
    picture.legend(fontsize=8, loc="outside lower center", ncols=5)
    picture.savefig(path, dpi=110)


def report(
    script: str,
    head: Sequence[str],
    rows: Sequence[Sequence[object]],
    results: Mapping[str, Any],
    out: Path | None,
) -> None:
    """Print conditions and a Markdown table, and save full results as JSON in the folder `out`."""
    print(conditions())
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(_cell(value) for value in row) + " |", flush=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{script}.json").write_text(
            json.dumps({"conditions": conditions(), **results}, indent=1)
        )


def conditions() -> str:
    """Return the date, hardware and versions in one line."""
    installed = {package.name: package.version for package in importlib.metadata.distributions()}
    versions = [
        f"{name} {installed.get(name, 'absent')}" for name in ("triton", "transformers", "ray")
    ]
    today = time.strftime("%Y-%m-%d")
    return f"{today}; {device_name()}, torch {torch.__version__}, {', '.join(versions)}"


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1 else f"{value:,.1f}"
    return str(value)
