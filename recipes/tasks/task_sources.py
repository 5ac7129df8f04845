"""Tasks of a recipe from their sources: packaged, generated, read from files, or custom."""

from collections.abc import Sequence
from dataclasses import replace

from recipes.config.sections import ProblemSection, TaskSection, sets_by_key
from recipes.errors import RecipeError
from recipes.importing import calling, import_function
from recipes.tasks.data_files import read_file
from recipes.tasks.guess import guess
from recipes.tasks.gym import PREFIX, reasoning_gym
from recipes.tasks.problem import Problem, Task, Tasks
from recipes.tasks.scoring import reward_set
from recipes.tasks.split import hash_text
from recipes.tasks.toy import toy


def make_tasks(section: TaskSection, sets: Sequence[ProblemSection] = ()) -> Tasks:
    """Build the tasks of a recipe.

    A problem that one set holds out, or that is only evaluated, is left out of the training
    problems of all other sets.

    Args:
        section: The recipe's task section.
        sets: Sets that are only evaluated (`eval.sets`).

    Returns:
        The sets, each with its name and weight.

    Raises:
        RecipeError: A set cannot be built, or has no problem to train or to evaluate on.
    """
    built = [make_task(part, key) for key, part in sets_by_key(section, sets).items()]
    count = 1 + len(section.mixture)
    evaluated = tuple(map(_evaluated_only, built[count:]))
    tasks = Tasks(trained=tuple(built[:count]), evaluated=evaluated)
    return with_problems(tasks.separated(lambda problem: problem.text, "prompt"), section)


def evaluated_tasks(sets: Sequence[ProblemSection]) -> Tasks:
    """Build `eval.sets` alone, without a set to train on.

    Raises:
        RecipeError: A set cannot be built.
    """
    built = [make_task(part, f"eval.sets[{index}]") for index, part in enumerate(sets)]
    return Tasks(trained=(), evaluated=tuple(map(_evaluated_only, built)))


def with_problems(tasks: Tasks, section: TaskSection) -> Tasks:
    """Return the tasks of a recipe if each set has problems on the sides that it needs.

    Raises:
        RecipeError: A set has no problem to train or to evaluate on.
    """
    # An evaluation alone has no set to train on.
    trained = sets_by_key(section, ()).items() if tasks.trained else ()
    for (key, part), task in zip(trained, tasks.trained, strict=True):
        fraction = f"{key}.held_out_fraction"
        if not task.train or (part.held_out_fraction and not task.held_out):
            setting = f"{fraction}={part.held_out_fraction}"
            other = 0.2 if part.held_out_fraction > 0.2 else 0.5
            raise no_problem(task, setting, f"set {fraction}={other}, or name more data")
    return tasks


def make_task(section: ProblemSection, key: str = "task") -> Task:
    """Build one set of problems.

    Args:
        section: The set's section of the recipe.
        key: Key of the section, for messages.

    Returns:
        The set with its name, weight and rewards.

    Raises:
        RecipeError: The set cannot be built.
    """
    task = source_of(section, key)
    named = section.environments or task.environments
    task = replace(task, environments=named, agent=bool(section.agent) or task.agent)
    source = f"name={section.name}" if section.data is None else f"data={section.data}"
    return replace(
        task,
        name=section.set_name,
        weight=section.weight,
        source=f"{key}.{source}",
        rewards=reward_set(section, task, source_of, key),
    )


def source_of(section: ProblemSection, key: str = "task") -> Task:
    """Return the problems of a section and their own scorer; messages name the section's `key`."""
    if section.name == "toy":
        return toy(section, key)
    if section.name == "guess":
        return guess(section, key)
    if section.name == "file":
        return read_file(section, key)
    if section.name.startswith(PREFIX):
        return reasoning_gym(section, key)
    return custom_task(section, key)


def _evaluated_only(task: Task) -> Task:
    """Return the set with all problems held out, in an arbitrary order."""
    problems = sorted(task.problems(), key=lambda problem: hash_text(problem.text))
    return replace(task, train=(), held_out=tuple(problems))


def no_problem(task: Task, setting: str, remedy: str) -> RecipeError:
    """Return the error of a setting that leaves a side of a set without problems."""
    empty = "evaluation" if task.train else "training"
    counts = f" ({', '.join(task.left_out)} left out)" if task.left_out else ""
    return RecipeError(f"{setting}: leaves no problem for {empty} of {task.name}{counts}; {remedy}")


def custom_task(section: ProblemSection, place: str) -> Task:
    """Return the task that a function of the user makes."""
    key = f"{place}.name={section.name}"
    function = import_function(key, section.name)
    with calling(key):
        task = function(section)
        if isinstance(task, Task):
            task = replace(task, train=tuple(task.train), held_out=tuple(task.held_out))
    if not isinstance(task, Task):
        raise RecipeError(f"{key}: must return a recipes.tasks.Task, not a {type(task).__name__}")
    if others := [item for item in task.problems() if not isinstance(item, Problem)]:
        rule = f"has a {type(others[0]).__name__} among its problems; use recipes.tasks.Problem"
        raise RecipeError(f"{key}: {rule}")
    return task
