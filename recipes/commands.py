"""The subcommands of `memsaver`: a row of COMMANDS and a function each. What they do is imported
when they run.

A command's function takes the parsed arguments and returns the exit status. RecipeError and
RunError become one line and an exit status in `recipes.cli`.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from recipes.errors import RecipeError


class Command(NamedTuple):
    name: str
    help: str
    description: str
    arguments: Callable[[ArgumentParser], None]
    execute: Callable[[Namespace], int]


def add_words(parser: ArgumentParser) -> None:
    """A recipe and its overrides; the overrides may stand anywhere on the line."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RECIPE [KEY=VALUE ...]",
        help="YAML file or packaged name, then overrides",
    )


def recipe_and_overrides(arguments: Namespace) -> tuple[str | None, list[str]]:
    """Returns what `add_words` took: the recipe (None where there are only overrides) and these."""
    words = list(arguments.words)
    recipe = words.pop(0) if words and "=" not in words[0] else None
    return recipe, words


def _run_arguments(parser: ArgumentParser) -> None:
    add_words(parser)
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="where to write (default runs/RECIPE-DATE-TIME)"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="DIR",
        help="continue the run in DIR from its last checkpoint",
    )


def _run(arguments: Namespace) -> int:
    from recipes.run import continue_run, start_run

    recipe, overrides = recipe_and_overrides(arguments)
    if arguments.resume is not None:
        if arguments.run_dir is not None:
            raise RecipeError(
                "--run-dir: --resume continues in its own folder; give one of the two"
            )
        continue_run(arguments.resume, recipe, overrides)
    elif recipe is None:
        raise RecipeError("run: names no recipe; try: memsaver run tiny")
    else:
        start_run(recipe, overrides, arguments.run_dir)
    return 0


def _plan_arguments(parser: ArgumentParser) -> None:
    add_words(parser)
    parser.add_argument("--gpu", metavar="GPU[:N]", help="on N of these instead, as h100-80gb:8")
    parser.add_argument(
        "--unstaged",
        action="store_true",
        help="wake all of the engine before the sync, as others do",
    )
    parser.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="of the longest prompt (default: the task's)"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw it, too")
    parser.add_argument(
        "--into", type=Path, metavar="RUN", help="write RUN/plan.json, for memsaver report"
    )


def _plan(arguments: Namespace) -> int:
    from recipes.planner.command import plan_recipe

    recipe, overrides = recipe_and_overrides(arguments)
    if recipe is None:
        raise RecipeError("plan: names no recipe; try: memsaver plan qwen2.5-7b")
    return plan_recipe(recipe, overrides, arguments)


def _fetch_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="smollm2-135m")
    parser.add_argument(
        "--to", type=Path, metavar="DIR", help="models folder (default ~/.cache/memsaver/models)"
    )
    parser.add_argument(
        "--from", type=Path, metavar="FILE.gguf", dest="from_gguf", help="convert it, no download"
    )


def _fetch(arguments: Namespace) -> int:
    from recipes.setup.fetch import fetch

    fetch(arguments.name, to=arguments.to, from_gguf=arguments.from_gguf)
    return 0


def _report_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="the folder of a run, finished or not"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE.html", help="where to write (default RUN/report.html)"
    )


def _report(arguments: Namespace) -> int:
    from recipes.watch.report import write_report

    print(write_report(arguments.run, arguments.out))
    return 0


def _doctor_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--device", metavar="DEVICE", help="cuda:N, or cpu for no GPU (default: the current GPU)"
    )


def _doctor(arguments: Namespace) -> int:
    from memsaver.doctor import report

    return report(arguments.device)


PLAN = "Bytes of every stage, process, GPU and host before anything is run; "
PLAN += "exit status 3: does not fit."
REPORT = "Write one HTML page about a run; it needs no other file and no network."
DOCTOR = "Examine this machine; exit status 1 when a check failed."
COMMANDS = (
    Command("run", "run a recipe", "Run a recipe, or continue a run.", _run_arguments, _run),
    Command("plan", "what a recipe takes", PLAN, _plan_arguments, _plan),
    Command(
        "fetch", "bring a model", "Bring a model into the models folder.", _fetch_arguments, _fetch
    ),
    Command("report", "write a page about a run", REPORT, _report_arguments, _report),
    Command("doctor", "examine this machine", DOCTOR, _doctor_arguments, _doctor),
)
