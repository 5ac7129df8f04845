"""Digests of what decides a run's prompts and rewards, by which a resume notices other data."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from recipes.config.recipe import Recipe
from recipes.config.sections import ProblemSection, sets_by_key
from recipes.tasks.problem import Problem, Tasks
from recipes.tasks.split import hash_text


def prompt_digests(recipe: Recipe, tasks: Tasks, template: str | None) -> dict[str, int]:
    """Return digests of the template and, by set, of token ids, texts and further columns."""
    digests = {"template": hash_text(template or "")}
    for section, task in zip(sets_by_key(recipe.task, ()).values(), tasks.trained, strict=True):
        problems, size = task.problems(), str(len(task.train)).encode()
        ids = (problem.prompt_ids.tobytes() for problem in problems)
        digests[f"tokens {task.name}"] = _digest(size, ids)
        digests[f"texts {task.name}"] = _digest(size, map(_stable, (p.text for p in problems)))
        digests[f"rows {task.name}"] = _digest(size, (_row(section, p) for p in problems))
    return digests


def first_change(
    recipe: Recipe, tasks: Tasks, now: Mapping[str, int], saved: Mapping[str, int]
) -> str:
    """Describe the first change of prompts or rewards since the digests `saved`, for a message.

    The result is empty if nothing changed. A prompt is its token ids: another spelling of the same
    prompt is no change. If the token ids differ, the other digests name the cause.
    """
    changed = {key for key, digest in now.items() if saved.get(key, digest) != digest}
    for task in tasks.trained:
        if {f"tokens {task.name}", f"texts {task.name}"} <= changed:
            return f"{task.source}: has other problems, or in another order,"
        if f"rows {task.name}" in changed:
            return f"{task.source}: has other answers or columns"
    if not any(key.startswith("tokens ") for key in changed):
        return ""
    if "template" in changed and recipe.task.template not in (None, "none"):
        return f"task.template={recipe.task.template}: has another text"
    return f"model.path={recipe.model.path}: tokenizer and chat template make other prompts"


def _digest(size: bytes, parts: Iterable[bytes]) -> int:
    digest = hashlib.sha256(size)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return int.from_bytes(digest.digest()[:8], "big")


def _row(section: ProblemSection, problem: Problem) -> bytes:
    """Return the answer and, if a function may read them, the columns besides the prompt's."""
    columns: Mapping[str, Any] = {}
    if any(":" in name for name in (section.name, *section.rewards)):
        columns = {k: v for k, v in problem.columns.items() if k != section.prompt_column}
    return _stable([problem.answer, columns])


def _stable(value: Any) -> bytes:
    """Return the same bytes for equal values in any process; values may be of any type."""
    try:
        return json.dumps(value, sort_keys=True, default=_described).encode()
    except (TypeError, ValueError, RecursionError):  # Keys of a type that JSON lacks, or a circle
        return _described(value).encode()


def _described(value: Any) -> str:
    """Return a description without addresses and without the order of sets, which vary."""
    if isinstance(value, set | frozenset):
        return str(sorted(map(repr, value)))
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
