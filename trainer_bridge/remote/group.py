"""Blocking handles on Ray actors that are called alike; ray is imported when first needed."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from rollout.types import RankError
from trainer_bridge.errors import ActorDied, ActorTimeout, RankFailed, SyncError

# For the other ranks to answer, too, when one has failed: it may be by another's fault.
_GRACE_SECONDS = 5.0
_ECHOES = (SyncError, RankError)  # what a rank raises because of another


P = ParamSpec("P")
Answer = TypeVar("Answer")


class RemoteActor:
    """A handle on one Ray actor (an `ActorBase`), and what to call it in an error."""

    def __init__(self, handle: Any, name: str) -> None:
        self.handle = handle
        self.name = name

    def start(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls the method; returns a reference to the answer."""
        return self.handle.call.remote(method, *args, **kwargs)

    def answer(self, reference: Any, method: str) -> Any:
        """Wait for the answer, or what the method raised; ActorDied where there will be none."""
        import ray

        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise error.cause from error
            raise
        except ray.exceptions.RayActorError as error:
            if error.actor_init_failed:  # what the constructor raised is the last line of the text
                reason = f"could not be made ({str(error).strip().splitlines()[-1].strip()})"
                raise ActorDied(self.name, "__init__", reason) from error
            raise ActorDied(self.name, method, "died") from error


class RemoteGroup:
    """Actors that are called alike, rank by rank; a call blocks until all have answered. Often it
    is one actor.

    What all ranks raise, or the only one, is raised here; `RankFailed` names the rank where others
    did not raise it. `ActorDied` and `ActorTimeout` name the actor and the method; nobody waits for
    the others when one has died.
    """

    def __init__(self, ranks: Sequence[RemoteActor], timeout: float) -> None:
        """timeout: seconds for one call."""
        self.ranks = tuple(ranks)
        self.timeout = timeout

    @property
    def name(self) -> str:
        return ", ".join(rank.name for rank in self.ranks)

    def each(self) -> list[Self]:
        """Returns every rank as a group of its own."""
        return [type(self)([rank], self.timeout) for rank in self.ranks]

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls the method on every rank; returns rank 0's answer, which is everybody's."""
        return self.call_all(method, *args, **kwargs)[0]

    def call_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls the method on every rank; returns all answers, by rank."""
        if len(self.ranks) > 1:
            args, kwargs = _stored_once(args, kwargs)
        return self._gather(method, [rank.start(method, *args, **kwargs) for rank in self.ranks])

    def call_each(self, method: str, args: Sequence[tuple[Any, ...] | None]) -> list[Any]:
        """Calls each rank with its own arguments; None is not called, and its answer is None."""
        pairs = zip(self.ranks, args, strict=True)
        return self._gather(
            method, [None if mine is None else rank.start(method, *mine) for rank, mine in pairs]
        )

    def call_one(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of one rank; a ValueError where there are several: ask one of `each()`."""
        if len(self.ranks) > 1:
            raise ValueError(f"{method}() is of one rank, these are {self.name}; ask one of each()")
        return self.call(method, *args, **kwargs)

    def _gather(self, method: str, references: Sequence[Any]) -> list[Any]:
        import ray

        waiting = {
            reference: rank for rank, reference in enumerate(references) if reference is not None
        }
        called = len(waiting)
        answers: list[Any] = [None] * len(references)
        failed: list[tuple[int, Exception]] = []
        end = time.monotonic() + self.timeout
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not done:
                break
            rank = waiting.pop(done[0])
            try:
                answers[rank] = self.ranks[rank].answer(done[0], method)
            except ActorDied:
                raise
            except Exception as error:  # another rank's may be the cause
                failed.append((rank, error))
                end = min(end, time.monotonic() + _GRACE_SECONDS)
        if failed:
            raise self._cause(method, failed, called)
        if waiting:
            silent = ", ".join(self.ranks[rank].name for rank in waiting.values())
            raise ActorTimeout(silent, method, f"gave no answer for {self.timeout:g} s")
        return answers

    def _cause(
        self, method: str, failed: Sequence[tuple[int, Exception]], called: int
    ) -> Exception:
        """The error to raise: the first that no other rank is to blame for."""
        rank, first = min(failed, key=lambda each: isinstance(each[1], _ECHOES))
        if len(failed) == called and len({(type(error), str(error)) for _, error in failed}) == 1:
            return first
        error = RankFailed(self.ranks[rank].name, method, first)
        error.__cause__ = first
        return error


def _stored_once(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns references in place of arguments: Ray would store them once for every call."""
    import ray

    return tuple(ray.put(arg) for arg in args), {name: ray.put(kwargs[name]) for name in kwargs}


def on_every_rank(
    method: Callable[Concatenate[Any, P], Answer],
) -> Callable[Concatenate[RemoteGroup, P], Answer]:
    """Makes the same method of a group, run on every rank; rank 0 answers (`RemoteGroup.call`)."""
    return _forwarded(RemoteGroup.call, method)


def on_one_rank(
    method: Callable[Concatenate[Any, P], Answer],
) -> Callable[Concatenate[RemoteGroup, P], Answer]:
    """Makes the same method of a group of one rank (`RemoteGroup.call_one`)."""
    return _forwarded(RemoteGroup.call_one, method)


def _forwarded(
    how: Callable[..., Any], method: Callable[Concatenate[Any, P], Answer]
) -> Callable[Concatenate[RemoteGroup, P], Answer]:
    """Signature and docstring are the method's own, for readers and for type checkers."""
    name = method.__name__

    @functools.wraps(method)
    def forward(group: RemoteGroup, *args: P.args, **kwargs: P.kwargs) -> Answer:
        return how(group, name, *args, **kwargs)

    return forward
