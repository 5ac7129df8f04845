"""The command `memsaver` and its subcommands.

`build_parser` declares the arguments of each subcommand. The function of a subcommand takes the
parsed arguments and returns the exit status, None for 0; it imports what it needs when it runs.

Exit status: 0 done; 1 the run failed (one line names the stage and the cause), a check of the
doctor failed, or a trace found a difference; 2 bad recipe or usage; 3 a plan does not fit; 130 or
143 interrupted or stopped; 141 the reader of the output has gone.
"""

import argparse
import contextlib
import os
import signal
import sys
import threading
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from recipes.config.load import first_sentence, packaged_recipes
from recipes.config.recipe import FIELDS
from recipes.errors import RecipeError, RunError, one_line


def recipe_and_overrides(arguments: Namespace) -> tuple[str | None, list[str]]:
    """Return the recipe (None if the words are all overrides) and the overrides."""
    words = list(arguments.words)
    recipe = words.pop(0) if words and "=" not in words[0] else None
    return recipe, words


def _run(arguments: Namespace) -> None:
    """Run a recipe, or continue a run."""
    if "torch" not in sys.modules:
        print("loading torch ...", flush=True)  # takes some seconds
    from recipes.logs.run_folder import newest_run
    from recipes.run import continue_run, start_run

    recipe, overrides = recipe_and_overrides(arguments)
    if arguments.resume is not None:
        # `--resume steps=80` names no folder, unless a folder has this name.
        if "=" in arguments.resume and not Path(arguments.resume).exists():
            overrides, arguments.resume = [arguments.resume, *overrides], ""
        if arguments.run_dir is not None:
            raise RecipeError(
                "--run-dir: --resume continues in its own folder; give one of the two"
            )
        folder = Path(arguments.resume) if arguments.resume else newest_run()
        if not arguments.resume:
            print(f"resuming {folder}", flush=True)
        continue_run(folder, recipe, overrides)
    elif recipe is None:
        raise RecipeError("run: names no recipe; try: memsaver run tiny")
    else:
        start_run(recipe, overrides, arguments.run_dir)


def _plan(arguments: Namespace) -> int:
    """Print the bytes of every stage before a run; the exit status is 3 if it does not fit."""
    from recipes.planner.command import plan_recipe

    recipe, overrides = recipe_and_overrides(arguments)
    if recipe is None:
        raise RecipeError("plan: names no recipe; try: memsaver plan qwen2.5-7b")
    return plan_recipe(recipe, overrides, arguments)


def _recipes(arguments: Namespace) -> None:
    """List the packaged recipes."""
    names = packaged_recipes()
    for name in names:
        print(f"{name:{max(map(len, names))}}  {first_sentence(name)}")


def _keys(arguments: Namespace) -> None:
    """Print all keys of a recipe as Markdown."""
    import json

    from recipes.config.reference import markdown, schema

    print(json.dumps(schema(), indent=2) if arguments.schema else markdown())


def _fetch(arguments: Namespace) -> None:
    """Fetch a model into the models folder."""
    from recipes.setup.model_files import fetch

    fetch(arguments.name, to=arguments.to, from_gguf=arguments.from_gguf)


def _export(arguments: Namespace) -> None:
    """Export a run's checkpoint as a Hugging Face folder, without a GPU."""
    from recipes.export_run import export_run

    which = {"step": arguments.step, "best": arguments.best}
    print(export_run(arguments.run, arguments.to, merge_adapters=arguments.merge, **which))


def _evaluate(arguments: Namespace) -> None:
    """Evaluate a model as a run does: a recipe's before training, a run's, or any folder's."""
    from recipes.evaluate_model import Question, evaluate_model

    subject, overrides = recipe_and_overrides(arguments)
    if subject is None:
        raise RecipeError("evaluate: names no model; try: memsaver evaluate runs/NAME")
    names = ("recipe", "data", "rewards", "limit")
    question = Question(overrides=overrides, **{name: vars(arguments)[name] for name in names})
    which = {"step": arguments.step, "best": arguments.best}
    evaluate_model(subject, question, out=arguments.out, **which)


def _report(arguments: Namespace) -> None:
    """Write one HTML page about a run, which needs no other file and no network."""
    from recipes.logs.report_page import write_report

    print(write_report(arguments.run, arguments.out))


def _samples(arguments: Namespace) -> None:
    """Print prompts, answers and rewards that a run recorded, by default of its newest row."""
    from recipes.logs.recorded_samples import show_samples

    show_samples(arguments.run, arguments)


def _trace_mismatch(arguments: Namespace) -> int:
    """Name the first operation in which rollout and trainer of an exact run differ.

    The exit status is 1 if there is one.
    """
    from recipes.trace_mismatch import show_trace

    return show_trace(arguments.run, arguments.device)


def _serve(arguments: Namespace) -> None:
    """Serve a model by OpenAI's API, until Ctrl-C."""
    from recipes.serve_model import Service, serve_model

    model, overrides = recipe_and_overrides(arguments)
    if model is None:
        raise RecipeError("serve: names no model; try: memsaver serve smollm2-135m")
    given = {name: value for name, value in vars(arguments).items() if name in SERVICE}
    serve_model(Service(model=model, overrides=overrides, **given))


def _doctor(arguments: Namespace) -> int:
    """Check this machine; the exit status is 1 if a check fails."""
    from memsaver.doctor import report

    return report(arguments.device)


SERVICE = (
    "name", "host", "port", "device", "adapters", "max_waiting", "api_keys", "admin_keys", "paused",
    "tool_format",
)  # fmt: skip
"""Options of `serve` that are fields of `recipes.serve_model.Service`."""
DESCRIPTION = """\
RL post-training of language models; trainer and rollout engine share memory."""
EPILOG = """\
examples:
  memsaver doctor                          check this machine
  memsaver recipes                         list the packaged recipes
  memsaver run tiny                        a random model learns a toy task
  memsaver run qwen2.5-0.5b                random weights, to measure a GPU
  memsaver fetch smollm2-135m              a real model (93 MB), once
  memsaver run smollm2-135m steps=3        GRPO on sums; on a GPU if any
  memsaver run --resume steps=80           continue the newest run
  memsaver export runs/NAME --to my-model  for transformers or vLLM
  memsaver evaluate runs/NAME              figures on held-out problems
  memsaver samples runs/NAME               print some of the newest answers
  memsaver report runs/NAME                write one page about the run
  memsaver serve my-model                  answer requests of OpenAI's API

A run leaves a folder with recipe.yaml, metrics.jsonl, samples.jsonl, trace.json
(open in ui.perfetto.dev), reward.png, memory.png, checkpoints/ and exports/.
"""


class _PrintVersion(argparse.Action):
    """Option that prints the version and exits; only then is torch imported, with memsaver."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import memsaver

        print(f"memsaver {memsaver.__version__}")
        parser.exit()


class _AdapterOption(argparse.Action):
    """Option NAME=DIR, collected as a mapping."""

    def __call__(self, parser: Any, namespace: Namespace, value: Any, option: Any = None) -> None:
        name, equals, folder = value.partition("=")
        if not equals or not name or not folder:
            parser.error(f"argument {option}: {value}: must be NAME=DIR")
        setattr(namespace, self.dest, {**getattr(namespace, self.dest), name: folder})


def at_least(least: int) -> Callable[[str], int]:
    """Return a converter of an argument to an integer that is not below `least`."""

    def integer(text: str) -> int:
        if (number := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{number}: must be at least {least}")
        return number

    return integer


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands; a command's description is its function's docstring."""
    parser = argparse.ArgumentParser(
        prog="memsaver",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        execute: Callable[[Namespace], int | None], brief: str, words: str = ""
    ) -> argparse.ArgumentParser:
        name, text = execute.__name__[1:].replace("_", "-"), execute.__doc__
        own = commands.add_parser(name, help=brief, description=text)
        own.add_argument("--verbose", action="store_true", help="show the traceback of a failure")
        own.set_defaults(execute=execute)
        if words:
            subject, how = words.split(": ")
            shown, how = f"{subject} [KEY=VALUE ...]", f"{how}, then overrides"
            own.add_argument("words", nargs="*", metavar=shown, help=how)
        return own

    _add_recipe_commands(command)
    _add_run_commands(command)
    _add_serve_command(command)
    add = command(_doctor, "check this machine").add_argument
    add("--device", metavar="DEVICE", help="cuda:N, or cpu for no GPU (default: the current GPU)")
    return parser


def _add_recipe_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands about recipes and models; `command` adds one."""
    recipe = "RECIPE: YAML file or packaged name"
    add = command(_run, "run a recipe", recipe).add_argument
    default = "where to write (default runs/RECIPE-DATE-TIME)"
    add("--run-dir", type=Path, metavar="DIR", help=default)
    again = "continue the run in DIR (default: the newest under runs/) from its last checkpoint"
    add("--resume", nargs="?", const="", metavar="DIR", help=again)
    command(_recipes, "list the packaged recipes")
    add = command(_keys, "list all keys of a recipe").add_argument
    add("--schema", action="store_true", help="as a JSON schema, for editors")
    add = command(_plan, "plan the memory of a recipe", recipe).add_argument
    add("--gpu", metavar="GPU[:N]", help="plan for N of these GPUs, such as h100-80gb:8")
    add("--unstaged", action="store_true", help="wake the whole engine before the sync")
    longest = "length of the longest prompt (default: the task's)"
    add("--prompt-tokens", type=int, metavar="N", help=longest)
    add("--picture", type=Path, metavar="FILE.png", help="draw the plan, too")
    add("--into", type=Path, metavar="RUN", help="write RUN/plan.json, for memsaver report")
    add = command(_fetch, "fetch a model").add_argument
    add("name", metavar="NAME", help="smollm2-135m")
    default = "models folder (default memsaver/models in $XDG_CACHE_HOME or ~/.cache)"
    add("--to", type=Path, metavar="DIR", help=default)
    local = "convert this file; no download"
    add("--from", type=Path, metavar="FILE.gguf", dest="from_gguf", help=local)


def _add_serve_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command that serves a model; `command` adds it."""
    subject = "MODEL: model (a folder, a fetched one or ORG/NAME)"
    add = command(_serve, "serve a model over HTTP", subject).add_argument
    add("--name", metavar="NAME", help="name for clients (default: MODEL)")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen (127.0.0.1)")
    add("--port", type=at_least(0), default=8000, metavar="N", help="(8000; 0: a free one)")
    add("--device", choices=("cpu", "cuda"), help="(default: the first GPUs, if there are any)")
    adapter: dict[str, Any] = {"action": _AdapterOption, "dest": "adapters", "default": {}}
    add("--adapter", metavar="NAME=DIR", help="serve adapters of PEFT, too; repeatable", **adapter)
    most = "requests that wait for a first token; more get status 429 (1024)"
    add("--max-waiting", type=at_least(1), default=1024, metavar="N", help=most)
    keys = {"type": Path, "metavar": "FILE"}
    lines = "keys, one in a line, of which a request must have one"
    add("--api-key-file", dest="api_keys", help=lines, **keys)  # type: ignore[arg-type]
    lines = "the same for /pause and /resume, which are off without it"
    add("--admin-key-file", dest="admin_keys", help=lines, **keys)  # type: ignore[arg-type]
    wait = "requests during a pause: wait (default), or refuse with status 503"
    add("--when-paused", dest="paused", choices=("wait", "refuse"), default="wait", help=wait)
    form = "form of tool calls: qwen3, qwen3.5, glm, deepseek-v3 (default: the chat template's)"
    add("--tool-format", metavar="NAME", help=form)


def _add_run_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands about runs; `command` adds one."""
    run: dict[str, Any] = {"type": Path, "metavar": "RUN"}
    run["help"] = "the folder of a run, finished or not"
    own = command(_export, "export a run's model as a Hugging Face folder")
    add, either = own.add_argument, own.add_mutually_exclusive_group().add_argument
    add("run", **run)
    add("--to", type=Path, metavar="DIR", required=True, help="where to write, a new folder")
    add("--merge", action="store_true", help="the whole model with the adapters merged")
    newest = "step of the checkpoint (default: the newest)"
    either("--step", type=at_least(1), metavar="N", help=newest)
    either("--best", action="store_true", help="the checkpoint of the best evaluation")
    several = "MODEL: recipe, folder of a run, or model (a folder or ORG/NAME)"
    own = command(_evaluate, "evaluate a model", several)
    add, either = own.add_argument, own.add_mutually_exclusive_group().add_argument
    add("--recipe", metavar="RECIPE", help="whose sets, rewards and settings to use")
    add("--data", metavar="FILE", help="answer all of this data file instead of the recipe's sets")
    function = "reward function of --data; may be given several times"
    add("--reward", action="append", dest="rewards", default=[], metavar="NAME", help=function)
    most = "problems of each set (default: eval.problems; of --data: all)"
    add("--limit", type=at_least(1), metavar="N", help=most)
    add("--out", type=Path, metavar="DIR", help="new folder for metrics.jsonl and samples.jsonl")
    either("--step", type=at_least(1), metavar="N", help=newest)
    either("--best", action="store_true", help="the checkpoint of the best evaluation")
    add = command(_report, "write a page about a run").add_argument
    add("run", **run)
    add("--out", type=Path, metavar="FILE.html", help="where to write (default RUN/report.html)")
    own = command(_samples, "print answers of a run")
    add, either = own.add_argument, own.add_mutually_exclusive_group().add_argument
    add("run", **run)
    newest = "updates of the row (default: the newest row)"
    add("--step", type=at_least(0), metavar="N", help=newest)
    add("--kind", choices=("train", "eval"), help="answers of training, or of evaluations")
    add("--set", metavar="LABEL", help="answers to problems of this set")
    either("--best", type=at_least(1), metavar="N", help="the N answers of the largest reward")
    either("--worst", type=at_least(1), metavar="N", help="of the smallest, faults first")
    few = "number of answers (default 4; with --json: all); 0: all that are recorded"
    either("--count", type=at_least(0), metavar="N", help=few)
    add("--json", action="store_true", help="print whole records, one in a line")
    add = command(_trace_mismatch, "trace the mismatch of an exact run").add_argument
    add("run", **run)
    add("--device", metavar="DEVICE", help="cuda:N or cpu (default: as in the run)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    `argv` defaults to the command line of the process. The function works in any thread and
    restores signal handlers.
    """
    status = _executed(parse(argv))
    if argv is None and any(thread.name.startswith("tracker ") for thread in threading.enumerate()):
        # It does not answer. Python would wait for its library's threads, which may never end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _executed(arguments: Namespace) -> int:
    with interrupts() as interrupted:
        try:
            status = arguments.execute(arguments) or 0
            sys.stdout.flush()
            return status
        except BrokenPipeError:
            # The reader of a pipe has gone. Without this, Python would fail again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        except RecipeError as error:
            return _fail(2, error, arguments.verbose, *str(error).splitlines())
        except BaseException as error:
            # A library may have turned the interrupt into any other exception.
            if interrupted:
                exec("")  # After an interrupt inside exec(), Python would else exit by SIGINT.
                text = " ".join(["interrupted", *getattr(error, "__notes__", ())])
                return _fail(128 + interrupted[0], error, arguments.verbose, text)
            if not isinstance(error, (RunError, KeyboardInterrupt)):
                raise
            return _fail(1, error, arguments.verbose)


@contextlib.contextmanager
def interrupts() -> Iterator[list[int]]:
    """Raise KeyboardInterrupt for SIGINT and SIGTERM inside the block.

    The block gets the list of received signal numbers, which grows as signals arrive. It also has
    the signals whose KeyboardInterrupt a library turned into another error. Python handles signals
    in the main thread only, so in another thread this changes nothing.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, frame: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    def again(lost: Any) -> None:
        # Python drops an exception raised in a finalizer, so send the signal once more.
        if lost.exc_type is KeyboardInterrupt and received:
            main = threading.main_thread().ident
            threading.Timer(0.01, signal.pthread_kill, (main, received[-1])).start()
        else:
            hook(lost)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    hook, sys.unraisablehook = sys.unraisablehook, again
    try:
        yield received
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line whose overrides may stand anywhere, also after options.

    argparse takes no positional argument after a later option, so the rest is added here.
    """
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    words = getattr(arguments, "words", None)
    strange = [word for word in rest if words is None or word.startswith("-")]
    if strange:
        hint = "" if words is None else _as_override(strange[0], sys.argv if argv is None else argv)
        parser.error(f"unrecognized arguments: {' '.join(strange)}{hint}")
    if words is not None:
        words += rest
    return arguments


def _as_override(option: str, argv: Sequence[str]) -> str:
    """Return the remedy for a recipe's key that was typed as an option."""
    key, equals, value = option.lstrip("-").partition("=")
    if key not in FIELDS:
        return "; a recipe's key has no dashes, for example steps=3"
    following = [*argv[argv.index(option) + 1 :], "VALUE"][0]
    return f"; set {key}={value if equals else following}"


def _fail(status: int, error: BaseException, verbose: bool, *lines: str) -> int:
    if verbose:
        traceback.print_exception(error)
    for line in lines or [one_line(error)]:
        print(f"memsaver: {line}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
