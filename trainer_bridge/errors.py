"""Errors of the wake-up cycle and of the actors it drives; users' mistakes are ValueError."""

from collections.abc import Mapping, Sequence

Shape = tuple[int, ...]


class CycleError(RuntimeError):
    """A stage of the cycle failed; the cycle cannot go on and the engine serves no undefined
    weights.

    Attributes:
        stage: name of the stage, as given to `on_stage`.
        cause: what the stage raised.
    """

    def __init__(self, stage: str, cause: BaseException) -> None:
        text = " ".join(str(cause).split())
        what = f"{type(cause).__name__}: {text}" if text else repr(cause)
        super().__init__(f"stage {stage!r} failed: {what}")
        self.stage = stage
        self.cause = cause

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.stage, self.cause)


class ActorError(RuntimeError):
    """A Ray actor did not answer; `actor` and `method` say which and what it was asked."""

    def __init__(self, actor: str, method: str, reason: str) -> None:
        super().__init__(f"the {actor} actor {reason} in {method}()")
        self.actor = actor
        self.method = method
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.actor, self.method, self.reason)


class ActorDied(ActorError):
    """The actor's process is gone (killed, out of memory, crashed)."""


class ActorTimeout(ActorError):
    """The actor's process may be alive, but gave no answer in time."""


class RankFailed(RuntimeError):
    """One actor of several raised what the others did not; they may still wait for it, so start all
    anew.

    Attributes:
        actor: like `trainer[1]`; method: what it was asked; error: what it raised.
    """

    def __init__(self, actor: str, method: str, error: Exception) -> None:
        super().__init__(f"the {actor} actor failed in {method}(): {type(error).__name__}: {error}")
        self.actor = actor
        self.method = method
        self.error = error

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.actor, self.method, self.error)


class OtherRankFailed(RuntimeError):
    """Another rank failed in what all ranks do together; the text names it and its error."""


class OtherWeights(ValueError):
    """A checkpoint is of a run that began with other weights than this trainer; see the text."""


class SyncError(RuntimeError):
    """A weight sync ended on all ranks: in `stage`, for `reason`, which names rank and error."""

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(f"the weight sync failed in stage {stage!r}: {reason}")
        self.stage = stage
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.stage, self.reason)


def listed(problems: Sequence[str], limit: int = 20) -> str:
    """Return the problems in one text; of very many the first, and how many more there are."""
    more = f" and {len(problems) - limit} more" if len(problems) > limit else ""
    return f"{'; '.join(problems[:limit])}{more}"


def misfits(wanted: Mapping[str, Shape], found: Mapping[str, Shape]) -> list[str]:
    """List every name that is missing, unknown or of another shape than the model has."""
    problems = [f"missing {name}" for name in wanted.keys() - found.keys()]
    problems += [f"unknown {name}" for name in found.keys() - wanted.keys()]
    for name in wanted.keys() & found.keys():
        if found[name] != wanted[name]:
            problems.append(f"{name} has shape {found[name]}, the model {wanted[name]}")
    return sorted(problems)
