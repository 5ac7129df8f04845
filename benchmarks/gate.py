"""The speed gate: run the six benchmarks and compare their ratios with the accepted ones.

`make bench-gate`. A ratio is our time over the time of a rival or a floor in the same run, so that
machines with the same GPU may differ; lower is better. `gate.json` has, by GPU, the accepted value
of each ratio and its noise, the relative spread of repeated runs. `--accept` writes the measured
values there and keeps the noise.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import device_name, parser, report

STORED = Path(__file__).with_name("gate.json")
NOISE = 0.1
"""Relative noise of a ratio without a stored noise."""

Results = Mapping[str, Any]
"""The saved results of a benchmark: lists of figures by case, or figures by name."""


class Ratio(NamedTuple):
    """One ratio of a benchmark's results; None where this machine cannot measure it."""

    name: str
    script: str
    read: Callable[[Results], float | None]


def _value(results: Results, case: str, what: str, unit: str = "ms") -> float | None:
    """Return the case's first figure that is described by `what`, or by a prefix and `what`."""
    for figure in results.get(case, ()):
        named = figure["what"] == what or figure["what"].endswith(f", {what}")
        if named and figure["unit"] == unit:
            return float(figure["value"])
    return None


def _total(results: Results, case: str, whats: Sequence[str]) -> float | None:
    values = [_value(results, case, what) for what in whats]
    return None if None in values else sum(value for value in values if value is not None)


def _over(case: str, rival: str, *whats: str) -> Callable[[Results], float | None]:
    """Return a reader of the time of one case over that of another."""

    def read(results: Results) -> float | None:
        ours, theirs = _total(results, case, whats), _total(results, rival, whats)
        return ours / theirs if ours is not None and theirs else None

    return read


def _rate_over(case: str, rival: str, what: str) -> Callable[[Results], float | None]:
    """Return a reader of the rival's rate over ours: lower is better, as with times."""

    def read(results: Results) -> float | None:
        ours, theirs = _value(results, case, what, ""), _value(results, rival, what, "")
        return theirs / ours if ours and theirs is not None else None

    return read


def _switch_share(case: str) -> Callable[[Results], float | None]:
    def read(results: Results) -> float | None:
        from benchmarks.bench_switch import TO_ROLLOUT, TO_TRAIN

        stages = results[case]
        return sum(stages.get(stage, 0.0) for stage in TO_ROLLOUT + TO_TRAIN) / stages["step"]

    return read


def _step_over_work(results: Results) -> float | None:
    times = results["ms"].get("256 samples, depth 1", {})
    return times["step"] / times["device works"] if "device works" in times else None


SLEEP = ("level 2, 0.5 s: sleep", "level 2, 0.5 s: wake weights", "level 2, 0.5 s: wake kv_cache")
RATIOS = (
    Ratio(
        "14.9 GiB paused and resumed, kept for other tags / by the driver alone",
        "bench_memory",
        _over("memsaver, kept", "driver's floor, clean", "pause", "resume"),
    ),
    Ratio(
        "14.9 GiB paused and resumed through the driver / by the driver alone",
        "bench_memory",
        _over("memsaver, driver, clean", "driver's floor, clean", "pause", "resume"),
    ),
    Ratio(
        "8 GiB paused with content / pinned copy",
        "bench_backup",
        _over("host, extents kept", "pinned copy", "pause"),
    ),
    Ratio(
        "8 GiB resumed with content / pinned copy",
        "bench_backup",
        _over("host, extents kept", "pinned copy", "resume"),
    ),
    Ratio(
        "cast, copy and digest of a 7B sync / bandwidth floor",
        "bench_sync",
        lambda results: _value(results, "memsaver", "cast, copy and digest", "x floor"),
    ),
    Ratio(
        "whole 7B sync, verified / bandwidth floor",
        "bench_sync",
        lambda results: _value(results, "memsaver", "whole sync over Ray actors", "x floor"),
    ),
    Ratio(
        "256 x (128 + 128) tokens generated, 0.5B / transformers.generate",
        "bench_generate",
        lambda results: (
            results["ms"]["engine, sampled"] / results["ms"]["transformers.generate, sampled"]
        ),
    ),
    Ratio(
        "decode step of 256 samples, 0.5B / the device's work",
        "bench_steps",
        _step_over_work,
    ),
    Ratio(
        "switch of a 0.5B step, everything resident / step",
        "bench_switch",
        _switch_share("everything stays"),
    ),
    Ratio(
        "switch of a 0.5B step, everything offloaded / step",
        "bench_switch",
        _switch_share("everything is offloaded"),
    ),
    Ratio(
        "vLLM's sleep 2 and wake-ups, 7B / its own",
        "bench_vllm",
        _over("memsaver", "its own", *SLEEP),
    ),
    Ratio(
        "vLLM's tokens a second alone / on our tags, 7B",
        "bench_vllm",
        _rate_over("memsaver", "its own", "new tokens a second, before the cycles"),
    ),
)
ARGUMENTS = {
    "bench_memory": [
        "--cases",
        "memsaver, kept",
        "memsaver, driver, clean",
        "driver's floor, clean",
    ],
    "bench_backup": ["--cases", "pinned copy", "host, extents kept"],
    "bench_sync": ["--cases", "memsaver"],
    "bench_generate": [],
    "bench_steps": [],
    "bench_switch": ["--steps", "5"],
    "bench_vllm": ["--quick", "--cycles", "0"],
}


def measure(scripts: Sequence[str], folder: Path, *flags: str) -> dict[str, float | None]:
    """Run benchmarks; return their ratios by name, None for a ratio that was not measured."""
    ratios: dict[str, float | None] = {}
    for script in scripts:
        arguments = ["--out", str(folder), *ARGUMENTS[script], *flags]
        importlib.import_module(f"benchmarks.{script}").main(arguments)
        results = json.loads((folder / f"{script}.json").read_text())
        ratios |= {ratio.name: ratio.read(results) for ratio in RATIOS if ratio.script == script}
    return ratios


def judge(
    measured: Mapping[str, float | None], stored: Mapping[str, Mapping[str, float]]
) -> tuple[list[list[object]], list[str]]:
    """Return the rows of the table, and the names of ratios that are slower beyond noise."""
    rows, slower = [], []
    for name, value in measured.items():
        known = stored.get(name)
        if value is None or known is None:
            verdict = "not measured" if value is None else "nothing stored"
        elif value > known["ratio"] * (1 + known["noise"]):
            verdict = "SLOWER"
            slower.append(name)
        else:
            verdict = "ok"
        cells = (known["ratio"], f"{100 * known['noise']:.0f} %") if known else ("", "")
        rows.append([name, "" if value is None else f"{value:.3g}", *cells, verdict])
    return rows, slower


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__, ARGUMENTS)
    options.add_argument("--accept", action="store_true", help="store the measured ratios")
    options.add_argument("--stored", type=Path, default=STORED, help="the accepted ratios")
    args = options.parse_args(arguments)
    by_gpu = json.loads(args.stored.read_text()) if args.stored.exists() else {}
    stored = by_gpu.get(device_name(), {})
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--tiny"] if args.tiny else []
        measured = measure(args.cases, args.out or Path(folder), *flags)
    rows, slower = judge(measured, stored)
    head = ["ratio, lower is better", "measured", "accepted", "noise", ""]
    report("bench_gate", head, rows, {"ratios": measured}, args.out)
    if args.accept:
        accepted = {
            name: {"ratio": round(value, 4), "noise": stored.get(name, {}).get("noise", NOISE)}
            for name, value in measured.items()
            if value is not None
        }
        by_gpu[device_name()] = {**stored, **accepted}
        args.stored.write_text(json.dumps(by_gpu, indent=1) + "\n")
    elif not stored:
        raise SystemExit(
            f"no ratio is accepted for {device_name()}; --accept stores those measured"
        )
    elif slower:
        raise SystemExit(f"slower than accepted, beyond noise: {'; '.join(slower)}")


if __name__ == "__main__":
    main()
