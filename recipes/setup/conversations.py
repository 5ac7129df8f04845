"""Conversations of a run: the environments of its tasks, and the chat format of their turns."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter

from recipes.config.recipe import Recipe
from recipes.environments import EnvironmentKind, Environments
from recipes.errors import RecipeError, refused, shown
from recipes.rewards.reward_set import EnvironmentReward
from recipes.setup.agent_server import AgentServer
from recipes.setup.chat_turns import ChatTurns, chat_of
from recipes.setup.prompts import PromptFormat
from recipes.tasks import Problem, Task, Tasks


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """What conversations of a run need.

    Attributes:
        turns: Chat format of their turns.
        kinds: What each environment has, by its class.
        environments: The processes; None: they are not open.
        agents: The server for agents; None: it is not open, or there are none.
    """

    turns: ChatTurns
    kinds: Mapping[str, EnvironmentKind]
    environments: Environments | None = None
    agents: AgentServer | None = None

    @contextlib.contextmanager
    def opened(self, recipe: Recipe, longest: int) -> Iterator["Conversations"]:
        """Yield the conversations with processes and server, which end with the block.

        `longest` is the number of tokens that a conversation may have.
        """
        environments = Environments(recipe.loop.parallel_environments, recipe.task.timeout)
        with contextlib.ExitStack() as undo:
            undo.callback(environments.close)
            agents = None
            if any(kind.agent for kind in self.kinds.values()):
                agents = undo.enter_context(
                    contextlib.closing(AgentServer(self.turns.form, longest))
                )
            yield replace(self, environments=environments, agents=agents)


def environment_kinds(recipe: Recipe, tasks: Tasks) -> dict[str, EnvironmentKind]:
    """Return what each environment of the tasks has, by its class.

    Raises:
        RecipeError: An environment cannot be made, a problem names none, or nothing rewards its
            conversations.
    """
    kinds = dict[str, EnvironmentKind]()
    with contextlib.closing(Environments(1, recipe.task.timeout)) as environments:
        for task in filter(attrgetter("environments"), tasks.all):
            for problem in task.problems():
                name = _environment_of(task, problem)
                if name not in kinds:
                    functions = task.rewards.functions if task.rewards else ()
                    named = [item for item in functions if isinstance(item, str)]
                    kinds[name] = environments.describe(name, _key(task), named)
                    _check_kind(task, name, kinds[name])
    return kinds


def with_tools(recipe: Recipe, tasks: Tasks) -> tuple[Tasks, dict[str, EnvironmentKind]]:
    """Return the tasks with the tools of its environment in each prompt, and what these have.

    Raises:
        RecipeError: As `environment_kinds` says, or the recipe excludes conversations.
    """
    kinds = environment_kinds(recipe, tasks)
    if not kinds:
        return tasks, kinds
    _check_recipe(recipe)

    def given(task: Task, problem: Problem) -> Problem:
        name = task.environment_of(problem)
        tools = kinds[name].tools if name is not None else ()
        return replace(problem, tools=(*problem.tools, *tools)) if tools else problem

    judges = {*chain.from_iterable(kind.judges for kind in kinds.values())}

    def tooled(task: Task) -> Task:
        train = tuple(given(task, problem) for problem in task.train)
        held_out = tuple(given(task, problem) for problem in task.held_out)
        rewards = task.rewards
        if rewards is not None:
            functions = [
                EnvironmentReward(name, name) if name in judges else name
                for name in rewards.functions
            ]
            rewards = replace(rewards, functions=functions)
        return replace(task, train=train, held_out=held_out, rewards=rewards)

    return tasks.mapped(tooled), kinds


def conversations(form: PromptFormat, kinds: Mapping[str, EnvironmentKind]) -> Conversations | None:
    """Return what conversations need; None: there are no environments.

    Raises:
        RecipeError: The model's chat template is not fit for the environments.
    """
    if not kinds:
        return None
    agents = any(kind.agent for kind in kinds.values())
    tools = any(kind.tools for kind in kinds.values())
    replies = agents or any(kind.replies for kind in kinds.values())
    key = "task.agent" if agents else "task.environment"
    turns = ChatTurns.of(form, key, tools=tools, replies=replies)
    if agents:
        chat_of(form, key)
    return Conversations(turns=turns, kinds=kinds)


def _environment_of(task: Task, problem: Problem) -> str:
    """Return the class of the environment of a problem, in a task that has environments."""
    try:
        return str(task.environment_of(problem))
    except KeyError as error:
        known = ", ".join(task.environments)
        rule = f"the column environment of {shown(repr(problem.text), 40)} is {error}"
        raise RecipeError(f"{_key(task)}: {rule}; it must be one of {known}") from None


def _check_recipe(recipe: Recipe) -> None:
    """Refuse what conversations with environments exclude."""
    if recipe.engine.hosted:
        rule = "conversations with environments need the native engine"
        raise refused("engine.kind", recipe.engine.kind, rule, "native")
    if recipe.loop.router_replay:
        rule = "conversations with environments exclude it"
        raise refused("loop.router_replay", True, rule, False)


def _check_kind(task: Task, name: str, kind: EnvironmentKind) -> None:
    """Refuse an agent among environments, or the other way round, and what nothing rewards."""
    if kind.agent != task.agent:
        rule = "is a function, an agent" if kind.agent else "is a class, an environment"
        other = "agent" if kind.agent else "environment"
        raise RecipeError(f"{_key(task)}={name}: {rule}; name it by task.{other}")
    others = task.rewards is not None and len(task.rewards.functions) > 1
    if not kind.rewards and not others:
        rule = "has no method get_reward, and no function of rewards is named"
        raise RecipeError(f"{_key(task)}={name}: {rule}; add one of both")


def _key(task: Task) -> str:
    """Return the key that names the environments of a task."""
    own = "agent" if task.agent else "environment"
    return f"{re.sub(r'[.](name|data)=.*', '', task.source, flags=re.S)}.{own}"
