"""Problems and tasks: what sources of problems build."""

import json
from array import array
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

from recipes.errors import shown
from recipes.rewards import RewardSet, Score

Message = Mapping[str, Any]
"""One turn of a chat, with the keys role and content."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A prompt, the expected answer, and the columns of its row.

    Attributes:
        prompt: The user's turn as text, or the messages of a chat.
        answer: Expected answer, which only scorers and reward functions read.
        columns: Columns of the row by name, for reward functions.
        tools: Tools of the chat as JSON schemas, for the chat template.
        prompt_ids: Token ids of the prompt; empty until a run has encoded it.

    Raises:
        TypeError: The prompt is neither text nor messages, or the answer is no text.
    """

    prompt: str | tuple[Message, ...]
    answer: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict, hash=False)
    tools: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    prompt_ids: "array[int]" = field(default_factory=partial(array, "i"), compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str) and not (
            isinstance(self.prompt, tuple) and all("content" in turn for turn in self.prompt)
        ):
            wanted = "neither text nor a tuple of messages with role and content"
            raise TypeError(f"prompt={shown(repr(self.prompt), 40)} is {wanted}")
        if not isinstance(self.answer, str):
            raise TypeError(f"answer={shown(repr(self.answer), 40)} must be a text")

    @property
    def turns(self) -> tuple[Message, ...]:
        """Return the prompt as messages; a text is one turn of the user."""
        if isinstance(self.prompt, str):
            return ({"role": "user", "content": self.prompt},)
        return self.prompt

    @cached_property
    def text(self) -> str:
        """Return one text for all spellings of the prompt: as text, as messages, in any key order.

        A split depends on this text alone, so a prompt's spelling does not decide its side.
        """
        forms = [{**turn, "content": ""} for turn in self.turns]
        if forms == [{"role": "user", "content": ""}] and not self.tools:
            return str(self.turns[0]["content"])
        return json.dumps([*self.tools, *self.turns], sort_keys=True, default=str)

    @property
    def words(self) -> list[str]:
        """Return the words of prompt and answer, split at whitespace."""
        return " ".join([*(turn["content"] for turn in self.turns), self.answer]).split()


# Takes the problem, the answer's text, and whether the answer ended by the end token. A number
# instead of a Score is a reward.
Scorer = Callable[[Problem, str, bool], Score | float]


@dataclass(frozen=True, kw_only=True)
class Task:
    """One set of problems to train and to evaluate on, and the scorer of their answers.

    An evaluation takes the first `eval.problems` of the held-out problems, so their order should be
    arbitrary, as `split` makes it.

    Attributes:
        name: Name of the set in figures.
        train: Problems to train on; empty: the set is only evaluated.
        held_out: Problems to evaluate on.
        score: Scorer of an answer.
        weight: Share of the prompts that come from this set, relative to other sets' weights.
        words: Words for the tokenizer of a random model; empty: the words of prompts and answers.
        source: Key and value that name the source, for messages.
        left_out: Problems of the source that the set leaves out: their number and the reason.
        rewards: Reward functions of the answers, which `make_task` sets; None: the scorer, called
            in the process of the command.
        environments: Classes of environments by name, as `task.environment`, or the function of
            `task.agent`; empty: there are none.
        agent: Whether it is the latter.
    """

    name: str
    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]
    score: Scorer
    weight: float = 1.0
    words: tuple[str, ...] = ()
    source: str = "task.name"
    left_out: tuple[str, ...] = ()
    rewards: RewardSet | None = None
    environments: Mapping[str, str] = field(default_factory=dict, hash=False)
    agent: bool = False

    def environment_of(self, problem: Problem) -> str | None:
        """Return the class of the environment of a problem; None: it has none.

        Raises:
            KeyError: The problem's column `environment` names none.
        """
        if not self.environments:
            return None
        if "" in self.environments:
            return self.environments[""]
        return self.environments[str(problem.columns.get("environment"))]

    def problems(self) -> tuple[Problem, ...]:
        return (*self.train, *self.held_out)

    def summary(self) -> str:
        """Return name, numbers of problems and omissions on one line."""
        sides = [f"{len(self.train)} to train"] * bool(self.train)
        sides += [f"{len(self.held_out)} held out"] * bool(self.held_out)
        left_out = [f"left out: {', '.join(self.left_out)}"] * bool(self.left_out)
        return f"{self.name} ({'; '.join([', '.join(sides), *left_out])})"

    def keeping(self, keeps: Callable[[Problem], bool], why: str, held_out: bool = True) -> "Task":
        """Return the set with the problems that `keeps` accepts; note the others with the reason.

        `keeps` is called for the held-out problems first. Without `held_out`, all of them remain.
        """
        evaluated = tuple(filter(keeps, self.held_out)) if held_out else self.held_out
        rest = replace(self, held_out=evaluated, train=tuple(filter(keeps, self.train)))
        if not (count := len(self.problems()) - len(rest.problems())):
            return self
        return replace(rest, left_out=(*self.left_out, f"{count} {why}"))


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """The sets of problems of a run; their names differ.

    Attributes:
        trained: Sets to train and to evaluate on, the recipe's own set first.
        evaluated: Sets that are only evaluated (`eval.sets`).
    """

    trained: tuple[Task, ...]
    evaluated: tuple[Task, ...] = ()

    @property
    def all(self) -> tuple[Task, ...]:
        return (*self.trained, *self.evaluated)

    @property
    def evaluable(self) -> list[Task]:
        """Return the sets that have problems to evaluate on."""
        return [task for task in self.all if task.held_out]

    @property
    def words(self) -> tuple[str, ...]:
        """Return the words of all sets, each once."""
        words: dict[str, None] = {}
        for task in self.all:
            own = chain.from_iterable(problem.words for problem in task.problems())
            words |= dict.fromkeys(task.words or own)
        return tuple(words)

    def problems(self) -> Iterator[Problem]:
        for task in self.all:
            yield from task.problems()

    def mapped(self, change: Callable[[Task], Task]) -> "Tasks":
        """Return the sets that `change` makes of each set."""
        trained, evaluated = (tuple(map(change, sets)) for sets in (self.trained, self.evaluated))
        return Tasks(trained=trained, evaluated=evaluated)

    def separated(self, identity: Callable[[Problem], Hashable], what: str) -> "Tasks":
        """Return the sets with each prompt on one side: evaluated prompts are not trained on.

        Problems of equal `identity` have the same prompt. Of several spellings in one set, the
        first remains, or the one that is held out. A custom task may train on a problem that the
        task itself holds out. `what` names the identity in the reason of an omission.
        """

        def separate(task: Task) -> Task:
            others = (other.held_out for other in self.all if other is not task)
            held_out = set(map(identity, chain.from_iterable(others)))
            spellings: dict[Hashable, str] = {}

            def first(problem: Problem) -> bool:
                return spellings.setdefault(identity(problem), problem.text) == problem.text

            task = task.keeping(first, f"whose {what} another problem of the set has")
            return task.keeping(
                lambda problem: identity(problem) not in held_out,
                f"whose {what} another set holds out",
                held_out=False,
            )

        return self.mapped(separate)
