"""Evaluations on held-out problems, their figures, and the best of them."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from recipes.config.sections import EvalSection
from recipes.errors import RecipeError
from recipes.loops.figures import by_function, unrewarded
from recipes.loops.sampling import Samples, answer
from recipes.rewards import Rewards, Scored
from recipes.setup.preparation import Setup
from recipes.tasks import Problem, Task
from recipes.tasks.split import hash_text
from rollout import Rollout


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Answers to the problems of all sets, under one version of the weights.

    Attributes:
        row: Figures, for metrics.jsonl.
        samples: The answers; those to one problem are adjacent.
        scores: Record of each answer.
    """

    row: dict[str, Any]
    samples: Samples
    scores: list[Scored]


def evaluate(rollout: Rollout, setup: Setup, rewards: Rewards) -> Evaluation:
    """Answer the same problems as every evaluation of the run, with the same seeds."""
    samples = answer_held_out(rollout, setup, held_out_prompts(setup))
    scores = rewards.submit(samples.answers())()
    return evaluation_of(samples, scores, setup.recipe.eval.samples)


def held_out_prompts(setup: Setup) -> list[tuple[Task, Problem]]:
    """Return the first `eval.problems` held-out problems of each set, with their sets."""
    prompts: list[tuple[Task, Problem]] = []
    for task in setup.tasks.all:
        prompts += ((task, problem) for problem in task.held_out[: setup.recipe.eval.problems])
    return prompts


def answer_held_out(
    rollout: Rollout, setup: Setup, prompts: Sequence[tuple[Task, Problem]]
) -> Samples:
    """Answer problems as every evaluation of the run does, `eval.samples` times each."""
    recipe = setup.recipe
    seeds = [evaluation_seed(recipe.seed, task, problem) for task, problem in prompts]
    how: dict[str, Any] = {"temperature": recipe.eval.temperature, "samples": recipe.eval.samples}
    return answer(rollout, setup, prompts, seeds, **how)


def evaluation_of(samples: Samples, scores: list[Scored], count: int) -> Evaluation:
    """Return the evaluation that has `count` answers to each problem, one set after the other."""
    answers = Counter(task.name for task in samples.tasks)  # of each set, in the order of the sets
    row: dict[str, Any] = {}
    begin = 0
    for suffix, number in zip(suffixes(answers), answers.values(), strict=True):
        end = begin + number
        figures = set_figures(samples, scores, slice(begin, end), count)
        row |= {name + suffix: value for name, value in figures.items()}
        begin = end
    return Evaluation(row=row, samples=samples, scores=scores)


def suffixes(names: Iterable[str]) -> list[str]:
    """Return the endings of the figures' names by set, of which the first is empty."""
    return ["", *(f"_{name}" for name in [*names][1:])]


def evaluation_seed(seed: int, task: Task, problem: Problem) -> int:
    """Return a seed below 2**63 for the answers to one problem, the same in every evaluation."""
    return hash_text(f"{seed}/evaluation/{task.name}/{problem.text}") >> 1


def set_figures(
    samples: Samples, scores: Sequence[Scored], part: slice, count: int
) -> dict[str, Any]:
    """Return the figures of one set.

    Args:
        samples: All answers of the evaluation.
        scores: Their records.
        part: The set's answers among them.
        count: Answers to each problem.

    Returns:
        The figures by name. An answer without a reward is not correct and has no part in the
        mean reward, which is missing if no answer has one.
    """
    scores = scores[part]
    correct = [score.correct for score in scores]
    rewards = [score.reward for score in scores if score.reward is not None]
    row: dict[str, Any] = {"correct": statistics.fmean(correct)}
    row |= {"reward": statistics.fmean(rewards)} if rewards else {}
    if functions := by_function(scores):
        row["rewards"] = functions
    if count > 1:
        right = [sum(correct[at : at + count]) for at in range(0, len(correct), count)]
        row[f"avg@{count}"] = row["correct"]
        for k in powers_of_two(count):
            row[f"pass@{k}"] = statistics.fmean(pass_at(k, count, number) for number in right)
    return {
        **row,
        "length": statistics.fmean(samples.lengths[part]),
        "cut_off": 1 - statistics.fmean(samples.ended[part]),
        "problems": len(correct) // count,
        **unrewarded(scores),
    }


def powers_of_two(limit: int) -> list[int]:
    """Return 1, 2, 4, ... below the limit, and the limit itself."""
    return [*(1 << power for power in range((limit - 1).bit_length())), limit]


def pass_at(k: int, count: int, right: int) -> float:
    """Return the chance that at least one of k answers is right, if they are drawn from `count`.

    This is the unbiased estimator 1 - C(count - right, k) / C(count, k) of Chen et al.,
    "Evaluating Large Language Models Trained on Code" (2021).
    """
    return 1 - math.comb(count - right, k) / math.comb(count, k)


def check_best(setup: Setup) -> None:
    """Refuse an `eval.best` that no evaluation of the run has, or that does not grow with quality.

    Raises:
        RecipeError: Lists the figures that `eval.best` may name.
    """
    section = setup.recipe.eval
    if not section.every or section.best is None:
        return
    names: list[str] = []
    for suffix in suffixes(task.name for task in setup.tasks.evaluable):
        names += (name + suffix for name in _qualities(section))
    if section.best not in names:
        rule = "is no figure that evaluations of this run can improve"
        raise RecipeError(f"eval.best={section.best}: {rule}; set one of {', '.join(names)}")


def _qualities(section: EvalSection) -> list[str]:
    """Return the figures of a set of which more is better."""
    several = section.samples > 1
    passes = [f"pass@{k}" for k in powers_of_two(section.samples)] if several else []
    return ["correct", "reward", *([f"avg@{section.samples}"] if several else []), *passes]


class Standing(NamedTuple):
    """The best of a run's evaluations.

    Attributes:
        step: Updates before that evaluation.
        value: Its value of the figure.
        since: Number of evaluations after it, none of which was better.
    """

    step: int
    value: float
    since: int


def failures(row: Mapping[str, Any]) -> int:
    """Return the number of answers of an evaluation, of all sets, whose reward function failed."""
    return sum(value for name, value in row.items() if name.startswith("faults"))


def standing(evaluations: Iterable[Mapping[str, Any]], figure: str | None) -> Standing | None:
    """Return the first evaluation with the highest value; None if no row has the figure.

    Evaluations in which a reward function failed do not count, neither as the best nor as one
    without improvement: they judged other answers than the others did.
    """
    rows = [row for row in evaluations if figure in row and not failures(row)]
    if figure is None or not rows:
        return None
    values = [row[figure] for row in rows]
    place = values.index(max(values))
    return Standing(rows[place]["step"], values[place], since=len(values) - 1 - place)
