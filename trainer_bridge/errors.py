"""Errors of the wake-up cycle and of the actors it drives. A user's mistake is a ValueError."""

from collections.abc import Mapping, Sequence

Shape = tuple[int, ...]


class CycleError(RuntimeError):
    """A stage failed, which ends the cycle; no engine serves undefined weights.

    Attributes:
        stage: Name of the stage, as passed to `on_stage`.
        cause: Exception that the stage raised.
    """

    def __init__(self, stage: str, cause: BaseException) -> None:
        super().__init__(stage, cause)  # all arguments, so that it can be unpickled
        self.stage, self.cause = stage, cause

    def __str__(self) -> str:
        text = " ".join(str(self.cause).split())
        description = f"{type(self.cause).__name__}: {text}" if text else repr(self.cause)
        return f"stage {self.stage!r} failed: {description}"


class UnequalTokens(RuntimeError):
    """The rollout's log-probabilities are not those of an exact trainer.

    Attributes:
        count: Number of tokens that differ.
        sequence: Number of the first sequence with such a token.
        token: Number of that token among the response tokens.
        values: Log-probability of that token in the rollout and in the trainer.
        remedy: How to find the cause.
    """

    def __init__(self, count: int, sequence: int, token: int, values: tuple[float, float]) -> None:
        super().__init__(count, sequence, token, values)
        self.count, self.sequence, self.token, self.values = count, sequence, token, values
        self.remedy = "run the engine with exact=True too, or set exact=warn"

    def __str__(self) -> str:
        rollout, own = self.values
        tokens = f"{self.count} token{'s' * (self.count > 1)}"
        return (
            f"log-probabilities of {tokens} differ, first of token {self.token} of "
            f"sequence {self.sequence}: {rollout!r} in the rollout, {own!r} in the trainer; "
            f"nothing has changed; {self.remedy}"
        )


class ActorError(RuntimeError):
    """A Ray actor did not answer a call.

    Attributes:
        actor: Name of the actor, such as `trainer[1]`.
        method: Name of the method.
        reason: What the actor did, as in the message, such as "died".
    """

    def __init__(self, actor: str, method: str, reason: str) -> None:
        super().__init__(actor, method, reason)
        self.actor, self.method, self.reason = actor, method, reason

    def __str__(self) -> str:
        return f"the {self.actor} actor {self.reason} in {self.method}()"


class ActorDied(ActorError):
    """An actor's process is gone: killed, out of memory or crashed."""


class ActorTimeout(ActorError):
    """An actor did not answer a call in time; its process may be alive."""


class RankFailed(RuntimeError):
    """A call failed on some actors but not on all, or with different errors.

    Other ranks may still be waiting for the failed one: restart all of them.

    Attributes:
        actor: Name of the actor, such as `trainer[1]`.
        method: Name of the method.
        error: Exception that the actor raised.
    """

    def __init__(self, actor: str, method: str, error: Exception) -> None:
        super().__init__(actor, method, error)
        self.actor, self.method, self.error = actor, method, error

    def __str__(self) -> str:
        cause = f"{type(self.error).__name__}: {self.error}"
        return f"the {self.actor} actor failed in {self.method}(): {cause}"


class OtherRankFailed(RuntimeError):
    """A collective operation failed on another rank, which the message names with its error."""


class OtherWeights(ValueError):
    """The run of a checkpoint started from other weights than this trainer."""


class SyncError(RuntimeError):
    """A weight sync failed, and has ended on all ranks.

    Attributes:
        stage: Stage that failed.
        reason: Text that names the failed ranks and their errors.
    """

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(stage, reason)
        self.stage, self.reason = stage, reason

    def __str__(self) -> str:
        return f"the weight sync failed in stage {self.stage!r}: {self.reason}"


def listed(problems: Sequence[str], limit: int = 20) -> str:
    """Join the first `limit` problems into one text, and state how many more there are."""
    more = f" and {len(problems) - limit} more" if len(problems) > limit else ""
    return f"{'; '.join(problems[:limit])}{more}"


def misfits(wanted: Mapping[str, Shape], given: Mapping[str, Shape]) -> list[str]:
    """List names that `given` lacks, that `wanted` lacks, or that differ in shape."""
    problems = [f"missing {name}" for name in wanted.keys() - given.keys()]
    problems += [f"unknown {name}" for name in given.keys() - wanted.keys()]
    for name in wanted.keys() & given.keys():
        if given[name] != wanted[name]:
            problems.append(f"{name} has shape {given[name]}, the model {wanted[name]}")
    return sorted(problems)
