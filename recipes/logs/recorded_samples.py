"""Answers on record: samples.jsonl of a run, and the command `memsaver samples`."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from recipes.errors import RecipeError, counted
from recipes.logs.metric_rows import METRICS, SAMPLES, Row, position_of, whole_rows
from recipes.logs.run_folder import check_holds_run

FAULTY = 16  # further answers of a row that are recorded because they have a fault
FEW = 4  # samples that the command prints by default
LONGEST = 1000  # characters of one text in tables
Item = TypeVar("Item")
COLUMNS = ("set", "prompt", "answer", "completion", "reward", "correct", "finish_reason", "tokens")


def records_of(batches: Sequence[tuple[Any, Sequence[Any]]], row: Row, limit: int) -> list[Row]:
    """Return the samples of a row for samples.jsonl.

    Whole groups are taken, from every set in turn. If a step has room for fewer groups than it has
    sets, the step's number decides which set comes first. Answers with a fault are added.

    Args:
        batches: The row's answers (`recipes.loops.sampling.Samples`) with their scores.
        row: The row, of which kind and step are read.
        limit: Largest number of answers; 0: none, not even faulty ones.

    Returns:
        Records that JSON can hold.
    """
    if not limit:
        return []
    groups = _groups_of(batches)
    chosen: list[_Answer] = []
    for group in _by_set(groups, row["step"] if row["kind"] == "train" else 0):
        if chosen and len(chosen) + len(group) > limit:
            break
        chosen += group[:limit]
    answers = list(itertools.chain.from_iterable(groups))
    taken = set(map(id, chosen))
    faulty = [id(answer) for answer in answers if answer.score.fault and id(answer) not in taken]
    taken |= {*faulty[:FAULTY]}
    head = {"kind": row["kind"], "step": row["step"]}
    return [{**head, **_record(*answer)} for answer in answers if id(answer) in taken]


class _Answer(NamedTuple):
    """An answer: its samples, its score, its place in these, and the number of its prompt."""

    samples: Any
    score: Any
    place: int
    group: int


def _groups_of(batches: Sequence[tuple[Any, Sequence[Any]]]) -> list[list[_Answer]]:
    """Return the answers in groups of the same prompt, whose answers are adjacent."""
    groups: list[list[_Answer]] = []
    for samples, scores in batches:
        prompts = map(id, samples.problems)
        places = itertools.groupby(enumerate(prompts), key=itemgetter(1))
        for number, (_, group) in enumerate(places, len(groups)):
            groups.append([_Answer(samples, scores[at], at, number) for at, _ in group])
    return groups


def _by_set(groups: Sequence[list[_Answer]], turn: int) -> list[list[_Answer]]:
    """Order groups so that sets take turns; `turn` decides which set comes first."""
    sets = [group[0].samples.tasks[group[0].place].name for group in groups]
    names = sorted({*sets})
    ranks = {name: (number - turn) % len(names) for number, name in enumerate(names)}
    ordered = sorted(zip(sets, groups, strict=True), key=lambda pair: ranks[pair[0]])
    return [group for _, group in _in_turn(ordered, itemgetter(0))]


def _in_turn(items: Iterable[Item], owner: Callable[[Item], Any]) -> list[Item]:
    """Order items so that owners take turns: the first item of each owner, then the second."""
    seen = Counter[Any]()

    def turn(item: Item) -> int:
        seen[key := owner(item)] += 1
        return seen[key]

    return sorted(items, key=turn)


def _record(samples: Any, score: Any, place: int, group: int) -> Row:
    problem, versions = samples.problems[place], samples.weight_versions
    talk = samples.conversations[place] if samples.conversations else None
    return {
        "set": samples.tasks[place].name,
        "group": group,
        "prompt": problem.prompt,
        "answer": problem.answer,
        "completion": text_of(talk.messages) if talk else samples.texts[place],
        "reward": score.reward,
        "correct": score.correct,
        "figures": dict(score.figures),
        "fault": score.fault,
        "finish_reason": "stop" if samples.ended[place] else "length",
        "tokens": samples.lengths[place],
        "weight_versions": None if versions is None else versions.runs(place),
        **({"messages": talk.messages} if talk else {}),
    }


def read_samples(folder: Path) -> list[Row]:
    """Return the samples of the rows that metrics.jsonl has; skip the rest of a killed run."""
    places = set(map(position_of, whole_rows(folder / METRICS)))
    return [sample for sample in whole_rows(folder / SAMPLES) if position_of(sample) in places]


def text_of(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a prompt as one text, the messages of a chat below each other with their roles."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(map(_line_of, prompt))


def _line_of(message: Mapping[str, Any]) -> str:
    """Return a message with its role, and the tools that it calls."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    texts = [str(message.get("content")), *(f"{c['name']}({c['arguments']})" for c in calls)]
    return f"{message.get('role')}: {' '.join(filter(None, texts))}"


def cells(sample: Mapping[str, Any]) -> list[Any]:
    """Return the cells of a sample in a table with `COLUMNS`."""
    return [text_of(sample[key]) if key == "prompt" else sample[key] for key in COLUMNS]


def printable(text: str) -> str:
    """Return a text with the characters escaped that could steer a terminal; line ends stay."""
    return "".join(
        char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text
    )


def shortened(text: str) -> str:
    """Return a text for a table, cut to `LONGEST` characters."""
    more = len(text) - LONGEST
    return text if more <= 0 else f"{text[:LONGEST]} ... {more} more characters"


# ---------------------------------------------------------------- the command


def show_samples(run_dir: Path, arguments: Any, console: Console | None = None) -> None:
    """Print samples of a run, by default the first ones of its newest row.

    Args:
        run_dir: Folder of the run.
        arguments: The attributes kind, set, step, best, worst, count and json of the command line.
        console: Where to print; by default to the standard output.

    Raises:
        RecipeError: The folder holds no run, no samples, or none of the given kind.
    """
    chosen, left = _asked(run_dir, arguments)
    if arguments.json:
        for sample in chosen:
            print(json.dumps(sample))
        return
    console = console or Console()
    for sample in chosen:
        console.print(Text(printable(_head(sample)), "bold"))
        console.print(_texts(sample))
    if left:
        rest = counted(left, "further sample")
        console.print(Text(f"{rest} of this row; --count 0 shows all, --json whole texts"))


def _asked(run_dir: Path, arguments: Any) -> tuple[list[Row], int]:
    """Return the samples to show, and how many more answer the request."""
    place = f"samples {run_dir}"
    check_holds_run("samples", run_dir, [METRICS])
    recorded = read_samples(run_dir)
    if not recorded:
        raise RecipeError(f"{place}: no sample is recorded yet; a run with samples=16 records them")
    wanted = {"kind": arguments.kind, "set": arguments.set, "step": arguments.step}
    wanted = {key: value for key, value in wanted.items() if value is not None}
    samples = _matching(recorded, wanted)
    if not samples:
        asked = ", ".join(f"{key}={value}" for key, value in wanted.items())
        raise RecipeError(f"{place}: no sample with {asked}; there are {_contents(recorded)}")
    if arguments.step is None:
        samples = _matching(samples, {key: samples[-1][key] for key in ("kind", "step")})
    if count := arguments.best or arguments.worst:
        samples.sort(key=_reward, reverse=bool(arguments.best))
        return samples[:count], 0
    if arguments.count == 0 or (arguments.count is None and arguments.json):
        return samples, 0
    count = FEW if arguments.count is None else arguments.count
    samples = _in_turn(samples, itemgetter("kind", "group"))
    return samples[:count], len(samples[count:])


def _matching(samples: Iterable[Row], wanted: Row) -> list[Row]:
    return [sample for sample in samples if wanted.items() <= sample.items()]


def _reward(sample: Row) -> float:
    """Return the reward, or minus infinity for an answer without one."""
    return -math.inf if sample["reward"] is None else sample["reward"]


def _contents(samples: Sequence[Row]) -> str:
    """Return which rows and sets have samples, in words."""
    steps: dict[str, list[int]] = {}
    for sample in samples:
        steps.setdefault(sample["kind"], []).append(sample["step"])
    rows = [f"kind={kind} of steps {min(n)} to {max(n)}" for kind, n in steps.items()]
    sets = sorted({sample["set"] for sample in samples})
    return f"{' and '.join(rows)}, of {', '.join(sets)}"


def _head(sample: Row) -> str:
    """Return a line with the figures of a sample."""
    reward = sample["reward"]
    parts = [
        f"{sample['kind']} {sample['step']}",
        sample["set"],
        "no reward" if reward is None else f"reward {reward:.3g}",
        *(["correct"] if sample["correct"] else []),
        *(f"{name} {value:.3g}" for name, value in sample["figures"].items()),
        f"{sample['tokens']} tokens, {sample['finish_reason']}",
    ]
    return " | ".join(parts)


def _texts(sample: Row) -> Table:
    texts = {
        "prompt": text_of(sample["prompt"]),
        "expected": sample["answer"],
        "answer": sample["completion"],
        "fault": sample["fault"],
    }
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for name, text in texts.items():
        if text or name == "answer":
            grid.add_row(f"  {name}", Text(printable(shortened(text))))
    return grid
