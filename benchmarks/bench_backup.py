"""Saved content against torch_memory_saver and the copy rate: host copies, clean tags, swap.

`make bench-backup`. Every case checks the restored content.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks import common
from benchmarks.common import GIB, MIB, Case, Figure, Figures, Scale, Times, figures
from benchmarks.rival_tms import in_its_process
from memsaver import MemorySaver
from tests.helpers.memsaver.savers import driver_calls

COUNT, TENSOR = 182, 45 * MIB  # 8 GiB
REPEATS = 5
Run = Callable[[], object]


def immediately(scale: Scale) -> None:
    return


def cycles(
    scale: Scale, pause: Run, resume: Run, between: Callable[[Scale], object] = immediately
) -> Times:
    times = Times(REPEATS)
    for _ in times.rounds:
        times("pause", pause)
        between(scale)
        times("resume", resume)
    return times


def floor(scale: Scale) -> Figures:
    """Measure one copy of 8 GiB between pinned memory and the device, one way and both ways."""
    half = scale.choose(4 * GIB, MIB)
    host = torch.empty(half, dtype=torch.uint8, pin_memory=scale.on_gpu)
    device = torch.empty(half, dtype=torch.uint8, device=scale.device)
    other_host, other = torch.empty_like(host, pin_memory=scale.on_gpu), torch.empty_like(device)
    inward = torch.cuda.Stream() if scale.on_gpu else None

    def both() -> None:
        host.copy_(device, non_blocking=True)
        with torch.cuda.stream(inward):
            other.copy_(other_host, non_blocking=True)

    ways: dict[str, Run] = {
        "pause": lambda: host.copy_(device, non_blocking=True),
        "resume": lambda: device.copy_(host, non_blocking=True),
        "both, each way": both,
    }
    return figures({name: 2 * common.median_ms(way, REPEATS, 2) for name, way in ways.items()})


@contextmanager
def tensors(
    scale: Scale, count: int = COUNT, content: str = "host", **options: Any
) -> Iterator[tuple[MemorySaver, dict[int, torch.Tensor]]]:
    """Yield a saver and numbered tensors on tag "params"; check the tensors left at the end."""
    saver, nbytes = MemorySaver(scale.device, **options), scale.choose(TENSOR, MIB)
    with saver.region("params", content=content):
        numbered = {
            number: torch.empty(nbytes, dtype=torch.uint8, device=scale.device)
            for number in range(scale.choose(count, 4))
        }
    for number, tensor in numbered.items():
        tensor.fill_(number % 251)
        tensor[-1] = 255 - number % 251
    del tensor
    yield saver, numbered
    for number in list(numbered):
        tensor = numbered.pop(number)
        assert bool((tensor[:-1] == number % 251).all()) and int(tensor[-1]) == 255 - number % 251
    del tensor
    saver.close()


def to_the_host(release: str, between: Callable[[Scale], object], scale: Scale) -> Figures:
    """Measure cycles with content on the host; at the "first pause" nothing is pinned."""
    with tensors(scale) as (saver, _):
        saver.pinned_arena.trim()
        pause = partial(saver.pause, "params", release=release)
        resume = partial(saver.resume, "params")
        times = cycles(scale, pause, resume, between)
    return figures({"first pause": times.rows["pause"][0], **times.medians})


def rival(*flags: str) -> Case:
    return lambda scale: figures(
        in_its_process(scale, COUNT, TENSOR, "freed", "backup", *flags, repeats=REPEATS)
    )


def clean(scale: Scale) -> Figures:
    with tensors(scale) as (saver, _):

        def pause() -> None:
            saver.mark_clean("params", 1)
            saver.pause("params", release="retain")

        pause()  # compiles the digest's kernel
        saver.resume("params")
        times = cycles(scale, pause, partial(saver.resume, "params"))
        before = driver_calls(saver)["copy"].nbytes
        pause()
        copied = driver_calls(saver)["copy"].nbytes - before
        saver.resume("params")
    return [*figures(times.medians), *figures({"copied": copied}, "bytes")]


def swap(scale: Scale) -> Figures:
    """Measure a swap of 16 GiB against pause and then resume of the same tags.

    The used memory of the device is sampled during more swaps.
    """
    saver, nbytes = MemorySaver(scale.device), scale.choose(16 * GIB, 8 * MIB)
    one = saver.empty(nbytes, torch.uint8, tag="one", content="host").fill_(1)
    saver.pause("one")
    two = saver.empty(nbytes, torch.uint8, tag="two", content="host").fill_(2)
    for _ in range(2):  # from here on, memory is in pieces
        saver.swap(pause="two", resume="one")
        saver.swap(pause="one", resume="two")

    def serial(away: str, back: str) -> None:
        saver.pause(away, release="retain")
        saver.resume(back)

    turns = [("two", "one"), ("one", "two")] * 3
    in_turn = [common.timed(lambda a=a, b=b: serial(a, b)) for a, b in turns]
    saver.trim()
    swapped = [
        common.timed(lambda a=away, b=back: saver.swap(pause=a, resume=b)) for away, back in turns
    ]
    rise = common.rise_of(
        scale.device, lambda: [saver.swap(pause=away, resume=back) for away, back in turns]
    )
    assert int(two[0]) == int(two[-1]) == 2 and bool((two[::MIB] == 2).all())
    saver.swap(pause="two", resume="one")
    assert bool((one[::MIB] == 1).all())
    del one, two
    saver.close()
    serial_ms, swap_ms = statistics.median(in_turn[2:]), statistics.median(swapped[2:])
    return [
        *figures({"in turn": serial_ms, "swap": swap_ms}),
        Figure(what="swap", value=swap_ms / serial_ms, unit="x in turn"),
        Figure(what="additional device memory", value=rise / MIB, unit="MiB"),
    ]


a_second = partial(common.others_write, nbytes=0)
CASES: dict[str, Case] = {
    "pinned copy": floor,
    "host, extents kept": partial(to_the_host, "retain", immediately),
    "host, extents to the driver, resumed immediately": partial(to_the_host, "driver", immediately),
    "the same, resumed a second later": partial(to_the_host, "driver", a_second),
    "the same, written by others meanwhile": partial(
        to_the_host, "driver", partial(common.others_write, nbytes=COUNT * TENSOR)
    ),
    "torch_memory_saver, retain_cpu_backup": rival("retain"),
    "torch_memory_saver": rival(),
    "marked clean": clean,
    "swap 16 GiB": swap,
}


def bar(name: str, figure: Figure) -> tuple[str, str] | None:
    left_out = name == "torch_memory_saver"  # takes seconds
    return None if left_out or figure.what not in ("pause", "resume") else (name, figure.what)


def main(arguments: list[str] | None = None) -> None:
    args = common.parser(__doc__, CASES).parse_args(arguments)
    scale = common.make_scale(args)
    print(f"{COUNT} tensors of {TENSOR // MIB} MiB (8 GiB) unless said otherwise")
    common.run_cases(
        "bench_backup", {name: partial(CASES[name], scale) for name in args.cases}, args.out, bar
    )


if __name__ == "__main__":
    main()
